"""Interleaved measurement: every case is measured once per round, A B A B, so that drift of the machine affects all.

A window is the wall time of a number of steps, on CUDA between two synchronizations. Loaders fill their queues while
others are measured. So before a window all queues are full and idle; then the queue of the case is drained, two steps
are discarded, and the window shows the sustained rate. A window of a loader with worker processes is a whole number of
their rounds, as their batches come in bursts. The first windows of each case, with compilation and the search for fast
kernels, only determine how many steps fill the wanted time.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from utils.benchmark.progress import Progress
from utils.distributed.process import read_stat
from utils.errors import Stopped
from utils.training.run import Run
from utils.training.state.meter import Meter

MIN_STEPS, LEAD_IN = 3, 2  # of a window, and discarded before it


class Stream(Protocol):
    """An endless stream of batches, or of their sizes."""

    def __next__(self) -> object:
        """The next one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        name: for the progress.
        step: the timed function, for one batch.
        stream: the source of its batches; None if it needs none.
        queue: batches that `stream` may keep ready.
        stride: a window is a multiple of this many steps.
        meter: of the training step.
    """

    name: str
    step: Callable[[], object]
    stream: Stream | None = None
    queue: int = 0
    stride: int = 1
    meter: Meter | None = None


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device; on the CPU there is none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclasses.dataclass(frozen=True)
class Window:
    """One window of one case: wall and CPU time in seconds; `data_wait` a share of the wall time, 0 to 1."""

    steps: int
    seconds: float
    cpu_seconds: float
    data_wait: float

    def rate(self, batch_size: int) -> float:
        """Images per second."""
        return self.steps * batch_size / self.seconds


def measure(cases: Sequence[Case], run: Run, windows: int, window_seconds: float) -> list[list[Window]]:
    """`windows` windows of each case, interleaved, after one of each that is discarded.

    Raises:
        Stopped: a signal came.
    """
    device, batch_size = run.env.device, run.config.batch_size
    run.state.model.train()
    with Progress([case.name for case in cases], windows, window_seconds) as progress:

        def measure_once(case: Case, steps: int) -> Window:
            window = _measure_window(case, steps, device)
            if run.stop.should_stop():
                raise Stopped
            return window

        def calibrate(number: int, case: Case) -> int:
            progress.start(number)
            steps = case.stride
            measure_once(case, steps)  # compiles
            while (window := measure_once(case, steps)).seconds < window_seconds / 4:
                steps *= 2
            progress.finish(number, window.rate(batch_size))
            needed = max(MIN_STEPS, window_seconds * steps / window.seconds)
            return math.ceil(needed / case.stride) * case.stride

        steps = [calibrate(number, case) for number, case in enumerate(cases)]
        results: list[list[Window]] = [[] for _ in cases]
        for _ in range(windows):
            for number, case in enumerate(cases):
                progress.start(number)
                window = measure_once(case, steps[number])
                progress.finish(number, window.rate(batch_size))
                results[number].append(window)
    return results


def _measure_window(case: Case, steps: int, device: torch.device) -> Window:
    settle(device)
    if case.stream is not None:
        for _ in range(case.queue + case.stride):
            next(case.stream)
    for _ in range(LEAD_IN):
        case.step()
    synchronize(device)
    if case.meter is not None:
        case.meter.start()
    started, cpu_started = time.perf_counter(), cpu_seconds()
    for _ in range(steps):
        case.step()
    synchronize(device)
    seconds, used = time.perf_counter() - started, cpu_seconds() - cpu_started
    data_wait = case.meter.read().data_wait if case.meter is not None else 0.0
    return Window(steps, seconds, used, data_wait)


def settle(device: torch.device, timeout: float = 60.0) -> None:
    """Wait until all queues are full: until this process and its workers have idled for 0.1 s."""
    synchronize(device)
    deadline, idle = time.monotonic() + timeout, 0
    while idle < 2 and time.monotonic() < deadline:
        before = cpu_seconds()
        time.sleep(0.05)
        idle = idle + 1 if cpu_seconds() - before <= 0.01 else 0  # one tick of the clock that counts the workers'


def cpu_seconds() -> float:
    """CPU time of this process and its live worker processes, which no rusage counts before their end."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        assert worker.pid is not None  # it was started
        with contextlib.suppress(OSError):  # it has just ended
            seconds += read_stat(worker.pid).cpu_seconds
    return seconds
