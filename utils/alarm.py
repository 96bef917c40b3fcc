"""Alarm: one rank that cannot go on ends all, within seconds, also those that wait for it in a collective.

A collective waits for --timeout, which must be long enough for honest delays; a launcher that sees one process die asks
the others to stop, which they cannot hear there. So each rank has a thread that looks for news in the launch's store.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from torch.distributed.distributed_c10d import _get_default_store

from utils.distributed import DistEnv
from utils.errors import EXIT_USER_ERROR, BadFile, RunFailed, Stopped, UserError, one_line

KEY = "alarm"
POLL_SECONDS = 0.25
GRACE_SECONDS = 1.0  # until every rank has seen an alarm: four polls
SAVE_SECONDS = 60.0  # for a checkpoint that is being written when the alarm comes

# Held while a file is written that the alarm must not cut off. What it would leave is whole, but the file before.
writing = threading.RLock()


@contextlib.contextmanager
def shared_alarm(env: DistEnv) -> Iterator[None]:
    """Around a run of several processes: a BadFile on one ends all of them at once; one process just raises it.

    The rank that was first says so, in one line; all end with the status of a user's mistake: the same command would
    meet the same file again, so nobody is to start it again unchanged.
    """
    if env.world_size == 1:
        yield
        return
    store = _get_default_store().clone()  # a connection of its own: the other may be waiting for an answer
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(store, env, over), name="alarm", daemon=True)
    watch.start()
    try:
        yield
    except BadFile as error:
        if store.add(KEY, 1) == 1:
            os.write(2, f"train.py: {one_line(str(error))}\n".encode(errors="replace"))
        _leave(env)
    except (UserError, RunFailed, Stopped):
        raise
    except Exception:
        # A rank that left breaks the collectives of the others, which need not tell of that.
        with contextlib.suppress(Exception):
            time.sleep(2 * POLL_SECONDS)
            if store.check([KEY]):
                _leave(env)
        raise
    finally:
        over.set()
        watch.join()


def _watch(store: Any, env: DistEnv, over: threading.Event) -> None:
    while not over.wait(POLL_SECONDS):
        try:
            rung = store.check([KEY])
        except Exception:  # the process that holds the store has ended; what the launcher makes of it is its business
            return
        if rung:
            _leave(env)


def _leave(env: DistEnv) -> NoReturn:
    """End this process, whatever its other threads wait for."""
    with contextlib.suppress(Exception):
        time.sleep(GRACE_SECONDS * (2 if env.is_main else 1))  # rank 0 last, as it may hold the store
        writing.acquire(timeout=SAVE_SECONDS)
        sys.stdout.flush()
        for child in multiprocessing.active_children():  # of a DataLoader, deaf to gentler signals
            child.kill()
    os._exit(EXIT_USER_ERROR)
