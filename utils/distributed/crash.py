"""Crashes: where a decoder ends this process by a signal, a process beside it searches for the image and prints a line.

A crash leaves no chance to run Python here. So a tracer is started, a small process that waits. This process notes the
images that it asks for in memory that both share. When it crashes, `faulthandler` writes into a socket that holds
next to nothing, and thus waits until the tracer has searched. Then the signal ends this process.
"""

import contextlib
import faulthandler
import functools
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SEARCH = "utils.data.reading.crash_search"  # the module that the tracer imports then
SEARCH_SECONDS = 120  # after which the tracer ends in any case
SLOTS, SLOT_BYTES = 64, 2**18
EXIT_SECONDS = 5.0
_HEADER = 8  # bytes of a count or a length
_COMMAND = """
import sys
sys.path[:] = {path}
from utils.distributed.crash import wait_for_crash
crash = wait_for_crash({context})
from {search} import explain_crash
explain_crash(crash)
"""


class Context(NamedTuple):
    """What the tracer knows of the process beside it.

    Attributes:
        program: its name, as messages begin with it.
        rank: of the process.
        on_gpu: whether it decodes on a GPU.
        pid: of the process.
        notes: file descriptor of the shared memory.
    """

    program: str
    rank: int
    on_gpu: bool
    pid: int
    notes: int


class Crash(NamedTuple):
    """How a process ended.

    Attributes:
        context: of the process.
        cause: what Python calls the signal, such as "Segmentation fault".
        notes: the latest, newest first.
    """

    context: Context
    cause: str
    notes: list[bytes]


class Notes:
    """The latest notes, each of at most `SLOT_BYTES`, in memory that two processes share."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _HEADER + SLOTS * (_HEADER + SLOT_BYTES))
        self._adding = threading.Lock()

    def add(self, note: bytes) -> None:
        """Keep a note instead of the oldest one; one that is too long is dropped."""
        if len(note) > SLOT_BYTES:
            return
        with self._adding:
            count = self._number(0)
            at = self._slot(count)
            self._set(at, 0)  # a note that is written by half does not count
            self._memory[at + _HEADER : at + _HEADER + len(note)] = note
            self._set(at, len(note))
            self._set(0, count + 1)

    def newest_first(self) -> list[bytes]:
        """All that are kept."""
        count = self._number(0)
        slots = [self._slot(number) for number in range(count - 1, max(count - 1 - SLOTS, -1), -1)]
        return [self._memory[at + _HEADER : at + _HEADER + length] for at in slots if (length := self._number(at))]

    def _slot(self, number: int) -> int:
        return _HEADER + number % SLOTS * (_HEADER + SLOT_BYTES)

    def _number(self, at: int) -> int:
        return int.from_bytes(self._memory[at : at + _HEADER], "little")

    def _set(self, at: int, number: int) -> None:
        self._memory[at : at + _HEADER] = number.to_bytes(_HEADER, "little")


class _Trace(NamedTuple):
    notes: Notes
    socket: socket.socket


_trace: _Trace | None = None


def is_traced() -> bool:
    """Whether `note` has a reader."""
    return _trace is not None


def note(images: bytes) -> None:
    """Note images that are about to be read, in the form that the search reads."""
    if _trace is not None:
        _trace.notes.add(images)


@contextlib.contextmanager
def trace_crashes(rank: int, on_gpu: bool) -> Iterator[None]:
    """Around the work of a program: a crash is explained in one line. Only a program's main enters this.

    Where no process can be started, a crash is not explained.
    """
    global _trace
    enabled = faulthandler.is_enabled()
    try:
        ours, tracer, notes = _start_tracer(rank, on_gpu)
    except OSError:
        yield
        return
    _watch_forks()
    _trace = _Trace(notes, ours)
    faulthandler.enable(file=ours.fileno())
    try:
        yield
    finally:
        faulthandler.disable()
        _trace = None
        ours.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            tracer.wait(EXIT_SECONDS)
        if enabled:
            with contextlib.suppress(Exception):  # standard error may be closed
                faulthandler.enable()


def _start_tracer(rank: int, on_gpu: bool) -> tuple[socket.socket, subprocess.Popen[bytes], Notes]:
    descriptor = os.memfd_create("images")
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        stack.callback(ours.close)
        os.ftruncate(descriptor, _HEADER + SLOTS * (_HEADER + SLOT_BYTES))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least: a few short writes
        context = Context(os.path.basename(sys.argv[0]), rank, on_gpu, os.getpid(), descriptor)
        path = [str(Path(__file__).resolve().parents[2]), *sys.path]
        command = _COMMAND.format(path=path, context=list(context), search=SEARCH)
        tracer = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", command],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,  # signals of a terminal or a launcher are not for it
        )
        notes = Notes(descriptor)
        stack.pop_all()
        os.close(descriptor)
        return ours, tracer, notes


def _stop_tracing() -> None:
    """In a process that was forked: its crashes are another's matter, and it must not keep the socket open."""
    global _trace
    if _trace is not None:
        faulthandler.disable()
        os.close(_trace.socket.detach())
        _trace = None


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_stop_tracing)


# ---------------------------------------------------------------------------------------------------------------------
# The tracer


def wait_for_crash(values: list[object]) -> Crash:
    """What the tracer does first: wait for a crash of the process beside it. Ends with that where it ends otherwise.

    What it writes when it crashes stays in the socket, so that it waits for the end of the tracer.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    context = Context(*values)  # type: ignore[arg-type]
    beside = socket.socket(fileno=0)
    with contextlib.suppress(OSError):
        if beside.recv(1, socket.MSG_PEEK):
            signal.alarm(SEARCH_SECONDS)  # its default action ends this process
            time.sleep(0.1)  # the first line comes in parts
            line = beside.recv(200, socket.MSG_PEEK).decode(errors="replace").partition("\n")[0]
            beside.detach()  # stays open, for `read_stack`
            return Crash(context, line.removeprefix("Fatal Python error: "), Notes(context.notes).newest_first())
    os._exit(0)


def read_stack() -> list[str]:
    """In the tracer, once: Python's calls in the thread that crashed, the innermost first. Lets the process end."""
    with socket.socket(fileno=0) as beside:
        text = b"".join(iter(lambda: beside.recv(2**16), b"")).decode(errors="replace")
    return text.partition("Current thread ")[2].partition("\n\n")[0].splitlines()[1:]
