"""scripts/performance.py: no processes and files remain of a run that is cut off; starts are timed."""

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import launcher, performance
from tests.conftest import ROOT, alive, descendants, environment, identify, kill_tree

TINY = ("--arch", "test_resnet", "--image-size", "32", "--batch-size", "4", "--device", "cpu")
# A benchmark with a temporary folder, and a worker that ignores SIGTERM, as the benchmark does for --window-seconds 2.
STUBBORN = """
import os, signal, sys, tempfile, time
tempfile.mkdtemp(prefix="benchmark-")
if sys.argv[sys.argv.index("--window-seconds") + 1] == "2.0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
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
        assert performance.run("resnet18", tmp_path, tmp_path, window_seconds, 2.0) == "cut off after 2 s"
    assert "ready" in (tmp_path / "resnet18" / "log.txt").read_text()
    assert len(seen) == 2
    assert alive(seen) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.dist
@pytest.mark.slow
def test_a_benchmark_that_is_cut_off_leaves_nothing(
    data: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*TINY, "--workers", "2", "--loaders", "torch", "--windows", "100")
    monkeypatch.setattr(performance, "RUNS", {"resnet18": flags})
    with Watch() as seen:
        assert performance.run("resnet18", data, tmp_path, 1.0, 25.0) == "cut off after 25 s"
    assert len(seen) >= 3, "it had workers"
    assert alive(seen) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "window_seconds"), [(signal.SIGINT, "1.0"), (signal.SIGTERM, "1.0"), (signal.SIGTERM, "2.0")]
)
def test_a_signal_ends_the_run_under_way(tmp_path: Path, number: signal.Signals, window_seconds: str) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    program = f"import sys; from scripts import performance as p; p.BENCHMARK = {str(tmp_path / 'stubborn.py')!r}; "
    words = ["-c", f"{program}sys.exit(p.main(sys.argv[1:]))", "--data-dir", tmp_path, "--output-dir", tmp_path / "out"]
    words += ["--only", "resnet18", "--window-seconds", window_seconds]
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=ROOT, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
    )  # fmt: skip
    log = tmp_path / "out" / "resnet18" / "log.txt"
    while not (log.exists() and log.read_text() == "ready\n" * 2):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    seen = identify(descendants(process.pid))
    process.send_signal(number)
    if window_seconds == "2.0":  # the run ignores SIGTERM, and the user sends it twice
        time.sleep(1)
        process.send_signal(number)
    try:
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert len(seen) == 2
    assert alive(seen) == []


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    """Standard output and error; puts back the handler that `performance.main` sets."""
    before = signal.getsignal(signal.SIGTERM)
    yield capsys
    signal.signal(signal.SIGTERM, before)


def call(data_dir: Path, output_dir: Path, only: str = "resnet18") -> int:
    words = ("--data-dir", data_dir, "--output-dir", output_dir, "--only", only, "--limit", 100)
    return performance.main([str(word) for word in words])


def test_a_failed_run_removes_its_old_results(tmp_path: Path, printed: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    old = tmp_path / "out" / "resnet18" / "benchmark.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    assert call(tmp_path / "empty", tmp_path / "out") == 1
    assert "resnet18: exit 2, see" in printed.readouterr().out
    assert not old.exists()


def test_refusals(tmp_path: Path, printed: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for words, message in (
        ((tmp_path / "nowhere", tmp_path), f"--data-dir {tmp_path}/nowhere: no such folder; give"),
        ((tmp_path / "file", tmp_path), f"--data-dir {tmp_path}/file: no such folder; give"),
        ((tmp_path, tmp_path / "file"), f"--output-dir {tmp_path}/file: cannot be written (File exists); give another"),
        ((tmp_path, Path("/proc/brisk")), "--output-dir /proc/brisk: cannot be written (No such file or directory);"),
        ((tmp_path, tmp_path, "resnet18,foo"), "--only resnet18,foo: 'foo' is not one of resnet50, "),
    ):
        assert call(*words) == 2
        out, err = printed.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"performance.py: {message}")


@pytest.mark.slow
def test_starts_are_timed(tmp_path: Path) -> None:
    ended = performance.time_starts(tmp_path, 100, TINY, count=2)
    found = re.fullmatch(r"done; launch to first step: (.*) s", ended)
    assert found, ended
    seconds = [float(word) for word in found[1].split(", ")]
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert list(tmp_path.iterdir()) == [], "the checkpoints are not needed"
    assert performance.time_starts(tmp_path, 100, ("--arch", "nonsense")).startswith(
        "exit 2: train.py: --arch nonsense"
    )
