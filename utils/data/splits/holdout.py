"""`--val-fraction` and `--fold`: which images of train/ are held out for validation, by a hash of their content."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from utils.data.images.manifest import FileEntry, Listing, Manifest, bad_files_error
from utils.data.reading.decode_pool import FileReport
from utils.data.reading.verification import content_digests, read_digests
from utils.data.splits.folds import choose_fold_of_contents
from utils.distributed.collective import collective
from utils.distributed.collectives import broadcast, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.folds import Fold
from utils.text import count


@collective
def choose_by_content(
    manifest: Manifest, share: float | Fold, output_dir: Path, workers: int, env: DistEnv
) -> NDArray[np.bool_]:
    """Which images are held out, (num_images,): of a fraction as `choose`, of a fold as `choose_fold_of_contents`.

    Every file is read once, by one rank; the output folder keeps the digests.

    Raises:
        UserError: on all ranks: a class cannot be divided, a file cannot be read, or the output folder not be written.
    """
    assert manifest.root is not None, "synthetic data has no files"
    listed = zip(manifest.names(), manifest.sizes.tolist(), manifest.mtimes.tolist(), strict=True)
    entries = [FileEntry(manifest.path(name), size, mtime) for name, size, mtime in listed]
    known = read_digests(Listing(manifest.root.parent, entries, manifest.record), output_dir, workers, env)
    chosen = None
    with sync_errors(env):
        if known is not None:
            digests = content_digests(manifest, known)
            _refuse_unread(manifest, np.flatnonzero(digests == 0).tolist(), known)
            if isinstance(share, Fold):
                chosen = choose_fold_of_contents(manifest, digests, share)
            else:
                chosen = choose(digests, manifest.strata(), share)
                _keep_all_classes(manifest, digests, chosen)
                check_classes(manifest, f"--val-fraction {share:g}", chosen)
    result = broadcast(chosen, env)
    assert result is not None
    return result


def _refuse_unread(manifest: Manifest, indices: Sequence[int], known: Mapping[str, FileReport]) -> None:
    """Raise UserError if there are images of which no digest is known."""
    names = {manifest.record(index).name: manifest.path(manifest.name(index)) for index in indices}
    reasons = {path: known[name].bad or "changed while it was read" for path, name in names.items()}
    if reasons:
        raise bad_files_error(reasons, "delete or replace {}")


def choose(digests: NDArray[np.int64], strata: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Which images are held out: (num_images,).

    An image is held out if its digest, as a number from 0 to 1, is less than `fraction`. This depends on nothing but
    its content, so that an image stays on its side whatever its name, the order, the machine and the other images are,
    copies are on the same side, and a larger fraction holds out the same images and more. The price is that the share
    of a class varies, by a standard deviation of sqrt(n x fraction x (1 - fraction)) of its n images: 100 images give
    10 +- 3. The exact share of every class would need a rank among its images, and each image that is added or removed
    would move others to the other side.

    Every class has an image on both sides: one with no image below `fraction` gives that with the smallest digest, one
    with no other keeps that with the largest. Only in such a class may an added image change the side of another.

    Args:
        digests: of the contents, int64 (num_images,), uniformly distributed.
        strata: class of each image, or see `Manifest.strata`: int64 (num_images,).
        fraction: 0 to 1, both excluded.
    """
    numbers = digests.view(np.uint64)
    order = np.argsort(strata, kind="stable")
    starts = np.flatnonzero(np.diff(strata[order], prepend=-1))  # of the classes
    has_two = np.diff(starts, append=len(order)) > 1  # otherwise there is nothing to choose
    of_class = numbers[order]
    smallest, largest = (each.reduceat(of_class, starts)[has_two] for each in (np.minimum, np.maximum))
    end = np.uint64(int(fraction * 2**64))
    added, removed = smallest[smallest >= end], largest[largest < end]
    chosen: NDArray[np.bool_] = ((numbers < end) | np.isin(numbers, added)) & ~np.isin(numbers, removed)
    return chosen


def _keep_all_classes(manifest: Manifest, digests: NDArray[np.int64], chosen: NDArray[np.bool_]) -> None:
    """Where images have any number of classes, leave each class its image with the largest digest in train, in place.

    All images of a class may be held out for the sake of others, as they are divided by their rarest class.
    """
    if manifest.label_sets is None:
        return
    numbers = digests.view(np.uint64)
    held_out = manifest.class_counts(chosen.astype(np.float64))
    for label in np.flatnonzero((held_out > 0) & (held_out == manifest.class_counts())).tolist():
        of_class = manifest.label_sets[manifest.labels, label]
        chosen[of_class & (numbers == numbers[of_class].max())] = False


def check_classes(manifest: Manifest, held_out_by: str, chosen: NDArray[np.bool_] | None = None) -> None:
    """Raise UserError unless every class has an image on both sides, or may have, where none is `chosen` yet.

    Groups may leave a class on one side. Where images have any number of classes, one may lack validation images.

    Args:
        held_out_by: the flag, see `TrainConfig`.
    """
    if manifest.groups is not None or manifest.label_sets is not None:
        return
    counts = np.bincount(manifest.labels)
    held_out = np.minimum(counts - 1, 1) if chosen is None else np.bincount(manifest.labels, weights=chosen)
    for label in np.flatnonzero((counts > 0) & ((held_out == 0) | (held_out == counts))).tolist():
        what = "1 image" if counts[label] == 1 else f"{counts[label]:,} images, which are copies of others"
        raise UserError(
            f"{held_out_by}: {manifest.place(label)} has {what}, but training and validation need one "
            "each; add images or remove the class"
        )


def choose_by_name(manifest: Manifest, names: Sequence[str]) -> NDArray[np.bool_] | None:
    """Which images have these names, (num_images,); None if one of the names, or any, is missing."""
    encoded = set(map(os.fsencode, names))
    chosen = np.array([name in encoded for name in manifest.table().names.tolist()], dtype=bool)
    return chosen if encoded and chosen.sum() == len(encoded) else None


def divide(manifest: Manifest, chosen: NDArray[np.bool_]) -> dict[str, Manifest]:
    """The splits train and val of the images of train/, of which the `chosen` are held out.

    What train/ has besides images, its bad files and the weights are those of the split train.
    """
    train = manifest.part(np.flatnonzero(~chosen))
    val = dataclasses.replace(manifest, weights=None).part(np.flatnonzero(chosen))
    return {"train": train, "val": dataclasses.replace(val, bad={}, ignored={}, held_out=True)}


def describe_shares(train: Manifest, val: Manifest) -> str:
    """How many images of each class are held out, such as `3 to 7 of each class`, and how many groups."""
    counts = val.class_counts()
    fewest, most = int(counts.min()), int(counts.max())
    shares = f"{fewest:,} of each class" if fewest == most else f"{fewest:,} to {most:,} of each class"
    if train.groups is None or val.groups is None:
        return shares
    of_class = 100 * counts / (counts + train.class_counts())
    held = len(set(val.groups.tolist()))
    share = f"{100 * len(val) / (len(train) + len(val)):.1f} % of the images, {of_class.min():.1f} to "
    groups = count(held + len(set(train.groups.tolist())), "group")
    return f"{held:,} of {groups}: {share}{of_class.max():.1f} % of a class"
