"""Integrity: whether weights and running statistics are worth saving: finite, and the same on all ranks."""

import torch
from torch import nn

from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object
from utils.errors import RunFailed
from utils.network.parallel import diverged_parameters
from utils.training.state.train_state import TrainState


@collective
def require_same_weights(state: TrainState, resume_hint: str) -> None:
    """Check that all ranks have the same weights, bit for bit.

    Raises:
        RunFailed: on all ranks, they have not; the message says what resumes the run.
    """
    diverged = diverged_parameters(state.model, state.env)
    if diverged:
        rank, names = next(iter(diverged.items()))
        ranks = ", ".join(map(str, diverged))
        raise RunFailed(
            f"at step {state.step}: the weights of rank {ranks} are no longer those of rank 0 ({names[0]} and "
            f"{len(names) - 1} more on rank {rank}), which points to a faulty GPU or memory; nothing was saved "
            f"since the last checkpoint, which {resume_hint} resumes"
        )


@collective
def require_finite_statistics(state: TrainState, amp: str) -> None:
    """Check batch norm's running statistics of all ranks.

    A forward pass that overflows leaves them infinite for ever, even if fp16's scaler skips the step, so that
    evaluations alone would show it.

    Args:
        state: the run.
        amp: as the flag, for the message.

    Raises:
        RunFailed: on all ranks, some are not finite.
    """
    statistics = [
        buffer
        for module in state.networks().values()
        for name, buffer in module.named_buffers()
        if name.endswith(("running_mean", "running_var"))
    ]
    finite = not statistics or bool(torch.cat([values.flatten() for values in statistics]).isfinite().all())
    if not all(all_gather_object(finite, state.env)):
        remedy = "use --amp bf16 or none" if amp == "fp16" else "lower --lr"
        raise RunFailed(
            f"at step {state.step}: running statistics are not finite, as activations overflowed; {remedy}; "
            "the last good checkpoint is kept"
        )


@collective
def nonfinite_reason(state: TrainState) -> str | None:
    """Why the weights are not worth saving, the same on all ranks; None if they are.

    In fp16 the loss may be infinite, as the scaler has skipped that step.
    """
    if not state.scaler.is_enabled() and not state.meter.is_finite():
        return "the loss is not finite"
    norm = nn.utils.get_total_norm([value.detach() for value in state.model.parameters()])
    return None if norm.isfinite() else "the weights are not finite"
