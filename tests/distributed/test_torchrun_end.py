"""The program that ends a torchrun which nothing else can end, with processes in torchrun's place."""

import signal
import time
from pathlib import Path

import pytest

from tests.harness import Started, start
from utils.distributed.torchrun_end import end_when_idle

# What torchrun does, by the first argument; the files of the folder tell it when.
TORCHRUN = """
import ctypes, os, signal, sys, time
from pathlib import Path

case, folder = sys.argv[1], Path(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def start_process():
    if os.fork() == 0:
        wait_for("process may end")
        os._exit(1)

if case == "has a process":
    start_process()
(folder / "ready").touch()
if case == "starts a process":
    wait_for("program started")
    time.sleep(0.1)  # the times of starts have ticks of 0.01 s
    start_process()
    wait_for("may end")
if case == "ends":
    wait_for("program started")
    sys.exit(3)
while case == "sleeps":
    time.sleep(1)
mutex = ctypes.create_string_buffer(64)  # in C, where no handler of Python's runs
ctypes.CDLL(None).pthread_mutex_lock(mutex)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def start_torchrun(case: str, folder: Path) -> Started:
    return start(case, folder, program=TORCHRUN)


@pytest.mark.parametrize(
    ("case", "seconds", "status"), [("waits in C", 0.5, -signal.SIGKILL), ("sleeps", 0.5, 7), ("ends", 600, 3)]
)
def test_it_ends(tmp_path: Path, case: str, seconds: float, status: int) -> None:
    """Killed, as it was asked to, or by itself."""
    with start_torchrun(case, tmp_path) as torchrun:
        torchrun.wait_for((tmp_path / "ready").exists)
        program = end_when_idle(torchrun.pid, seconds)
        (tmp_path / "program started").touch()
        assert torchrun.end().status == status
        assert program.wait(60) == 0


def test_it_may_wait_for_a_process(tmp_path: Path) -> None:
    """Another rank that is still writing its checkpoint."""
    with start_torchrun("has a process", tmp_path) as torchrun:
        torchrun.wait_for((tmp_path / "ready").exists)
        program = end_when_idle(torchrun.pid, 0.5)
        time.sleep(2)  # for a program that would not wait
        assert torchrun.process.poll() is None
        (tmp_path / "process may end").touch()
        assert torchrun.end().status == -signal.SIGKILL
        assert program.wait(60) == 0


def test_it_may_go_on(tmp_path: Path) -> None:
    """With another launch, where restarts are left."""
    with start_torchrun("starts a process", tmp_path) as torchrun:
        torchrun.wait_for((tmp_path / "ready").exists)
        program = end_when_idle(torchrun.pid, 600)
        (tmp_path / "program started").touch()
        assert program.wait(60) == 0
        assert torchrun.process.poll() is None
        torchrun.descendants()
