"""Leave: end this process now, whatever its threads wait for."""

import contextlib
import multiprocessing
import os
import sys
import threading
from typing import NoReturn

SAVE_SECONDS = 60.0  # for a checkpoint that is being written

# Held while a file is written that must not be cut off. What would be left is whole, but it is the file before.
writing = threading.RLock()


def leave(status: int) -> NoReturn:
    """End with `status`: nothing is closed, as that may wait for a device or a process that never answers again."""
    with contextlib.suppress(Exception):
        writing.acquire(timeout=SAVE_SECONDS)
        sys.stdout.flush()
        for child in multiprocessing.active_children():  # of a DataLoader, deaf to gentler signals
            child.kill()
    os._exit(status)
