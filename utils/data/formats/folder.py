"""Data in folders, train/CLASS/*.jpg and val/CLASS/*.jpg: lists them and makes the manifest."""

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from utils.data.formats.flat import first_names, label_flat
from utils.data.formats.naming import is_hidden
from utils.data.formats.refused import refuse_unreadable
from utils.data.formats.split_folders import folders_in, is_folder
from utils.data.images.codecs import IMAGE_SUFFIXES, is_image
from utils.data.images.manifest import (
    NO_CLASS,
    NO_SUFFIX,
    FileEntry,
    Listing,
    Manifest,
    bad_files_error,
    describe_counts,
    files_fingerprint,
    stat_file,
)
from utils.data.images.records import Record
from utils.errors import Stopped, UserError
from utils.options.validation import require_folder
from utils.text import count, describe_alike

SCAN_THREADS = 16  # on a network file system a scan waits, it does not compute


@dataclasses.dataclass(frozen=True)
class FileTable:
    """`FilesTable` of images below the folder `root`: in class folders, or all in it, if it is flat."""

    root: Path
    names: NDArray[np.bytes_]
    is_flat: bool = False

    def record(self, index: int) -> Record:
        """The file as messages name it and as it is opened: the same path."""
        return file_record(os.fsdecode(self.locations(np.array([index]))[0]))

    def locations(self, indices: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """Paths of a batch: (len(indices),)."""
        names = self.names[indices]
        if self.is_flat:
            names = np.array([name.partition(b"/")[2] for name in names.tolist()])
        return np.char.add(os.fsencode(os.path.join(self.root, "")), names)

    def select(self, indices: NDArray[np.int64]) -> "FileTable":
        """The table of these files, in this order."""
        return dataclasses.replace(self, names=self.names[indices])


def file_record(path: str) -> Record:
    """An image that is the file `path`."""
    return Record(name=path, location=path)


def file_listing(root: Path, entries: Sequence[FileEntry]) -> Listing:
    """Files below `root`, in folders of any kind."""
    return Listing(root, entries, lambda index: file_record(os.path.join(root, entries[index].name)))


def list_images(root: Path, stopped_by: Callable[[], str] = str) -> tuple[list[FileEntry], Mapping[str, int]]:
    """All files below `root` that are named like images, sorted; hidden files are excluded, as in training.

    Links to folders are followed, but no folder is listed twice.

    Returns:
        The files, and how many others there are of which suffix.

    Raises:
        UserError: a folder cannot be read.
        Stopped: by `stopped_by`.
    """
    entries: list[FileEntry] = []
    others: collections.Counter[str] = collections.Counter()
    folders, seen = [""], set()
    while folders:
        if reason := stopped_by():
            raise Stopped(reason)
        folder = folders.pop()
        path = os.path.join(root, folder)
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(path) as found:
                for entry in found:
                    name = os.path.join(folder, entry.name)
                    if is_hidden(entry.name):
                        continue
                    if is_folder(entry):
                        folders.append(name)
                    elif is_image(entry.name):
                        entries.append(stat_file(entry.path)._replace(name=name))
                    else:
                        others[suffix_of(entry.name)] += 1
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from None
    return sorted(entries), others


def scan(data_dir: Path, split: str, skip_bad: bool = False, train: str = "train") -> Manifest:
    """List the images of `data_dir/split`, one folder a class.

    `train` is the folder of the training images, whose classes a flat `split` has.

    Empty files and what is no regular file are bad: refused, or excluded with `skip_bad`. No file is opened. Images
    beside the class folders and files with other suffixes are counted, hidden ones are not.

    Raises:
        UserError: missing or unreadable folder, a broken link instead of one, no class, an empty class,
            images nested deeper than one folder, or bad files.
    """
    root = data_dir / split
    try:
        classes, listings, ignored = _list_flat(data_dir, split, train) or _list_split(data_dir, split, train)
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); remove it or check its permissions"
        ) from None
    entries = [
        FileEntry(f"{name}/{entry.name}", *entry[1:])
        for name, listing in zip(classes, listings, strict=True)
        for entry in listing
    ]
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(listing) for listing in listings])
    del listings  # memory, of millions of files
    bad = {entry.name: entry.bad for entry in entries if entry.bad is not None}
    names = np.array([os.fsencode(entry.name) for entry in entries])
    images = FileTable(root.absolute(), names, not os.path.isdir(root / classes[0]))
    if bad and not skip_bad:
        paths = {name: os.path.join(root, os.path.basename(name) if images.is_flat else name) for name in bad}
        raise bad_files_error({paths[name]: reason for name, reason in bad.items()}, "delete or replace {}")
    sizes = np.array([entry.size for entry in entries], dtype=np.int64)
    manifest = Manifest(
        root=root.absolute(),
        classes=tuple(classes),
        labels=labels,
        fingerprint=files_fingerprint(names, sizes),
        images=images,
        sizes=sizes,
        mtimes=np.array([entry.mtime for entry in entries], dtype=np.int64),
        ignored=ignored,
        flat_in=f"{root.name}/" if images.is_flat else None,
        source="flat folder" if images.is_flat else "class folders",
    ).without(bad)
    return manifest.with_all_classes() if split == train else manifest


def scan_splits(
    data_dir: Path, skip_bad: bool = False, val_split: str = "val", train_split: str = "train"
) -> tuple[Manifest, Manifest]:
    """Manifests of the folders `train_split` and `val_split`, with the classes of the first.

    Raises:
        UserError: as `scan`, and for classes that only `val_split` has.
    """
    train = scan(data_dir, train_split, skip_bad, train_split)
    if val_split == train_split:
        return train, dataclasses.replace(train, bad={}, ignored={})
    val = scan(data_dir, val_split, skip_bad, train_split)
    if only := sorted(set(val.classes) - set(train.classes)):
        names = first_names([repr(name) for name in only])
        missing = (
            f"{count(len(only), 'class')} of {val_split}/ {'is' if len(only) == 1 else 'are'} missing in {train_split}/"
        )
        alike = describe_alike(only, train.classes)
        remedy = (
            f": {alike}, in {val_split}/ and {train_split}/; rename one as the other"
            if alike
            else ("; add training images of it, or move the folder away")
        )
        raise UserError(f"--data-dir {data_dir}: {missing} ({names}){remedy}")
    return train, val.numbered_as(train.classes)


def _list_flat(
    data_dir: Path, split: str, train: str
) -> tuple[list[str], list[list[FileEntry]], dict[str, int]] | None:
    """As `_list_split`, of validation images in one folder whose labels are in a file; None if it is none."""
    root = data_dir / split
    if split == train or not root.is_dir() or any(map(is_folder, _visible(root))):
        return None
    classes = folders_in(data_dir / train)
    labels = label_flat(root, classes)
    if labels is None:
        return None
    listings: dict[str, list[FileEntry]] = {name: [] for name in classes}
    for name, label in labels:
        listings[label].append(stat_file(os.path.join(root, name)))
    return [name for name in classes if listings[name]], [listing for listing in listings.values() if listing], {}


def _list_split(data_dir: Path, split: str, train: str) -> tuple[list[str], list[list[FileEntry]], dict[str, int]]:
    """Class names, the images of each class, and `Manifest.ignored`."""
    root = data_dir / split
    require_folder(data_dir)
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; give --data-dir one that holds it")
    visible = _visible(root)
    classes = sorted(entry.name for entry in visible if is_folder(entry))
    beside = [entry for entry in visible if not is_folder(entry)]
    _refuse_broken_links(beside)
    loose = sum(is_image(entry.name) for entry in beside)
    if not classes:
        refuse_unreadable(data_dir)
        found = f" ({loose} image{'s lie' if loose > 1 else ' lies'} there without one)" if loose else ""
        remedy = f", or their classes into {split}.csv" if loose and split != train else ""
        raise UserError(
            f"{root}: no class folders{found}; put the images of each class into a folder of its name{remedy}"
        )
    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        listings, others = zip(*pool.map(_list_class, [root / name for name in classes]), strict=True)
    ignored = sum(others, collections.Counter({NO_CLASS: loose} if loose else {}))
    return classes, list(listings), dict(ignored)


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


def _refuse_broken_links(entries: Iterable[os.DirEntry[str]]) -> None:
    """Raise UserError for a broken link: it may have been a class, and every label after it would shift."""
    for entry in entries:
        if entry.is_symlink() and not is_image(entry.name):
            try:
                entry.stat()
            except OSError as error:
                raise UserError(
                    f"{entry.path}: a link that leads to no class folder ({error.strerror}); restore its target or "
                    "remove the link"
                ) from None


def _refuse_nested(folder: Path) -> None:
    split = folder.parent.parent.name
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        if any(is_image(name) and not is_hidden(name) for name in names):
            raise UserError(
                f"{parent}: images nested deeper than {split}/CLASS/IMAGE; the folder below {split}/ "
                "is the class: move them up, or away if they are not of it"
            )


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not is_hidden(entry.name)]


def suffix_of(name: str) -> str:
    """Key of a file in `Manifest.ignored`: its suffix in lower case with the dot, or `NO_SUFFIX`."""
    return os.path.splitext(name)[1].lower() or NO_SUFFIX
