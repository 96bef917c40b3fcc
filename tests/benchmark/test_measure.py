"""Cases are measured interleaved, with drained queues, and the CPU time of worker processes counts."""

import signal
import time
from collections.abc import Callable

import pytest

from utils.benchmark.loaders import open_loader
from utils.benchmark.measure import Case, cpu_seconds, measure
from utils.data.images.manifest import Manifest
from utils.errors import Stopped
from utils.training.run import Run


def test_cases_are_interleaved(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, _ = opened()
    steps: list[str] = []
    streams = {name: iter(range(10**9)) for name in "AB"}

    def case(name: str, stride: int) -> Case:
        return Case(name, lambda: steps.append(name), streams[name], queue=5, stride=stride)

    results = measure([case("A", 1), case("B", 4)], run, windows=5, window_seconds=1e-9)
    assert [len(windows) for windows in results] == [5, 5]
    assert {window.steps for window in results[0]} == {3}
    assert {window.steps for window in results[1]} == {4}  # complete rounds of its workers
    assert "".join(steps[-5 * (5 + 6) :]) == ("A" * (2 + 3) + "B" * (2 + 4)) * 5  # two steps lead in
    assert next(streams["B"]) == 7 * (5 + 4)  # drained before every window, and before the two that size it


def test_a_signal_ends_it(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, _ = opened()
    ending = Case("ending", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped):
        measure([ending], run, windows=5, window_seconds=0.01)


def test_worker_time_counts(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened()
    loader = open_loader("torch", run, manifest)
    before, before_here = cpu_seconds(), time.process_time()
    for _ in range(50):
        next(loader.stream)
    workers = cpu_seconds() - before - (time.process_time() - before_here)
    loader.stream.close()
    assert workers > 0.05, "400 images cannot be decoded in less"
