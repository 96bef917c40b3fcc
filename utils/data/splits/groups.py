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
    num_classes = len(manifest.classes)
    keys, counts = np.unique(of_image * num_classes + manifest.labels, return_counts=True)
    starts = np.searchsorted(keys, np.arange(len(names) + 1) * num_classes)
    total = np.bincount(manifest.labels, minlength=num_classes)
    members = [(keys[a:b] % num_classes, counts[a:b]) for a, b in itertools.pairwise(starts)]
    held, chosen = np.zeros_like(total), np.zeros(len(names), dtype=bool)
    order = sorted(range(len(names)), key=lambda group: hashlib.sha256(str(names[group]).encode()).digest())

    def move(group: int, if_nearer: bool) -> bool:
        classes, images = members[group]
        after = held[classes] + (-images if chosen[group] else images)
        before, then = (np.sum((each / total[classes] - fraction) ** 2) for each in (held[classes], after))
        if np.any(after == total[classes]) or (if_nearer and then >= before):
            return False
        held[classes], chosen[group] = after, not chosen[group]
        return True

    for _ in range(_ROUNDS):
        if not sum(move(group, if_nearer=True) for group in order):
            break
    for group in sorted(order, key=lambda group: int(members[group][1].sum())):  # the smallest that a class has
        if not chosen[group] and np.any(held[members[group][0]] == 0):
            move(group, if_nearer=False)
    if not chosen.any():
        raise UserError(
            f"--val-fraction {fraction:g}: of {count(len(names), 'group')} none can be held out, as each has the last "
            "images of a class; add groups, or give another --val-group"
        )
    held_out: NDArray[np.bool_] = chosen[of_image]
    return held_out


def shared_groups(train: Manifest, val: Manifest) -> list[str]:
    """Groups of val that train has, too."""
    if train.groups is None or val.groups is None:
        return []
    return sorted(set(val.groups.tolist()) & set(train.groups.tolist()))
