"""Run: everything that a training loop holds."""

import dataclasses
from pathlib import Path

import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import nn

from utils.config import ResolvedConfig
from utils.data.batch import TrainLoader, ValLoader
from utils.data.sampler import Sampler
from utils.distributed.collectives import all_gather_object, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.stop import StopRequest
from utils.errors import RunFailed, UserError
from utils.log import Log
from utils.network.augment import BatchAugment
from utils.network.gradients import ForwardBackward, GraphedForwardBackward
from utils.network.parallel import diverged_parameters
from utils.training import checkpoint
from utils.training.batch_layout import Layout
from utils.training.checkpoint import RunRecord
from utils.training.output import SUMMARY
from utils.training.state import TrainState


@dataclasses.dataclass
class Run:
    """What a training loop holds in its hands: the state that a checkpoint keeps, and the tools that it does not."""

    config: ResolvedConfig
    env: DistEnv
    state: TrainState
    gradients: ForwardBackward | GraphedForwardBackward
    schedule: CosineLRScheduler
    sampler: Sampler
    train_loader: TrainLoader
    val_loader: ValLoader
    num_val: int
    augment: BatchAugment
    amp_dtype: torch.dtype
    record: RunRecord
    origin: str  # of the first weights, or the checkpoint: for the start-up block
    changes: list[str]  # flags that differ from those of the checkpoint
    warnings: list[str]  # of a resume
    shared_before: Layout | None  # how the checkpoint's run shared a step, if not as this one
    log: Log
    stop: StopRequest
    kept: tuple[int, int] | None  # until `begin`: metrics.jsonl's records up to these epochs and steps stay
    replaced: list[Path]  # files of the output folder that `begin` removes
    seconds_to_first_step: float | None = None  # of this launch, from the start of the process
    last_save_error: str | None = None  # why the last save failed; known to rank 0 alone

    @property
    def again(self) -> str:
        """What resumes this run."""
        if self.config.resume == "auto":
            return "the same command"
        without = " and without --overwrite" if self.config.overwrite else ""
        return f"the same command with --resume auto{without}"

    def begin(self) -> None:
        """Let the output folder be this run's, now that there is something to lose. A collective; does it once.

        metrics.jsonl ends where this launch began, config.json says how it runs, an earlier summary.json is gone, as is
        what `--overwrite` replaces.

        Raises:
            UserError: on all ranks, if rank 0 cannot write there.
        """
        if self.kept is None:
            return
        with sync_errors(self.env):
            try:
                self.log.truncate_after(*self.kept)
                if self.env.is_main:
                    for path in self.replaced:
                        path.unlink(missing_ok=True)
                    self.config.save(self.config.output_dir / "config.json")
                    (self.config.output_dir / SUMMARY).unlink(missing_ok=True)
            except OSError as error:
                raise UserError(
                    f"--output-dir {self.config.output_dir}: cannot be written ({error.strerror}); make room there"
                ) from error
        self.kept = None

    def save(self, is_best: bool = False) -> None:
        """Write last.pt (and best.pt) as of now; if that fails, say so and let the run go on. A collective.

        Weights that are not finite, or gave such a loss, are not worth the checkpoint before them. In fp16 the loss
        may be, as the scaler has skipped that step.

        Raises:
            RunFailed: on all ranks, if their weights are not the same, or running statistics are lost for good.
        """
        with self.state.meter.paused():
            self._check_ranks()
            self.last_save_error = self.nonfinite_reason()
            if self.last_save_error is not None:
                self.log.info(
                    f"warning: no checkpoint at step {self.state.step}: {self.last_save_error}; the one before stands"
                )
                return
            self._check_statistics()
            loader = self.train_loader.state()
            self.last_save_error = checkpoint.save(self.state, loader, self.config, self.record, is_best)
        if self.last_save_error is not None:
            self.log.info(
                f"warning: no checkpoint at step {self.state.step} ({self.last_save_error}); make room in "
                f"{self.config.output_dir}: the next save tries again"
            )

    def _check_ranks(self) -> None:
        diverged = diverged_parameters(self.state.model, self.env)
        if diverged:
            rank, names = next(iter(diverged.items()))
            ranks = ", ".join(map(str, diverged))
            raise RunFailed(
                f"at step {self.state.step}: the weights of rank {ranks} are no longer those of rank 0 ({names[0]} and "
                f"{len(names) - 1} more on rank {rank}), which points to a faulty GPU or memory; nothing was saved "
                f"since the last checkpoint, which {self.again} resumes"
            )

    def _check_statistics(self) -> None:
        # Of batch norm: a forward pass that overflows leaves them so for ever, even if fp16's scaler skips the step, so
        # that evaluations alone would show it.
        statistics = [
            buffer
            for module in self.state.modules().values()
            for name, buffer in module.named_buffers()
            if name.endswith(("running_mean", "running_var"))
        ]
        finite = not statistics or bool(torch.stack([values.isfinite().all() for values in statistics]).all())
        if not all(all_gather_object(finite, self.env)):
            remedy = "use --amp bf16 or none" if self.config.amp == "fp16" else "lower --lr"
            raise RunFailed(
                f"at step {self.state.step}: running statistics are not finite, as activations overflowed; {remedy}; "
                "the last good checkpoint stands"
            )

    def nonfinite_reason(self) -> str | None:
        """Why the weights are not worth saving, the same on all ranks; None if they are."""
        if not self.state.scaler.is_enabled() and not self.state.meter.is_finite():
            return "the loss is not finite"
        norm = nn.utils.get_total_norm([value.detach() for value in self.state.model.parameters()])
        return None if norm.isfinite() else "the weights are not finite"
