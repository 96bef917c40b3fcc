"""Run: everything that the training loop holds, and what happens around its steps: logs, checkpoints, stops."""

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from timm.scheduler.scheduler import Scheduler

from utils.data.images.batch import Batch, TrainLoader, ValLoader
from utils.data.images.listing import save_listing
from utils.data.loaders.sampler import Sampler
from utils.data.loaders.settings import with_val_batch
from utils.data.splits.selection import Splits
from utils.distributed.collective import collective
from utils.distributed.collectives import broadcast, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.launcher import seconds_since_launch, terminate_torchrun
from utils.distributed.startup import show_startup, startup_parts
from utils.distributed.stop import StopRequest
from utils.errors import RunFailed, Stopped, UserError
from utils.figures import better_network, better_value, is_better
from utils.log import SUMMARY, Log
from utils.network.augment import BatchAugment
from utils.network.freezing import AnyForwardBackward
from utils.options.resolved import ResolvedConfig
from utils.progress import with_bar
from utils.report.tracking.sender import TrackerProcess
from utils.targets import Targets
from utils.text import count
from utils.training.optimization.optim import learning_rate
from utils.training.resume.restore import Claim
from utils.training.state.checkpoint import RunRecord, create_checkpoint
from utils.training.state.checkpoint_writer import CheckpointWriter, may_queue
from utils.training.state.integrity import nonfinite_reason, require_finite_statistics, require_same_weights
from utils.training.state.output import has_summary
from utils.training.state.train_state import BestEpoch, TrainState

MIN_LOSS_SCALE = 1e-3  # in fp16: 26 steps that overflow, from torch's first scale


@dataclasses.dataclass
class Run:
    """What the training loop holds: the state that a checkpoint keeps, and the tools that it does not.

    Attributes:
        config: what the run uses.
        state: what a checkpoint keeps.
        forward_backward: loss and gradients of a batch.
        schedule: of the learning rate.
        sampler: order of the training images.
        train_loader, val_loader: batches on the device.
        num_val, val_targets: validation images over all ranks, and what their labels stand for.
        augment: uint8 batches to normalized, mixed and erased ones.
        amp_dtype: of the forward pass.
        record: what all checkpoints of the run say.
        log, tracker: console and metrics.jsonl, and what sends them on.
        stop: whether the ranks are asked to stop.
        origin, teacher, warnings: on first weights, on the teacher, and on what is odd about a resume, for the user.
        claim, initial: on the output folder, until `claim_output_dir`; the images that the run began with.
        seconds_to_first_step: of this launch, from the start of the process; None before it.
        first_step_seconds: the part of it in the first step, with its input and compilation.
        startup_parts: seconds of each part of `seconds_to_first_step`; empty before it.
        facts: the start-up block, as names and texts.
        writer: of checkpoints.
        last_save_error: why the last save failed, the same on all ranks; a write that is under way has not yet.
    """

    config: ResolvedConfig
    env: DistEnv
    state: TrainState
    forward_backward: AnyForwardBackward
    schedule: Scheduler
    sampler: Sampler
    train_loader: TrainLoader
    val_loader: ValLoader
    num_val: int
    val_targets: Targets
    augment: BatchAugment
    amp_dtype: torch.dtype
    record: RunRecord
    log: Log
    tracker: TrackerProcess
    stop: StopRequest
    writer: CheckpointWriter
    origin: str
    teacher: str
    warnings: list[str]
    claim: Claim | None
    initial: Splits
    seconds_to_first_step: float | None = None
    first_step_seconds: float | None = None
    startup_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    last_save_error: str | None = None
    _best_before: BestEpoch | None = dataclasses.field(default=None, init=False)  # what best.pt holds if a save fails

    @property
    def resume_hint(self) -> str:
        """What resumes this run."""
        if self.config.resume == "auto":
            return "the same command"
        given = {"--overwrite": self.config.overwrite, "--accept-changes": self.config.accept_changes}
        without = "".join(f" and without {name}" for name, is_given in given.items() if is_given)
        return f"the same command with --resume auto{without}"

    @property
    def epoch_start(self) -> int:
        """Steps that are done before the epoch under way."""
        return self.state.epoch * self.sampler.steps_per_epoch

    @property
    def epoch_end(self) -> int:
        """Steps that are done after it."""
        return self.epoch_start + self.sampler.steps_per_epoch

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the epoch under way ends with an evaluation."""
        done = self.state.epoch + 1
        return done % self.config.eval_every == 0 or done >= self.config.epochs

    @property
    def ends_early(self) -> bool:
        """Whether `--patience` ends the run before its last epoch."""
        is_over = 0 < self.config.patience <= self.state.evaluations_since_best
        return is_over and self.state.epoch < self.config.epochs

    @property
    def is_done(self) -> bool:
        """Whether no epoch is left to train or to evaluate."""
        return self.ends_early or (self.state.epoch >= self.config.epochs and self.state.is_evaluated)

    @collective
    def is_finished(self) -> bool:
        """Whether the run is done and summarized."""
        return self.is_done and broadcast(has_summary(self.config.output_dir), self.env)

    @collective
    def remaining_epochs(self) -> Iterator[int]:
        """Epochs, from 0, that are neither trained nor evaluated.

        Raises:
            Stopped: the ranks agreed to stop between two epochs.
        """
        if not self.is_done and self.state.epoch >= self.config.epochs:
            self.state.epoch -= 1  # the last one since a resume with fewer --epochs: its evaluation is left
        while not self.is_done:
            yield self.state.epoch
            if not self.is_done and self.stop.should_stop():
                self.stop_here()
            if self.seconds_to_first_step is None:  # resumed before the evaluation; now the first step compiles
                self.finish_write()  # before a signal ends the process at once again
                self.stop.disable()

    def remaining_steps(self) -> Iterator[int]:
        """Steps, from 0, of the epoch under way that are not done; none where a resume goes on with its end."""
        if self.state.step >= self.epoch_end:  # beyond it after a resume with fewer --epochs
            return
        self.state.model.train()
        self.forward_backward.start_epoch(self.state.epoch)
        if self.seconds_to_first_step is None:
            show_startup("first step" + (", compiling" if self.config.compile else ""))
        self.augment.start_epoch(self.state.epoch)
        self.log.start_epoch(
            self.state.epoch, self.state.step, self.sampler.global_batch_size, self._evaluations_left, self._loss_and_lr
        )
        self.state.meter.start()
        while self.state.step < self.epoch_end:
            yield self.state.step

    @property
    def _evaluations_left(self) -> int:
        every, epochs = self.config.eval_every, self.config.epochs
        return math.ceil(epochs / every) - self.state.epoch // every

    def _loss_and_lr(self) -> tuple[float | None, float]:
        return self.state.meter.recent_loss(), learning_rate(self.state.optimizer)

    @collective
    def after_step(self) -> None:
        """Log, stop and save where it is due.

        Raises:
            Stopped: the ranks agreed to stop; the checkpoint is written.
            RunFailed: the loss or the weights are lost.
        """
        state, config = self.state, self.config
        self.log.advance()
        if self.seconds_to_first_step is None:
            self._after_first_step()
        is_last = state.step == self.epoch_end
        if is_last or (state.step - self.epoch_start) % config.log_steps == 0:
            self._log_interval()
        if self.stop.should_stop():
            self.save()
            self.stop_here()
        # At the end of an epoch without evaluation `end_epoch` saves at once.
        every = config.checkpoint_steps
        is_due = self.is_evaluation_due if is_last else every > 0 and state.step % every == 0
        if is_due:
            self.save()

    @collective
    def _after_first_step(self) -> None:
        """From now on there is something to lose."""
        self.stop.enable(self.env)  # at once: a signal that finds only one rank enabled ends the two in different ways
        if self.env.device.type == "cuda":
            torch.cuda.synchronize(self.env.device)
        self.startup_parts = startup_parts()
        self.seconds_to_first_step, self.first_step_seconds = seconds_since_launch(), round(self.state.meter.seconds, 3)
        self.log.info(f"first step done {self.seconds_to_first_step:.1f} s after the launch")
        self.writer.warn_of_size(self.state, self.record, self.config.keep)
        self.claim_output_dir()

    @collective
    def _log_interval(self) -> None:
        """Read the meter and write a line of metrics.

        Raises:
            RunFailed: the loss has not been finite for too many steps, or fp16 finds no scale for it.
        """
        state, max_bad_steps = self.state, self.config.max_bad_steps
        lr = learning_rate(state.optimizer)
        interval = state.meter.read()
        values = {"epoch": state.epoch + 1, "step": state.step} | interval.metrics | {"lr": lr} | interval.speed()
        values |= {"skipped_steps": interval.skipped_steps} if state.scaler.is_enabled() else {}
        self.log.train(values, interval.shown())
        where = f"at step {state.step}, lr {lr:.4g}"
        remedy = "lower --lr, set --clip-grad 1, or warm up longer; the last good checkpoint is kept"
        if 0 < max_bad_steps <= interval.bad_steps:
            self.finish_write()
            raise RunFailed(
                f"{where}: the loss has not been finite for {count(interval.bad_steps, 'step')} in a row; {remedy}"
            )
        if max_bad_steps and state.scaler.is_enabled() and state.scaler.get_scale() < MIN_LOSS_SCALE:
            self.finish_write()
            raise RunFailed(f"{where}: fp16 gradients overflow at any scale of the loss; use --amp bf16, or {remedy}")

    @collective
    def begin_evaluation(self) -> None:
        """A stop is heeded between batches from now on, where an evaluation is due."""
        self.stop.enable(self.env)
        self.claim_output_dir()
        self._evaluation_began = time.perf_counter()

    @collective
    def val_batches(self) -> Iterator[Batch]:
        """This rank's validation images, once.

        Raises:
            Stopped: between two batches, on all ranks; the checkpoint from before the evaluation is kept.
        """
        batches = iter(self.val_loader)
        most_per_rank = math.ceil(self.num_val / self.env.world_size)  # other ranks have one image less
        most_batches = math.ceil(most_per_rank / with_val_batch(self.config).batch_size)
        for _ in with_bar(range(most_batches), "evaluating", most_batches, self.env.is_main):
            batch = next(batches, None)
            if batch is not None:
                yield batch
            if self.stop.should_stop():
                self.stop_here()

    @collective
    def end_epoch(self, result: dict[str, Any]) -> None:
        """Note an evaluation, if there was one, and whether it is the best, and save.

        Args:
            result: the keys `val/...` of metrics.jsonl; {} for an epoch without evaluation.
        """
        state, new_best = self.state, None
        state.epoch += 1
        if result:
            state.result = {"epoch": state.epoch, "step": state.step} | result
            seconds = round(time.perf_counter() - self._evaluation_began, 3)
            by, value = self.config.best_by, better_value(result, self.config.best_by)
            self.log.evaluation(state.result | {"val/seconds": seconds}, by, self.config.num_classes)
            if is_better(by, value, state.best.value if state.best else None):
                of_network = "" if better_network(result, by) == "model" else "ema_"
                new_best = BestEpoch(state.epoch, state.step, result.get(f"val/{of_network}top1"), by, value)
            state.evaluations_since_best = 0 if new_best else state.evaluations_since_best + 1
        else:
            self.log.epoch_without_evaluation(state.epoch)
        self.save(new_best, queued=bool(result) and may_queue(state.model))

    @collective
    def claim_output_dir(self) -> None:
        """Make the output folder this run's, now that there is something to lose; does it once.

        metrics.jsonl ends where this launch began, config.json says how it runs, an earlier summary.json is removed, as
        is what `--overwrite` replaces.

        Raises:
            UserError: on all ranks, if rank 0 cannot write there.
        """
        claim = self.claim
        if claim is None:
            return
        with sync_errors(self.env):
            try:
                self.log.truncate_after(*(claim.metrics_until or (0, 0)))
                if self.env.is_main:
                    for path in claim.replaced:
                        path.unlink(missing_ok=True)
                    self.config.save(self.config.output_dir / "config.json")
                    if claim.metrics_until is None or self.config.accept_changes:
                        save_listing(self.config.output_dir, self.initial)
                    (self.config.output_dir / SUMMARY).unlink(missing_ok=True)
                    self.log.event(
                        "started", self.state.step, self.state.seconds, host=os.uname().nodename, pid=os.getpid(),
                        processes=self.env.world_size, steps_per_epoch=self.sampler.steps_per_epoch,
                        startup_seconds=self.seconds_to_first_step, first_step_seconds=self.first_step_seconds,
                        first_batch_seconds=self.state.meter.first_batch_seconds,
                        startup_parts=list(self.startup_parts.items()), facts=list(self.facts.items()),
                    )  # fmt: skip
            except OSError as error:
                raise UserError(
                    f"--output-dir {self.config.output_dir}: cannot be written ({error.strerror}); make room there"
                ) from error
        self.claim = None
        self.tracker.start()

    @collective
    def save(self, new_best: BestEpoch | None = None, *, queued: bool = False) -> None:
        """Copy the run aside as it is now; last.pt is written while training goes on.

        Weights that are not finite, or gave such a loss, do not replace a good checkpoint. A write that fails is
        logged, and the run goes on.

        Args:
            new_best: the evaluation of this epoch if it is the best so far, which best.pt then holds.
            queued: do not wait for the save before the evaluation, which leaves best.pt as it is.

        Raises:
            RunFailed: on all ranks, if their weights are not the same, or running statistics are lost for good.
        """
        if not queued:
            self.finish_write()
        state = self.state
        with state.meter.paused():
            require_same_weights(state, self.resume_hint)
            self.last_save_error = nonfinite_reason(state)
            if self.last_save_error is not None:
                self.log.info(
                    f"warning: no checkpoint at step {state.step}: {self.last_save_error}; the one before is kept"
                )
                return
            require_finite_statistics(state, self.config.amp)
            self._best_before, state.best = state.best, new_best or state.best
            taken = create_checkpoint(state, self.train_loader.state(), self.config, self.record)
            self.writer.start(taken, is_best=new_best is not None)

    @collective
    def finish_write(self) -> None:
        """Wait until all saves are written, or have failed and been logged."""
        if not self.writer.num_pending:
            return
        with self.state.meter.paused():
            error = self.writer.wait()
        if error is not None:
            self.last_save_error = error
            self.state.best = self._best_before  # what best.pt holds, and what the next epoch is compared with

    @collective
    def stop_here(self) -> NoReturn:
        """End the run as it was asked to, after its checkpoint.

        Raises:
            Stopped: always, or
            RunFailed: the last checkpoint could not be written.
        """
        self.require_saved()
        self.log.event(
            "stopped", self.state.step, self.state.seconds, reason=self.stop.reason,
            checkpoint_seconds=round(self.state.meter.checkpoint_seconds, 3),
        )  # fmt: skip
        self.log.info(f"stopped by {self.stop.reason} at step {self.state.step}; {self.resume_hint} resumes here")
        if not self.stop.by_signal:
            terminate_torchrun()
        raise Stopped

    @collective
    def require_saved(self) -> None:
        """Check, before the run ends, that its last checkpoint was written.

        No rank ends before the check: as soon as one process ends, torchrun signals the others.

        Raises:
            RunFailed: on all ranks, it was not.
        """
        self.finish_write()
        if self.last_save_error is not None:
            raise RunFailed(
                f"--output-dir {self.config.output_dir}: the checkpoint of step {self.state.step} could not be written "
                f"({self.last_save_error}); {self.resume_hint} goes on from the one before it"
            )
