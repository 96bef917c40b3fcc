"""Immediate exit: ends this process and its worker processes, whatever its threads wait for."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import NoReturn

SAVE_TIMEOUT = 60.0  # seconds for the checkpoints that are being written
WORKER_EXIT_TIMEOUT = 1.0  # seconds for workers to end when asked
MAX_WRITES = 2
# One is taken for each file that must not be cut off, until it is written. What would be left is whole, but it is the
# file before. One thread may take it for another that writes, so that there is no gap between the two.
write_slots = threading.BoundedSemaphore(MAX_WRITES)
# Held, until the end of the process, by the thread that prints why it ends: there is one line, whoever else notices.
exit_lock = threading.RLock()


def hard_exit(status: int) -> NoReturn:
    """End with `status`. Nothing is closed, as that may wait for a device or a process that never answers again."""
    with contextlib.suppress(Exception):
        deadline = time.monotonic() + SAVE_TIMEOUT
        for _ in range(MAX_WRITES):
            write_slots.acquire(timeout=max(0.0, deadline - time.monotonic()))
        sys.stdout.flush()
        terminate_workers()
    os._exit(status)


def install_worker_exit_handler() -> None:
    """In a worker process, before it shares anything: let `terminate_workers` end it, between two calls into C."""
    signal.signal(signal.SIGUSR2, lambda number, frame: os._exit(0))


def terminate_workers() -> None:
    """End the workers of a DataLoader, which ignore a launcher's signals; those that do not react are killed.

    One that is killed while it shares a tensor leaves that in /dev/shm for good.
    """
    workers = multiprocessing.active_children()
    for worker in workers:
        assert worker.pid is not None  # it was started
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR2)
    deadline = time.monotonic() + WORKER_EXIT_TIMEOUT
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
