"""What is odd about the images of a run, as warnings: few classes, few images, images of train/ in val/."""

import random
import time
from collections.abc import Iterator

import numpy as np

from utils.data.images.manifest import Manifest
from utils.data.reading.decode_pool import content_digest
from utils.data.reading.reader import read_image
from utils.data.reading.sample import describe_depth
from utils.data.splits.groups import shared_groups
from utils.data.splits.selection import Splits
from utils.errors import some
from utils.text import count, describe_alike

FEW_STEPS = 10  # in an epoch
UNEVEN = 10  # times as many images in a class as in another
SAMPLE = 200  # validation images that are looked for in train/
SAMPLE_SECONDS = 2.0


def describe_oddities(splits: Splits, steps_per_epoch: int, balance: float) -> list[str]:
    """A line for each; `balance` is that of `--balance`."""
    train, val = splits["train"], splits["val"]
    lines = []
    if len(train.classes) == 1 and train.label_sets is None:
        lines.append(f"only one class ({train.classes[0]}): every network has 100 % there, and learns nothing")
    if not balance and _extremes(train)[1] >= UNEVEN:
        remedy = "--balance 0.5 shows rare ones more often"
        if train.label_sets is None:
            remedy = f"top-1 is mostly that of the common ones; --best-by macro_recall counts all alike, {remedy}"
        lines.append(f"classes are uneven ({class_sizes(train)}): {remedy}")
    if lacking := np.flatnonzero(val.class_counts() == 0).tolist():
        names = some([val.classes[label] for label in lacking])
        lines.append(f"{count(len(lacking), 'class')} without validation images ({names}): no figure says how it does")
    if alike := describe_alike(train.classes, train.classes):
        lines.append(f"two classes look the same: {alike}")
    if depth := describe_depth(train):
        lines.append(depth)
    if steps_per_epoch < FEW_STEPS:
        steps, images = count(steps_per_epoch, "step"), count(len(train), "image")
        lines.append(f"{steps} per epoch, as train/ has {images}: a smaller --batch-size gives more")
    if shared := [] if val.held_out else shared_groups(train, val):
        lines.append(
            f"{val.title} has {count(len(shared), 'group')} of train/ ({some(shared)}): accuracy looks better than it "
            "is on others"
        )
    if (train.root, train.fingerprint) == (val.root, val.fingerprint) and train.root is not None:  # --val-fraction 0
        lines.append("all images train and validate: accuracy says how well they are known, not how it is on others")
        return lines
    # Without groups `--val-fraction` keeps copies together.
    copies = [] if val.held_out and val.groups is None else list(find_copies(train, val))
    if copies:
        (first, same), more = copies[0], f", and {len(copies) - 1} more" if len(copies) > 1 else ""
        lines.append(
            f"{val.title} has images of train/ ({first} is {same}{more} of those that were compared): accuracy looks "
            "better than it is"
        )
    return lines


def class_sizes(manifest: Manifest) -> str:
    """The largest and the smallest class and their ratio, such as `red 500 to blue 5 images, 100 : 1`."""
    (most, fewest), ratio = _extremes(manifest)
    (name, images), (other, others) = most, fewest
    return f"{name} {images:,} to {other} {count(others, 'image')}, {ratio:.3g} : 1"


def _extremes(manifest: Manifest) -> tuple[list[tuple[str, int]], float]:
    """Name and images of the largest class and of the smallest, and how many times larger the first is."""
    counts = manifest.class_counts()
    found = [(manifest.classes[at], int(counts[at])) for at in (counts.argmax(), counts.argmin())]
    return found, float(counts.max() / max(1, counts.min()))


def find_copies(train: Manifest, val: Manifest) -> Iterator[tuple[str, str]]:
    """Images of `val`, of a random sample of them, that are byte for byte in `train` too: both names.

    Reads images of the same size only, and for two seconds at most.
    """
    if train.images is None or val.images is None:
        return
    deadline = time.monotonic() + SAMPLE_SECONDS
    order = np.argsort(train.sizes, kind="stable")
    sizes = train.sizes[order]
    for index in random.Random(0).sample(range(len(val)), min(SAMPLE, len(val))):
        start, end = np.searchsorted(sizes, [val.sizes[index], val.sizes[index] + 1])
        if start == end:
            continue
        try:
            digest = content_digest(read_image(val.record(index)))
            for other in order[start:end].tolist():
                if time.monotonic() > deadline:
                    return
                if content_digest(read_image(train.record(other))) == digest:
                    yield val.name(index), train.name(other)
                    break
        except OSError:  # which the loader reports
            continue
