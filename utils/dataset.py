"""Manifest of a data set: which files, which labels, which class names, and a fingerprint of all three.

Brisk lists the files itself instead of leaving that to a reader, so that every loader sees the same images in the
same order, and what a reader would skip in silence is an error with a remedy.
"""

import collections
import contextlib
import dataclasses
import hashlib
import os
import random
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from utils.errors import UserError, one_line

# What both DALI's decoder and Pillow read. GIF and AVIF are not among them: DALI rejects both.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")
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
        stand_ins: those of `bad` whose place another file has taken, and which.
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
    stand_ins: Mapping[str, str] = dataclasses.field(default_factory=dict)
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

    def with_stand_ins(self, bad: Mapping[str, str]) -> "Manifest":
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
            stand_ins={self.files[index]: self.files[order[index]] for index in np.flatnonzero(is_bad)},
        )


def scan(data_dir: Path, split: str, skip_bad: bool = False) -> Manifest:
    """List the images of `data_dir/split`, one folder a class.

    Empty files and what is no regular file are bad: refused, or left out with `skip_bad`. What a file holds is not
    looked at here. Images that lie beside the class folders and files with other suffixes are counted, hidden ones not.

    Raises:
        UserError: missing or unreadable folder, a link that leads nowhere in place of one, no class, an empty class,
            images nested deeper than one folder, or bad files.
    """
    root = data_dir / split
    try:
        if not data_dir.is_dir():
            raise UserError(f"--data-dir {data_dir}: no such folder; give the one that holds train/ and val/")
        if not root.is_dir():
            raise UserError(f"--data-dir {data_dir}: has no {split}/ folder; it must hold train/ and val/")
        beside = _visible(root)
        classes = sorted(entry.name for entry in beside if is_folder(entry))
        beside = [entry for entry in beside if not is_folder(entry)]
        _refuse_lost(beside)
        loose = sum(is_image(entry.name) for entry in beside)
        if not classes:
            found = f" ({loose} images lie there without one)" if loose else ""
            raise UserError(f"{root}: no class folders{found}; put the images of each class into a folder of its name")
        with ThreadPoolExecutor(16) as pool:  # on a network file system a scan waits, it does not compute
            listings, others = zip(*pool.map(_list_class, [root / name for name in classes]), strict=True)
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); remove it or check its permissions"
        ) from None
    entries = [
        FileEntry(f"{name}/{entry.name}", *entry[1:])
        for name, listing in zip(classes, listings, strict=True)
        for entry in listing
    ]
    bad = {os.path.join(root, entry.name): entry.bad for entry in entries if entry.bad is not None}
    if bad and not skip_bad:
        raise UserError(
            f"{describe(bad)}; delete or replace {'it' if len(bad) == 1 else 'them'}, or leave out all bad files with "
            "--bad-files skip"
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(listing) for listing in listings])
    ignored = sum(others, collections.Counter({NO_CLASS: loose} if loose else {}))
    return _manifest(root.absolute(), tuple(classes), entries, labels, {}, dict(ignored))


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
    parts = [(-count, "file", f" {one_line(kind)}") for count, kind in files[:SUFFIXES]]
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


def scan_splits(data_dir: Path, skip_bad: bool = False) -> tuple[Manifest, Manifest]:
    """Manifests of `train/` and `val/`, whose classes must agree.

    Raises:
        UserError: as `scan`, and for classes that only one of the two has.
    """
    train, val = scan(data_dir, "train", skip_bad), scan(data_dir, "val", skip_bad)
    for here, there, split, other in ((train, val, "val", "train"), (val, train, "train", "val")):
        only = sorted(set(here.classes) - set(there.classes))
        if only:
            names = ", ".join(map(repr, only[:3])) + (", ..." if len(only) > 3 else "")
            raise UserError(
                f"--data-dir {data_dir}: {len(only)} classes of {other}/ are missing in {split}/ ({names}); "
                "both must hold the same class folders, or every label would be shifted"
            )
    return train, val


def decoded_bytes(manifest: Manifest, sample: int = 256) -> int:
    """Bytes that all images of `manifest` take as uint8 RGB, estimated from `sample` of them; 0 for synthetic data."""
    if manifest.root is None:
        return 0
    chosen = random.Random(0).sample(range(len(manifest)), min(sample, len(manifest)))
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a size is read, nothing is decoded
        for index in chosen:
            # Whoever decodes it will say what is wrong with a file.
            with (
                contextlib.suppress(OSError, ValueError, Image.DecompressionBombError),
                Image.open(manifest.path(index)) as image,
            ):
                sizes.append(3 * image.width * image.height)
    return round(len(manifest) * sum(sizes) / len(sizes)) if sizes else 0


def synthetic(num_images: int, num_classes: int) -> Manifest:
    """A manifest of images that exist on no disk, for measuring the training step alone."""
    labels = np.arange(num_images, dtype=np.int64) % num_classes
    classes = tuple(str(index) for index in range(num_classes))
    return Manifest(None, classes, (), labels, f"synthetic-{num_images}-{num_classes}")


def _list_class(folder: Path) -> tuple[list[FileEntry], collections.Counter[str]]:
    """The images of a class, sorted, and how many other files there are of which suffix."""
    listing = []
    others: collections.Counter[str] = collections.Counter()
    for entry in _visible(folder):
        if is_folder(entry):
            _refuse_nested(Path(entry.path))
        elif is_image(entry.name):
            listing.append(stat_file(entry.path))
        else:
            others[suffix_of(entry.name)] += 1
    if not listing:
        found = f" ({describe_counts(others)})" if others else ""
        raise UserError(
            f"{folder}: a class without images{found}; remove the folder or add files ending in "
            f"{' '.join(IMAGE_SUFFIXES)}"
        )
    return sorted(listing, key=lambda entry: entry.name), others


def _refuse_lost(entries: Iterable[os.DirEntry[str]]) -> None:
    """Raise UserError for a link that leads nowhere: it may have been a class, and every label after it would shift."""
    for entry in entries:
        if entry.is_symlink() and not is_image(entry.name):
            try:
                entry.stat()
            except OSError as error:
                raise UserError(
                    f"{entry.path}: a link that leads to no class folder ({error.strerror}); restore its target or "
                    "remove the link"
                ) from None


def stat_file(path: str) -> FileEntry:
    """Look at a file from outside. Nothing is opened: a pipe would wait for its writer for ever."""
    name = os.path.basename(path)
    try:
        found = os.stat(path)
    except OSError as error:
        return FileEntry(name, 0, 0, f"cannot be read ({error.strerror})")
    if not stat.S_ISREG(found.st_mode):
        return FileEntry(name, 0, found.st_mtime_ns, "not a regular file")
    return FileEntry(name, found.st_size, found.st_mtime_ns, None if found.st_size else "an empty file")


def _refuse_nested(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        if any(map(is_image, names)):
            raise UserError(
                f"{parent}: images nested deeper than train/CLASS/IMAGE; move them up, "
                "the folder below train/ or val/ is the class"
            )


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or leads to one; a link that leads nowhere is none."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_image(name: str) -> bool:
    """Whether a file of that name is taken for an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def suffix_of(name: str) -> str:
    """Key of a file in `Manifest.ignored`: its suffix in lower case with the dot, or `NO_SUFFIX`."""
    return os.path.splitext(name)[1].lower() or NO_SUFFIX
