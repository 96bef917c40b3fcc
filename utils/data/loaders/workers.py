"""Worker processes of torch's DataLoader: their batches, signals and end."""

import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Listener
from typing import Any

import torch
from torch import Tensor

from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import Sampler
from utils.distributed.exit import install_worker_exit_handler
from utils.distributed.group import DistEnv
from utils.distributed.stop import StopRequest
from utils.errors import UserError
from utils.options.resolved import ResolvedConfig


class BatchSampler:
    """Batches of (image, draw) pairs from batch `first` of a run up to `last`, without it; endless if None."""

    def __init__(self, sampler: Sampler, first: int, last: int | None = None) -> None:
        self.sampler, self.first, self.last = sampler, first, last

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        batch = self.first
        while self.last is None or batch < self.last:
            yield list(zip(self.sampler.indices(batch).tolist(), self.sampler.draws(batch).tolist(), strict=True))
            batch += 1


def label_tensor(manifest: Manifest, index: int) -> Tensor:
    """Label of an image, as a worker returns it: int64 ()."""
    # A batch of numbers becomes a shared tensor in a thread of the worker, which `terminate_workers` can interrupt.
    return torch.tensor(int(manifest.labels[index]))


def _worker_init(worker: int) -> None:
    # torchrun signals whole sessions; the trainer needs its workers until the checkpoint is written.
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    install_worker_exit_handler()


def worker_options(config: ResolvedConfig, env: DistEnv) -> dict[str, Any]:
    """Options of every DataLoader with worker processes."""
    return {
        "num_workers": config.workers,
        "pin_memory": env.device.type == "cuda",
        "worker_init_fn": _worker_init,
        "generator": torch.Generator(),  # the workers' seeds must not draw from the run's random numbers
    }


def shutdown_workers(batches: Any) -> None:
    """End at once what a DataLoader's iterator has started.

    Otherwise the traceback of an error keeps the iterator until the interpreter ends. There the interpreter sends the
    workers a signal that they ignore, and waits for them.
    """
    batches._shutdown_workers()


def to_device(images: Tensor, targets: Tensor, device: torch.device) -> Batch:
    """Batch on `device` of what a DataLoader has collated: uint8 (N, 3, H, W) and int64 (N,)."""
    images = images.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
    return Batch(images, targets.to(device, non_blocking=True))


def check_sockets(users: str) -> None:
    """Open a socket in the temporary folder, as the workers of torch's DataLoader do to share their tensors.

    Where they cannot, the DataLoader waits for ever: https://github.com/python/cpython/issues/132124. Python makes a
    folder for the sockets of this process, which its workers share. It removes the folder when the process ends.

    Args:
        users: of the sockets, for the message.

    Raises:
        UserError: no socket can be opened, as where the folder's path is too long.
    """
    folder = tempfile.gettempdir()
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        raise UserError(
            f"TMPDIR {folder}: {users} cannot open sockets there ({error}); give a folder with a short path"
        ) from None
