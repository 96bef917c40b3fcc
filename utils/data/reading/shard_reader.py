"""Reads images out of shards: single ones, and batches into a ring of buffers that DALI takes without a copy."""

import collections
import functools
import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from utils.data.formats.shards import ShardTable
from utils.data.images.records import Span

SPARE = 2  # buffers more than DALI needs: the batch that is handed over, and one whose work on a GPU may still run
GROWTH = 1.25  # of a buffer that is too small
MAX_OPEN = 1024  # shards that a process keeps open, at most
_Parts = list[Future[None]]  # of a batch that is being read


class _OpenShard:
    """A file descriptor that is closed when nobody reads from it any more."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class ShardFiles:
    """Shards that stay open between reads; the least recently used is closed. Threads may share one."""

    def __init__(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A quarter: two training pipelines and validation have one of these each.
        self._open = functools.lru_cache(maxsize=min(MAX_OPEN, max(1, limit // 4)))(_OpenShard)

    def read(self, span: Span) -> bytes:
        """The bytes of an image.

        Raises:
            OSError: the shard cannot be read, or is shorter than it was when it was indexed.
        """
        buffer = bytearray(sum(length for _, length in span.ranges))
        self.read_into(span.path, span.ranges, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, ranges: Sequence[tuple[int, int]], buffer: memoryview) -> None:
        """Fill `buffer` with the parts of an image, one behind the other.

        Raises:
            OSError: see `read`.
        """
        shard = self._open(path)
        at = 0
        for offset, length in ranges:
            end = at + length
            while at < end:
                count = os.preadv(shard.descriptor, [buffer[at:end]], offset)
                if count == 0:
                    raise OSError(0, "shorter than its index says, it has changed since the launch", path)
                at, offset = at + count, offset + count


class ShardBatches:
    """Batches of encoded images, read ahead by threads into a ring of buffers.

    A buffer is filled again when `prefetch` + `SPARE` further batches have been handed over: DALI uses what it is given
    without a copy for as many iterations as it prefetches.

    Args:
        table: the images.
        indices: position in the stream -> indices of its images.
        threads: that read.
        read_ahead: batches read besides those that DALI holds.
        prefetch: batches that the pipeline prepares ahead.
        first: position of the first batch.
    """

    def __init__(
        self,
        table: ShardTable,
        indices: Callable[[int], NDArray[np.int64]],
        *,
        threads: int,
        read_ahead: int,
        prefetch: int,
        first: int,
    ) -> None:
        self._table, self._indices, self._threads, self._read_ahead = table, indices, threads, read_ahead
        self._files = ShardFiles()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-shards")
        self._buffers = [np.empty(0, dtype=np.uint8) for _ in range(read_ahead + prefetch + SPARE)]
        self._pending: collections.deque[tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64], _Parts]]
        self._pending = collections.deque()
        self._next = first  # to be submitted

    def read(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
        """The batch at `position`, which must be the next.

        Returns:
            Its images, their bytes, uint8 (total,), and where each image ends in them.

        Raises:
            OSError: a shard cannot be read.
        """
        while self._next <= position + self._read_ahead:
            self._submit(self._next)
            self._next += 1
        indices, buffer, ends, parts = self._pending.popleft()
        for part in parts:
            part.result()
        return indices, buffer, ends

    def _submit(self, position: int) -> None:
        """Begin to read a batch."""
        indices = self._indices(position)
        ends = np.cumsum(self._table.lengths[indices])
        slot = position % len(self._buffers)
        if len(self._buffers[slot]) < ends[-1]:
            self._buffers[slot] = np.empty(int(ends[-1] * GROWTH), dtype=np.uint8)
        buffer = self._buffers[slot]
        parts = [
            self._pool.submit(self._fill, buffer, indices[at :: self._threads], ends[at :: self._threads])
            for at in range(min(self._threads, len(indices)))
        ]
        self._pending.append((indices, buffer, ends, parts))

    def _fill(self, buffer: NDArray[np.uint8], indices: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        table, view = self._table, memoryview(buffer.data)
        numbers, offsets = table.numbers[indices].tolist(), table.offsets[indices].tolist()
        lengths = table.lengths[indices].tolist()
        for number, offset, length, end in zip(numbers, offsets, lengths, ends.tolist(), strict=True):
            ranges = table.parts.get((number, offset)) or ((offset, length),)
            self._files.read_into(table.shards[number], ranges, view[end - length : end])
