"""bench launch and series: exit statuses, time limits, signals, and the end of all processes of a command."""

import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from scripts.bench import series
from scripts.bench.__main__ import main
from tests.conftest import call_main
from tests.harness import ROOT, launch, start
from tests.processes import alive, identify

BENCH = ROOT / "scripts" / "bench"
# A process that ends after some seconds, and its child in another session, which ignores SIGTERM.
DETACHED = """
import os, pathlib, signal, sys, tempfile, time
tempfile.mkdtemp()
if sys.argv[3] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()}\\n")
    time.sleep(600)
    os._exit(0)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""
# bench, which waits less long for a command to end after SIGTERM.
IMPATIENT = """
import sys
from scripts.bench import launch
from scripts.bench.__main__ import main
launch.END_SECONDS = 2.0
sys.exit(main(sys.argv[1:]))
"""
# What benchmark.py leaves, as far as the table of a series needs it. With windows of 600 s it takes as long.
MEASURED = """
import json, pathlib, sys, time
rates = {"synthetic": {"median": 200.0, "windows": [200.0] * 5}, "dali": {"median": 100.0, "windows": [100.0] * 5}}
found = {"workers": 4, "batch_size": 256, "training": rates, "alone": rates}
pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1], "benchmark.json").write_text(json.dumps(found))
if sys.argv[sys.argv.index("--window-seconds") + 1] == "600.0":
    time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files of all commands; workers' sockets need a short path."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize(
    ("seconds", "kind", "limit", "signals", "status"),
    [
        (0, "willing", 60, (), 0),
        pytest.param(600, "willing", 5, (), 124, marks=pytest.mark.slow),
        pytest.param(600, "stubborn", 5, (), 124, marks=pytest.mark.slow),
        (600, "willing", 60, (signal.SIGINT,), 130),
        (600, "willing", 60, (signal.SIGTERM,), 143),
        pytest.param(600, "stubborn", 60, (signal.SIGTERM, signal.SIGTERM), 143, marks=pytest.mark.slow),
    ],
)
def test_no_process_and_no_file_remains(
    tmp_path: Path, temporary: Path, seconds: int, kind: str, limit: int, signals: Sequence[int], status: int
) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", DETACHED, pid_file, seconds, kind]
    with start("launch", "--limit", limit, "--", *command, program=IMPATIENT) as started:
        started.wait_for(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        seen = identify([int(pid_file.read_text()), *started.descendants()])
        assert seen
        for number in signals:
            started.send(number, started.pid)
        assert started.end().status == status
        assert alive(seen) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.dist
@pytest.mark.slow
def test_a_benchmark_that_is_cut_off_leaves_nothing(data: Path, tmp_path: Path, temporary: Path) -> None:
    flags = "--arch test_resnet --image-size 32 --batch-size 4 --device cpu --workers 2 --loaders torch --windows 1000"
    command = [sys.executable, ROOT / "scripts" / "benchmark.py", *flags.split()]
    command += ["--data-dir", data, "--output-dir", tmp_path]
    with start("launch", "--limit", 60, "--", *command, program=BENCH) as started:
        started.wait_for(lambda: len(started.descendants()) >= 3)  # it has workers
        assert started.end().status == 124
        started.check_nothing_left(timeout=0)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("code", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_the_status_is_that_of_the_command(code: str, status: int) -> None:
    command = (sys.executable, "-c", f"import os, signal, sys; {code}")
    done = launch("launch", "--limit", 60, "--", *command, program=BENCH)
    assert (done.status, done.err) == (status, "")


def test_a_command_is_terminated_once_its_file_has_a_line(tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
path = pathlib.Path(sys.argv[1])
path.write_text("half")
time.sleep(1)
path.write_text("half a line\\n")
time.sleep(600)
"""
    log = tmp_path / "log"
    flags = ("--limit", 60, "--terminate-after", log)
    done = launch("launch", *flags, "--", sys.executable, "-c", code, log, program=BENCH)
    assert (done.status, log.read_text()) == (7, "half a line\n")


# ---------------------------------------------------------------------------------------------------------------------
# series


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """Of a series whose benchmark is MEASURED."""
    (tmp_path / "measured.py").write_text(MEASURED)
    monkeypatch.setattr(series, "BENCHMARK", tmp_path / "measured.py")
    return "series", "--data-dir", tmp_path, "--output-dir", tmp_path / "out", "--only", "resnet50,resnet18"


def test_results_are_printed_after_each_run_and_as_a_table(
    flags: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = call_main(main, flags, capsys).out.splitlines()
    assert (lines[0], lines[2]) == ("resnet50: done", "resnet18: done")
    for name, line in (("resnet50", lines[1]), ("resnet18", lines[3])):
        assert line.startswith(f"    | {name}, dali | 4 | 256 | 200")
    assert lines[-2:] == [lines[1].strip(), lines[3].strip()]
    assert "| 0.500 |" in lines[1]


def test_a_run_of_the_series_is_cut_off(flags: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> None:
    done = call_main(main, (*flags, "--window-seconds", 600, "--limit", 1), capsys)
    assert done.status == 1
    assert "resnet18: cut off after 1 s\n" in done.out


def test_a_signal_ends_the_series(flags: tuple[object, ...], tmp_path: Path) -> None:
    program = f"from scripts.bench import series; series.BENCHMARK = {str(series.BENCHMARK)!r}{IMPATIENT}"
    with start(*flags, "--window-seconds", 600, program=program) as started:
        started.wait_for((tmp_path / "out" / "resnet50" / "benchmark.json").exists)
        started.send(signal.SIGTERM, started.pid)
        assert started.end().status == 143
        started.check_nothing_left(timeout=0)


def test_a_run_of_the_series_that_fails_leaves_no_old_measurements(
    flags: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measured.py").write_text("import sys; sys.exit(2)")
    old = tmp_path / "out" / "resnet18" / "benchmark.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    done = call_main(main, flags, capsys)
    assert done.status == 1
    assert "resnet18: exit 2, see" in done.out
    assert not old.exists()
