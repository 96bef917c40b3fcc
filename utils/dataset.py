"""Manifest of a data set: which files, which labels, which class names, and a fingerprint of all three.

Brisk lists the files itself instead of leaving that to a reader, so that every loader sees the same images in the
same order, and what a reader would skip in silence is an error with a remedy.
"""

import contextlib
import dataclasses
import hashlib
import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from utils.errors import UserError

# What both DALI's decoder and Pillow read. GIF and AVIF are not among them: DALI rejects both.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The images of one split.

    Attributes:
        root: folder of the split, `data_dir/train` or `data_dir/val`; None for synthetic data.
        classes: class names in label order (sorted by code point, as torchvision's ImageFolder does).
        files: paths relative to `root`, sorted within each class; empty for synthetic data.
        labels: int64 (num_images,), in [0, len(classes)).
        fingerprint: hex digest of class names, file names, file sizes and labels.
    """

    root: Path | None
    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: NDArray[np.int64]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Path of image `index`, fit for `open()`."""
        assert self.root is not None, "synthetic data has no files"
        return os.path.join(self.root, self.files[index])


def scan(data_dir: Path, split: str) -> Manifest:
    """List the images of `data_dir/split`, one folder a class.

    Raises:
        UserError: missing or unreadable folder, no class, an empty class, or images nested deeper than one folder.
    """
    root = data_dir / split
    try:
        if not data_dir.is_dir():
            raise UserError(f"--data-dir {data_dir}: no such folder; give the one that holds train/ and val/")
        if not root.is_dir():
            raise UserError(f"--data-dir {data_dir}: has no {split}/ folder; it must hold train/ and val/")
        classes = sorted(entry.name for entry in _visible(root) if entry.is_dir())
        if not classes:
            loose = sum(_is_image(entry) for entry in _visible(root))
            found = f" ({loose} images lie there without one)" if loose else ""
            raise UserError(f"{root}: no class folders{found}; put the images of each class into a folder of its name")
        with ThreadPoolExecutor(16) as pool:  # on a network file system a scan waits, it does not compute
            listings = list(pool.map(_list_class, [root / name for name in classes]))
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); remove it or check its permissions"
        ) from None
    files = [f"{name}/{file}" for name, listing in zip(classes, listings, strict=True) for file, _ in listing]
    sizes = [size for listing in listings for _, size in listing]
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(listing) for listing in listings])
    digest = hashlib.sha256()
    for name, size in zip(files, sizes, strict=True):
        digest.update(os.fsencode(name) + b"\0%d\0" % size)
    return Manifest(root.absolute(), tuple(classes), tuple(files), labels, digest.hexdigest()[:32])


def scan_splits(data_dir: Path) -> tuple[Manifest, Manifest]:
    """Manifests of `train/` and `val/`, whose classes must agree.

    Raises:
        UserError: as `scan`, and for classes that only one of the two has.
    """
    train, val = scan(data_dir, "train"), scan(data_dir, "val")
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


def _list_class(folder: Path) -> list[tuple[str, int]]:
    listing = []
    for entry in _visible(folder):
        if entry.is_dir():
            _refuse_nested(Path(entry.path))
        elif _is_image(entry):
            size = entry.stat().st_size
            if size == 0:
                raise UserError(f"{entry.path}: an empty file, which no decoder reads; delete or replace it")
            listing.append((entry.name, size))
    if not listing:
        raise UserError(
            f"{folder}: a class without images; remove the folder or add files ending in {' '.join(IMAGE_SUFFIXES)}"
        )
    return sorted(listing)


def _refuse_nested(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        if any(name.lower().endswith(IMAGE_SUFFIXES) for name in names):
            raise UserError(
                f"{parent}: images nested deeper than train/CLASS/IMAGE; move them up, "
                "the folder below train/ or val/ is the class"
            )


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(IMAGE_SUFFIXES)
