"""Writes a data set again, as WebDataset tars or class folders: which image goes where, and the processes that write.

A file appears under its final name only when it is complete and on the disk. What is in it depends on the source and
the options alone. So a conversion that was killed goes on with the files that are missing.
"""

import collections
import contextlib
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image
from tqdm import tqdm

from utils.data.images.codecs import is_image
from utils.data.images.manifest import Manifest
from utils.data.images.records import Record
from utils.data.reading.decoding import upright_rgb
from utils.data.reading.reader import read_image
from utils.data.reading.shard_reader import ShardFiles
from utils.distributed.process_pool import process_pool
from utils.errors import Stopped, UserError, first_line, readable
from utils.files import DISK_FULL, rename, temporary_of, write_temporary

POLL_SECONDS = 0.5  # between two looks for a signal
_BLOCK, _MEMBERS = 512, 3  # bytes of a tar's block; blocks that an image needs besides its own: two headers, its label


class Shrink(NamedTuple):
    """How larger images are made smaller.

    Attributes:
        max_side: pixels that the longer side may have; None leaves all images as they are.
        quality: of the JPEG, 1 to 100.
    """

    max_side: int | None
    quality: int


class Task(NamedTuple):
    """Images that one process writes.

    Attributes:
        path: of the tar, or the split's folder.
        names: of the tar's members, or of the files below the folder.
        labels: numbers of the classes.
        is_tar: whether `path` is a tar.
    """

    path: Path
    names: list[str]
    labels: list[int]
    records: list[Record]
    is_tar: bool


# ---------------------------------------------------------------------------------------------------------------------
# Which image goes where


def check_classes(classes: Sequence[str], is_tar: bool) -> None:
    """Check that the names of the classes can be those of folders and, for tars, lines of classes.txt.

    Raises:
        UserError: a name that a folder or a line of classes.txt cannot have.
    """
    folders = [name.replace("/", "_") for name in classes]
    counts = collections.Counter(folders)
    for name, folder in zip(classes, folders, strict=True):
        if is_tar and readable(name) != name:
            raise UserError(f"class {name!r}: not UTF-8, as classes.txt is; rename it, or give --to folder")
        unfit = folder in ("", ".", "..") or "\0" in folder or counts[folder] > 1
        if unfit or (name.splitlines() != [name] if is_tar else folder.startswith(".")):
            raise UserError(f"class {name!r}: no name for a folder or a line of text; rename it")


def output_names(manifest: Manifest, is_tar: bool) -> list[str]:
    """The path of each image in the tars or below the split's folder.

    The manifest of what is written has the same names, hence the same order. Names that a tar or a folder cannot keep
    become others in the same order: a suffix is added, "/" becomes "_", or the image gets its number as a name.
    """
    pairs = [name.partition("/")[::2] for name in manifest.names()]
    folders = [folder for folder, _ in pairs]
    names = [name if is_image(name) else f"{name}.jpg" for _, name in pairs]
    flat = [name.replace("/", "_") for name in names]
    if any("/" in name for name in names) and is_tar and _keeps(folders, names) and _reads_whole_key(folders, names):
        return names
    if not _keeps(folders, flat):
        flat = [f"{number:08}.jpg" for number in range(len(names))]
    paths = [f"{folder}/{name}" for folder, name in zip(folders, flat, strict=True)]
    if is_tar:
        keys = ["", *map(key_of, paths)]
        for index, (before, key) in enumerate(itertools.pairwise(keys)):
            if key == before:  # as a.1.jpg and a.2.jpg, which a reader would take for one sample
                paths[index] = f"{folders[index]}/{index:08}/{flat[index]}"
    return paths


def key_of(path: str) -> str:
    """The key of a sample: the path up to the first dot of the file's name."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}"


def _keeps(folders: Sequence[str], names: Sequence[str]) -> bool:
    """Whether no name is hidden or leads elsewhere, and the names of each class are in order."""
    if any(part.startswith(".") or not part for name in names for part in name.split("/")):
        return False
    encoded = zip(folders, map(os.fsencode, names), strict=True)
    return all(
        folder != after or name < next_name for (folder, name), (after, next_name) in itertools.pairwise(encoded)
    )


def _reads_whole_key(folders: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a reader of the tars takes these members' whole paths for names, and each for a sample of its own."""
    files = {(folder, name.rpartition("/")[2]) for folder, name in zip(folders, names, strict=True)}
    return len(files) < len(names) and all(one != other for one, other in itertools.pairwise(map(key_of, names)))


def plan(manifest: Manifest, limit: float) -> list[range]:
    """The images of each task, in order, of at most `limit` bytes where one image has not more."""
    parts, start, total = [], 0, 0
    for index, size in enumerate(manifest.sizes.tolist()):
        size = (-(-size // _BLOCK) + _MEMBERS) * _BLOCK
        if index > start and total + size > limit:
            parts.append(range(start, index))
            start, total = index, 0
        total += size
    return [*parts, range(start, len(manifest))]


def missing(split: str, target: Path, parts: Sequence[range], is_tar: bool) -> list[tuple[Path, range]]:
    """Where the images of each task go, without the tars that are there."""
    paths = [target / (f"{split}-{number:04}.tar" if is_tar else split) for number in range(len(parts))]
    return [(path, part) for path, part in zip(paths, parts, strict=True) if not (is_tar and path.exists())]


def tasks(manifest: Manifest, is_tar: bool, parts: Sequence[tuple[Path, range]]) -> Iterator[Task]:
    """The tasks that write `parts` of a split."""
    names = output_names(manifest, is_tar) if parts else []
    for path, part in parts:
        inside = slice(part.start, part.stop)
        records = [manifest.record(index) for index in part]
        yield Task(path, names[inside], manifest.labels[inside].tolist(), records, is_tar)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def run_tasks(
    pending: Iterable[Task], total: int, target: Path, shrink: Shrink, workers: int, stopped_by: Callable[[], str]
) -> None:
    """Write what is missing, in `workers` processes, with a bar.

    Args:
        total: images of all tasks.
        target: folder of the data set, for messages.
        stopped_by: names the signal that came, "" before.

    Raises:
        UserError: an image cannot be read, or the folder cannot be written.
        Stopped: by `stopped_by`. Files that are being written are finished before.
    """
    waiting = iter(pending)
    running: dict[Future[None], int] = {}
    with tqdm(total=total, desc="converting", unit="image", leave=False, disable=None) as bar:
        try:
            with process_pool(workers) as pool:
                while True:
                    for task in itertools.islice(waiting, 2 * workers - len(running)):
                        running[pool.submit(write_task, task, target, shrink)] = len(task.records)
                    if not running:
                        return
                    for done in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                        bar.update(running.pop(done))
                        done.result()
                    if reason := stopped_by():
                        raise Stopped(reason)
        except BrokenProcessPool:
            if reason := stopped_by():  # a signal to all processes ends these at once
                raise Stopped(reason) from None
            raise UserError(
                f"{target}: a process that wrote there was killed, perhaps as no memory was left; the same command "
                "goes on, with fewer --workers it needs less"
            ) from None


def write_task(task: Task, target: Path, shrink: Shrink) -> None:
    """Write a tar, or the files of a task that are not there yet.

    Raises:
        UserError: as `run_tasks`.
    """
    try:
        if task.is_tar:
            _replace(task.path, lambda file: _write_tar(file, task, shrink))
            return
        shards = ShardFiles()
        for name, record in zip(task.names, task.records, strict=True):
            path = task.path / name
            if not path.exists():
                content = _read(record, shards, shrink)
                path.parent.mkdir(parents=True, exist_ok=True)
                _replace(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
    except OSError as error:
        raise write_error(target, error) from None


def write_error(target: Path, error: OSError) -> UserError:
    """What the user reads when the data set's folder cannot be written."""
    if error.errno in DISK_FULL:
        return UserError(f"{target}: no space left; make room, the same command goes on with what is missing")
    path = error.filename or target
    return UserError(f"{path}: cannot be read or written ({error.strerror or error}); check its permissions")


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    try:
        rename(write_temporary(path, write), path)
    except (OSError, UserError):
        with contextlib.suppress(OSError):
            temporary_of(path).unlink(missing_ok=True)
        raise


def _write_tar(file: BinaryIO, task: Task, shrink: Shrink) -> None:
    shards = ShardFiles()
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for name, label, record in zip(task.names, task.labels, task.records, strict=True):
            for member, content in ((name, _read(record, shards, shrink)), (f"{key_of(name)}.cls", b"%d" % label)):
                info = tarfile.TarInfo(member)  # of user 0 and time 0
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def _read(record: Record, shards: ShardFiles, shrink: Shrink) -> bytes:
    """The bytes of an image, which is made smaller if it is too large.

    Raises:
        UserError: it cannot be read or decoded.
    """
    try:
        content = read_image(record, shards)
    except OSError as error:
        raise UserError(f"{record.name}: cannot be read ({error.strerror or error}); replace or remove it") from None
    if shrink.max_side is None:
        return content
    try:
        with Image.open(io.BytesIO(content)) as image:
            if max(image.size) <= shrink.max_side:
                return content
        smaller = upright_rgb(content)
        smaller.thumbnail((shrink.max_side, shrink.max_side), Image.Resampling.LANCZOS)
        encoded = io.BytesIO()
        smaller.save(encoded, "JPEG", quality=shrink.quality)
    except Exception as error:  # Pillow raises errors of many kinds for a damaged image
        raise UserError(
            f"{record.name}: Pillow cannot decode it ({first_line(error)}); replace or remove it, "
            "scripts/check_dataset.py finds all such images, or leave out --max-side"
        ) from None
    return encoded.getvalue()
