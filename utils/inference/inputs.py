"""Images that a command line names, in its order: files, folders, patterns and shards; and their classes.

Imports nothing slow.
"""

import collections
import dataclasses
import glob
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from utils.data.formats.folder import file_record, list_images
from utils.data.formats.naming import SYSTEM_NAMES, is_hidden, split_of
from utils.data.formats.refused import describe_refused, refuse_unreadable
from utils.data.formats.shards import Shards, ShardTable
from utils.data.formats.sources import FORMATS
from utils.data.images.manifest import FileEntry, Manifest, stat_file
from utils.data.images.records import Record, ShardFormat
from utils.errors import UserError
from utils.text import describe_alike

NO_TARGET = -1  # label of an image whose class is not known
_REMEDY = "give images, folders, patterns in quotes, or shards"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What sources name: image files or shards, not both.

    Attributes:
        files: images, in order; those that are bad by their listing, too.
        shards: paths, in order.
        ignored: files of folders that are not named like images, by suffix, and how many.
    """

    files: Sequence[FileEntry]
    shards: Sequence[Path]
    ignored: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class PathTable:
    """`FilesTable` of images anywhere; a name is the path, as the user gave it."""

    names: NDArray[np.bytes_]

    def record(self, index: int) -> Record:
        """See `ImageTable`."""
        return file_record(os.fsdecode(self.names[index]))

    def locations(self, indices: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """See `FilesTable`."""
        return self.names[indices]

    def select(self, indices: NDArray[np.int64]) -> "PathTable":
        """See `ImageTable`."""
        return PathTable(self.names[indices])


def expand_sources(sources: Sequence[str]) -> list[str]:
    """The paths that the sources name; a pattern stands for what matches, sorted.

    Raises:
        UserError: there is no such path, or its format cannot be read.
    """
    paths: list[str] = []
    for source in sources:
        source = source if os.path.lexists(source) else os.path.expanduser(source)
        found = [source] if os.path.lexists(source) else _matching(source)
        if not found:
            what = "no file of that name" if glob.has_magic(source) else "no such file or folder"
            raise UserError(f"{source!r}: {what}; {_REMEDY}")
        for path in found:
            if not os.path.isdir(path) and (reason := describe_refused(Path(path))):
                raise UserError(reason)
        paths += found
    return paths


def _matching(pattern: str) -> list[str]:
    """The paths that match, sorted; not those that a system made, unless the pattern names their folder."""
    ignored = SYSTEM_NAMES.difference(map(str.lower, _parts(pattern)))
    found = glob.glob(pattern, recursive=True)  # without those that begin with a dot
    return sorted((path for path in found if ignored.isdisjoint(map(str.lower, _parts(path)))), key=_parts)


def list_inputs(sources: Sequence[str]) -> Inputs:
    """Find the images or shards of the sources. No file is opened.

    A folder is searched recursively, without hidden files: for images, and if it has none for shards. Images are sorted
    by folder and name, as in training. A file that is no shard by its name is taken for an image.

    Raises:
        UserError: as `expand_sources`; a folder has neither or cannot be read, or there are both images and shards.
    """
    files: list[FileEntry] = []
    shards: list[Path] = []
    ignored: collections.Counter[str] = collections.Counter()
    for path in expand_sources(sources):
        if _format_of(path) is not None:
            shards.append(Path(path))
        elif os.path.isdir(path):
            found, others = list_images(Path(path))
            ordered = sorted(found, key=lambda entry: _parts(entry.name))
            files += [entry._replace(name=os.path.join(path, entry.name)) for entry in ordered]
            if found:
                ignored.update(others)
            else:
                shards += _shards_below(path)
        else:
            files.append(stat_file(path)._replace(name=path))
    if files and shards:
        raise UserError(f"{files[0].name} is an image, {shards[0]} a shard; give them to two commands")
    return Inputs(files, shards, ignored)


def _parts(path: str) -> list[str]:
    return path.split("/")  # so that the files of one folder stay together


def _format_of(path: str) -> ShardFormat | None:
    """The format of a shard, by its name; None for other files, and for folders."""
    if os.path.isdir(path):
        return None
    return next((each for each in FORMATS if each.is_shard(os.path.basename(path))), None)


def _shards_below(folder: str) -> list[Path]:
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        status = os.stat(parent)
        is_new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if is_new and not is_hidden(name))
        if not is_new:  # links may form a circle
            continue
        paths = [os.path.join(parent, name) for name in sorted(names) if not is_hidden(name)]
        found += [Path(path) for path in paths if _format_of(path) is not None]
    if not found:
        refuse_unreadable(Path(folder))
        raise UserError(f"{folder}: no images in it, and no shards; {_REMEDY}")
    return found


def _refuse_folder(error: OSError) -> None:
    raise UserError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions")


# ---------------------------------------------------------------------------------------------------------------------
# Manifests


def files_manifest(files: Sequence[FileEntry], classes: tuple[str, ...]) -> Manifest:
    """The images of `files`. The class of one is the name of its folder, if `classes` has it.

    Returns:
        With a label of `NO_TARGET` where the class is not known, and the files that are bad by their listing in `bad`.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    folders = {folder: os.path.basename(os.path.abspath(folder)) for folder in {os.path.dirname(f.name) for f in files}}
    labels = [numbers.get(folders[os.path.dirname(entry.name)], NO_TARGET) for entry in files]
    return Manifest(
        root=None,
        classes=classes,
        labels=np.array(labels, dtype=np.int64),
        fingerprint="",
        images=PathTable(np.array([os.fsencode(entry.name) for entry in files])),
        sizes=np.array([entry.size for entry in files], dtype=np.int64),
        mtimes=np.array([entry.mtime for entry in files], dtype=np.int64),
        bad={entry.name: entry.bad for entry in files if entry.bad is not None},
    )


def describe_folders(manifest: Manifest) -> str:
    """A note on folders whose names are not a class, but look like one; "" for none."""
    unknown = np.flatnonzero(manifest.labels == NO_TARGET).tolist()
    folders = {os.path.basename(os.path.dirname(manifest.record(index).name)) for index in unknown}
    alike = describe_alike(folders, manifest.classes)
    return f"note: the true class of some images is not known: {alike}, a folder's name and a class" if alike else ""


def shards_manifest(groups: Sequence[tuple[ShardFormat, Shards]], classes: tuple[str, ...]) -> Manifest:
    """The images of shards in stored order, with labels as `files_manifest`."""
    labels = [_shard_labels(format, shards, classes) for format, shards in groups]
    first_shards = np.cumsum([0, *(len(shards.paths) for _, shards in groups)]).tolist()
    numbers = [
        first + np.repeat(np.arange(len(shards.paths), dtype=np.int32), shards.counts)
        for first, (_, shards) in zip(first_shards, groups, strict=False)
    ]
    parts: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
    for shard, (_, shards) in zip(numbers, groups, strict=True):
        for image, offset, length in shards.index.parts.tolist():
            key = (int(shard[image]), int(shards.index.offsets[image]))
            parts[key] = (*parts.get(key, ()), (offset, length))
    lengths = np.concatenate([shards.index.lengths for _, shards in groups])
    table = ShardTable(
        shards=tuple(path for _, shards in groups for path in shards.paths),
        names=np.concatenate([np.strings.add(b"/", shards.index.keys) for _, shards in groups]),  # without a class
        numbers=np.concatenate(numbers).astype(np.int32),
        offsets=np.concatenate([shards.index.offsets for _, shards in groups]),
        lengths=lengths,
        parts=parts,
    )
    empty = np.flatnonzero(lengths == 0).tolist()
    return Manifest(
        root=None,
        classes=classes,
        labels=np.concatenate(labels),
        fingerprint="",
        images=table,
        sizes=lengths,
        mtimes=np.zeros(len(lengths), dtype=np.int64),
        bad={table.record(index).name: "an empty file" for index in empty},
    )


def _shard_labels(format: ShardFormat, shards: Shards, classes: tuple[str, ...]) -> NDArray[np.int64]:
    """Labels in the order of `classes`. Numbers stand for the names that the data has, or are names themselves."""
    index = shards.index
    known = {name: number for number, name in enumerate(classes)}
    if index.texts:
        return np.array([known.get(text, NO_TARGET) for text in index.texts], dtype=np.int64)[index.labels]
    names = format.class_names([Path(path) for path in shards.paths])
    values = np.unique(index.labels).tolist()
    first = _first_label(values, len(names or classes))
    if names is None and all(str(value) in known for value in values):  # as a run without --class-names calls them
        by_value = {value: known[str(value)] for value in values}
    elif first is None:
        by_value = {}
    else:
        by_value = {value: known.get((names or classes)[value - first], NO_TARGET) for value in values}
    return np.array([by_value.get(value, NO_TARGET) for value in index.labels.tolist()], dtype=np.int64)


def _first_label(values: Sequence[int], count: int) -> int | None:
    """Whether sorted labels of `count` classes count from 0 or from 1; None if they do not show it, or do not fit."""
    if values[0] == 0 and values[-1] < count:
        return 0
    return 1 if values[0] > 0 and values[-1] == count else None


def split_shards(shards: Sequence[Path]) -> Iterator[tuple[ShardFormat, str, list[Path]]]:
    """Format, split and paths of shards that follow each other and share one index (`utils.data.formats.index`)."""

    def key(path: Path) -> tuple[ShardFormat | None, str, Path]:
        split = split_of(path.name) or split_of(path.absolute().parent.name)
        return _format_of(str(path)), "train" if split == "train" else "val", path.parent

    for (format, split, _), group in itertools.groupby(shards, key):
        assert format is not None, "as listed"
        yield format, split, list(group)
