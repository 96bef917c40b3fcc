"""Reads every file of a data set once, to decode it or for its digest, and saves what is known for the next launch."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from utils.data.images.codecs import CODECS, PILLOW_CODECS
from utils.data.images.manifest import Listing, Manifest
from utils.data.reading.decode_pool import FileReport, content_digest, decode_files
from utils.data.reading.decoding import Decoder, ImageInfo
from utils.data.reading.reader import read_image
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, broadcast, gather_to_rank0, raise_on_all_ranks
from utils.distributed.group import DistEnv
from utils.errors import Stopped, UserError
from utils.files import atomic_write_text

MANIFEST, BAD_FILES = "manifest.json", "bad_files.json"
DIGESTS = "digests.json"  # like manifest.json, of files that were read and not decoded
FORMAT = 1
ROUND_SECONDS = 5.0  # between two exchanges among the ranks, which must be shorter than --timeout
SAVE_SECONDS = 5.0  # at least, between two saves; a save may take a twentieth of the time
COMPARE_SECONDS = 10.0  # for reading files again that have changed since a checkpoint
BAR_SECONDS = 0.5  # between two updates of a single process's bar
TINY = 16  # pixels of the shorter side
NARROW = 50  # longer side over shorter one
_T = TypeVar("_T")
_UNKNOWN = FileReport(-1, -1, None)


@collective
def verify_dataset(
    listing: Listing,
    decoder: Decoder,
    output_dir: Path,
    workers: int,
    env: DistEnv,
    partial: bool = False,
    stopped_by: Callable[[], str] = str,
) -> dict[str, FileReport] | None:
    """Find the files of a listing that cannot be decoded.

    Files that an earlier verification knows, and that have not changed, are not decoded again. The ranks share the
    others. Rank 0 saves what is known every few seconds; a verification that is killed continues from there.

    Args:
        listing: the files, the same on all ranks. Those that are bad by their listing are not opened.
        decoder: decides which are bad.
        output_dir: of manifest.json and bad_files.json.
        workers: processes of this rank.
        partial: whether the data set has more files; their entries in manifest.json are kept.
        stopped_by: called now and then, where this process is the only one; a name of a cause stops the verification.

    Returns:
        On rank 0, what is known of each file, in the order of the listing; None on the others.

    Raises:
        UserError: on all ranks, if a result cannot be written.
        Stopped: by `stopped_by`; what is known has been saved.
    """
    known = load_manifest(output_dir / MANIFEST, decoder.name) if env.is_main else {}
    pending = broadcast(_pending(listing, known), env)
    known |= {name: FileReport(size, mtime, bad) for name, size, mtime, bad in listing.entries if bad is not None}
    saver = _Saver(listing.root, output_dir, decoder, MANIFEST)
    with contextlib.closing(_decode_by_all(listing, pending, decoder, workers, env)) as rounds:
        for reports, done in rounds:
            known |= reports
            raise_on_all_ranks(saver.save_at_times(known) if env.is_main else None, env)
            if env.world_size == 1 and not done and (reason := stopped_by()):
                raise saver.save(known) or Stopped(reason)
    current = {entry.name: known[entry.name] for entry in listing.entries} if env.is_main else None
    raise_on_all_ranks(None if current is None else saver.save_all(known if partial else current), env)
    return current


@collective
def read_digests(listing: Listing, output_dir: Path, workers: int, env: DistEnv) -> dict[str, FileReport] | None:
    """The digests of all files of a listing.

    Files that an earlier call or verification knows, and that have not changed, are not read again. The ranks share the
    others. What is known is saved every few seconds, as by `verify_dataset`.

    Args:
        listing: the files, the same on all ranks.
        output_dir: of digests.json; also manifest.json is looked at.
        workers: processes of this rank.

    Returns:
        On rank 0, what is known of each file, `bad` where it cannot be read; None on the others.

    Raises:
        UserError: on all ranks, if a result cannot be written.
    """
    known = load_digests(output_dir) if env.is_main else {}
    pending = broadcast(_pending(listing, known), env)
    saver = _Saver(listing.root, output_dir, _NO_DECODER, DIGESTS)
    with contextlib.closing(_decode_by_all(listing, pending, _NO_DECODER, workers, env, "reading")) as rounds:
        for reports, _ in rounds:
            known |= reports
            raise_on_all_ranks(saver.save_at_times(known) if env.is_main else None, env)
    raise_on_all_ranks(saver.save(known) if env.is_main and pending else None, env)
    return {entry.name: known[entry.name] for entry in listing.entries} if env.is_main else None


def _accept(content: bytes) -> ImageInfo:
    return ImageInfo("", 0, 0)


_NO_DECODER = Decoder("none", _accept)


def _pending(listing: Listing, known: Mapping[str, FileReport]) -> list[int]:
    """Indices of the files that must be decoded.

    Those that were bad are among them: neither changed permissions nor a repaired file server alter size and mtime.
    """
    return [
        index
        for index, (name, size, mtime, bad) in enumerate(listing.entries)
        if bad is None and known.get(name, _UNKNOWN)[:3] != (size, mtime, None)
    ]


@collective
def _decode_by_all(
    listing: Listing, pending: list[int], decoder: Decoder, workers: int, env: DistEnv, title: str = "scanning"
) -> Generator[tuple[dict[str, FileReport], bool]]:
    """Decode the `pending` files, each on one rank.

    The ranks exchange results every few seconds, so that none waits longer for another than --timeout allows.

    Yields:
        The reports of a round, on rank 0, and whether this rank has decoded all of its files.
    """
    mine = pending[env.rank :: env.world_size]
    left = len(mine)
    shown = env.is_main and len(pending) > 0
    with (
        tqdm(total=len(pending), desc=title, unit="file", disable=None if shown else True) as bar,
        contextlib.closing(decode_files(map(listing.record, mine), decoder.decode, workers)) as reports,
    ):
        while any(all_gather_object(left, env)):
            decoded = list(_for_seconds(reports, ROUND_SECONDS if env.world_size > 1 else BAR_SECONDS))
            left -= len(decoded)
            gathered = gather_to_rank0([(mine[position], report) for position, report in decoded], env) or []
            bar.update(sum(map(len, gathered)))
            yield {listing.entries[index].name: report for part in gathered for index, report in part}, left == 0


def _for_seconds(stream: Iterator[_T], seconds: float) -> Iterator[_T]:
    """What `stream` gives until the time is over, at least one."""
    deadline = time.monotonic() + seconds
    for item in stream:
        yield item
        if time.monotonic() > deadline:
            return


class _Saver:
    """Writes the file `name` now and then, and manifest.json with bad_files.json at the end.

    Errors are returned, for all ranks to raise.
    """

    def __init__(self, root: Path, output_dir: Path, decoder: Decoder, name: str) -> None:
        self._root, self._output_dir, self._decoder, self._name = root, output_dir, decoder, name
        self._next = time.monotonic() + SAVE_SECONDS

    def save_at_times(self, known: Mapping[str, FileReport]) -> UserError | None:
        started = time.monotonic()
        if started < self._next:
            return None
        error = self.save(known)
        ended = time.monotonic()
        self._next = ended + max(SAVE_SECONDS, 20 * (ended - started))
        return error

    def save(self, known: Mapping[str, FileReport]) -> UserError | None:
        return self._write(self._name, json.dumps(self._manifest(known)))

    def save_all(self, known: Mapping[str, FileReport]) -> UserError | None:
        bad = [{"path": path, "reason": reason} for path, reason in bad_files(known).items()]
        warnings = [{"path": path, "reason": reason} for path, reason in suspicious(known).items()]
        error = self._write(self._name, json.dumps(self._manifest(known) | {"suspicious": warnings}))
        return error or self._write(BAD_FILES, json.dumps(bad, indent=1))

    def _manifest(self, known: Mapping[str, FileReport]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "decoder": self._decoder.name,
            "root": str(self._root),
            "fields": FileReport._fields,
            "files": known,
        }

    def _write(self, name: str, text: str) -> UserError | None:
        try:
            atomic_write_text(self._output_dir / name, text + "\n", concurrent=True)
        except OSError as error:
            return UserError(
                f"--output-dir {self._output_dir}: {name} cannot be written ({error.strerror}); give another"
            )
        return None


def load_manifest(path: Path, decoder: str | None) -> dict[str, FileReport]:
    """What an earlier verification with the same decoder (None: any) found; {} for none, or if its file is damaged."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or decoder not in (None, content["decoder"]):
            return {}
        return {name: FileReport(*values) for name, values in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def load_digests(output_dir: Path) -> dict[str, FileReport]:
    """The files whose digests are known from `read_digests` or a verification by any decoder; {} if there are none."""
    found = load_manifest(output_dir / DIGESTS, None) | load_manifest(output_dir / MANIFEST, None)
    return {name: report for name, report in found.items() if report.digest}


def content_digests(manifest: Manifest, known: Mapping[str, FileReport]) -> NDArray[np.int64]:
    """Digests of the files' contents, int64 (num_images,): 0 where `known` has none of a file of that size and time."""
    digests = np.zeros(len(manifest.sizes), dtype=np.int64)
    if known:
        listed = zip(manifest.names(), manifest.sizes, manifest.mtimes, strict=True)
        for index, (name, size, mtime) in enumerate(listed):
            report = known.get(manifest.path(name), _UNKNOWN)
            if (report.size, report.mtime) == (size, mtime) and report.digest:
                digests[index] = _number(report.digest)
    return digests


def _number(digest: str) -> int:
    return int.from_bytes(bytes.fromhex(digest)[:8], signed=True)


def compare_contents(
    manifest: Manifest,
    changed: NDArray[np.int64],
    before: NDArray[np.int64],
    now: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int | None]:
    """Which of the `changed` files may have another content than before, and the first that is known to have.

    The former are those whose content was, or is, not known. Files whose earlier digest is known are read, for ten
    seconds at most.

    Args:
        manifest: the files.
        changed: indices of those with another time of change.
        before: `content_digests` of all files when the checkpoint was written.
        now: those of today; the digests of files that are read are added to it.
    """
    unsure, other = [], None
    deadline = time.monotonic() + COMPARE_SECONDS
    for index in map(int, changed):
        if before[index] and not now[index] and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the loader that decodes it reports it
                now[index] = _number(content_digest(read_image(manifest.record(index))))
        if not (before[index] and now[index]):
            unsure.append(index)
        elif before[index] != now[index] and other is None:
            other = index
    return np.array(unsure, dtype=np.int64), other


def bad_files(known: Mapping[str, FileReport]) -> dict[str, str]:
    """Path -> why it cannot be decoded."""
    return {path: report.bad for path, report in known.items() if report.bad is not None}


def suspicious(known: Mapping[str, FileReport]) -> dict[str, str]:
    """Path -> what is unusual about a file that can be decoded."""
    first: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for path, report in known.items():
        if report.bad is None:
            twin = first.setdefault(report.digest, path)
            warnings = [*_warnings_for(path, report), *([] if twin == path else [f"the same content as {twin}"])]
            if warnings:
                reasons[path] = "; ".join(warnings)
    return reasons


def _warnings_for(path: str, report: FileReport) -> Iterator[str]:
    suffix = os.path.splitext(path)[1].lower()
    shorter, longer = sorted((report.width, report.height))
    if shorter < TINY:
        yield f"tiny, {report.width} x {report.height} pixels"
    if longer > NARROW * shorter:
        yield f"narrow, {report.width} x {report.height} pixels: its shorter side becomes --val-resize"
    codec = PILLOW_CODECS.get(report.codec, report.codec)
    if codec != CODECS.get(suffix, codec):
        yield f"named {suffix}, holds {codec}"
    if report.warning:
        yield f"damaged, decodes all the same ({report.warning})"
