"""CheckpointWriter: a thread of rank 0 that writes a copy of the run to the disk while training goes on."""

import copy
import dataclasses
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, UntypedStorage

from utils.distributed.collectives import broadcast
from utils.distributed.exit import write_lock
from utils.distributed.group import DistEnv
from utils.log import Log
from utils.training.checkpoint import Checkpoint, save

T = TypeVar("T")
WAIT_INTERVAL = 0.5  # seconds; well below any --timeout


class CheckpointWriter:
    """Writes one checkpoint at a time. At the end of the `with` block none is left to write.

    Args:
        folder: the output folder.
        env: this process; rank 0 writes.
        log: gets a line on a write that fails, at once.

    Attributes:
        is_pending: whether there is a checkpoint whose `wait` is to come, the same on all ranks.
    """

    def __init__(self, folder: Path, env: DistEnv, log: Log) -> None:
        self.is_pending = False
        self._folder, self._env, self._log = folder, env, log
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint") if env.is_main else None
        self._write: futures.Future[str | None] | None = None
        if self._thread is not None:
            self._thread.submit(int)  # it starts now: a machine that has no thread left shows before the first step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def start(self, checkpoint: Checkpoint | None, is_best: bool = False) -> None:
        """Copy a checkpoint and begin to write the copy; the next step may change the tensors of `checkpoint`.

        Where there is no memory for a copy, returns after the write. To be called on every rank, after `wait`.

        Args:
            checkpoint: of the run; None on other ranks than 0.
            is_best: whether it is best.pt, too.
        """
        assert not self.is_pending, "one write at a time"
        self.is_pending = True
        if checkpoint is None or self._thread is None:
            return
        try:
            state, ranks = copy_to_host((checkpoint.state, checkpoint.ranks))
            copied: Checkpoint | None = dataclasses.replace(checkpoint, state=state, ranks=ranks)
        except (MemoryError, RuntimeError):  # the latter from torch
            copied = None
        write_lock.acquire()  # for the thread: who ends this process from now on waits for the write
        self._write = self._thread.submit(self._save, copied or checkpoint, is_best)
        if copied is None:
            futures.wait([self._write])

    def _save(self, checkpoint: Checkpoint, is_best: bool) -> str | None:
        try:
            error = save(checkpoint, self._folder, is_best)
        finally:
            write_lock.release()
        if error is not None:
            self._log.info(
                f"warning: no checkpoint at step {checkpoint.state.step} ({error}); make room in {self._folder}: the "
                "next save tries again"
            )
        return error

    def wait(self) -> str | None:
        """Wait for the end of the write. Collective: call on every rank.

        No collective lasts for longer than WAIT_INTERVAL, and each is a heartbeat: a disk that is slower than --timeout
        makes no rank look hung.

        Returns:
            Why it failed, on all ranks; None if it did not.
        """
        error, is_done = None, not self.is_pending
        while not is_done:
            if self._env.monitor is not None:
                self._env.monitor.heartbeat()
            is_done, error = broadcast(self._poll(), self._env)
        self.is_pending = False
        return error

    def _poll(self) -> tuple[bool, str | None]:
        """On rank 0: whether the write has ended, after WAIT_INTERVAL at the latest, and why it failed."""
        if self._write is None:
            return False, None
        done, _ = futures.wait([self._write], WAIT_INTERVAL)
        return bool(done), self._write.result() if done else None


def copy_to_host(value: T) -> T:
    """A deep copy with all tensors on the CPU: the same types, strides and common storages, so the same file.

    Waits for the copies, so that the next step may change the originals. Those from a GPU go to page-locked memory,
    which torch keeps for the next copy.

    Args:
        value: dataclasses, dicts, lists and tuples with tensors in them.

    Raises:
        MemoryError, RuntimeError: there is no memory for it.
    """
    copies: dict[int, UntypedStorage] = {}  # by the identity of the original storage
    memo: dict[int, Any] = {}  # copy.deepcopy's: what takes the place of an object
    for tensor in _tensors(value):
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = _copy_storage(storage)
        found = torch.empty(0, dtype=tensor.dtype)
        memo[id(tensor)] = found.set_(copies[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
    for device in {tensor.device for tensor in _tensors(value) if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copy.deepcopy(value, memo)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in dataclasses, dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from _tensors(vars(value))
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _copy_storage(storage: UntypedStorage) -> UntypedStorage:
    """On the CPU; from a GPU it is under way, in the order of the current stream."""
    on_gpu = storage.device.type == "cuda"
    original = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    copied = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return copied.copy_(original, non_blocking=on_gpu).untyped_storage()
