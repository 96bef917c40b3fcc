"""Process trees of this machine, read from /proc, and free ports."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, parents first."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def ranks_among(pids: Iterable[int]) -> dict[int, int]:
    """Rank -> process id of the trainers among `pids`, parents first."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if word.startswith(b"RANK="):
                    found.setdefault(int(word[5:]), pid)  # before its own children, which inherit it
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all below it; torchrun's workers have sessions of their own and would survive it."""
    for each in reversed([pid, *descendants(pid)]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by SIGSTOP."""
    return _stat(pid)[:1] == ["T"]


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if it is gone or a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "XZ" else None


def identify(pids: Iterable[int]) -> dict[int, int]:
    """Process id -> when it started, of those that are alive. The system gives an id to another process later."""
    return {pid: when for pid in pids if (when := start_time(pid)) is not None}


def alive(processes: dict[int, int]) -> list[int]:
    """Which of the `processes`, as `identify` gave them, are still alive."""
    return [pid for pid, when in processes.items() if start_time(pid) == when]


def free_port() -> int:
    """A port of this machine that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
