"""Meter: metrics, speed and waiting time of a log interval, kept on the device until it is read."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.distributed.collective import collective
from utils.distributed.collectives import all_reduce_sum
from utils.distributed.group import DistEnv
from utils.training.state.metrics import TRAIN_METRICS, GradNorm, MeanLoss

WARMUP_STEPS = 200  # of a launch; DALI's buffers and torch's memory grow until all large images have come


@dataclasses.dataclass(frozen=True)
class Interval:
    """One log interval over all ranks.

    Attributes:
        metrics: key of each of `TRAIN_METRICS` that the interval has -> mean.
        images_per_second: over all ranks, by wall time.
        data_wait: share of the wall time, 0 to 1, in which the device had nothing to do because input was late; the
            mean over the ranks.
        bad_steps: how many steps in a row, up to now, had a loss that is not finite, on the rank with most of them.
        skipped_steps: steps whose fp16 gradients overflowed, so that the scaler left the weights alone.
        seconds: wall time on this rank, without evaluation and checkpoints.
        checkpoint_seconds: of the checkpoints on this rank since the last read.
        gpu_memory_mb: most that torch has allocated on this rank's GPU since the launch, 10^6 bytes; None without one.
    """

    metrics: dict[str, float]
    images_per_second: float
    data_wait: float
    bad_steps: int
    skipped_steps: int
    seconds: float
    checkpoint_seconds: float = 0.0
    gpu_memory_mb: float | None = None

    def speed(self) -> dict[str, float]:
        """Times, speed and memory, under their keys in metrics.jsonl, without those that are None."""
        found = {
            "images_per_second": round(self.images_per_second, 1),
            "data_wait": round(self.data_wait, 4),
            "seconds": round(self.seconds, 3),
            "checkpoint_seconds": round(self.checkpoint_seconds, 3),
            "gpu_memory_mb": self.gpu_memory_mb,
        }
        return {name: value for name, value in found.items() if value is not None}

    def shown(self) -> dict[str, str]:
        """Label -> value of the metrics that the line of an interval has."""
        found = [each for each in TRAIN_METRICS if each.label and each.key in self.metrics]
        return {each.label: f"{self.metrics[each.key]:.4f}" for each in found}


@dataclasses.dataclass
class Totals:
    """A sum of log intervals, without evaluation and checkpoints.

    Attributes:
        steps: optimizer steps.
        images: of all ranks.
        seconds: wall time.
        wait: the part of `seconds` in which the device had nothing to do, the mean over the ranks.
    """

    steps: int = 0
    images: float = 0.0
    seconds: float = 0.0
    wait: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.steps + other.steps,
            self.images + other.images,
            self.seconds + other.seconds,
            self.wait + other.wait,
        )

    @property
    def images_per_second(self) -> float:
        """Mean, images of all ranks."""
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def data_wait(self) -> float:
        """Share of the time, 0 to 1."""
        return self.wait / self.seconds if self.seconds else 0.0


class Meter:
    """What is added up between two reads.

    Attributes:
        skipped_steps: those of `Interval`, of the whole run, up to the last read.
        checkpoint_seconds: in `paused` since the last read.
        first_batch_seconds: for which the host waited for this launch's first batch; None before it.
    """

    def __init__(self, env: DistEnv) -> None:
        self.skipped_steps, self.checkpoint_seconds = 0, 0.0
        self.first_batch_seconds: float | None = None
        # Of all launches: their first intervals, with compilation and the filling of the queues; those that begin
        # within the first WARMUP_STEPS; the others.
        self._totals = {"first": Totals(), "early": Totals(), "steady": Totals()}
        self._env = env
        self._metrics = [metric(env.device) for metric in TRAIN_METRICS]
        self._bad_loss = torch.zeros((), dtype=torch.bool, device=env.device)  # within the step under way
        self._bad_steps = torch.zeros((), dtype=torch.int64, device=env.device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=env.device)
        self._waits: list[tuple[Any, Any]] = []
        self._recent: float | None = None
        self._copy: tuple[Tensor, float, torch.cuda.Event] | None = None  # of the loss: on its way to the host
        self._steps = 0  # of this launch
        self._is_first = True
        self.start()

    def start(self) -> None:
        """Begin timing, at the start of an epoch's training."""
        self._waits.clear()
        self._timed_images = 0
        self._start_step = self._steps
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time of the interval under way."""
        return time.perf_counter() - self._started

    @property
    def totals(self) -> Totals:
        """Intervals that begin when `WARMUP_STEPS` of their launch are done, over all launches of a run.

        In a short run, in which those have fewer steps than the ones before, these too, but no launch's first interval;
        that one as long as there is no other. An interval that a stop has cut off is in none.
        """
        early, steady = self._totals["early"], self._totals["steady"]
        later = steady if steady.steps >= early.steps else early + steady
        return later if later.steps else self._totals["first"]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training, a checkpoint in mid-interval. Waits for the device, whose steps are training."""
        self._wait_for_device()
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._started += seconds
        self.checkpoint_seconds += seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around taking the next batch.

        On CUDA both ends are events on the training stream: the first is reached when the device has finished all
        earlier steps, the second when the batch is there, so a batch that is early costs nothing even if the host
        waits for it. On the CPU, host time.
        """
        start, began = self._mark(), time.perf_counter()
        yield
        self._waits.append((start, self._mark()))
        if self.first_batch_seconds is None:
            self.first_batch_seconds = round(time.perf_counter() - began, 3)

    def update(self, loss: Tensor, images: int) -> None:
        """Add one batch; `loss` is its mean, a scalar on the device, and is not waited for."""
        for metric in self._metrics:
            metric.after_batch(loss, images)
        self._bad_loss |= ~torch.isfinite(loss.detach())
        self._timed_images += images

    def recent_loss(self) -> float | None:
        """Mean loss on this rank of the interval under way, or of the last one; None before there is any.

        Does not wait for the device: on CUDA a call starts a copy, which a later call reads.
        """
        of_loss = self._metrics[0]
        if self._env.device.type != "cuda":
            if of_loss.weight:
                self._recent = of_loss.total.item() / of_loss.weight
        elif self._copy is None or self._copy[2].query():  # type: ignore[no-untyped-call]
            if self._copy is not None and self._copy[1]:
                self._recent = self._copy[0].item() / self._copy[1]
            loss = torch.empty((), dtype=torch.float64, pin_memory=True).copy_(of_loss.total, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copy = loss, of_loss.weight, event
        return self._recent

    def end_step(self) -> None:
        """After the last batch of an optimizer step."""
        self._bad_steps.add_(1).mul_(self._bad_loss)
        self._bad_loss.zero_()
        self._steps += 1

    def count_skipped(self, skipped: Tensor) -> None:
        """Add a step that the fp16 scaler skipped, if `skipped`, a boolean scalar on the device, is true."""
        self._skipped += skipped

    def add_grad_norm(self, norm: Tensor) -> None:
        """Add the norm of a step's gradients, a scalar on the device, which is not waited for."""
        for metric in self._metrics:
            metric.after_clipping(norm)

    @collective
    def is_finite(self) -> bool:
        """Whether the last step's loss was, on every rank. Waits for the device."""
        return all_reduce_sum(self._bad_steps.clamp(max=1).cpu()).item() == 0

    @collective
    def read(self) -> Interval:
        """Sum over all ranks and begin the next interval. Waits for the device."""
        self._wait_for_device()
        if self._env.device.type == "cuda":
            wait = sum(start.elapsed_time(end) for start, end in self._waits) / 1000
        else:
            wait = sum(end - start for start, end in self._waits)
        seconds = self.seconds
        means = torch.tensor([(each.total.item(), each.weight) for each in self._metrics], dtype=torch.float64)
        counts = torch.tensor([self._timed_images, wait / seconds], dtype=torch.float64)
        bad_steps = torch.zeros(self._env.world_size, dtype=torch.float64)  # of each rank
        bad_steps[self._env.rank] = self._bad_steps
        summed = all_reduce_sum(torch.cat([means.flatten(), counts, bad_steps]))
        sums = summed[: means.numel()].view(means.shape).tolist()
        timed, share, *bad = summed[means.numel() :].tolist()
        share /= self._env.world_size
        self._totals[self._phase()] += Totals(self._steps - self._start_step, timed, seconds, share * seconds)
        self._is_first = False
        skipped = int(self._skipped)  # the same on all ranks, as they exchange gradients first
        self.skipped_steps += skipped
        found = {
            metric.key: total / weight for metric, (total, weight) in zip(self._metrics, sums, strict=True) if weight
        }
        is_cuda = self._env.device.type == "cuda"
        memory = round(torch.cuda.max_memory_allocated(self._env.device) / 1e6, 1) if is_cuda else None
        interval = Interval(
            found, timed / seconds, share, int(max(bad)), skipped, seconds, self.checkpoint_seconds, memory
        )  # fmt: skip
        for metric in self._metrics:
            metric.reset()
        self._skipped.zero_()
        self.checkpoint_seconds = 0.0
        self.start()
        return interval

    def _phase(self) -> str:
        """Key of the totals that the interval under way belongs to."""
        if self._is_first:
            return "first"
        return "early" if self._start_step < WARMUP_STEPS else "steady"

    def _wait_for_device(self) -> None:
        if self._env.device.type == "cuda":
            torch.cuda.synchronize(self._env.device)

    def _mark(self) -> Any:
        if self._env.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def state_dict(self) -> dict[str, Any]:
        """The interval under way on this rank, and the totals."""
        totals = {phase: dataclasses.asdict(totals) for phase, totals in self._totals.items()}
        skipped = {"interval": int(self._skipped), "run": self.skipped_steps}
        metrics = {each.key: (each.total.item(), each.weight) for each in self._metrics}
        return {"metrics": metrics, "totals": totals, "skipped_steps": skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of `state_dict`."""
        saved = _saved_metrics(state)
        for metric in self._metrics:
            total, metric.weight = saved.get(metric.key, (0.0, 0.0))
            metric.total.fill_(total)
        self._skipped.fill_(state["skipped_steps"]["interval"])
        self.skipped_steps = state["skipped_steps"]["run"]
        self._totals = {phase: Totals(**totals) for phase, totals in state["totals"].items()}


def _saved_metrics(state: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Key -> (total, weight) in a `Meter.state_dict`, also one of a version that had these two figures alone."""
    if "metrics" in state:
        return dict(state["metrics"])
    norm = state.get("grad_norm", {"sum": 0.0, "steps": 0})  # not in the checkpoints of 0.1
    return {MeanLoss.key: (state["loss"], state["images"]), GradNorm.key: (norm["sum"], norm["steps"])}


def share_interval(states: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """The `Meter.state_dict` of `rank` among other ranks, so that the sum over all of them stays what it was."""
    saved = [_saved_metrics(state) for state in states]
    sums = {key: (sum(each[key][0] for each in saved), sum(each[key][1] for each in saved)) for key in saved[0]}
    return states[0] | {"metrics": sums if rank == 0 else {}}
