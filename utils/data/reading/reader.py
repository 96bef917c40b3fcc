"""Reads encoded images: with `shard_reader.py` the only module that opens image files.

read_image(record)       all bytes of one image
open_image(record)       a file of them, to read a header
BatchReader(...)         batches of them for DALI's pipelines, read ahead
request_of(record)       an image by reference, for a DALI server in another process; its pipeline calls
requested_images(...)    for the bytes
"""

import collections
import io
import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, cast

import numpy as np
import nvidia.dali as dali
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.types import BatchInfo

from utils.data.formats.shards import ShardTable
from utils.data.images.manifest import FileEntry, Manifest, stat_file
from utils.data.images.records import FilesTable, Record, Span
from utils.data.reading.decoding import END, as_netpbm, check_end, check_gpu, check_orientation
from utils.data.reading.shard_reader import SPARE, ShardBatches, ShardFiles
from utils.data.reading.suspects import differs_on_gpu, may_be_odd
from utils.data.reading.tiff_messages import hide_tiff_messages
from utils.distributed.crash import is_traced, note

READ_THREADS = 4  # at least, of each reader; they mostly wait for the disk
_TIFF = b"IM"  # one of these twice begins a TIFF
HEAD_BYTES = 4096  # that have all metadata of most JPEGs
NOTE_IMAGES = 1024  # in one note
HEADER_BYTES = 2**17  # in which the first two blocks of EXIF data, of 64 KiB at most, begin; cameras write large files
READ_AHEAD = 2  # batches of files, besides those that are being decoded
# Whether DALI reads local files with plain I/O instead of mapping them. 256 JPEGs of 109 KB in the page cache take
# 8.0 ms instead of 17.7 on two cores: a mapping costs page faults and a lock that all threads of the process share.
DONT_USE_MMAP = True


def stat_image(record: Record) -> FileEntry:
    """Size, time of change, and what is wrong with an image as far as that shows without opening it."""
    location = record.location
    if isinstance(location, str):
        return stat_file(location)
    return stat_file(location.path)._replace(name=record.name, size=sum(length for _, length in location.ranges))


def open_image(record: Record, shards: ShardFiles | None = None) -> BinaryIO:
    """The bytes of an image as a file, for what needs only some of them. Never waits for the writer of a pipe.

    Args:
        record: the image.
        shards: keeps shards open between calls.

    Raises:
        OSError: it cannot be opened.
    """
    location = record.location
    if isinstance(location, Span):
        return io.BytesIO((shards or ShardFiles()).read(location))
    return open(location, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def read_image(record: Record, shards: ShardFiles | None = None) -> bytes:
    """All bytes of an image; `shards` as for `open_image`.

    Raises:
        OSError: it cannot be read.
    """
    with open_image(record, shards) as file:
        return file.read()


def note_images(manifest: Manifest, indices: NDArray[np.int64]) -> None:
    """Note images that are about to be read, so that a crash can be explained (`utils.distributed.crash`)."""
    if is_traced():
        for at in range(0, len(indices), NOTE_IMAGES):
            note(pickle.dumps(manifest.table().select(indices[at : at + NOTE_IMAGES])))


class BatchReader:
    """Source of encoded images for DALI's pipelines, which reads ahead; each call returns a batch.

    The operators of one pipeline share its threads. Files read there wait behind the decoding of the batch before,
    which cost a fifth of the images per second on an H100 (docs/internals/experiments.md). So files are read by a
    pipeline of their own, and shards by threads of their own.

    Args:
        manifest: the images.
        indices: position in the stream -> indices of its images.
        device: which decodes them, "gpu" or "cpu".
        batch_size: images in a batch, at most.
        threads: CPU threads of the process, of which the reader takes half.
        prefetch: batches that the decoding pipeline prepares ahead.
        first: position of the first batch.
    """

    def __init__(
        self,
        manifest: Manifest,
        indices: Callable[[int], NDArray[np.int64]],
        *,
        device: str,
        batch_size: int,
        threads: int,
        prefetch: int,
        first: int = 0,
    ) -> None:
        self._next, self._device = first, device
        self._held: collections.deque[Any] = collections.deque(maxlen=prefetch + SPARE)  # DALI does not copy

        def noted(position: int) -> NDArray[np.int64]:
            batch = indices(position)
            note_images(manifest, batch)
            return batch

        self._threads = threads = max(READ_THREADS, threads // 2)
        ahead = READ_AHEAD + prefetch  # a slow file must not hold up the training thread
        table = manifest.table()
        self._read: Callable[[int], tuple[Any, Any, Iterable[int]]]
        if isinstance(table, ShardTable):
            batches = ShardBatches(table, noted, threads=threads, read_ahead=ahead, prefetch=prefetch, first=first)
            self._read = lambda position: _from_shards(batches, manifest.labels, position, device)
            return
        pipeline = read_pipeline(
            lambda info: _located(manifest, noted(first + info.iteration)),
            batch_size=batch_size,
            num_threads=threads,
            device_id=None,
            seed=0,  # draws nothing
            prefetch_queue_depth=ahead,
        )
        pipeline.build()
        self._read = lambda position: _from_files(pipeline.run(), device)

    def read(self, position: int) -> tuple[Any, Any]:
        """Bytes and targets of the batch at `position`, which must be the next.

        An image that a GPU would decode to other pixels is decoded on the CPU: its bytes become those of a Netpbm file.

        Raises:
            DecodeError: a JPEG or PNG was cut off, or a JPEG has two orientations. Decoders on a GPU do not notice a
                cut JPEG. Those on the CPU notice it only if a crop reaches the missing part.
            OSError: a shard cannot be read.
        """
        assert position == self._next, f"batch {position} requested, {self._next} is next"
        self._next += 1
        images, targets, suspects = self._read(position)
        others = []
        for index in map(int, suspects):
            image = images[index] if isinstance(images, list) else images.at(index)
            header = image[:HEADER_BYTES].tobytes()
            check_orientation(header)
            if tuple(image[-len(END) :]) != tuple(END):
                check_end(image.tobytes())
            if self._device == "gpu" and differs_on_gpu(header):
                others.append((index, image.tobytes()))
        if others:
            images = [images[index] for index in range(len(images))]
            decoded = as_netpbm([content for _, content in others], self._threads)
            for (index, _), image in zip(others, decoded, strict=True):
                images[index] = image
            self._held.append(images)
        return images, targets


def _from_files(outputs: Any, device: str) -> tuple[Any, Any, Iterable[int]]:
    """A batch of `read_pipeline`, and which of its images do not end as a JPEG does, or may be odd."""
    images, targets, heads, tails = outputs
    if not tails.is_dense_tensor():  # an image is shorter than its tail would be
        return images, targets, range(len(images))
    starts = np.arange(len(images)) * HEAD_BYTES
    data = heads.as_array().reshape(-1)
    _look_for_tiffs(data, starts)
    odd = may_be_odd(data, starts, starts + HEAD_BYTES, device)
    return images, targets, np.flatnonzero(odd | (tails.as_array() != tuple(END)).any(axis=1))


def _from_shards(
    batches: ShardBatches, labels: NDArray[np.int64], position: int, device: str
) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64], Iterable[int]]:
    """As `_from_files`, of shards; the images are views of a buffer."""
    indices, buffer, ends = batches.read(position)
    starts = np.concatenate([[0], ends[:-1]])
    images = [buffer[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    _look_for_tiffs(buffer, starts)
    has_end = (ends - starts >= len(END)) & (buffer[ends - 2] == END[0]) & (buffer[ends - 1] == END[1])
    return images, labels[indices, None], np.flatnonzero(~has_end | may_be_odd(buffer, starts, ends, device))


def _look_for_tiffs(data: NDArray[np.uint8], starts: NDArray[np.int64]) -> None:
    """Before a batch with TIFFs is decoded: hide what their decoders print."""
    first, second = data[starts], data[np.minimum(starts + 1, len(data) - 1)]
    if ((first == second) & ((first == _TIFF[0]) | (first == _TIFF[1]))).any():
        hide_tiff_messages()


def encoded_images(source: Callable[[BatchInfo], Any]) -> tuple[Any, Any]:
    """Graph op: encoded images and targets of a batch, as `BatchReader.read` gives them."""
    images, targets = fn.external_source(
        source=source,
        num_outputs=2,
        batch=True,
        batch_info=True,
        no_copy=True,
        dtype=[types.UINT8, types.INT64],
        ndim=[1, 1],
    )
    return images, targets


def request_of(record: Record, shards: ShardFiles, device: str) -> NDArray[np.uint8]:
    """What a DALI server needs to read an image, uint8 (length,): the path of a file, or the bytes from a shard.

    Raises:
        OSError: it cannot be read.
        DecodeError: a JPEG or PNG was cut off, a JPEG has two orientations (see `BatchReader.read`), or the image has
            other pixels on a GPU and `device` is "gpu".
    """
    location = record.location
    with open_image(record, shards) as file:
        head = np.frombuffer(file.read(HEAD_BYTES), dtype=np.uint8)
        if may_be_odd(head, np.array([0]), np.array([len(head)]), device).any():
            file.seek(0)
            content = file.read()
            check_orientation(content)
            if device == "gpu":
                check_gpu(content)
        file.seek(-min(len(END), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if file.read() != END:
            file.seek(0)
            check_end(file.read())
        if isinstance(location, Span):
            file.seek(0)
            return np.frombuffer(file.read(), dtype=np.uint8)
    return np.frombuffer(os.fsencode(location), dtype=np.uint8)


def requested_images(manifest: Manifest) -> Any:
    """Graph op: the encoded images whose requests a DALI server is given."""
    requests = fn.external_source(name="requests", no_copy=True)
    return requests if isinstance(manifest.table(), ShardTable) else _read_files(requests)


def _located(manifest: Manifest, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
    """Locations of a batch in a byte table, uint8 (n, width), their lengths, int32 (n, 1), and labels, int64 (n, 1).

    One indexing operation gives them, without a Python object per image.
    """
    locations = cast(FilesTable, manifest.table()).locations(indices)
    table = locations.view(np.uint8).reshape(len(locations), locations.itemsize)
    return table, np.char.str_len(locations).astype(np.int32)[:, None], manifest.labels[indices, None]


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def read_pipeline(source: Callable[[BatchInfo], Any]) -> Any:
    """The bytes of the images that `source` locates, their int64 (N, 1) targets, the first and the last bytes of each.

    Of an image that has fewer than `HEAD_BYTES`, zeros follow.
    """
    table, lengths, targets = fn.external_source(
        source=source,
        num_outputs=3,
        batch=True,
        batch_info=True,
        dtype=[types.UINT8, types.INT32, types.INT64],
        ndim=[1, 1, 1],
    )
    images = _read_files(fn.slice(table, 0, lengths, axes=[0]))
    heads = fn.slice(images, 0, HEAD_BYTES, axes=[0], out_of_bounds_policy="pad")
    return images, targets, heads, images[-len(END) :]


def _read_files(paths: Any) -> Any:
    return fn.io.file.read(paths, dont_use_mmap=DONT_USE_MMAP)
