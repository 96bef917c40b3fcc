"""Ends torchrun where it would wait for ever for the store of another machine: a program that outlives the ranks.

torchrun asks the store in C, where it handles no signal and, once the network is cut, waits for as long as TCP does: a
quarter of an hour and more (seen with torch 2.15). It would keep its machine, as a node of Slurm, all that time.

Imports nothing of Brisk, as it is started by its path.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

POLL_INTERVAL = 0.5  # seconds
TERM_SECONDS = 2.0  # to end after SIGTERM, before it is killed


def end_when_idle(torchrun: int, seconds: float) -> "subprocess.Popen[bytes]":
    """Start the program that ends the process `torchrun` once that has been idle for `seconds`.

    It is idle while it has no process. Where it starts another one, it is left alone.

    Raises:
        OSError: there is no such process, or a kernel before Linux 5.3.
    """
    file = os.pidfd_open(torchrun)  # its number may become another process's
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    words = [sys.executable, "-I", "-S", __file__, *map(str, (torchrun, file, seconds, now))]
    nothing = subprocess.DEVNULL
    # In a session of its own, as torchrun signals those of its processes; and without the variables of a rank.
    return subprocess.Popen(
        words, pass_fds=[file], start_new_session=True, env={}, stdin=nothing, stdout=nothing, stderr=nothing
    )


def children(parent: int) -> list[int]:
    """Start times of the running processes whose parent is this one, in ticks since the boot."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:  # it may end meanwhile
            state, of, *fields = file.read().rpartition(")")[2].split()  # see proc(5)
            if int(of) == parent and state not in "XZ":
                found.append(int(fields[17]))
    return found


def _end(torchrun: int, file: int, seconds: float, began: int) -> None:
    idle = 0.0
    while idle < seconds:
        if select.select([file], [], [], POLL_INTERVAL)[0]:
            return  # by itself
        found = children(torchrun)
        if any(started > began for started in found):
            return  # it goes on, with another launch
        idle = 0.0 if found else idle + POLL_INTERVAL
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal.pidfd_send_signal(file, number)
        if select.select([file], [], [], TERM_SECONDS)[0]:
            return


if __name__ == "__main__":
    _end(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
