"""Manifest of a data set: its images, labels, class names, and a fingerprint of all three."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.errors import UserError, escape_control_chars

NAMED = 20  # bad files that one line names; a data set can have thousands
SUFFIXES = 5  # of other files that one line names
NO_CLASS, NO_SUFFIX = "without a class folder", "without a suffix"


class FileEntry(NamedTuple):
    """One file of a listing.

    Attributes:
        name: within its folder or, in a manifest, below the split's.
        size: bytes.
        mtime: of the last change, nanoseconds since 1970.
        bad: why nobody can read it, as far as the listing can tell; None for the others.
    """

    name: str
    size: int
    mtime: int
    bad: str | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The images of one split.

    Attributes:
        root: folder of the split, `data_dir/train` or `data_dir/val`; None for synthetic data.
        classes: class names in label order (sorted by code point, as torchvision's ImageFolder does).
        files: paths relative to `root`, sorted within each class; empty for synthetic data.
        labels: int64 (num_images,), in [0, len(classes)).
        fingerprint: hex digest of class names, file names, file sizes and labels.
        sizes: int64 (num_images,), bytes; as `mtimes`, of no images for synthetic data.
        mtimes: int64 (num_images,), of the last change, nanoseconds since 1970.
        bad: files that were left out, relative to `root`, and why.
        replacements: those of `bad` whose place another file has taken, and which.
        ignored: what was not taken for an image of a class, by suffix or as `NO_CLASS` or `NO_SUFFIX`, and how many.
    """

    root: Path | None
    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: NDArray[np.int64]
    fingerprint: str
    sizes: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    mtimes: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    bad: Mapping[str, str] = dataclasses.field(default_factory=dict)
    replacements: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Path of image `index`, fit for `open()`."""
        assert self.root is not None, "synthetic data has no files"
        return os.path.join(self.root, self.files[index])

    def without(self, bad: Mapping[str, str]) -> "Manifest":
        """The manifest that a listing would give if the files `bad` (relative to `root`, with a reason) did not exist.

        Raises:
            UserError: a class would have no image left.
        """
        assert self.root is not None, "synthetic data has no files"
        entries = [
            FileEntry(name, int(size), int(mtime), bad.get(name))
            for name, size, mtime in zip(self.files, self.sizes, self.mtimes, strict=True)
        ]
        return _manifest(self.root, self.classes, entries, self.labels, self.bad, self.ignored)

    def with_replacements(self, bad: Mapping[str, str]) -> "Manifest":
        """The same number of images with the same labels and fingerprint, none of them among the files `bad`.

        The next good file of the class takes the place of a bad one, and is in two places then: a run that has begun
        with these files keeps its order of images.

        Raises:
            UserError: a class would have no image left.
        """
        order = np.arange(len(self))
        is_bad = np.array([name in bad for name in self.files], dtype=bool)
        for index in np.flatnonzero(is_bad):
            start, end = np.searchsorted(self.labels, [self.labels[index], self.labels[index] + 1])
            good = start + np.flatnonzero(~is_bad[start:end])
            if not len(good):
                raise UserError(
                    f"{self.root}: of {self.classes[self.labels[index]]} no image is left that this run began with; "
                    f"repair one ({self.files[index]}: {bad[self.files[index]]}), or start anew in another --output-dir"
                )
            order[index] = good[np.searchsorted(good, index) % len(good)]
        return dataclasses.replace(
            self,
            files=tuple(self.files[index] for index in order),
            sizes=self.sizes[order],
            mtimes=self.mtimes[order],
            bad={**self.bad, **bad},
            replacements={self.files[index]: self.files[order[index]] for index in np.flatnonzero(is_bad)},
        )


def describe(bad: Mapping[str, str]) -> str:
    """Path -> reason as a clause, which names the first `NAMED` and counts the rest."""
    named = ", ".join(f"{path}: {reason}" for path, reason in list(bad.items())[:NAMED])
    return named + (f", and {len(bad) - NAMED:,} more bad files" if len(bad) > NAMED else "")


def describe_ignored(manifest: Manifest) -> str:
    """What lies in the split's folder and is not trained on, such as "7 files .jfif, 1 image without a class folder".

    Empty if there is nothing.
    """
    return describe_counts(manifest.ignored)


def describe_counts(ignored: Mapping[str, int]) -> str:
    """`Manifest.ignored` as a clause, which names the `SUFFIXES` most frequent and counts the rest."""
    files = sorted((-count, kind) for kind, count in ignored.items() if kind != NO_CLASS)
    parts = [(-count, "file", f" {escape_control_chars(kind)}") for count, kind in files[:SUFFIXES]]
    parts.append((-sum(count for count, _ in files[SUFFIXES:]), "more file", ""))
    parts.append((ignored.get(NO_CLASS, 0), "image", f" {NO_CLASS}"))
    return ", ".join(f"{count:,} {noun}{'s' if count > 1 else ''}{kind}" for count, noun, kind in parts if count)


def _manifest(
    root: Path,
    classes: tuple[str, ...],
    entries: Sequence[FileEntry],
    labels: NDArray[np.int64],
    bad: Mapping[str, str],
    ignored: Mapping[str, int],
) -> Manifest:
    """The manifest of those `entries` that are good; `bad` were left out before."""
    good = np.array([entry.bad is None for entry in entries], dtype=bool)
    kept = [entry for entry in entries if entry.bad is None]
    bare = set(range(len(classes))) - set(np.unique(labels[good]).tolist())
    if bare:
        raise UserError(
            f"{root / classes[min(bare)]}: a class without a readable image, its {(labels == min(bare)).sum():,} files "
            "are bad; replace them or remove the folder"
        )
    return Manifest(
        root,
        classes,
        tuple(entry.name for entry in kept),
        labels[good],
        _fingerprint(kept),
        np.array([entry.size for entry in kept], dtype=np.int64),
        np.array([entry.mtime for entry in kept], dtype=np.int64),
        {**bad, **{entry.name: entry.bad for entry in entries if entry.bad is not None}},
        ignored=ignored,
    )


def _fingerprint(entries: Iterable[FileEntry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(os.fsencode(entry.name) + b"\0%d\0" % entry.size)
    return digest.hexdigest()[:32]


def synthetic(num_images: int, num_classes: int) -> Manifest:
    """A manifest of images that exist on no disk, for measuring the training step alone."""
    labels = np.arange(num_images, dtype=np.int64) % num_classes
    classes = tuple(str(index) for index in range(num_classes))
    return Manifest(None, classes, (), labels, f"synthetic-{num_images}-{num_classes}")
