"""The state and times of real processes, and a process that ends with its parent."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import launch, start
from utils.distributed.process import read_stat


def wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 30
    while read_stat(pid).state != state:
        assert time.monotonic() < deadline, read_stat(pid)
        time.sleep(0.01)


def test_states() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        wait_for_state(process.pid, "S")
        process.send_signal(signal.SIGSTOP)
        wait_for_state(process.pid, "T")
        process.kill()
        wait_for_state(process.pid, "Z")
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        read_stat(process.pid)


def test_the_name_of_a_program_is_no_field(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "1000"]) as process:
        wait_for_state(process.pid, "S")
        process.kill()


def test_times() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen(["sleep", "1000"]) as process:
        after = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert before - 0.01 <= read_stat(process.pid).started <= after, "it has ticks of 0.01 s"
        process.kill()
    start = time.process_time()
    assert read_stat(os.getpid()).cpu_seconds == pytest.approx(start, abs=0.05)
    while time.process_time() < start + 0.5:
        pass
    assert read_stat(os.getpid()).cpu_seconds == pytest.approx(start + 0.5, abs=0.05)


CHILD_OF_A_PARENT = """
import os, signal, time
from utils.distributed.process import exit_with_parent

parent = os.getpid()
if os.fork() == 0:
    exit_with_parent(signal.SIGKILL, parent)
    print(os.getpid(), flush=True)
time.sleep(1000)
"""


def test_exit_with_parent() -> None:
    with start(program=CHILD_OF_A_PARENT) as parent:
        parent.wait_for(lambda: parent.out.endswith("\n"))
        assert parent.descendants() == [int(parent.out)]
        parent.process.kill()
        parent.check_nothing_left(30)


def test_exit_with_a_parent_that_has_ended_already() -> None:
    program = (
        "import os, signal\n"
        "from utils.distributed.process import exit_with_parent\n"
        "exit_with_parent(signal.SIGTERM, os.getppid() + 1)\n"
        "print('still here')\n"
    )
    done = launch(program=program)
    assert (done.status, done.out) == (-signal.SIGTERM, ""), done.err
