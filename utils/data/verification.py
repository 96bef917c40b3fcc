"""Verification of a data set: every file is decoded once, and the result is kept for the next launch."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from utils.data.decode_pool import FileReport, content_digest, decode_files
from utils.data.decoding import Decoder
from utils.data.manifest import FileEntry, Manifest
from utils.distributed.collectives import all_gather_object, broadcast, gather_to_rank0, raise_on_all_ranks
from utils.distributed.group import DistEnv
from utils.errors import Stopped, UserError

MANIFEST, BAD_FILES = "manifest.json", "bad_files.json"
FORMAT = 1
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
_NOTHING = FileReport(-1, -1, None)


def verify_dataset(
    root: Path,
    entries: Sequence[FileEntry],
    decoder: Decoder,
    output_dir: Path,
    workers: int,
    env: DistEnv,
    partial: bool = False,
    stopped_by: Callable[[], str] = str,
) -> dict[str, FileReport] | None:
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
    known |= {name: FileReport(size, mtime, bad) for name, size, mtime, bad in entries if bad is not None}
    pending = broadcast(pending, env)
    prefix = os.path.join(root, "")
    share = [prefix + entries[index].name for index in pending[env.rank :: env.world_size]]
    saver = _Saver(root, output_dir, decoder)
    left = len(share)
    shown = env.is_main and len(pending) > 0
    with (
        tqdm(total=len(pending), desc="scanning", unit="file", disable=None if shown else True) as bar,
        contextlib.closing(decode_files(share, decoder.decode, workers)) as stream,
    ):
        while any(all_gather_object(left, env)):
            fresh = list(_for_seconds(stream, ROUND_SECONDS if env.world_size > 1 else BAR_SECONDS))
            left -= len(fresh)
            for part in gather_to_rank0(fresh, env) or []:
                known |= {path[len(prefix) :]: found for path, found in part}
                bar.update(len(part))
            raise_on_all_ranks(saver.save_at_times(known) if env.is_main else None, env)
            if env.world_size == 1 and left and (reason := stopped_by()):
                raise saver.save(known) or Stopped(reason)
    if not env.is_main:
        raise_on_all_ranks(None, env)
        return None
    current = {entry.name: known[entry.name] for entry in entries}
    raise_on_all_ranks(saver.save_all(known if partial else current), env)
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

    def save_at_times(self, known: Mapping[str, FileReport]) -> UserError | None:
        started = time.monotonic()
        if started < self._next:
            return None
        error = self.save(known)
        ended = time.monotonic()
        self._next = ended + max(SAVE_SECONDS, 20 * (ended - started))
        return error

    def save(self, known: Mapping[str, FileReport]) -> UserError | None:
        return self._write(MANIFEST, self._manifest(known))

    def save_all(self, known: Mapping[str, FileReport]) -> UserError | None:
        bad = [{"path": path, "reason": reason} for path, reason in bad_files(known).items()]
        odd = [{"path": path, "reason": reason} for path, reason in suspicious(known).items()]
        return self._write(MANIFEST, self._manifest(known) | {"suspicious": odd}) or self._write(BAD_FILES, bad)

    def _manifest(self, known: Mapping[str, FileReport]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "decoder": self._decoder.name,
            "root": str(self._root),
            "fields": FileReport._fields,
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


def load_manifest(path: Path, decoder: str | None) -> dict[str, FileReport]:
    """What an earlier survey with the same decoder (None: any) knew; {} for none, or if its file is damaged."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or decoder not in (None, content["decoder"]):
            return {}
        return {name: FileReport(*values) for name, values in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def load_digests(output_dir: Path) -> dict[str, FileReport]:
    """What the manifest of an earlier survey, by any decoder, knows; {} if there is none, or if it is damaged."""
    return load_manifest(output_dir / MANIFEST, None)


def content_digests(manifest: Manifest, known: Mapping[str, FileReport], split: str) -> NDArray[np.int64]:
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
                now[index] = _number(content_digest(Path(manifest.path(int(index))).read_bytes()))
        if not (before[index] and now[index]):
            unsure.append(index)
        elif before[index] != now[index]:
            raise UserError(
                f"--resume {checkpoint}: {manifest.path(int(index))} has another content than when it was saved, with "
                "the same name and size; restore it, or start anew with another --output-dir"
            )
    return np.array(unsure, dtype=np.int64)


def bad_files(known: Mapping[str, FileReport]) -> dict[str, str]:
    """Path -> why it cannot be decoded."""
    return {path: found.bad for path, found in known.items() if found.bad is not None}


def suspicious(known: Mapping[str, FileReport]) -> dict[str, str]:
    """Path -> what is odd about files that can be decoded."""
    first: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for path, found in known.items():
        if found.bad is None:
            twin = first.setdefault(found.digest, path)
            odd = [*_warnings_for(path, found), *([] if twin == path else [f"the same content as {twin}"])]
            if odd:
                reasons[path] = "; ".join(odd)
    return reasons


def _warnings_for(path: str, found: FileReport) -> Iterator[str]:
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
