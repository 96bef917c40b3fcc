"""The output folder: its files, whether it can be written, and the lock that keeps other runs out."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.log import EVENTS, METRICS, SUMMARY

LOCK_SECONDS = 10.0
EVALUATION = "evaluation.json"
OUTPUTS = ("config.json", METRICS, EVENTS, "last.pt", "best.pt", SUMMARY, EVALUATION)
PROBE_BYTES = 100_000  # more than the small files take: a full disk is found before the run


@collective
def prepare_output(
    folder: Path, env: DistEnv, stack: contextlib.ExitStack | None = None, names: Sequence[str] = OUTPUTS
) -> None:
    """Make the output folder and check that it can be written.

    Args:
        folder: to be made, unless it is there.
        stack: at its end a folder that was made here is removed, if it is still empty.
        names: of files that will be written there.

    Raises:
        UserError: on all ranks, if rank 0 cannot write there.
    """
    with sync_errors(env):
        if not env.is_main:
            return
        probe = folder / ".write-test"
        try:
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if is_new and stack is not None:
                stack.callback(_remove_empty, folder)
            try:
                probe.write_bytes(bytes(PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)
            for name in names:
                if (folder / name).is_dir():
                    raise IsADirectoryError(errno.EISDIR, f"{name} in it is a folder")
        except OSError as error:
            raise UserError(f"--output-dir {folder}: cannot be written ({error.strerror}); give another") from error


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


@collective
def lock_output(folder: Path, env: DistEnv, stack: contextlib.ExitStack) -> bool:
    """Keep other runs out of the output folder while this process lives.

    The lock is the kernel's, on the folder itself: it leaves no file and ends with the process, however that ends.

    Returns:
        Whether it is locked, the same on all ranks; False if there is no such folder yet.

    Raises:
        UserError: on all ranks, if another run holds it for 10 seconds, more than the workers of a dead one live.
    """
    locked = env.is_main and os.path.isdir(folder)  # unlike Path.is_dir, False for what may not be looked at
    with sync_errors(env):
        if locked:
            _lock(folder, stack)
    return any(all_gather_object(locked, env))


def _lock(path: Path, stack: contextlib.ExitStack) -> None:
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError:  # which `prepare_output` explains
        return
    stack.callback(os.close, folder)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output-dir {path}: another run is writing there; wait for its end or give another folder"
                ) from None
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return


def has_summary(folder: Path) -> bool:
    """Whether a run has come to its end there."""
    return os.path.isfile(folder / SUMMARY)  # unlike Path.is_file, False for what may not be looked at
