"""Groups of images, such as those of one patient or camera, that lie wholly in train or in val: `--val-group`."""

import dataclasses
import hashlib
import itertools
import re

import numpy as np
from numpy.typing import NDArray

from utils.data.images.manifest import Manifest
from utils.errors import UserError
from utils.text import count

_ROUNDS = 20  # through all groups; few change sides after the third


def find_groups(manifest: Manifest, pattern: str | None) -> Manifest:
    """The manifest with the groups that a regular expression finds in the names, CLASS/NAME, unless it has groups.

    The group is what the expression's own groups match, or else all that it matches.

    Raises:
        UserError: it is no regular expression, or there is none in a name.
    """
    if pattern is None or manifest.groups is not None or manifest.images is None:
        return manifest
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"--val-group {pattern}: no column of a label file, and no regular expression ({error}); correct it"
        ) from None
    names = manifest.names()
    found = [expression.search(name) for name in names]
    if None in found:
        raise UserError(
            f"--val-group {pattern}: no column of a label file, and nothing in {names[found.index(None)]} matches it "
            f"({found.count(None):,} of {count(len(names), 'image')} without a group); correct it"
        )
    groups = ["/".join(part or "" for part in match.groups()) or match[0] for match in found if match]
    return dataclasses.replace(manifest, groups=np.array(groups))


def choose_groups(manifest: Manifest, fraction: float) -> NDArray[np.bool_]:
    """Which images are held out, (num_images,): whole groups, and of each class about `fraction` of its images.

    Groups change sides, one after the other in the order of a hash of their names, as long as that brings the shares of
    the classes nearer to `fraction`, by the sum of squares. No class loses its last training image; one that has no
    held-out image gets the smallest group that this allows. The result follows from the groups, not from their order.

    Args:
        manifest: with groups.
        fraction: 0 to 1, both excluded.

    Raises:
        UserError: no group can be held out.
    """
    assert manifest.groups is not None, "checked"
    names, of_image = np.unique(manifest.groups, return_inverse=True)
    members = _members(of_image, strata := manifest.strata(), len(names))
    of_classes = members if manifest.label_sets is None else _classes_of(of_image, len(names), manifest)
    left = manifest.class_counts().tolist()  # training images
    total = np.bincount(strata, minlength=len(manifest.classes)).tolist()  # lists, as most groups have few classes
    held, chosen = [0] * len(total), [False] * len(names)
    order = sorted(range(len(names)), key=lambda group: hashlib.sha256(str(names[group]).encode()).digest())

    def move(group: int, if_nearer: bool) -> bool:
        sign, nearer = -1 if chosen[group] else 1, 0.0
        for label, images in members[group]:
            after = held[label] + sign * images
            nearer += (held[label] / total[label] - fraction) ** 2 - (after / total[label] - fraction) ** 2
        if any(left[label] == sign * images for label, images in of_classes[group]) or (if_nearer and nearer <= 0):
            return False
        for label, images in members[group]:
            held[label] += sign * images
        for label, images in of_classes[group]:
            left[label] -= sign * images
        chosen[group] = not chosen[group]
        return True

    for _ in range(_ROUNDS):
        if not sum(move(group, if_nearer=True) for group in order):
            break
    for group in sorted(order, key=lambda group: sum(images for _, images in members[group])):  # the smallest first
        if not chosen[group] and any(held[label] == 0 for label, _ in members[group]):
            move(group, if_nearer=False)
    if not any(chosen):
        raise UserError(
            f"--val-fraction {fraction:g}: of {count(len(names), 'group')} none can be held out, as each has the last "
            "images of a class; add groups, or give another --val-group"
        )
    held_out: NDArray[np.bool_] = np.array(chosen)[of_image]
    return held_out


def _classes_of(of_image: NDArray[np.int64], num_groups: int, manifest: Manifest) -> list[list[tuple[int, int]]]:
    """Of each group all classes of its images, which have more than the one by which they are divided."""
    assert manifest.label_sets is not None, "of several labels"
    images, labels = np.nonzero(manifest.label_sets[manifest.labels])
    return _members(of_image[images], labels, num_groups)


def _members(groups: NDArray[np.int64], labels: NDArray[np.int64], num_groups: int) -> list[list[tuple[int, int]]]:
    """Of each group the labels that it has, and how many images of each; of pairs of a group and a label."""
    num_labels = int(labels.max(initial=0)) + 1
    keys, counts = np.unique(groups * num_labels + labels, return_counts=True)
    starts = np.searchsorted(keys, np.arange(num_groups + 1) * num_labels)
    pairs = list(zip((keys % num_labels).tolist(), counts.tolist(), strict=True))
    return [pairs[start:end] for start, end in itertools.pairwise(starts.tolist())]


def shared_groups(train: Manifest, val: Manifest) -> list[str]:
    """Groups of val that train has, too."""
    if train.groups is None or val.groups is None:
        return []
    return sorted(set(val.groups.tolist()) & set(train.groups.tolist()))
