"""Manifest of a split: its images, their labels and class names, and a fingerprint of them."""

import dataclasses
import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.data.images.records import ImageTable, Record
from utils.errors import UserError, escape_control_chars, some
from utils.figures import Task
from utils.text import count

OR_SKIP = ", or exclude all bad files with --bad-files skip"  # a remedy that only train.py has
SUFFIXES = 5  # of other files that one line names
NO_CLASS, NO_ROW = "without a class folder", "without a row in the label file"  # images
NO_SUFFIX = "without a suffix"
SEVERAL = "|"  # between the classes of an image


class FileEntry(NamedTuple):
    """One file of a listing.

    Attributes:
        name: relative to the folder that was listed.
        size: bytes.
        mtime: of the last change, nanoseconds since 1970.
        bad: why it cannot be read, as far as a listing shows that; None for the others.
    """

    name: str
    size: int
    mtime: int
    bad: str | None = None


def stat_file(path: str) -> FileEntry:
    """Size, time and kind of a file, under its base name. It is not opened: opening a pipe waits for its writer."""
    name = os.path.basename(path)
    try:
        found = os.stat(path)
    except OSError as error:
        return FileEntry(name, 0, 0, f"cannot be read ({error.strerror})")
    if not stat.S_ISREG(found.st_mode):
        return FileEntry(name, 0, found.st_mtime_ns, "not a regular file")
    return FileEntry(name, found.st_size, found.st_mtime_ns, None if found.st_size else "an empty file")


class Listing(NamedTuple):
    """Files of any number of splits, for `utils.data.reading.verification`.

    Attributes:
        root: folder that holds them, absolute.
        entries: with names relative to `root`.
        record: index of an entry that is not bad -> its image.
    """

    root: Path
    entries: Sequence[FileEntry]
    record: Callable[[int], Record]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The images of one split. What it knows of each is in arrays, not in an object per image.

    Attributes:
        root: folder of the split, such as `data_dir/train`; None for synthetic data.
        classes: class names in label order (sorted by code point, as torchvision's ImageFolder does).
        labels: int64 (num_images,), in [0, len(classes)), or rows of `label_sets`.
        fingerprint: hex digest of class names, file names, file sizes, labels and weights.
        images: names and locations, sorted by name within each class; None for synthetic data.
        sizes: int64 (num_images,), bytes; as `mtimes`, of no images for synthetic data.
        mtimes: int64 (num_images,), of the last change, nanoseconds since 1970.
        label_sets: the classes that a label stands for, bool (num_sets, num_classes): an image has any number of
            classes. None: label n is class n.
        place_labels: where other images replace bad ones, the labels that count in `class_counts` and `strata`, so that
            the order of a run stays: int64 (num_images,); None for `labels`.
        weights: how often images come, 0 or more: float64 (num_images,); None for alike.
        groups: names of what lies wholly in one split, such as a patient: str (num_images,); None for none.
        bad: files that are excluded, relative to `root`, and why.
        replacements: those of `bad` that another file replaces, and which.
        ignored: what is not an image of a class, by suffix or as `NO_CLASS`, `NO_ROW` or `NO_SUFFIX`, and how many.
        held_out: whether these are the images of train/ that `--val-fraction` or `--fold` holds out.
        flat_in: what stands before the names of files that lie in no class folders, such as `images/`, relative to the
            data set; None for class folders and shards.
        source: format of the data, for messages.
    """

    root: Path | None
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    fingerprint: str
    images: ImageTable | None = None
    sizes: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    mtimes: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    label_sets: NDArray[np.bool_] | None = None
    place_labels: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None
    groups: NDArray[np.str_] | None = None
    bad: Mapping[str, str] = dataclasses.field(default_factory=dict)
    replacements: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held_out: bool = False
    flat_in: str | None = None
    source: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def task(self) -> Task:
        """Whether an image has one class, or any number."""
        return "multiclass" if self.label_sets is None else "multilabel"

    @property
    def folder(self) -> str:
        """Name of the split's folder; "" for synthetic data."""
        return "" if self.root is None else self.root.name

    @property
    def title(self) -> str:
        """The split in messages, such as `val/`; "" for synthetic data."""
        folder = f"{self.folder}/" if self.folder else ""
        return f"the held-out part of {folder}" if self.held_out else folder

    @property
    def kind(self) -> str:
        """What its files are in messages, such as `val` files; "" for synthetic data."""
        return "held-out" if self.held_out else self.folder

    def table(self) -> ImageTable:
        """Names and locations of the images, which synthetic data does not have."""
        assert self.images is not None, "synthetic data has no files"
        return self.images

    def record(self, index: int) -> Record:
        """Image `index`, for `utils.data.reading.reader`."""
        return self.table().record(index)

    def name(self, index: int) -> str:
        """Path of image `index` relative to `root`."""
        return os.fsdecode(self.table().names[index])

    def names(self) -> list[str]:
        """Paths of all images relative to `root`; synthetic data has none."""
        return [] if self.images is None else [os.fsdecode(name) for name in self.images.names.tolist()]

    def path(self, name: str) -> str:
        """A file's path relative to the data set, from that relative to `root`; of an image in a shard the latter."""
        return f"{self.folder}/{name}" if self.flat_in is None else self.flat_in + name.partition("/")[2]

    def class_counts(self, weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Images of each class, or the sums of their `weights` (num_images,): float64 (num_classes,)."""
        size = len(self.classes) if self.label_sets is None else len(self.label_sets)
        labels = self.labels if self.place_labels is None else self.place_labels
        counts = np.bincount(labels, weights, size).astype(np.float64)
        return counts if self.label_sets is None else counts @ self.label_sets.astype(np.float64)

    def strata(self) -> NDArray[np.int64]:
        """What a division of the images keeps in proportion: int64 (num_images,), in [0, len(classes)].

        The class of each image. Of several the one with the fewest images, as a common one comes along with others; of
        none `len(classes)`.
        """
        if self.label_sets is None:
            return self.labels
        ranks = np.argsort(np.argsort(self.class_counts(), kind="stable"))
        of_class = np.where(self.label_sets, ranks, len(ranks))
        rarest = np.where(self.label_sets.any(axis=1), of_class.argmin(axis=1), len(ranks))
        return rarest.astype(np.int64)[self.labels if self.place_labels is None else self.place_labels]

    def with_label_sets(self) -> "Manifest":
        """The same images, each of which has any number of classes."""
        if self.label_sets is not None:
            return self
        return dataclasses.replace(self, label_sets=np.eye(len(self.classes), dtype=np.bool_))

    def place(self, label: int) -> str:
        """Where the images of a class are, for messages: its folder, or its name in the data set."""
        name = self.classes[label]
        is_folder = self.source == "class folders"
        return f"{self.root}/{name}" if is_folder else f"{self.root and self.root.parent}: {name} of {self.folder}"

    def select(self, indices: NDArray[np.int64]) -> "Manifest":
        """These images, in this order, with repetitions if there are any; the fingerprint stays."""
        return dataclasses.replace(
            self,
            images=self.table().select(indices),
            labels=self.labels[indices],
            sizes=self.sizes[indices],
            mtimes=self.mtimes[indices],
            weights=None if self.weights is None else self.weights[indices],
            groups=None if self.groups is None else self.groups[indices],
        )

    def part(self, indices: NDArray[np.int64]) -> "Manifest":
        """These images, in ascending order, as a split of its own."""
        part = self.select(indices)
        return dataclasses.replace(part, fingerprint=files_fingerprint(part.table().names, part.sizes, part.weights))

    def numbered_as(self, classes: tuple[str, ...]) -> "Manifest":
        """The same images with the labels of `classes`, which has all of the manifest's.

        Raises:
            KeyError: it lacks one.
        """
        numbers = {name: number for number, name in enumerate(classes)}
        own = np.array([numbers[name] for name in self.classes], dtype=np.int64)
        if self.label_sets is not None:
            sets = np.zeros((len(self.label_sets), len(classes)), dtype=np.bool_)
            sets[:, own] = self.label_sets
            return dataclasses.replace(self, classes=classes, label_sets=sets)
        labels = own[self.labels]
        renumbered = dataclasses.replace(self, classes=classes, labels=labels)
        order = np.argsort(labels, kind="stable")
        return renumbered if np.array_equal(order, np.arange(len(order))) else renumbered.select(order)

    def without(self, bad: Mapping[str, str]) -> "Manifest":
        """The manifest that a listing would give if the files `bad` (relative to `root`, with a reason) did not exist.

        A class may have no image left; see `with_all_classes`.
        """
        is_bad = self._is_named(bad)
        if not is_bad.any():
            return self
        good = self.part(np.flatnonzero(~is_bad))
        excluded = [self.name(index) for index in np.flatnonzero(is_bad).tolist()]
        return dataclasses.replace(good, bad={**self.bad, **{name: bad[name] for name in excluded}})

    def with_all_classes(self) -> "Manifest":
        """The manifest itself.

        Raises:
            UserError: the bad files leave a class without an image.
        """
        empty = np.flatnonzero(self.class_counts() == 0).tolist()
        if empty and self.bad:
            name = self.classes[empty[0]]
            of_files = (path.partition("/")[0] for path in self.bad)
            files = sum(name == each if self.label_sets is None else name in each.split(SEVERAL) for each in of_files)
            are, them = ("is", "it") if files == 1 else ("are", "them")
            raise UserError(
                f"{self.place(empty[0])}: a class without a readable image, its {count(files, 'file')} {are} bad; "
                f"replace {them} or remove the class"
            )
        return self

    def with_replacements(self, bad: Mapping[str, str]) -> "Manifest":
        """The same number of images with the same labels and fingerprint, none of them among the files `bad`.

        The next good image of its class replaces a bad one, and is in the result twice; where images have any number of
        classes, the next with the same ones, or else any. So a run that has begun with these files keeps its order of
        images.

        Raises:
            UserError: a class would have no image left.
        """
        order = np.arange(len(self))
        is_bad = self._is_named(bad)
        for index in np.flatnonzero(is_bad).tolist():
            start, end = np.searchsorted(self.labels, [self.labels[index], self.labels[index] + 1])
            good = start + np.flatnonzero(~is_bad[start:end])
            if not len(good) and self.label_sets is not None:
                good = np.flatnonzero(~is_bad)
            if not len(good):
                name = self.name(index)
                place = self.place(self.labels[index]) if self.label_sets is None else str(self.root)
                raise UserError(f"{place}: no image is left that this run began with; repair one ({name}: {bad[name]})")
            order[index] = good[np.searchsorted(good, index) % len(good)]
        return dataclasses.replace(
            self.select(order),
            place_labels=None if self.label_sets is None else self.labels,
            weights=self.weights,  # those of the places, which decide the order
            bad={**self.bad, **bad},
            replacements={self.name(index): self.name(int(order[index])) for index in np.flatnonzero(is_bad).tolist()},
        )

    def _is_named(self, files: Mapping[str, str]) -> NDArray[np.bool_]:
        """Which images are among `files`: (num_images,)."""
        encoded = set(map(os.fsencode, files))
        return np.array([name in encoded for name in self.table().names.tolist()], dtype=bool)


def files_fingerprint(
    names: NDArray[np.bytes_], sizes: NDArray[np.int64], weights: NDArray[np.float64] | None = None
) -> str:
    """Hex digest of the names, in which the classes are, of the sizes of a split's files, and of their weights."""
    digest = hashlib.sha256()
    for name, size in zip(names.tolist(), sizes.tolist(), strict=True):
        digest.update(name + b"\0%d\0" % size)
    if weights is not None:
        digest.update(weights.tobytes())
    return digest.hexdigest()[:32]


def describe(bad: Mapping[str, str]) -> str:
    """Path -> reason as a clause, which names the first `SHOWN` and counts the rest."""
    return some([f"{path}: {reason}" for path, reason in bad.items()])


def bad_files_error(bad: Mapping[str, str], remedy: str) -> UserError:
    """An error for bad files, path -> reason; `{}` in `remedy` stands for it or them."""
    return UserError(f"{describe(bad)}; {remedy.format('it' if len(bad) == 1 else 'them')}{OR_SKIP}")


def describe_counts(ignored: Mapping[str, int]) -> str:
    """`Manifest.ignored` as a clause, which names the `SUFFIXES` most frequent and counts the rest; "" for nothing.

    Such as "7 files .jfif, 1 image without a class folder".
    """
    images = (NO_CLASS, NO_ROW)
    files = sorted((-number, kind) for kind, number in ignored.items() if kind not in images)
    parts = [(-number, "file", f" {escape_control_chars(kind)}") for number, kind in files[:SUFFIXES]]
    parts.append((-sum(number for number, _ in files[SUFFIXES:]), "more file", ""))
    parts += [(ignored.get(kind, 0), "image", f" {kind}") for kind in images]
    return ", ".join(f"{count(number, noun)}{kind}" for number, noun, kind in parts if number)


def synthetic(num_images: int, num_classes: int) -> Manifest:
    """A manifest of images that exist on no disk, for measuring the training step alone."""
    labels = np.arange(num_images, dtype=np.int64) % num_classes
    classes = tuple(str(index) for index in range(num_classes))
    return Manifest(None, classes, labels, f"synthetic-{num_images}-{num_classes}", source="synthetic images")
