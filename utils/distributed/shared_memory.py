"""/dev/shm, by which worker processes hand batches over and wait for each other: whether it has room.

A container has 64 MB there unless it is given more.
"""

import contextlib
import errno
import math
import os
from collections.abc import Iterator

from utils.distributed.collective import collective
from utils.distributed.collectives import sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError, first_line
from utils.options.resolved import ResolvedConfig
from utils.options.schedules import size_schedule
from utils.options.sizes import sides_of

FOLDER = "/dev/shm"
AHEAD = 2  # batches that DataLoader lets each worker prepare
_SEMAPHORES = 64 * 1024  # bytes for those of a worker process, a page each
_GIVE_MORE = "give the container more (docker run --shm-size=16g, or --ipc=host)"


def batches_bytes(config: ResolvedConfig, num_val: int, env: DistEnv) -> int:
    """Bytes of the batches that the workers of this machine's processes have ready at the same time, at least.

    Args:
        num_val: validation images over all ranks.
    """
    per_process = config.workers * _SEMAPHORES
    if config.loader == "torch":  # DALI's server decodes in the trainer
        pixels = max(math.prod(sides_of(size)) for size in (config.image_size, *size_schedule(config).values()))
        train = 0 if config.evaluate else AHEAD * config.workers * config.batch_size
        val = min(config.workers * config.batch_size, math.ceil(num_val / env.world_size))
        per_process += 3 * (train * pixels + val * math.prod(sides_of(config.val_image_size)))
    return per_process * env.local_world_size


@collective
def check_shared_memory(
    config: ResolvedConfig, num_val: int, env: DistEnv, loaders: int = 1, other: str = "--loader dali"
) -> None:
    """Compare what `batches_bytes` says with what is free.

    Args:
        config, num_val, env: as of `batches_bytes`.
        loaders: that are open at the same time.
        other: flag that does without.

    Raises:
        UserError: on all ranks: one of their machines has less.
    """
    with sync_errors(env):
        if config.loader not in ("torch", "proxy"):
            return
        needed = loaders * batches_bytes(config, num_val, env)
        try:
            status = os.statvfs(FOLDER)
        except OSError as error:
            raise UserError(f"--loader {config.loader}: {FOLDER} cannot be used ({error.strerror}); mount it") from None
        free = status.f_bavail * status.f_frsize
        if free < needed:
            raise UserError(
                f"--loader {config.loader}: {FOLDER} has {free / 1e6:,.2f} MB free, and --workers {config.workers} and "
                f"--batch-size {config.batch_size} need {needed / 1e6:,.2f} MB there; {_remedy(other)}"
            )


def _remedy(other: str = "--loader dali") -> str:
    return f"{_GIVE_MORE}, or lower --workers or --batch-size; {other} needs none"


def explain_full(error: Exception, config: ResolvedConfig) -> UserError | None:
    """What the user reads if a worker of torch's DataLoader has failed because there was no room left; else None."""
    text = str(error)
    if config.loader not in ("torch", "proxy") or not ("shared memory" in text or "Bus error" in text):
        return None
    return UserError(
        f"--loader {config.loader}: {FOLDER} is full, which --workers {config.workers} with --batch-size "
        f"{config.batch_size} use; {_remedy()}"
    )


@contextlib.contextmanager
def explain_semaphores() -> Iterator[None]:
    """Around the start of worker processes, which wait for each other by semaphores in /dev/shm.

    Raises:
        UserError: there can be none.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOSYS, errno.EACCES, errno.ENOENT):
            raise
        raise UserError(
            f"{FOLDER}: processes cannot make semaphores there ({error.strerror or first_line(error)}); {_GIVE_MORE}"
        ) from None
