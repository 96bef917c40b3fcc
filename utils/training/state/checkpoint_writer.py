"""CheckpointWriter: a thread of rank 0 that writes a copy of the run to the disk while training goes on."""

import contextlib
import copy
import dataclasses
import shutil
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn

from utils.distributed.collective import collective
from utils.distributed.collectives import broadcast
from utils.distributed.exit import MAX_WRITES, write_slots
from utils.distributed.group import DistEnv
from utils.log import Log
from utils.text import data_size
from utils.training.state.checkpoint import BEST, EARLIER, LAST, Checkpoint, RunRecord, save
from utils.training.state.train_state import TrainState

T = TypeVar("T")
WAIT_INTERVAL = 0.5  # seconds; well below any --timeout
# Seconds before a write, in which a GPU gets its next steps. It begins with 20 ms of Python's lock, for ResNet-50.
WRITE_DELAY = 0.05
MUCH_ROOM = 0.1  # of what is free
MAX_QUEUED_WEIGHTS = 2**29  # bytes; ResNet-50 has 102 MB, ViT-B/16 346 MB


class CheckpointWriter:
    """Writes one checkpoint after the other. At the end of the `with` block none is left to write.

    Args:
        folder: the output folder.
        env: this process; rank 0 writes.
        log: gets a line on a write that fails, at once.

    Attributes:
        num_pending: checkpoints whose `wait` is to come, MAX_WRITES at most, the same on all ranks.
    """

    def __init__(self, folder: Path, env: DistEnv, log: Log) -> None:
        self.num_pending = 0
        self._folder, self._env, self._log = folder, env, log
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint") if env.is_main else None
        self._delay = WRITE_DELAY if env.device.type == "cuda" else 0.0
        self._is_waited_for = threading.Event()
        self._newest: futures.Future[str | None] | None = None
        if self._thread is not None:
            self._thread.submit(int)  # it starts now: a machine that has no thread left shows before the first step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def start(self, checkpoint: Checkpoint | None, is_best: bool = False) -> None:
        """Copy a checkpoint and begin to write the copy; the next step may change the tensors of `checkpoint`.

        Where there is no memory for a copy, returns after the write. To be called on every rank.

        Args:
            checkpoint: of the run; None on other ranks than 0.
            is_best: whether it is best.pt, too.
        """
        assert self.num_pending < MAX_WRITES, "wait for the writes before"
        self.num_pending += 1
        if checkpoint is None or self._thread is None:
            return
        try:
            state, ranks = copy_to_host((checkpoint.state, checkpoint.ranks))
            copied: Checkpoint | None = dataclasses.replace(checkpoint, state=state, ranks=ranks)
        except (MemoryError, RuntimeError):  # the latter from torch
            copied = None
        write_slots.acquire()  # for the thread: who ends this process from now on waits for the write
        self._newest = self._thread.submit(self._save, copied or checkpoint, is_best)
        if copied is None:
            futures.wait([self._newest])

    def warn_of_size(self, state: TrainState, record: RunRecord, keep: int) -> None:
        """Log a line if the checkpoints to come need much of the room in the folder.

        Args:
            state: after the first step, when the optimizer has its part.
            keep: spare ones.
        """
        if not self._env.is_main:
            return
        storages = (tensor.untyped_storage() for tensor in _tensors((state.replicated_state(), record)))
        size = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        with contextlib.suppress(OSError):  # of a file system that does not say
            if text := describe_room(self._folder, size, keep):
                self._log.info(f"warning: {text}")

    def _save(self, checkpoint: Checkpoint, is_best: bool) -> str | None:
        self._is_waited_for.wait(self._delay)
        try:
            error = save(checkpoint, self._folder, is_best)
        finally:
            write_slots.release()
        if error is not None:
            self._log.info(
                f"warning: no checkpoint at step {checkpoint.state.step} ({error}); make room in {self._folder}: the "
                "next save tries again"
            )
        return error

    @collective
    def wait(self) -> str | None:
        """Wait for the end of all writes.

        No collective lasts for longer than WAIT_INTERVAL, and each is a heartbeat: a disk that is slower than --timeout
        makes no rank look hung.

        Returns:
            Why the newest failed, on all ranks; None if it did not.
        """
        self._is_waited_for.set()
        error, is_done = None, not self.num_pending
        while not is_done:
            if self._env.monitor is not None:
                self._env.monitor.heartbeat()
            is_done, error = broadcast(self._poll(), self._env)
        self._is_waited_for.clear()
        self.num_pending = 0
        return error

    def _poll(self) -> tuple[bool, str | None]:
        """On rank 0: whether the newest write has ended, after WAIT_INTERVAL at the latest, and why it failed."""
        if self._newest is None:
            return False, None
        done, _ = futures.wait([self._newest], WAIT_INTERVAL)
        return bool(done), self._newest.result() if done else None


def describe_room(folder: Path, size: int, keep: int) -> str:
    """A sentence on the room that checkpoints of `size` bytes will need; "" up to `MUCH_ROOM` of what is free.

    Raises:
        OSError: it cannot be found.
    """
    paths = (folder / name for name in (LAST, BEST, *EARLIER))
    found = [path.stat() for path in paths if path.is_file()]
    there = sum({each.st_ino: each.st_size for each in found}.values())  # best.pt may be last.pt
    needed, free = (keep + 3) * size - there, shutil.disk_usage(folder).free
    if needed <= MUCH_ROOM * free:
        return ""
    kept, remedy = (f", {keep} spare", "--keep 0 keeps no spare ones, or ") if keep else ("", "")
    return (
        f"checkpoints will need {data_size(needed)}, and {data_size(free)} are free ({data_size(size)} each: last.pt, "
        f"best.pt{kept}, and one that is being written); {remedy}make room in {folder}"
    )


def may_queue(model: nn.Module) -> bool:
    """Whether the host may hold two copies of a run with this network: its weights are small. The same on all ranks."""
    return sum(parameter.nbytes for parameter in model.parameters()) <= MAX_QUEUED_WEIGHTS


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
    tensors = list(_tensors(value))
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = _copy_storage(storage)
        found = torch.empty(0, dtype=tensor.dtype)
        memo[id(tensor)] = found.set_(copies[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
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
