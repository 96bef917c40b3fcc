"""Peers: when a process dies or hangs, the others end too and say which one it was, with its last words."""

import contextlib
import ctypes
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from utils.errors import RankLost, RunFailed, Stopped

ROLL_CALL_SECONDS = 5.0  # well below the 30 s that torchrun gives the others after the first death
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclasses.dataclass(frozen=True)
class Roll:
    """Answer to "who is still there?".

    Attributes:
        lost: rank -> what is known of its end.
        heard: ranks that are well.
    """

    lost: dict[int, str]
    heard: list[int]


class Peers:
    """What the processes know of each other besides their collectives: a word of each in the launcher's store.

    Args:
        store: one that all processes reach.
        rank, world_size: this process among all.
        timeout: of the collectives, seconds.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self._store = PrefixStore("peers", store)
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._store.set(f"place/{rank}", f"{_machine()} {os.getpid()}")

    @contextlib.contextmanager
    def watched(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Around the work of the group: an error of communication becomes the name of the rank that caused it.

        To be the innermost context: torchrun sends SIGTERM to the others as soon as it sees a death, and as long as
        that is a request to stop, they can still speak.

        Args:
            tell: gives the user a line; called on the lowest rank that is well.

        Raises:
            RankLost: another rank failed, is gone, or does not answer; the user has been told.
        """
        try:
            yield
        except (RunFailed, Stopped):  # all ranks agree
            raise
        except Exception as error:
            if not _is_communication(error):
                words = f"{type(error).__name__}: {error}"
                self._ask(lambda: self._leave(words))
                raise
            rolls: list[Roll] = []
            self._ask(lambda: rolls.append(self._call_roll()))
            if rolls and not rolls[0].lost:
                raise
            line = "the store of the process group does not answer: the launcher of rank 0 has ended or hangs"
            if rolls:
                line = "; ".join(f"rank {rank} {what}" for rank, what in rolls[0].lost.items())
            if not rolls or self._rank == min(rolls[0].heard):
                tell(f"{line}; the same command goes on from the last checkpoint")
            raise RankLost from None

    def _ask(self, question: Callable[[], None]) -> None:
        """`question` to the store, in bounded time: its calls know no timeout, and its host may be what hangs."""

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                question()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(2 * ROLL_CALL_SECONDS)

    def _leave(self, words: str) -> None:
        self._store.set(f"word/{self._rank}", words)

    def _call_roll(self) -> Roll:
        """Answer, and wait for the others until each has answered or is known to be unable to."""
        self._leave("")
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        while True:
            silent = [rank for rank in range(self._world_size) if not self._store.check([f"word/{rank}"])]
            unable = {rank: what for rank in silent if (what := self._unable(rank))}
            if len(unable) == len(silent) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        words = {
            rank: self._store.get(f"word/{rank}").decode() for rank in range(self._world_size) if rank not in silent
        }
        failed = {rank: f"{self._place(rank)}failed: {last}" for rank, last in words.items() if last}
        mute = f"does not answer; --timeout {self._timeout:g} is over"
        # One that failed or died explains why others are silent.
        lost = failed or unable or {rank: self._place(rank) + mute for rank in silent}
        return Roll(lost, [rank for rank, last in words.items() if not last])

    def _place(self, rank: int) -> str:
        if not self._store.check([f"place/{rank}"]):
            return "never came and "
        machine, pid = self._store.get(f"place/{rank}").decode().split()
        return f"(process {pid} on {machine.partition('/')[0]}) "

    def _unable(self, rank: int) -> str:
        """Why `rank` cannot answer, as far as this machine's kernel knows; "" if it might."""
        if not self._store.check([f"place/{rank}"]):
            return ""
        machine, pid = self._store.get(f"place/{rank}").decode().split()
        if machine != _machine():
            return ""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state in "XZ":
            return self._place(rank) + "is gone: killed, by the kernel where memory was short, or crashed"
        return self._place(rank) + "is stopped (SIGSTOP)" if state in "Tt" else ""


def _machine() -> str:
    """Name of what process ids are counted in."""
    return f"{os.uname().nodename}/{os.readlink('/proc/self/ns/pid')}"


def _is_communication(error: Exception) -> bool:
    # gloo's errors have no class of their own: they come as RuntimeError, in a backward pass too, most with the path
    # of gloo's source file.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("gloo", "NCCL", "pair closure", "by peer", "Socket closed"))
    )


def end_with_launcher() -> None:
    """Ask the kernel for SIGTERM when torchrun dies: without it nobody would restart or end this process any more."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
