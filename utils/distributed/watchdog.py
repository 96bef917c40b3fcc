"""Alarm: one rank that cannot go on ends all, within seconds, also those that wait for it in a collective.

A collective waits for --timeout, which must be long enough for honest delays, and one within a CUDA graph for ever; a
launcher that sees one process die asks the others to stop, which they cannot hear there. So each rank has a thread that
looks for news of the others.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from utils.distributed.exit import ending, hard_exit
from utils.distributed.group import DistEnv
from utils.distributed.monitor import RESUME_HINT, RankMonitor
from utils.errors import EXIT_FAILED, EXIT_USER_ERROR, BadFile, RunFailed, Stopped, UserError, escape_control_chars

POLL_SECONDS = 0.25
GRACE_SECONDS = 1.0  # until every rank has seen an alarm: four polls
LOST_SECONDS = 5.0  # for the main thread to notice and tell by itself that a peer is lost


@contextlib.contextmanager
def shared_alarm(env: DistEnv, tell: Callable[[str], None]) -> Iterator[None]:
    """Around a run of several processes: what ends one of them ends all.

    A BadFile does so at once: the rank that was first says so, in one line, and all end with the status of a user's
    mistake, as the same command would meet the same file again. One process alone just raises it.

    A rank that is lost (`RankMonitor.lost`) is reported by the main thread, which mostly gets an error from a
    collective. If it does not, as it waits for a device that waits for that rank, the thread reports it.
    """
    if env.monitor is None:
        yield
        return
    monitor = env.monitor
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(monitor, over, tell), name="alarm", daemon=True)
    watch.start()
    try:
        yield
        monitor.mark_finished()
    except BadFile as error:
        if monitor.request_abort():
            os.write(2, f"train.py: {escape_control_chars(str(error))}\n".encode(errors="replace"))
        _leave_together(env.is_main)
    except (UserError, RunFailed, Stopped):  # all ranks agree
        monitor.mark_finished()
        raise
    except Exception:
        # A rank that left breaks the collectives of the others, which need not tell of that.
        with contextlib.suppress(Exception):
            time.sleep(2 * POLL_SECONDS)
            if monitor.abort_requested():
                _leave_together(env.is_main)
        raise
    finally:
        over.set()
        watch.join()


def _watch(monitor: RankMonitor, over: threading.Event, tell: Callable[[str], None]) -> None:
    def troubled() -> bool:
        with contextlib.suppress(Exception):  # the process that holds the store may have ended
            if monitor.abort_requested():
                _leave_together(monitor.rank == 0)
            if monitor.lost():
                return True
        return monitor.is_hung()

    while not over.wait(POLL_SECONDS):
        if troubled() and not over.wait(LOST_SECONDS) and troubled():  # a job that was suspended goes on meanwhile
            with ending:
                monitor.end_if_lost(tell)
                if monitor.rank == 0:
                    length = f"{monitor.hang_timeout:g} s (twice --timeout)"
                    tell(f"no step has ended for {length}, though all processes answer; {RESUME_HINT}")
                hard_exit(EXIT_FAILED)


def _leave_together(is_main: bool) -> NoReturn:
    time.sleep(GRACE_SECONDS * (2 if is_main else 1))  # rank 0 last, as it may hold the store
    hard_exit(EXIT_USER_ERROR)
