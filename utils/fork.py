"""Starting worker processes from a process that holds DALI pipelines."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def safe_fork() -> Iterator[None]:
    """Around the start of worker processes: no garbage of this process may be collected in them.

    A worker that frees a DALI pipeline which it inherited waits for threads that it did not, and aborts.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
