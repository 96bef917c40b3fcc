"""Shards, files that hold many images each: what is known of them, and the manifests of their images."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.data.images.manifest import Manifest, bad_files_error, files_fingerprint
from utils.data.images.records import Entry, Record, Span
from utils.errors import UserError, some
from utils.text import count, describe_alike

MANY = 100_000  # classes; a label above, and above the number of images, is no class


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """The images of one or more shards in stored order.

    Attributes:
        keys: `Entry.key`: (num_images,).
        labels: numbers as the shards give them, or indices into `texts`: int64 (num_images,).
        texts: the class names that the shards give instead of numbers; () for numbers.
        offsets, lengths: of the bytes in the shard, of split images from the first part on and in all parts: int64
            (num_images,).
        parts: the parts of split images, (image, offset, length): int64 (num_parts, 3).
    """

    keys: NDArray[np.bytes_]
    labels: NDArray[np.int64]
    texts: tuple[str, ...]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    parts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def index_entries(shard: Path, entries: Iterable[Entry]) -> ShardIndex:
    """The index of one shard.

    Raises:
        UserError: some labels are numbers and some are names, or there is no image.
    """
    found = list(entries)
    if not found:
        raise UserError(f"{shard}: a shard without images; remove it or write it again")
    kinds = {type(entry.label) for entry in found}
    if len(kinds) > 1:
        raise UserError(f"{shard}: some labels are numbers, others are names; write them all in one way")
    texts = tuple(sorted({str(entry.label) for entry in found})) if str in kinds else ()
    codes = {text: code for code, text in enumerate(texts)}
    labels = [codes[entry.label] if isinstance(entry.label, str) else entry.label for entry in found]
    parts = [(at, *part) for at, entry in enumerate(found) if len(entry.ranges) > 1 for part in entry.ranges]
    return ShardIndex(
        keys=np.array([os.fsencode(entry.key) for entry in found]),
        labels=np.array(labels, dtype=np.int64),
        texts=texts,
        offsets=np.array([entry.ranges[0][0] for entry in found], dtype=np.int64),
        lengths=np.array([sum(length for _, length in entry.ranges) for entry in found], dtype=np.int64),
        parts=np.array(parts, dtype=np.int64).reshape(-1, 3),
    )


def join_indexes(indexes: Sequence[ShardIndex]) -> ShardIndex:
    """One index of several shards, in their order."""
    used = {index.texts[code] for index in indexes if index.texts for code in np.unique(index.labels).tolist()}
    texts = tuple(sorted(used))
    codes = {text: code for code, text in enumerate(texts)}
    starts = np.cumsum([0, *map(len, indexes)])
    return ShardIndex(
        keys=np.concatenate([index.keys for index in indexes]),
        labels=np.concatenate(
            [
                np.array([codes.get(text, -1) for text in index.texts], dtype=np.int64)[index.labels]
                if index.texts
                else index.labels
                for index in indexes
            ]
        ),
        texts=texts,
        offsets=np.concatenate([index.offsets for index in indexes]),
        lengths=np.concatenate([index.lengths for index in indexes]),
        parts=np.concatenate(
            [index.parts + np.array([start, 0, 0]) for start, index in zip(starts, indexes, strict=False)]
        ),
    )


def split_index(joined: ShardIndex, counts: NDArray[np.int64]) -> list[ShardIndex]:
    """Undo of `join_indexes`: the index of each shard, which has `counts` images: int64 (num_shards,)."""
    ends = np.cumsum(counts)
    if len(joined) != (int(ends[-1]) if len(ends) else 0):
        raise ValueError("counts of another index")
    indexes = []
    for start, end in zip((ends - counts).tolist(), ends.tolist(), strict=True):
        inside = (joined.parts[:, 0] >= start) & (joined.parts[:, 0] < end)
        indexes.append(
            ShardIndex(
                keys=joined.keys[start:end],
                labels=joined.labels[start:end],
                texts=joined.texts,
                offsets=joined.offsets[start:end],
                lengths=joined.lengths[start:end],
                parts=joined.parts[inside] - np.array([start, 0, 0]),
            )
        )
    return indexes


@dataclasses.dataclass(frozen=True)
class ShardTable:
    """`ImageTable` of images that are parts of shards.

    Attributes:
        shards: absolute paths.
        names: (num_images,).
        numbers: of the shards, indices into `shards`: int32 (num_images,).
        offsets, lengths: see `ShardIndex`; int64 (num_images,).
        parts: (shard, offset of the first part) of a split image -> all its parts.
    """

    shards: tuple[str, ...]
    names: NDArray[np.bytes_]
    numbers: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    parts: Mapping[tuple[int, int], tuple[tuple[int, int], ...]]

    def record(self, index: int) -> Record:
        """The image as `SHARD:NAME`, its name without the class, and its bytes."""
        number, offset, length = int(self.numbers[index]), int(self.offsets[index]), int(self.lengths[index])
        shard = self.shards[number]
        name = os.fsdecode(self.names[index]).partition("/")[2].removeprefix(f"{os.path.basename(shard)}:")
        ranges = self.parts.get((number, offset), ((offset, length),))
        return Record(f"{shard}:{name}", Span(shard, ranges))

    def select(self, indices: NDArray[np.int64]) -> "ShardTable":
        """The table of these images, in this order."""
        return dataclasses.replace(
            self,
            names=self.names[indices],
            numbers=self.numbers[indices],
            offsets=self.offsets[indices],
            lengths=self.lengths[indices],
        )


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of one split and their index.

    Attributes:
        split: train or val.
        root: folder that holds them, absolute.
        paths: absolute.
        mtimes: of the shards' last change, nanoseconds since 1970: int64 (num_shards,).
        counts: images of each shard: int64 (num_shards,).
    """

    split: str
    root: Path
    paths: tuple[str, ...]
    mtimes: NDArray[np.int64]
    counts: NDArray[np.int64]
    index: ShardIndex


class ClassNames(NamedTuple):
    """What names the classes of shards.

    Attributes:
        names: in label order; None where nothing gives them.
        origin: where they are from, for messages.
        lists: of the splits, the names in the order of the split's numbers, where its data has them.
    """

    names: tuple[str, ...] | None
    origin: str = ""
    lists: Mapping[str, tuple[str, ...]] = {}


def create_manifests(
    splits: Sequence[Shards], names: ClassNames, format_name: str, skip_bad: bool, others: Sequence[Shards] = ()
) -> dict[str, Manifest]:
    """The manifests of the splits, whose labels must agree.

    Images are sorted by class, then by name. A name is the class and the last part of the key, as `CLASS/FILE.jpg` of a
    folder; where that is not unique it is the whole key, and else `SHARD:KEY`, or `SHARD:NUMBER:KEY`.

    Args:
        splits: train and val, or one of them.
        names: of the classes. Where the splits' own lists differ in their order, labels are those of train's.
        format_name: of the shards.
        skip_bad: exclude images of no bytes, instead of refusing them.
        others: splits of the data set that are not asked for, but whose labels count.

    Raises:
        UserError: a label outside the classes, a class without training images, or images of no bytes.
    """
    classes, labels = _common_labels([*splits, *others], names)
    for each in splits:
        if each.split == "train":
            _require_all_classes(each, classes, labels[each.split])
    manifests = {}
    for each in splits:
        manifest = _create_manifest(each, classes, labels[each.split])
        empty = np.flatnonzero(manifest.sizes == 0).tolist()
        if empty and not skip_bad:
            raise bad_files_error({manifest.record(index).name: "an empty file" for index in empty}, "write {} again")
        bad = {manifest.name(index): "an empty file" for index in empty}
        manifest = dataclasses.replace(manifest.without(bad), source=format_name)
        manifests[each.split] = manifest.with_all_classes() if each.split == "train" else manifest
    return manifests


def _common_labels(splits: Sequence[Shards], names: ClassNames) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """Class names in label order, and the label of each image of each split: int64, from 0 on."""
    if len({bool(each.index.texts) for each in splits}) > 1:
        raise UserError(f"{splits[0].root}: labels are numbers in one split and names in the other; write both alike")
    if not splits[0].index.texts:
        return _common_numbers(splits, names)
    texts = sorted({text for each in splits for text in each.index.texts})
    classes = names.names or tuple(texts)
    if unknown := [text for text in texts if text not in classes]:
        alike = describe_alike(unknown, classes)
        remedy = f"{alike}, write both alike" if alike else "add it there"
        raise UserError(f"{splits[0].root}: the class {unknown[0]!r} is not in {names.origin}; {remedy}")
    return classes, {
        each.split: np.array([classes.index(text) for text in each.index.texts], dtype=np.int64)[each.index.labels]
        for each in splits
    }


def _common_numbers(
    splits: Sequence[Shards], names: ClassNames
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """As `_common_labels`, of labels that are numbers."""
    first = min(map(first_label, splits))
    if first not in (0, 1):
        raise UserError(f"{splits[0].root}: the smallest label is {first}; labels must count from 0 or from 1")
    labels = {each.split: each.index.labels - first for each in splits}
    highest = max(int(each.max()) for each in labels.values())
    if highest >= max(MANY, images := sum(map(len, labels.values()))):
        raise UserError(
            f"{splits[0].root}: label {first + highest}, but {count(images, 'image')}; labels must number the classes"
        )
    classes = names.names or tuple(map(str, range(first, first + highest + 1)))
    reference = names.lists.get("train", next(iter(names.lists.values()), ()))
    for each in splits:
        listed = names.lists.get(each.split, reference)
        named = len(classes) if listed == reference else min(len(listed), len(classes))
        if (above := int(labels[each.split].max())) >= named:
            raise UserError(
                f"{each.root}: label {first + above}, but {names.origin} has {count(named, 'class')}; give it a name "
                "for each label"
            )
        if listed != reference:
            labels[each.split] = _renumber(each, labels[each.split], listed, reference)
    return classes, labels


def first_label(shards: Shards) -> int:
    """The smallest label of a split, which are numbers."""
    return int(shards.index.labels.min())


def _renumber(
    shards: Shards, labels: NDArray[np.int64], listed: tuple[str, ...], reference: tuple[str, ...]
) -> NDArray[np.int64]:
    """Labels that number the names `listed`, as numbers of the names `reference`."""
    used = np.unique(labels).tolist()
    for name in (listed[label] for label in used):
        if listed.count(name) > 1 or reference.count(name) != 1:
            alike = describe_alike([name], reference)
            raise UserError(
                f"{shards.root}: the lists of classes of train and val differ, and {name!r} of {shards.split} is not "
                f"exactly once in each; {f'{alike}, ' if alike else ''}give both the same names, in any order"
            )
    numbers = np.zeros(len(listed), dtype=np.int64)
    numbers[used] = [reference.index(listed[label]) for label in used]
    return numbers[labels]


def _require_all_classes(shards: Shards, classes: tuple[str, ...], labels: NDArray[np.int64]) -> None:
    """Raise UserError for a class without images."""
    missing = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)
    if len(missing):
        absent = [classes[label] for label in missing.tolist()]
        have = "has" if len(missing) == 1 else "have"
        alike = describe_alike(absent, classes)
        raise UserError(
            f"{shards.root}: {len(missing):,} of {count(len(classes), 'class')} {have} no image in {shards.split} "
            f"({some(absent)}); "
            f"{f'{alike}, write both alike' if alike else 'add training images, or remove those of val'}"
        )


def _create_manifest(shards: Shards, classes: tuple[str, ...], labels: NDArray[np.int64]) -> Manifest:
    index = shards.index
    numbers = np.repeat(np.arange(len(shards.paths), dtype=np.int32), shards.counts)
    names = _unique_names(shards, classes, labels, numbers)
    order = np.arange(len(index))
    if not np.all((labels[:-1] < labels[1:]) | ((labels[:-1] == labels[1:]) & (names[:-1] < names[1:]))):
        order = np.lexsort((names, labels))
    parts: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
    for image, offset, length in index.parts.tolist():
        key = (int(numbers[image]), int(index.offsets[image]))
        parts[key] = (*parts.get(key, ()), (offset, length))
    table = ShardTable(shards.paths, names, numbers, index.offsets, index.lengths, parts).select(order)
    return Manifest(
        root=shards.root / shards.split,
        classes=classes,
        labels=labels[order],
        fingerprint=files_fingerprint(table.names, table.lengths),
        images=table,
        sizes=table.lengths,
        mtimes=shards.mtimes[table.numbers],
    )


def _unique_names(
    shards: Shards, classes: tuple[str, ...], labels: NDArray[np.int64], numbers: NDArray[np.int32]
) -> NDArray[np.bytes_]:
    """`CLASS/NAME` of each image: (num_images,)."""
    keys = shards.index.keys
    folders = np.array([os.fsencode(name.replace("/", "_") + "/") for name in classes])[labels]
    files = np.array([key.rpartition(b"/")[2] for key in keys.tolist()])
    sources = np.array([os.fsencode(f"{os.path.basename(path)}:") for path in shards.paths])[numbers]
    for candidates in (lambda: files, lambda: keys, lambda: np.strings.add(sources, keys)):
        names = np.strings.add(folders, candidates())
        ordered = np.sort(names)
        if not np.any(ordered[:-1] == ordered[1:]):
            return names
    records = np.array([b"%08d:" % number for number in range(len(keys))])  # the same ids or file names come again
    return np.strings.add(np.strings.add(np.strings.add(folders, sources), records), keys)
