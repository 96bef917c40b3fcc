"""RankMonitor: when a rank dies or hangs, the others end too and say which one it was, with its last error."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from utils.distributed.exit import ending, hard_exit
from utils.distributed.launcher import terminate_torchrun
from utils.distributed.store import ANSWER_SECONDS, BoundedStore, NoAnswer
from utils.errors import EXIT_FAILED, EXIT_STOPPED, RunFailed, Stopped

ROLL_CALL_SECONDS = 5.0  # well below the 30 s that torchrun gives the others after the first death
TOLD_SECONDS = 1.0
RESUME_HINT = "the same command goes on from the last checkpoint (with --resume auto, as by default)"


@dataclasses.dataclass(frozen=True)
class Roll:
    """Answer to "who is still there?".

    Attributes:
        lost: rank -> what is known of its end.
        heard: ranks that are well.
    """

    lost: dict[int, str]
    heard: list[int]


class RankMonitor:
    """What the processes know of each other besides their collectives: a word of each in the launcher's store.

    All calls end within seconds, whether the store answers or not.

    Args:
        store: one that all processes reach.
        rank, world_size: this process among all.
        timeout: of the collectives, seconds.

    Raises:
        NoAnswer: the store does not answer, within the patience of `store`.
    """

    def __init__(self, store: BoundedStore, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self._world_size, self._timeout = world_size, timeout
        store.part("peers").set(f"place/{rank}", f"{_machine()} {os.getpid()}")
        self._store = store.part("peers", ANSWER_SECONDS)
        self._went_on: float | None = None

    @contextlib.contextmanager
    def guard(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Around the work of the group: an error of communication becomes the name of the rank that caused it.

        To be the innermost context but for the alarm: torchrun sends SIGTERM to the others as soon as it sees a death,
        and as long as that is a request to stop, they can still speak. The process then ends here (`leave`).

        Args:
            tell: gives the user a line; called on the lowest rank that is well.
        """
        try:
            yield
        except (RunFailed, Stopped):  # all ranks agree
            raise
        except Exception as error:
            if not _is_communication(error):
                words = f"{type(error).__name__}: {error}"
                with contextlib.suppress(RuntimeError):
                    self._leave_word(words)
                raise
            self.end_if_lost(tell)
            raise

    def end_if_lost(self, tell: Callable[[str], None]) -> None:
        """Find out who is lost; if anybody is, the lowest rank that is well tells, and this process ends here.

        It also ends where another has stepped down, which is no loss.
        """
        with ending:
            roll = None
            with contextlib.suppress(RuntimeError):
                if self._store.check(["stepped down"]):
                    terminate_torchrun()
                    hard_exit(EXIT_STOPPED)
                roll = self._poll_ranks()
            if roll is None:
                self._tell_cut_off(tell, "does not answer")
            elif not roll.lost:
                return
            elif self.rank == min(roll.heard):
                line = "; ".join(f"rank {rank} {what}" for rank, what in roll.lost.items())
                tell(f"{line}; {RESUME_HINT}")
            if self.rank == 0:
                time.sleep(TOLD_SECONDS)  # it may hold the store, where the others read the same
            hard_exit(EXIT_FAILED)

    def cut_off(self, tell: Callable[[str], None]) -> NoReturn:
        """The store has not answered for `timeout` seconds: tell, and end this process."""
        with ending:
            self._tell_cut_off(tell, f"has not answered for {self._timeout:g} s (--timeout)")
            hard_exit(EXIT_FAILED)

    def _tell_cut_off(self, tell: Callable[[str], None], what: str) -> None:
        tell(
            f"rank {self.rank}: the store of the process group at {self._store.where} {what}: the network or the "
            f"machine of rank 0 is down, or its launcher has ended or hangs; {RESUME_HINT}"
        )

    def lost(self) -> bool:
        """Whether a process failed, or one of this machine died; then also those on other machines will know."""
        if not self._store.check(["trouble"]):
            gone = [rank for rank, pid in self._neighbours.items() if _has_ended(pid)]
            if all(self._store.check([f"word/{rank}"]) and not self._store.get(f"word/{rank}") for rank in gone):
                return False
            self._store.set("trouble", "")
        return True

    @functools.cached_property
    def _neighbours(self) -> dict[int, str]:
        """Rank -> process id of the others on this machine."""
        places = {rank: self._store.get(f"place/{rank}").decode().split() for rank in range(self._world_size)}
        return {rank: pid for rank, (machine, pid) in places.items() if machine == _machine() and rank != self.rank}

    def heartbeat(self) -> None:
        """To be called once a step: collectives in between may last --timeout each, no longer."""
        self._went_on = time.monotonic()

    def pause(self) -> None:
        """Until `heartbeat` is called again its thread may take any time."""
        self._went_on = None

    def is_hung(self) -> bool:
        """Whether `heartbeat` has not been called for so long that its thread must be waiting for a device."""
        return self._went_on is not None and time.monotonic() - self._went_on > self.hang_timeout

    @property
    def hang_timeout(self) -> float:
        """Seconds that a step may last."""
        return 2 * self._timeout

    def announce_stop(self) -> None:
        """This process is about to end as it was asked to, before a step was done: all shall."""
        with contextlib.suppress(RuntimeError):
            self._store.set("stepped down", "")
        if self.rank == 0:
            time.sleep(TOLD_SECONDS)  # it may hold the store

    def mark_finished(self) -> None:
        """This process is about to end, and all is well."""
        with contextlib.suppress(RuntimeError):
            self._leave_word("")

    def request_abort(self) -> bool:
        """Tell all processes that they must end; whether this one was the first, as far as the store says."""
        try:
            return self._store.add("alarm", 1) == 1
        except RuntimeError:
            return True

    def abort_requested(self) -> bool:
        """Whether a process has called `ring`.

        Raises:
            RuntimeError: the store does not say. So with `lost`.
        """
        return self._store.check(["alarm"])

    def _leave_word(self, words: str) -> None:
        self._store.set(f"word/{self.rank}", words)
        if words:
            self._store.set("trouble", "")

    def _poll_ranks(self) -> Roll:
        """Answer, and wait for the others until each has answered or is known to be unable to."""
        self._leave_word("")
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
        mute = f"does not answer; --timeout {self._timeout:g} is over: it hangs, or its machine or the network is down"
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
        if _has_ended(pid):
            return self._place(rank) + "is gone: killed, by the kernel where memory was short, or crashed"
        return self._place(rank) + "is stopped (SIGSTOP)" if _state(pid) in "Tt" else ""


@functools.cache
def _machine() -> str:
    """Name of what process ids are counted in; the host's name and its namespace's may be those of others too."""
    boot = ""
    with contextlib.suppress(OSError):  # some sandboxes have none
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename}/{os.readlink('/proc/self/ns/pid')}/{boot}"


def _state(pid: str) -> str:
    """The kernel's letter for what a process of this machine does; "?" if it cannot be asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:  # no handle left
        return "?"


def _has_ended(pid: str) -> bool:
    return _state(pid) in "XZ"


def _is_communication(error: Exception) -> bool:
    # gloo's errors have no class of their own: they come as RuntimeError, in a backward pass too, most with the path
    # of gloo's source file.
    return isinstance(error, dist.DistError | NoAnswer) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("gloo", "NCCL", "pair closure", "by peer", "Socket closed"))
    )
