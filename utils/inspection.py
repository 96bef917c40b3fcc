"""Inspection: every file of a data set is decoded once, and what was found is kept for the next time.

Files are decoded by processes of their own: as many as there are cores, what a decoder prints there can be kept out of
the user's terminal and put to use, and a file that kills its decoder kills no more than that.
"""

import collections
import contextlib
import ctypes
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from utils.dataset import FileEntry, Manifest, stat_file
from utils.distributed import DistEnv, broadcast, gather, gather_main, raise_together
from utils.errors import Stopped, UserError
from utils.fork import safe_fork

MANIFEST, BAD_FILES = "manifest.json", "bad_files.json"
FORMAT = 1
CHUNK = 8  # files that a process takes at once
ROUND_SECONDS = 5.0  # between two meetings of the ranks, which must come sooner than --timeout
SAVE_SECONDS = 5.0  # at least, between two saves; a save may take a twentieth of the time
COMPARE_SECONDS = 10.0  # for reading files again that have changed since a checkpoint
BAR_SECONDS = 0.5  # between two movements of a single process's bar
TINY = 16  # pixels of the shorter side
NARROW = 50  # longer side over shorter one
CODECS = {
    ".jpg": "jpeg", ".jpeg": "jpeg", ".jpe": "jpeg", ".png": "png", ".webp": "webp", ".bmp": "bmp", ".tif": "tiff",
    ".tiff": "tiff", ".ppm": "pnm", ".pgm": "pnm", ".pnm": "pnm",
}  # fmt: skip
# Pillow's own names: a JPEG with more pictures behind the first, as phones write it, and all formats of Netpbm.
_PILLOW_NAMES = {"mpo": "jpeg", "ppm": "pnm"}
_T = TypeVar("_T")
_DECORATION = re.compile(r"\x1b\[[\d;]*m|\[\w+\] ?|Could not .* stream - ")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Undecodable(Exception):
    """A decoder does not take a file; the text says why, as far as it knows."""


class Picture(NamedTuple):
    """What a decoder tells of an image that it took: the file's format in lower case, and pixels."""

    codec: str
    width: int
    height: int


class Decoder(NamedTuple):
    """A decoder and its name with the version; `decode` raises Undecodable."""

    name: str
    decode: Callable[[bytes], Picture]


class Found(NamedTuple):
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


_NOTHING = Found(-1, -1, None)


def inspect(paths: Sequence[str], decode: Callable[[bytes], Picture], workers: int) -> Generator[tuple[str, Found]]:
    """Decode the files in `workers` processes; they come as they are ready."""
    left = collections.deque(paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK))
    while left:
        lost: list[Sequence[str]] = []
        with _pool(workers) as pool:
            running: dict[Future[list[tuple[str, Found]]], Sequence[str]] = {}
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


def _inspect_alone(path: str, decode: Callable[[bytes], Picture]) -> tuple[str, Found]:
    with _pool(1) as pool:
        try:
            return pool.submit(_inspect_files, [path], decode).result()[0]
        except BrokenProcessPool:
            _, size, mtime, _ = stat_file(path)
            return path, Found(size, mtime, "its decoding ends the process (a crash, or no memory left)")


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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # or it would wait for work for ever
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    messages = os.memfd_create("messages")
    os.dup2(messages, 2)  # decoders print there, past Python
    os.close(messages)


def _inspect_files(paths: Sequence[str], decode: Callable[[bytes], Picture]) -> list[tuple[str, Found]]:
    return [(path, _inspect_file(path, decode)) for path in paths]


def _inspect_file(path: str, decode: Callable[[bytes], Picture]) -> Found:
    _, size, mtime, bad = stat_file(path)
    if bad is not None:
        return Found(size, mtime, bad)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            content = file.read()
    except OSError as error:
        return Found(size, mtime, f"cannot be read ({error.strerror})")
    try:
        picture = decode(content)
    except Undecodable as error:
        messages = _take_messages()
        return Found(size, mtime, f"{error} ({messages[0]})" if messages else str(error))
    return Found(size, mtime, None, *picture, _digest(content), "; ".join(_take_messages()))


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


def survey(
    root: Path,
    entries: Sequence[FileEntry],
    decoder: Decoder,
    output_dir: Path,
    workers: int,
    env: DistEnv,
    partial: bool = False,
    stopped_by: Callable[[], str] = str,
) -> dict[str, Found] | None:
    """Know all files of a listing: from the manifest of an earlier survey, and those that changed by decoding them.

    The ranks share the work, and meet every few seconds, so that none waits longer for another than --timeout allows.
    Rank 0 writes what is known so far; a survey that is killed goes on from there. A collective.

    Args:
        root: folder of the data set.
        entries: files with names relative to `root`; the same on all ranks. Those that are bad by their listing are
            not opened.
        decoder: what decides which are bad.
        output_dir: of manifest.json and bad_files.json.
        workers: processes of this rank.
        env: this process.
        partial: whether the data set has more files; what the manifest knows of them is kept.
        stopped_by: asked now and then, where this process is the only one; what it names ends the survey.

    Returns:
        On rank 0, what is known of each file, in the order of `entries`; None on the others.

    Raises:
        UserError: on all ranks, if the manifest cannot be written.
        Stopped: by `stopped_by`; the manifest has been written.
    """
    known = load_manifest(output_dir / MANIFEST, decoder.name) if env.is_main else {}
    # What was bad is looked at again: neither permissions nor a server that was away leave a trace in size and mtime.
    pending = [
        index
        for index, (name, size, mtime, bad) in enumerate(entries)
        if bad is None and known.get(name, _NOTHING)[:3] != (size, mtime, None)
    ]
    known |= {name: Found(size, mtime, bad) for name, size, mtime, bad in entries if bad is not None}
    pending = broadcast(pending, env)
    prefix = os.path.join(root, "")
    share = [prefix + entries[index].name for index in pending[env.rank :: env.world_size]]
    saver = _Saver(root, output_dir, decoder)
    left = len(share)
    shown = env.is_main and len(pending) > 0
    with (
        tqdm(total=len(pending), desc="scanning", unit="file", disable=None if shown else True) as bar,
        contextlib.closing(inspect(share, decoder.decode, workers)) as stream,
    ):
        while any(gather(left, env)):
            fresh = list(_for_seconds(stream, ROUND_SECONDS if env.world_size > 1 else BAR_SECONDS))
            left -= len(fresh)
            for part in gather_main(fresh, env) or []:
                known |= {path[len(prefix) :]: found for path, found in part}
                bar.update(len(part))
            raise_together(saver.save_at_times(known) if env.is_main else None, env)
            if env.world_size == 1 and left and (reason := stopped_by()):
                raise saver.save(known) or Stopped(reason)
    if not env.is_main:
        raise_together(None, env)
        return None
    current = {entry.name: known[entry.name] for entry in entries}
    raise_together(saver.save_all(known if partial else current), env)
    return current


def _for_seconds(stream: Iterator[_T], seconds: float) -> Iterator[_T]:
    """What `stream` gives until the time is over, at least one."""
    deadline = time.monotonic() + seconds
    for item in stream:
        yield item
        if time.monotonic() > deadline:
            return


class _Saver:
    """Writes manifest.json now and then, and both files at the end. Errors are returned, for all ranks to raise."""

    def __init__(self, root: Path, output_dir: Path, decoder: Decoder) -> None:
        self._root, self._output_dir, self._decoder = root, output_dir, decoder
        self._next = time.monotonic() + SAVE_SECONDS

    def save_at_times(self, known: Mapping[str, Found]) -> UserError | None:
        started = time.monotonic()
        if started < self._next:
            return None
        error = self.save(known)
        ended = time.monotonic()
        self._next = ended + max(SAVE_SECONDS, 20 * (ended - started))
        return error

    def save(self, known: Mapping[str, Found]) -> UserError | None:
        return self._write(MANIFEST, self._manifest(known))

    def save_all(self, known: Mapping[str, Found]) -> UserError | None:
        bad = [{"path": path, "reason": reason} for path, reason in bad_files(known).items()]
        odd = [{"path": path, "reason": reason} for path, reason in suspicious(known).items()]
        return self._write(MANIFEST, self._manifest(known) | {"suspicious": odd}) or self._write(BAD_FILES, bad)

    def _manifest(self, known: Mapping[str, Found]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "decoder": self._decoder.name,
            "root": str(self._root),
            "fields": Found._fields,
            "files": known,
        }

    def _write(self, name: str, content: Any) -> UserError | None:
        path = self._output_dir / name
        temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w") as file:
                json.dump(content, file, indent=1 if name == BAD_FILES else None)
                file.write("\n")
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return UserError(
                f"--output-dir {self._output_dir}: {name} cannot be written ({error.strerror}); give another"
            )
        return None


def load_manifest(path: Path, decoder: str | None) -> dict[str, Found]:
    """What an earlier survey with the same decoder (None: any) knew; {} for none, or if its file is damaged."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or decoder not in (None, content["decoder"]):
            return {}
        return {name: Found(*values) for name, values in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def load_digests(output_dir: Path) -> dict[str, Found]:
    """What the manifest of an earlier survey, by any decoder, knows; {} if there is none, or if it is damaged."""
    return load_manifest(output_dir / MANIFEST, None)


def content_digests(manifest: Manifest, known: Mapping[str, Found], split: str) -> NDArray[np.int64]:
    """Digests of the files' contents, int64 (num_files,): 0 where `known` has none of a file of that size and time."""
    digests = np.zeros(len(manifest.files), dtype=np.int64)
    if known:
        listed = zip(manifest.files, manifest.sizes, manifest.mtimes, strict=True)
        for index, (name, size, mtime) in enumerate(listed):
            found = known.get(f"{split}/{name}", _NOTHING)
            if (found.size, found.mtime) == (size, mtime) and found.digest:
                digests[index] = _number(found.digest)
    return digests


def _number(digest: str) -> int:
    return int.from_bytes(bytes.fromhex(digest)[:8], signed=True)


def compare_contents(
    manifest: Manifest,
    changed: NDArray[np.int64],
    before: NDArray[np.int64],
    now: NDArray[np.int64],
    checkpoint: Path | None,
) -> NDArray[np.int64]:
    """Which of the `changed` files may have another content than before: those whose content was, or is, not known.

    Files whose earlier digest is known are read, for ten seconds at most.

    Args:
        manifest: the files.
        changed: indices of those with another time of change.
        before: `content_digests` of all files when the checkpoint was written.
        now: those of today; of files that are read they are filled in.
        checkpoint: for the message.

    Raises:
        UserError: a file has another content.
    """
    unsure = []
    deadline = time.monotonic() + COMPARE_SECONDS
    for index in changed:
        if before[index] and not now[index] and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # whoever decodes it will say what is wrong with it
                now[index] = _number(_digest(Path(manifest.path(int(index))).read_bytes()))
        if not (before[index] and now[index]):
            unsure.append(index)
        elif before[index] != now[index]:
            raise UserError(
                f"--resume {checkpoint}: {manifest.path(int(index))} has another content than when it was saved, with "
                "the same name and size; restore it, or start anew with another --output-dir"
            )
    return np.array(unsure, dtype=np.int64)


def bad_files(known: Mapping[str, Found]) -> dict[str, str]:
    """Path -> why it cannot be decoded."""
    return {path: found.bad for path, found in known.items() if found.bad is not None}


def suspicious(known: Mapping[str, Found]) -> dict[str, str]:
    """Path -> what is odd about files that can be decoded."""
    first: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for path, found in known.items():
        if found.bad is None:
            twin = first.setdefault(found.digest, path)
            odd = [*_odd(path, found), *([] if twin == path else [f"the same content as {twin}"])]
            if odd:
                reasons[path] = "; ".join(odd)
    return reasons


def _odd(path: str, found: Found) -> Iterator[str]:
    suffix = os.path.splitext(path)[1].lower()
    shorter, longer = sorted((found.width, found.height))
    if shorter < TINY:
        yield f"tiny, {found.width} x {found.height} pixels"
    if longer > NARROW * shorter:
        yield f"narrow, {found.width} x {found.height} pixels: its shorter side becomes --val-resize"
    codec = _PILLOW_NAMES.get(found.codec, found.codec)
    if codec != CODECS.get(suffix, codec):
        yield f"named {suffix}, holds {codec}"
    if found.warning:
        yield f"damaged, decodes all the same ({found.warning})"
