"""Decodes many images in worker processes, to learn which of them cannot be decoded."""

import contextlib
import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.data.dali import NUM_PIPELINES, dali_device
from utils.data.images.manifest import Manifest
from utils.data.images.records import Record
from utils.data.reading.decoding import DecodeError, ImageInfo, decoder_of
from utils.data.reading.reader import READ_AHEAD, read_image, stat_image
from utils.distributed.group import DistEnv
from utils.distributed.process_pool import process_pool
from utils.distributed.shared_memory import explain_full
from utils.errors import BadFile
from utils.options.resolved import ResolvedConfig
from utils.text import count

CHUNK = 8  # images that a process gets at once
# A summary, and what a decoder prints that passes an image on to the next one.
_NO_REASON = ("Something went", "Unsupported photometric interpretation")
_DECORATION = re.compile(r"\x1b\[[\d;]*m|\[\w+\] ?|Could not .* stream - ")
BAD_FILE_SEARCH_TIMEOUT = 5.0  # for finding the file that a loader failed on, from the first that is decoded


class FileReport(NamedTuple):
    """What is known of a file.

    Attributes:
        size, mtime: of the file that was decoded; see `FileEntry`.
        bad: why it cannot be decoded; None if it can.
        codec, width, height: see `ImageInfo`; of good files only, as what follows.
        digest: of the content.
        warning: what the decoder printed about a file that it decoded all the same; mostly "".
    """

    size: int
    mtime: int
    bad: str | None
    codec: str = ""
    width: int = 0
    height: int = 0
    digest: str = ""
    warning: str = ""


_Decode = Callable[[bytes], ImageInfo]
_Chunk = Sequence[tuple[int, Record]]  # images and their positions
_Reports = list[tuple[int, FileReport]]


def decode_files(records: Iterable[Record], decode: _Decode, workers: int) -> Generator[tuple[int, FileReport]]:
    """Decode images in `workers` processes.

    Yields:
        The position of an image in `records` and its report, as they are ready.
    """
    numbered = enumerate(records)
    chunk = list(itertools.islice(numbered, CHUNK))
    while chunk:
        lost: list[_Chunk] = []
        with process_pool(workers) as pool:
            running: dict[Future[_Reports], _Chunk] = {}
            while running or (chunk and not lost):
                while chunk and not lost and len(running) < 2 * workers:
                    try:
                        running[pool.submit(_decode_chunk, chunk, decode)] = chunk
                    except BrokenProcessPool:
                        lost.append(chunk)
                    chunk = list(itertools.islice(numbered, CHUNK))
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    finished = running.pop(done)
                    if isinstance(done.exception(), BrokenProcessPool):
                        lost.append(finished)
                    else:
                        yield from done.result()
        # A process was killed, by a file or because memory ran out, and the files of the whole pool are lost.
        for image in itertools.chain.from_iterable(lost):
            yield from _decode_alone(image, decode)


def _decode_alone(image: tuple[int, Record], decode: _Decode) -> _Reports:
    with process_pool(1) as pool:
        try:
            return pool.submit(_decode_chunk, [image], decode).result()
        except BrokenProcessPool:
            position, record = image
            found = stat_image(record)
            reason = "its decoding ends the process (a crash, or no memory left)"
            return [(position, FileReport(found.size, found.mtime, reason))]


def _decode_chunk(chunk: _Chunk, decode: _Decode) -> _Reports:
    return [(position, _decode_file(record, decode)) for position, record in chunk]


def _decode_file(record: Record, decode: _Decode) -> FileReport:
    _, size, mtime, bad = stat_image(record)
    if bad is not None:
        return FileReport(size, mtime, bad)
    try:
        content = read_image(record)
    except OSError as error:
        return FileReport(size, mtime, f"cannot be read ({error.strerror})")
    try:
        info = decode(content)
    except DecodeError as error:
        messages = _printed_messages()
        return FileReport(size, mtime, f"{error} ({messages[0]})" if messages else str(error))
    return FileReport(size, mtime, None, *info, content_digest(content), "; ".join(_printed_messages()))


def content_digest(content: bytes) -> str:
    """Digest of a file's content, 32 hex digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _printed_messages() -> list[str]:
    """What the decoder printed since the last call, each message once, without colors and the names of its parts."""
    size = os.lseek(2, 0, os.SEEK_END)
    text = os.pread(2, min(size, 10_000), 0).decode(errors="replace")
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    lines = [_DECORATION.sub("", line) for line in text.splitlines()]
    return [line.strip() for line in dict.fromkeys(lines) if line.strip() and not line.startswith(_NO_REASON)]


@contextlib.contextmanager
def identify_bad_file(
    config: ResolvedConfig, manifest: Manifest, env: DistEnv, upcoming: Iterable[NDArray[np.int64]]
) -> Iterator[None]:
    """Around the next batch: an error is raised as BadFile if one of the `upcoming` images, a batch each, is bad.

    Neither DALI nor torch's DataLoader names it in every case. Both read ahead, so that it need not be in the next
    batch.

    Raises:
        BadFile: instead of the loader's own error.
        UserError: there is no room for batches in /dev/shm.
    """
    try:
        yield
    except Exception as error:
        if full := explain_full(error, config):
            raise full from error
        ahead = itertools.islice(upcoming, 2 + READ_AHEAD + NUM_PIPELINES * config.prefetch)
        records = [manifest.record(int(index)) for indices in ahead for index in indices]
        message = str(error)
        records.sort(key=lambda record: record.name not in message)  # DALI names the file of some errors
        deadline = math.inf
        with contextlib.closing(
            decode_files(records, decoder_of(config.loader, dali_device(env)).decode, config.workers)
        ) as reports:
            for position, report in reports:
                deadline = min(deadline, time.monotonic() + BAD_FILE_SEARCH_TIMEOUT)
                if report.bad is not None:
                    raise BadFile(records[position].name, report.bad, env.rank, config.evaluate) from error
                if time.monotonic() > deadline:
                    error.add_note(
                        f"not the first of {count(len(records), 'image')}; scripts/check_dataset.py decodes all"
                    )
                    raise
        error.add_note(f"none of the {count(len(records), 'image')} that were being loaded is bad by itself")
        raise
