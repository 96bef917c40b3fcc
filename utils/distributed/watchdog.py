"""Watchdog: when one rank cannot go on, all ranks end within seconds, also those that wait for it in a collective.

A collective waits for --timeout, which must be long enough for honest delays, and one within a CUDA graph for ever. A
launcher that sees one process die sends the others a signal, which they cannot handle there. So each rank has a thread
that asks the store for the state of the others.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from utils.distributed.exit import exit_lock, hard_exit
from utils.distributed.group import DistEnv
from utils.distributed.monitor import RESUME_HINT, RankMonitor
from utils.errors import EXIT_FAILED, EXIT_USER_ERROR, BadFile, RunFailed, Stopped, UserError, escape_control_chars

POLL_INTERVAL = 0.25  # seconds
ABORT_SECONDS = 1.0  # until every rank has seen that all must end: four polls
MAIN_THREAD_SECONDS = 5.0  # for the main thread to notice and print by itself that a rank is lost


@contextlib.contextmanager
def watchdog(env: DistEnv, print_error: Callable[[str], None]) -> Iterator[None]:
    """Around a run of several processes: what ends one of them ends all. One process alone just raises.

    A BadFile ends all at once: the rank that was first prints it, in one line, and all end with the status of a user's
    mistake, as the same command would meet the same file again.

    A rank that is lost (`RankMonitor.has_lost_rank`) is printed by the main thread, which mostly gets an error from a
    collective. If it gets none, as it waits for a device that waits for that rank, the watchdog's thread prints it.

    Args:
        env: this process; without a monitor nothing is watched.
        print_error: prints a line for the user.
    """
    if env.monitor is None:
        yield
        return
    monitor = env.monitor
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(monitor, done, print_error), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
        monitor.mark_finished()
    except BadFile as error:
        if monitor.request_abort():
            os.write(2, f"train.py: {escape_control_chars(str(error))}\n".encode(errors="replace"))
        _exit_together(env.is_main)
    except (UserError, RunFailed, Stopped):  # all ranks agree
        monitor.mark_finished()
        raise
    except Exception:
        # A rank that has ended breaks the collectives of the others, which need not print that.
        with contextlib.suppress(Exception):
            time.sleep(2 * POLL_INTERVAL)
            if monitor.abort_requested():
                _exit_together(env.is_main)
        raise
    finally:
        done.set()
        thread.join()


def _watch(monitor: RankMonitor, done: threading.Event, print_error: Callable[[str], None]) -> None:
    def must_exit() -> bool:
        with contextlib.suppress(Exception):  # the process that holds the store may have ended
            if monitor.abort_requested():
                _exit_together(monitor.rank == 0)
            if monitor.has_lost_rank():
                return True
        return monitor.is_hung()

    while not done.wait(POLL_INTERVAL):
        # The second look is for a job that was suspended and goes on meanwhile.
        if must_exit() and not done.wait(MAIN_THREAD_SECONDS) and must_exit():
            with exit_lock:
                monitor.exit_if_lost(print_error)
                if monitor.rank == 0:
                    limit = f"{monitor.hang_timeout:g} s (twice --timeout)"
                    print_error(f"no step has ended for {limit}, though all processes answer; {RESUME_HINT}")
                hard_exit(EXIT_FAILED)


def _exit_together(is_main: bool) -> NoReturn:
    time.sleep(ABORT_SECONDS * (2 if is_main else 1))  # rank 0 last, as it may hold the store
    hard_exit(EXIT_USER_ERROR)
