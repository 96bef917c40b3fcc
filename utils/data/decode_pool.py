"""Decoding many files in worker processes, to learn which of them cannot be decoded."""

import collections
import contextlib
import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.config import ResolvedConfig
from utils.data.dali import NUM_PIPELINES
from utils.data.decoding import DecodeError, ImageInfo, decoder_of
from utils.data.formats.folder import stat_file
from utils.data.manifest import Manifest
from utils.data.reader import READ_AHEAD
from utils.data.workers import safe_fork
from utils.distributed.group import DistEnv
from utils.distributed.process import exit_with_parent
from utils.errors import BadFile

CHUNK = 8  # files that a process takes at once
_DECORATION = re.compile(r"\x1b\[[\d;]*m|\[\w+\] ?|Could not .* stream - ")
BAD_FILE_SEARCH_TIMEOUT = 5.0  # for finding the file that a loader failed on


class FileReport(NamedTuple):
    """What is known of a file.

    Attributes:
        size, mtime: of the file that was looked at; see `FileEntry`.
        bad: why it cannot be decoded; None if it can.
        codec, width, height: see `Picture`; of good files only, as what follows.
        digest: of the content.
        warning: what the decoder had to say about a file that it decoded all the same; mostly "".
    """

    size: int
    mtime: int
    bad: str | None
    codec: str = ""
    width: int = 0
    height: int = 0
    digest: str = ""
    warning: str = ""


def inspect(
    paths: Sequence[str], decode: Callable[[bytes], ImageInfo], workers: int
) -> Generator[tuple[str, FileReport]]:
    """Decode the files in `workers` processes; they come as they are ready."""
    left = collections.deque(paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK))
    while left:
        lost: list[Sequence[str]] = []
        with _pool(workers) as pool:
            running: dict[Future[list[tuple[str, FileReport]]], Sequence[str]] = {}
            while running or (left and not lost):
                with contextlib.suppress(BrokenProcessPool):  # the running ones say so too
                    while left and not lost and len(running) < 2 * workers:
                        running[pool.submit(_inspect_files, left[0], decode)] = left[0]
                        left.popleft()
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    chunk = running.pop(done)
                    if isinstance(done.exception(), BrokenProcessPool):
                        lost.append(chunk)
                    else:
                        yield from done.result()
        # A process was killed, by a file or for want of memory, and took the pool's other files with it.
        for path in itertools.chain.from_iterable(lost):
            yield _inspect_alone(path, decode)


def _inspect_alone(path: str, decode: Callable[[bytes], ImageInfo]) -> tuple[str, FileReport]:
    with _pool(1) as pool:
        try:
            return pool.submit(_inspect_files, [path], decode).result()[0]
        except BrokenProcessPool:
            _, size, mtime, _ = stat_file(path)
            return path, FileReport(size, mtime, "its decoding ends the process (a crash, or no memory left)")


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # Forked: a fresh interpreter would import the trainer for seconds.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, _start_worker, (os.getpid(),)) as pool:
        with safe_fork():
            pool.submit(os.getpid)  # all processes start with the first task
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)  # or a survey that is stopped would wait for all that is queued


def _start_worker(parent: int) -> None:
    exit_with_parent(signal.SIGKILL, parent)  # or it would wait for work for ever
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    messages = os.memfd_create("messages")
    os.dup2(messages, 2)  # decoders print there, past Python
    os.close(messages)


def _inspect_files(paths: Sequence[str], decode: Callable[[bytes], ImageInfo]) -> list[tuple[str, FileReport]]:
    return [(path, _inspect_file(path, decode)) for path in paths]


def _inspect_file(path: str, decode: Callable[[bytes], ImageInfo]) -> FileReport:
    _, size, mtime, bad = stat_file(path)
    if bad is not None:
        return FileReport(size, mtime, bad)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            content = file.read()
    except OSError as error:
        return FileReport(size, mtime, f"cannot be read ({error.strerror})")
    try:
        info = decode(content)
    except DecodeError as error:
        messages = _take_messages()
        return FileReport(size, mtime, f"{error} ({messages[0]})" if messages else str(error))
    return FileReport(size, mtime, None, *info, _digest(content), "; ".join(_take_messages()))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _take_messages() -> list[str]:
    """What the decoder printed since the last call, each message once, without colours and the names of its parts."""
    size = os.lseek(2, 0, os.SEEK_END)
    text = os.pread(2, min(size, 10_000), 0).decode(errors="replace")
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    lines = [_DECORATION.sub("", line) for line in text.splitlines()]
    return [line.strip() for line in dict.fromkeys(lines) if line.strip() and not line.startswith("Something went")]


@contextlib.contextmanager
def _identify_bad_file(
    config: ResolvedConfig, manifest: Manifest, env: DistEnv, upcoming: Iterable[NDArray[np.int64]]
) -> Iterator[None]:
    """Around the next batch: what fails for a bad file among the `upcoming` images, a batch each, names that file.

    Neither DALI nor torch's DataLoader says which it was, at least not always. Both read ahead, so that it need not be
    one of the next batch.

    Raises:
        BadFile: instead of the loader's own error.
    """
    try:
        yield
    except Exception as error:
        ahead = itertools.islice(upcoming, 2 + READ_AHEAD + NUM_PIPELINES * config.prefetch)
        paths = [manifest.path(int(index)) for indices in ahead for index in indices]
        deadline = time.monotonic() + BAD_FILE_SEARCH_TIMEOUT
        with contextlib.closing(inspect(paths, decoder_of(config.loader).decode, config.workers)) as stream:
            for path, found in stream:
                if found.bad is not None:
                    raise BadFile(path, found.bad, env.rank) from error
                if time.monotonic() > deadline:
                    break
        raise
