"""Ending this process now, whatever its threads wait for."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import NoReturn

SAVE_SECONDS = 60.0  # for a checkpoint that is being written
WORKER_SECONDS = 1.0  # for workers to end when asked
# Held while a file is written that must not be cut off. What would be left is whole, but it is the file before.
writing = threading.RLock()
# Held, until it is over, by the thread that says why this process ends: there is to be one line, whoever else notices.
ending = threading.RLock()


def hard_exit(status: int) -> NoReturn:
    """End with `status`: nothing is closed, as that may wait for a device or a process that never answers again."""
    with contextlib.suppress(Exception):
        writing.acquire(timeout=SAVE_SECONDS)
        sys.stdout.flush()
        terminate_workers()
    os._exit(status)


def install_worker_exit_handler() -> None:
    """In a worker process, before it shares anything: let `terminate_workers` end it, between two calls into C."""
    signal.signal(signal.SIGUSR2, lambda number, frame: os._exit(0))


def terminate_workers() -> None:
    """End a DataLoader's workers, which are deaf to a launcher's signals; the ones that do not listen are killed.

    One that is killed while it shares a tensor leaves that in /dev/shm for good.
    """
    workers = multiprocessing.active_children()
    for worker in workers:
        assert worker.pid is not None  # it was started
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR2)
    deadline = time.monotonic() + WORKER_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
