"""Reads encoded images: the only place that opens image files."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import nvidia.dali as dali
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.types import BatchInfo

from utils.config import ResolvedConfig
from utils.data.decoding import END, check_end
from utils.data.manifest import Manifest

READ_THREADS = 4  # at least, of each reader; they mostly wait for the disk
READ_AHEAD = 2  # batches of files, besides those that are being decoded


class _Files:
    """File names as one byte table: a batch of them is one indexing operation, not a Python object per image."""

    def __init__(self, manifest: Manifest) -> None:
        names = [os.fsencode(manifest.path(index)) for index in range(len(manifest))]
        self._lengths = np.array([len(name) for name in names], dtype=np.int32)
        width = int(self._lengths.max())
        self._table = np.array(names, dtype=f"S{width}").view(np.uint8).reshape(len(names), width)
        self._labels = manifest.labels

    def __getitem__(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        return self._table[indices], self._lengths[indices, None], self._labels[indices, None]


class BatchReader:
    """Source of encoded images: a pipeline of its own reads ahead; each call takes the next batch.

    The operators of one pipeline share its threads. Files read there wait behind the decoding of the batch before,
    which cost a fifth of the images per second on an H100 (docs/experiments.md).

    Args:
        manifest: the files.
        indices: position in the stream -> indices of its images.
        config: for the batch size and the number of threads.
        first: position of the first batch.
    """

    def __init__(
        self, manifest: Manifest, indices: Callable[[int], NDArray[np.int64]], config: ResolvedConfig, first: int = 0
    ) -> None:
        files = _Files(manifest)
        self._next = first
        self._pipeline = read_pipeline(
            lambda info: files[indices(first + info.iteration)],
            batch_size=config.batch_size,
            num_threads=max(READ_THREADS, config.workers // 2),
            device_id=None,
            seed=0,  # draws nothing
            prefetch_queue_depth=READ_AHEAD + config.prefetch,  # a slow file must not hold up the training thread
        )
        self._pipeline.build()

    def read(self, position: int) -> tuple[Any, Any]:
        """Bytes and targets of the batch at `position`, which must be the next.

        Raises:
            DecodeError: a JPEG was cut off. Decoders on a GPU take it for a whole one, those on the CPU do so while no
                crop reaches the part that is missing.
        """
        assert position == self._next, f"batch {position} asked, {self._next} is next"
        self._next += 1
        files, targets, tails = self._pipeline.run()
        suspects: Iterable[int] = range(len(files))
        if tails.is_dense_tensor():  # else one is shorter than its tail would be
            suspects = np.flatnonzero((tails.as_array() != tuple(END)).any(axis=1))
        for index in suspects:
            check_end(files.at(int(index)).tobytes())
        return files, targets


def encoded_images(source: Callable[[BatchInfo], Any]) -> tuple[Any, Any]:
    """Encoded files and targets of a batch, as `BatchReader` gives them."""
    jpegs, targets = fn.external_source(
        source=source,
        num_outputs=2,
        batch=True,
        batch_info=True,
        no_copy=True,
        dtype=[types.UINT8, types.INT64],
        ndim=[1, 1],
    )
    return jpegs, targets


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def read_pipeline(source: Callable[[BatchInfo], Any]) -> Any:
    """The bytes of the files that `source` names, their int64 (N, 1) targets, and the last two bytes of each file."""
    table, lengths, targets = fn.external_source(
        source=source,
        num_outputs=3,
        batch=True,
        batch_info=True,
        dtype=[types.UINT8, types.INT32, types.INT64],
        ndim=[1, 1, 1],
    )
    files = fn.io.file.read(fn.slice(table, 0, lengths, axes=[0]))
    return files, targets, files[-len(END) :]
