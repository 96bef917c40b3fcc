"""Processes as the Linux kernel sees them: state and times of any process, and a signal when the parent ends."""

import ctypes
import os
import signal
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat, see proc(5).

    Attributes:
        state: one letter: R for a process that runs, S that sleeps, T that is stopped, Z that has ended, ...
        cpu_seconds: user and system time since it started.
        started: seconds from the boot of the machine to its start.
    """

    state: str
    cpu_seconds: float
    started: float


def read_stat(pid: int) -> ProcessStat:
    """State and times of a process of this machine.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
        OSError: this process has no file descriptor left.
    """
    # The name of the program stands in parentheses and may contain spaces and parentheses itself.
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessStat(state, (int(fields[10]) + int(fields[11])) / ticks, int(fields[18]) / ticks)


def exit_with_parent(number: signal.Signals, parent: int) -> None:
    """Let the kernel send this process the signal `number` when its parent ends, or now if it has ended already.

    Args:
        number: SIGTERM or SIGKILL.
        parent: process id of the parent, read while it lived.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
