"""scripts/launcher.py: exit statuses, time limits, and the end of all processes of a command."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import launcher
from tests.conftest import Refused
from tests.harness import ROOT, launch, start
from tests.processes import alive, identify

LAUNCHER = ROOT / "scripts" / "launcher.py"

# A process that ends after some seconds, and its child in another session, which ignores SIGTERM.
DETACHED = """
import os, pathlib, signal, sys, tempfile, time
tempfile.mkdtemp()
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


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files of all commands."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize(("seconds", "status"), [(0, 0), (600, 124)])
def test_no_process_and_no_file_remains(tmp_path: Path, temporary: Path, seconds: float, status: int) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", DETACHED, pid_file, seconds]
    with start("--limit", 5, "--", *command, program=LAUNCHER) as started:
        started.wait_for(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        seen = identify([int(pid_file.read_text())])
        assert len(seen) == 1
        assert started.end().status == status
        assert alive(seen) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("code", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_the_status_is_that_of_the_command(code: str, status: int) -> None:
    command = (sys.executable, "-c", f"import os, signal, sys; {code}")
    done = launch("--limit", 60, "--", *command, program=LAUNCHER)
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
    done = launch(*flags, "--", sys.executable, "-c", code, log, program=LAUNCHER)
    assert (done.status, log.read_text()) == (7, "half a line\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--limit", "0", "--", "true"), "--limit 0.0: must be more than 0 and finite"),
        (("--limit", "5"), "Missing argument 'command'"),
        (("--limit", "5", "true", "--never"), "No such option: --never"),
        (("--limit", "5", "--", "/nowhere/program"), "/nowhere/program: cannot be started (no such program)"),
    ],
)
def test_refusals(refused: Refused, words: tuple[str, ...], message: str) -> None:
    refused(*words, main=launcher.main, program="launcher.py")(message)
