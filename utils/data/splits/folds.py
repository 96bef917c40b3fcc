"""`--fold`: the training images in N parts, of which one validates; by a hash of their content, or by their groups."""

import warnings

import numpy as np
from numpy.typing import NDArray

from utils.data.images.manifest import Manifest
from utils.errors import UserError
from utils.options.folds import Fold
from utils.text import count


def check_parts(manifest: Manifest, fold: Fold) -> None:
    """Raise UserError unless there are as many images and groups as parts. Opens no file."""
    what, number = "training image", len(manifest)
    if manifest.groups is not None:
        what, number = "group", len(np.unique(manifest.groups))
    if number < fold.parts:
        raise UserError(f"{_flag(fold)}: {count(number, what)} cannot fill {count(fold.parts, 'part')}; give fewer")


def choose_fold_of_contents(manifest: Manifest, digests: NDArray[np.int64], fold: Fold) -> NDArray[np.bool_]:
    """Which images the fold holds out: (num_images,).

    Args:
        digests: of the contents, int64 (num_images,).

    Raises:
        UserError: a part is empty, or has all images of a class.
    """
    return _choose(manifest, parts_of_contents(digests, manifest.strata(), fold.parts), fold)


def parts_of_contents(digests: NDArray[np.int64], strata: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """The part of each image, int64 (num_images,), in [0, parts).

    The contents go to the parts in turn, sorted by class, then by digest. So the shares of all classes are even, and
    nothing but the contents and classes counts: no names, no order, no number of processes. Copies are in one part,
    also those in another class; of these the first class counts.

    Args:
        digests: of the contents, int64 (num_images,).
        strata: class of each image, or see `Manifest.strata`: int64 (num_images,).
    """
    contents, of_image = np.unique(digests, return_inverse=True)
    first_class = np.full(len(contents), np.iinfo(np.int64).max)
    np.minimum.at(first_class, of_image, strata)
    part = np.empty(len(contents), dtype=np.int64)
    part[np.lexsort((contents, first_class))] = np.arange(len(contents)) % parts
    return part[of_image]


def choose_fold_of_groups(manifest: Manifest, fold: Fold) -> NDArray[np.bool_]:
    """Which images the fold holds out: whole groups, (num_images,).

    Raises:
        UserError: a part is empty, or has all images of a class.
    """
    from sklearn.model_selection import StratifiedGroupKFold  # slow

    strata, parts = manifest.strata(), np.empty(len(manifest), dtype=np.int64)
    if np.bincount(strata).max() < fold.parts:
        raise UserError(f"{_flag(fold)}: no class has {count(fold.parts, 'image')}; give fewer parts")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class in y has only")
        for part, (_, held_out) in enumerate(StratifiedGroupKFold(fold.parts).split(strata, strata, manifest.groups)):
            parts[held_out] = part
    return _choose(manifest, parts, fold)


def _choose(manifest: Manifest, parts: NDArray[np.int64], fold: Fold) -> NDArray[np.bool_]:
    """The images of a fold's part. What is wrong with any part is refused for all folds, so that the first shows it."""
    total = manifest.class_counts()
    for part in range(fold.parts):
        held_out = manifest.class_counts((parts == part).astype(np.float64))
        if not held_out.any() and not (parts == part).any():
            raise UserError(f"{_flag(fold)}: part {part + 1:,} would be empty; give fewer parts")
        for label in np.flatnonzero((total > 0) & (held_out == total)).tolist():
            images = count(int(total[label]), "image")
            raise UserError(
                f"{_flag(fold)}: part {part + 1:,} would have all of {manifest.classes[label]} ({images}, copies or of "
                "one group); add other images of it, or remove the class"
            )
    chosen: NDArray[np.bool_] = parts == fold.number - 1
    return chosen


def _flag(fold: Fold) -> str:
    return f"--fold {fold.number}/{fold.parts}"
