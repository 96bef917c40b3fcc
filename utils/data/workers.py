"""Worker processes of torch's DataLoader: their start, signals and end."""

import contextlib
import gc
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Listener
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from utils.config import ResolvedConfig
from utils.data.batch import Batch
from utils.data.manifest import Manifest
from utils.data.sampler import Sampler
from utils.distributed.exit import install_worker_exit_handler
from utils.distributed.group import DistEnv
from utils.distributed.stop import StopRequest
from utils.errors import UserError


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


class _BatchSampler:
    """Batches of (image, epoch) pairs from batch `first` of a run up to `last` (endless if None)."""

    def __init__(self, sampler: Sampler, first: int, last: int | None = None) -> None:
        self.sampler, self.first, self.last = sampler, first, last

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        batch = self.first
        while self.last is None or batch < self.last:
            epoch = self.sampler.epoch_of(batch)
            yield [(int(index), epoch) for index in self.sampler.indices(batch)]
            batch += 1


def _label(manifest: Manifest, index: int) -> Tensor:
    # A number would be shared with the trainer by a thread of the worker, which `terminate_workers` can cut off there.
    return torch.tensor(int(manifest.labels[index]))


def _worker_init(worker: int) -> None:
    # torchrun signals whole sessions; the trainer needs its workers until the checkpoint is written.
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    install_worker_exit_handler()


def _worker_options(config: ResolvedConfig, env: DistEnv) -> dict[str, Any]:
    return {
        "num_workers": config.workers,
        "pin_memory": env.device.type == "cuda",
        "worker_init_fn": _worker_init,
        "generator": torch.Generator(),  # the workers' seeds must not draw from the run's random numbers
    }


def _shutdown_workers_now(batches: Any) -> None:
    """End what a DataLoader's iterator has started, now: the traceback of an error would keep it to the very end.

    There the interpreter asks workers to end by a signal, which ours are deaf to, and waits for them.
    """
    batches._shutdown_workers()


def _to_device(images: Tensor, targets: Tensor, device: torch.device) -> Batch:
    images = images.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
    return Batch(images, targets.to(device, non_blocking=True))


def check_sockets(users: str) -> None:
    """Open a socket in the temporary folder, as the workers of torch's DataLoader do to share their tensors.

    Where they cannot, the DataLoader waits for ever: https://github.com/python/cpython/issues/132124. Python makes a
    folder for the sockets of this process, which its workers then share, and removes it at the process's end.

    Args:
        users: for the message.

    Raises:
        UserError: if that fails, as it does where the folder's path is too long.
    """
    folder = tempfile.gettempdir()
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        raise UserError(
            f"TMPDIR {folder}: {users} cannot open sockets there ({error}); give a folder with a short path"
        ) from None
