"""Rank monitor: when a rank dies or hangs, the others end too and print which one it was, with its last error."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from utils.distributed.exit import exit_lock, hard_exit
from utils.distributed.launcher import end_idle_torchrun, terminate_torchrun
from utils.distributed.process import read_stat
from utils.distributed.store import CALL_TIMEOUT, BoundedStore, NoAnswer
from utils.errors import EXIT_FAILED, EXIT_STOPPED, RunFailed, Stopped

POLL_TIMEOUT = 5.0  # seconds; well below the 30 s that torchrun gives the others after the first death
STORE_LINGER_SECONDS = 1.0  # that rank 0, which may hold the store, leaves the others to read it
RESUME_HINT = "the same command goes on from the last checkpoint (with --resume auto, as by default)"


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """Which ranks still work.

    Attributes:
        lost: rank -> what is known of its end.
        healthy: the ranks that answered and had no error.
    """

    lost: dict[int, str]
    healthy: list[int]


class RankMonitor:
    """What the ranks know of each other besides their collectives, through the launcher's store.

    Its keys: `address/RANK`, the machine and process id of a rank; `error/RANK`, its last error, or "" if it is well;
    `failed`, once any rank has failed; `stopped`, once one was asked to stop before its first step; `aborts`, how many
    have asked all to end. All calls end within seconds, whether the store answers or not.

    Args:
        store: one that these ranks share and no others.
        rank, world_size: this process among all.
        timeout: of the collectives, seconds.

    Raises:
        NoAnswer: the store does not answer, within the timeout of `store`.
    """

    def __init__(self, store: BoundedStore, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self._world_size, self._timeout = world_size, timeout
        store.with_prefix("monitor").set(f"address/{rank}", f"{_machine()} {os.getpid()}")
        self._store = store.with_prefix("monitor", CALL_TIMEOUT)
        self._last_heartbeat: float | None = None

    @contextlib.contextmanager
    def guard(self, print_error: Callable[[str], None]) -> Iterator[None]:
        """Around the work of the group: an error of communication becomes the name of the rank that caused it.

        The process then ends here (`hard_exit`). Only the watchdog may be a context within this one: torchrun sends
        SIGTERM to the others as soon as it sees a death, and until the handlers of `StopRequest` are removed they can
        still print their line.

        Args:
            print_error: prints a line for the user; called on the lowest healthy rank.
        """
        try:
            yield
        except (RunFailed, Stopped):  # all ranks agree
            raise
        except Exception as error:
            if not _is_communication(error):
                with contextlib.suppress(RuntimeError):
                    self._set_error(f"{type(error).__name__}: {error}")
                raise
            self.exit_if_lost(print_error)
            raise

    def exit_if_lost(self, print_error: Callable[[str], None]) -> None:
        """Find out which ranks are lost. If any are, the lowest healthy one prints which, and this process ends here.

        It also ends where another has announced a stop, which is no loss.
        """
        with exit_lock:
            status = None
            with contextlib.suppress(RuntimeError):
                if self._store.check(["stopped"]):
                    terminate_torchrun()
                    hard_exit(EXIT_STOPPED)
                status = self._poll_ranks()
            if status is None:
                self._print_cut_off(print_error, "does not answer")
            elif not status.lost:
                return
            elif self.rank == min(status.healthy):
                line = "; ".join(f"rank {rank} {reason}" for rank, reason in status.lost.items())
                print_error(f"{line}; {RESUME_HINT}")
            if self.rank == 0:
                time.sleep(STORE_LINGER_SECONDS)  # the others read there why it ends
            hard_exit(EXIT_FAILED)

    def exit_cut_off(self, print_error: Callable[[str], None]) -> NoReturn:
        """The store has not answered for `timeout` seconds: print that, and end this process."""
        with exit_lock:
            self._print_cut_off(print_error, f"has not answered for {self._timeout:g} s (--timeout)")
            hard_exit(EXIT_FAILED)

    def _print_cut_off(self, print_error: Callable[[str], None], symptom: str) -> None:
        print_error(
            f"rank {self.rank}: the store of the process group at {self._store.address} {symptom}: the network or the "
            f"machine of rank 0 is down, or its launcher has ended or hangs; {RESUME_HINT}"
        )
        end_idle_torchrun()

    def has_lost_rank(self) -> bool:
        """Whether a rank failed, or one of this machine died; then also those on other machines will know.

        Raises:
            RuntimeError: the store does not answer, or has ended.
        """
        if not self._store.check(["failed"]):
            ended = [rank for rank, pid in self._local_pids.items() if _has_ended(pid)]
            if all(self._store.check([f"error/{rank}"]) and not self._store.get(f"error/{rank}") for rank in ended):
                return False
            self._store.set("failed", "")
        return True

    @functools.cached_property
    def _local_pids(self) -> dict[int, int]:
        """Rank -> process id of the others on this machine."""
        addresses = {rank: self._store.get(f"address/{rank}").decode().split() for rank in range(self._world_size)}
        return {
            rank: int(pid) for rank, (machine, pid) in addresses.items() if machine == _machine() and rank != self.rank
        }

    def heartbeat(self) -> None:
        """To be called once a step. Collectives in between may last --timeout each, no longer."""
        self._last_heartbeat = time.monotonic()

    def pause(self) -> None:
        """Until the next `heartbeat`, the main thread may take any time."""
        self._last_heartbeat = None

    def is_hung(self) -> bool:
        """Whether the last `heartbeat` was so long ago that the main thread must be waiting for a device."""
        return self._last_heartbeat is not None and time.monotonic() - self._last_heartbeat > self.hang_timeout

    @property
    def hang_timeout(self) -> float:
        """Seconds that a step may last."""
        return 2 * self._timeout

    def announce_stop(self) -> None:
        """This process is about to end as it was asked to, before a step was done. All ranks then end."""
        with contextlib.suppress(RuntimeError):
            self._store.set("stopped", "")
        if self.rank == 0:
            time.sleep(STORE_LINGER_SECONDS)

    def mark_finished(self) -> None:
        """This process is about to end, and all is well."""
        with contextlib.suppress(RuntimeError):
            self._set_error("")

    def request_abort(self) -> bool:
        """Let all ranks end; returns whether this one was the first to ask, or the store does not answer."""
        try:
            return self._store.add("aborts", 1) == 1
        except RuntimeError:
            return True

    def abort_requested(self) -> bool:
        """Whether a rank has called `request_abort`.

        Raises:
            RuntimeError: the store does not answer, or has ended.
        """
        return self._store.check(["aborts"])

    def _set_error(self, error: str) -> None:
        self._store.set(f"error/{self.rank}", error)
        if error:
            self._store.set("failed", "")

    def _poll_ranks(self) -> RankStatus:
        """Set that this rank is well, and wait for the others until each has answered or is known to be unable to."""
        self._set_error("")
        deadline = time.monotonic() + POLL_TIMEOUT
        while True:
            silent = [rank for rank in range(self._world_size) if not self._store.check([f"error/{rank}"])]
            dead = {rank: reason for rank in silent if (reason := self._death_of(rank))}
            if len(dead) == len(silent) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        errors = {
            rank: self._store.get(f"error/{rank}").decode() for rank in range(self._world_size) if rank not in silent
        }
        failed = {rank: f"{self._address(rank)}failed: {error}" for rank, error in errors.items() if error}
        hung = f"does not answer; --timeout {self._timeout:g} is over: it hangs, or its machine or the network is down"
        # One that failed or died explains why others are silent.
        lost = failed or dead or {rank: self._address(rank) + hung for rank in silent}
        return RankStatus(lost, [rank for rank, error in errors.items() if not error])

    def _address(self, rank: int) -> str:
        """Process and host of `rank`, with a space after them, as the subject of a sentence on it."""
        if not self._store.check([f"address/{rank}"]):
            return "never came and "
        machine, pid = self._store.get(f"address/{rank}").decode().split()
        return f"(process {pid} on {machine.partition('/')[0]}) "

    def _death_of(self, rank: int) -> str:
        """Why `rank` cannot answer, as far as the kernel of this machine knows; "" if it might."""
        if not self._store.check([f"address/{rank}"]):
            return ""
        machine, pid = self._store.get(f"address/{rank}").decode().split()
        if machine != _machine():
            return ""
        if _has_ended(int(pid)):
            return self._address(rank) + "is gone: killed (by the kernel, if memory ran out) or crashed"
        return self._address(rank) + "is stopped (SIGSTOP)" if _state(int(pid)) in "Tt" else ""


@functools.cache
def _machine() -> str:
    """Name of the space in which process ids are unique: host, namespace and boot, each of which alone may not be."""
    boot = ""
    with contextlib.suppress(OSError):  # some sandboxes have none
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename}/{os.readlink('/proc/self/ns/pid')}/{boot}"


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process of this machine; X if there is none, "?" if it cannot be asked."""
    try:
        return read_stat(pid).state
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:  # no file descriptor left
        return "?"


def _has_ended(pid: int) -> bool:
    return _state(pid) in "XZ"


def _is_communication(error: Exception) -> bool:
    # gloo's errors have no class of their own: they come as RuntimeError, in a backward pass too, most with the path
    # of gloo's source file.
    return isinstance(error, dist.DistError | NoAnswer) or (
        isinstance(error, RuntimeError)
        and any(text in str(error) for text in ("gloo", "NCCL", "pair closure", "by peer", "Socket closed"))
    )
