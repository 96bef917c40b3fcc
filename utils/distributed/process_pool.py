"""Processes that are forked from this one: what they must not inherit, and a pool of them that reads many files."""

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from utils.distributed.process import exit_with_parent
from utils.distributed.shared_memory import explain_semaphores


@contextlib.contextmanager
def safe_fork() -> Iterator[None]:
    """Around the start of worker processes: what they inherit is never collected in them as garbage.

    A worker that frees a DALI pipeline which it inherited waits for threads that it did not inherit, and aborts.

    Raises:
        UserError: as `explain_semaphores`.
    """
    _register_once()
    _collects.append(gc.isenabled())
    gc.disable()  # until each worker has frozen what it inherits; a collection here would take longer than the fork
    try:
        with explain_semaphores():
            yield
    finally:
        if _collects.pop():
            gc.enable()


_collects: list[bool] = []  # of each `safe_fork` under way: whether garbage is collected outside of it


@functools.cache
def _register_once() -> None:
    os.register_at_fork(after_in_child=_keep_inherited)


def _keep_inherited() -> None:
    """In a worker, before any other code of it."""
    if _collects:
        gc.freeze()
        if _collects[0]:
            gc.enable()
        _collects.clear()


@contextlib.contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that read or decode files. What they print on standard error goes to a file in memory of their own."""
    # Forked: a fresh interpreter would import the trainer for seconds.
    fork = multiprocessing.get_context("fork")
    with explain_semaphores():
        opened = ProcessPoolExecutor(workers, fork, _start_process, (os.getpid(),))
    with opened as pool:
        with safe_fork():
            pool.submit(os.getpid)  # all processes start with the first task
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)  # a verification that is stopped must not wait for all that is queued


def _start_process(parent: int) -> None:
    exit_with_parent(signal.SIGKILL, parent)  # or it would wait for work for ever
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    messages = os.memfd_create("messages")
    os.dup2(messages, 2)  # decoders print there, past Python
    os.close(messages)
