"""scripts/performance.py: a run that takes too long leaves neither processes nor files."""

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import launcher, performance
from tests.conftest import Refused, call_main
from tests.harness import start
from tests.processes import alive, descendants, identify

TINY = ("--arch", "test_resnet", "--image-size", "32", "--batch-size", "4", "--device", "cpu")
# A benchmark with a temporary folder and a worker that ignores SIGTERM. Its parent ignores it with windows of 2 s.
STUBBORN = """
import os, signal, sys, tempfile, time
tempfile.mkdtemp(prefix="benchmark-")
if sys.argv[sys.argv.index("--window-seconds") + 1] == "2.0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"ready\\n")  # in one write, as two processes write to the file
time.sleep(600)
"""

# What benchmark.py leaves, as far as the table needs it.
MEASURED = """
import json, pathlib, sys
rates = {"synthetic": {"median": 200.0, "windows": [200.0] * 5}, "dali": {"median": 100.0, "windows": [100.0] * 5}}
found = {"workers": 4, "batch_size": 256, "training": rates, "alone": rates}
pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1], "benchmark.json").write_text(json.dumps(found))
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files, of this process and those that it starts; workers' sockets need a short path."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


class Watch:
    """All processes below this one that were seen within the block."""

    def __enter__(self) -> dict[int, int]:
        self._before = identify(descendants(threading.main_thread().native_id or 0))
        self._seen: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self._seen

    def _look(self) -> None:
        while not self._over.wait(0.1):
            found = identify(descendants(threading.main_thread().native_id or 0))
            self._seen.update({pid: when for pid, when in found.items() if pid not in self._before})

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("window_seconds", [1.0, 2.0], ids=["asked", "killed"])
def test_a_run_that_is_cut_off_leaves_nothing(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, window_seconds: float
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.setattr(performance, "BENCHMARK", tmp_path / "stubborn.py")
    monkeypatch.setattr(launcher, "END_SECONDS", 4)
    with Watch() as seen:
        assert performance.run("resnet18", tmp_path, tmp_path, window_seconds, 4.0) == "cut off after 4 s"
    assert "ready" in (tmp_path / "resnet18" / "log.txt").read_text()
    assert len(seen) == 2
    assert alive(seen) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.dist
@pytest.mark.slow
def test_a_benchmark_that_is_cut_off_leaves_nothing(
    data: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*TINY, "--workers", "2", "--loaders", "torch", "--windows", "1000")
    monkeypatch.setattr(performance, "RUNS", {"resnet18": flags})
    with Watch() as seen:
        assert performance.run("resnet18", data, tmp_path, 1.0, 60.0) == "cut off after 60 s"
    assert len(seen) >= 3, "it had workers"
    assert alive(seen) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "window_seconds"), [(signal.SIGINT, "1.0"), (signal.SIGTERM, "1.0"), (signal.SIGTERM, "2.0")]
)
def test_a_signal_ends_the_run_under_way(tmp_path: Path, number: signal.Signals, window_seconds: str) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    program = f"import sys; from scripts import performance as p; p.BENCHMARK = {str(tmp_path / 'stubborn.py')!r}; "
    flags = ("--data-dir", tmp_path, "--output-dir", tmp_path / "out", "--only", "resnet18")
    log = tmp_path / "out" / "resnet18" / "log.txt"
    program += "sys.exit(p.main(sys.argv[1:]))"
    with start(*flags, "--window-seconds", window_seconds, program=program) as started:
        started.wait_for(lambda: log.exists() and log.read_text() == "ready\n" * 2)
        seen = identify(started.descendants())
        started.send(number, started.pid)
        if window_seconds == "2.0":  # the run ignores the signal, so the user repeats it
            time.sleep(1)
            started.send(number, started.pid)
        assert started.end().status == (130 if number == signal.SIGINT else 143)
        assert len(seen) == 2
        assert alive(seen) == []


def test_results_are_printed_after_each_run_and_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measured.py").write_text(MEASURED)
    monkeypatch.setattr(performance, "BENCHMARK", tmp_path / "measured.py")
    flags = ("--data-dir", tmp_path, "--output-dir", tmp_path / "out", "--only", "resnet50,resnet18")
    lines = call_main(performance.main, flags, capsys).out.splitlines()
    assert (lines[0], lines[2]) == ("resnet50: done", "resnet18: done")
    for name, line in (("resnet50", lines[1]), ("resnet18", lines[3])):
        assert line.startswith(f"    | {name}, dali | 4 | 256 | 200")
    assert lines[-2:] == [lines[1].strip(), lines[3].strip()]
    assert "| 0.500 |" in lines[1]


def test_a_run_of_the_series_that_fails_leaves_no_old_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    old = tmp_path / "out" / "resnet18" / "benchmark.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    flags = ("--data-dir", tmp_path / "empty", "--output-dir", tmp_path / "out", "--only", "resnet18", "--limit", 100)
    done = call_main(performance.main, flags, capsys)
    assert done.status == 1
    assert "resnet18: exit 2, see" in done.out
    assert not old.exists()


@pytest.mark.parametrize(
    ("data_dir", "output_dir", "only", "message"),
    [
        ("{}/nowhere", "{}", "resnet18", "--data-dir {}/nowhere: no such folder; give"),
        ("{}/file", "{}", "resnet18", "--data-dir {}/file: no such folder; give"),
        ("{}", "{}/file", "resnet18", "--output-dir {}/file: cannot be written (File exists); give another"),
        ("{}", "/proc/brisk", "resnet18", "--output-dir /proc/brisk: cannot be written (No such file or directory);"),
        ("{}", "{}", "resnet18,foo", "--only resnet18,foo: 'foo' is not one of resnet50, "),
    ],
)
def test_refusals(refused: Refused, tmp_path: Path, data_dir: str, output_dir: str, only: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    flags = ("--data-dir", data_dir.format(tmp_path), "--output-dir", output_dir.format(tmp_path), "--only", only)
    refused(*flags, main=performance.main, program="performance.py")(f"performance.py: {message.format(tmp_path)}")
