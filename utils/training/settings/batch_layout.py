"""Batch layout: how many processes share a global batch, and how; a resume may change it."""

import dataclasses

from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.options.remedies import accept_changes, start_again
from utils.options.resolved import ResolvedConfig
from utils.text import count
from utils.training.settings.run_length import fit_batch_size
from utils.training.state.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who takes which part of an optimizer step.

    Attributes:
        world_size: processes.
        batch_size: images per process and batch.
        grad_accum_steps: batches per optimizer step.
    """

    world_size: int
    batch_size: int
    grad_accum_steps: int

    @property
    def global_batch_size(self) -> int:
        """Images per optimizer step."""
        return self.world_size * self.batch_size * self.grad_accum_steps

    def __str__(self) -> str:
        accumulated = f" x {self.grad_accum_steps} batches" if self.grad_accum_steps > 1 else ""
        return f"{count(self.world_size, 'process')} x {count(self.batch_size, 'image')}{accumulated}"


def layout_of(config: ResolvedConfig, world_size: int) -> Layout:
    """The layout of a run; `config` is resolved."""
    return Layout(world_size, config.batch_size, config.grad_accum_steps)


def saved_layout(saved: Checkpoint) -> Layout:
    """The layout of the run that wrote a checkpoint."""
    return layout_of(saved.config, len(saved.ranks))


def describe_processes(config: TrainConfig, now: Layout) -> str:
    """What another number of processes than `--processes` asks for means; "" if it is the same.

    Args:
        config: as the user gave it, perhaps by the config.json of another run.
    """
    given, batch_size = config.processes, config.batch_size or config.recipe_chosen.get("batch_size")
    if "processes" not in config.given or given in ("auto", now.world_size):
        return ""
    text = f"the launcher's number, not {given}"
    if batch_size is None:
        return text
    before = Layout(int(given), batch_size, config.grad_accum_steps)
    text += (
        f": the global batch is {count(now.global_batch_size, 'image')} instead of {before.global_batch_size:,}, and "
        "the learning rate in force follows it"
    )
    same, rest = divmod(batch_size * int(given), now.world_size)
    return text if rest else f"{text}; --batch-size {same} keeps both"


def _require_same_layout(config: TrainConfig, now: Layout, before: Layout, saved: Checkpoint) -> None:
    """Raise UserError on all ranks for another layout: DALI's own reader knows its position in one alone."""
    if now != before:
        raise UserError(
            f"{now}: --loader stock goes on only as its checkpoint was saved, by {before}; start the same, go on with "
            f"another loader by --loader dali {accept_changes(config, saved.path)}, or {start_again(config)}",
            on_all_ranks=True,
        )


def choose_batch_size(config: TrainConfig, env: DistEnv, saved: Checkpoint | None, num_train: int | None = None) -> int:
    """`--batch-size`, or where that was left open: what keeps the checkpoint's global batch, else by the images.

    With another global batch the images of the epoch under way would not come once each, so that it takes
    `--accept-changes`.

    Raises:
        UserError: on all ranks, if the global batch is not that of the checkpoint, or cannot be.
    """
    given = config.batch_size
    if saved is None or config.evaluate:
        on_cuda = env.device.type == "cuda"
        return fit_batch_size(config, num_train, env.world_size, on_cuda) if given is None else given
    before, accumulated = saved_layout(saved), config.grad_accum_steps
    if config.loader == saved.config.loader == "stock" and not config.accept_changes:
        _require_same_layout(config, Layout(env.world_size, given or before.batch_size, accumulated), before, saved)
    total = before.global_batch_size
    same_total, rest = divmod(total, env.world_size * accumulated)
    if given is not None and (config.accept_changes or given * env.world_size * accumulated == total):
        return given
    origin = f"the checkpoint was saved by {before}, a global batch of {total}"
    again = f"go on with it by {accept_changes(config, saved.path)}, or {start_again(config)}"
    now = count(env.world_size, "process") + (f" x --grad-accum-steps {accumulated}" if accumulated > 1 else "")
    if (rest or not same_total) and config.accept_changes:
        return saved.config.batch_size
    if rest or not same_total:
        fewer = [number for number in range(1, env.world_size) if total % (number * accumulated) == 0]
        remedy = f"start {count(fewer[-1], 'process')}" if fewer else "lower --grad-accum-steps"
        raise UserError(f"{now}: cannot share a step evenly, {origin}; {remedy}, {again}", on_all_ranks=True)
    if given is not None:
        raise UserError(
            f"--batch-size {given}: {origin}; on {now} give --batch-size {same_total} or leave it out, {again}",
            on_all_ranks=True,
        )
    return same_total
