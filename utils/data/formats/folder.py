"""Data in folders: train/CLASS/*.jpg and val/CLASS/*.jpg."""

import collections
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from utils.data.manifest import NO_CLASS, NO_SUFFIX, FileEntry, Manifest, _manifest, describe, describe_counts
from utils.errors import UserError

# What both DALI's decoder and Pillow read. GIF and AVIF are not among them: DALI rejects both.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")


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
