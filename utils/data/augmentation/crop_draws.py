"""Random crops and flips of many images at once, each a function of (seed, draw, image) alone.

There is no generator whose state would have to be saved, and no Python for each image: a counter-based generator
computes the numbers of all images of a batch. So the draws of an image are the same in every batch, on every process
and after every resume.
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.data.augmentation.policies import RATIO
from utils.seed import Stream, seed_sequence

TRIES = 10  # windows that are drawn until one fits, as torchvision
# Random numbers of an image: an area and an aspect of each try, two of the place, the flip, the turn.
WORDS = 2 * TRIES + 4
ROW, COLUMN, FLIP, TURN = range(2 * TRIES, WORDS)
ROUNDS = 10  # of the generator
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)


class Crops(NamedTuple):
    """The crop and the flip of each image of a batch, (N,) each.

    Attributes:
        tops: int64, first row of the crop.
        lefts: int64, first column.
        heights: int64, rows.
        widths: int64, columns.
        turns: int64, how the crop is turned, the sum of 1 where it is mirrored from left to right, 2 from top to bottom
            and then 4 where rows become columns.
    """

    tops: NDArray[np.int64]
    lefts: NDArray[np.int64]
    heights: NDArray[np.int64]
    widths: NDArray[np.int64]
    turns: NDArray[np.int64]


def draw_crops(
    seed: int,
    draws: NDArray[np.int64] | int,
    indices: NDArray[np.int64],
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    crop_scale: float | None,
    hflip: float,
    vflip: float = 0.0,
    rot90: bool = False,
) -> Crops:
    """The distribution of torchvision's RandomResizedCrop, RandomHorizontalFlip and RandomVerticalFlip.

    An area (a fraction of the image from `crop_scale` to 1) and an aspect (3/4 to 4/3, its logarithm uniform) are drawn
    up to ten times, until the window fits into the image; its place is uniform. If none fits, the crop is the largest
    one of the nearest aspect allowed, from the center.

    Args:
        seed: of the run.
        draws: int64 (N,), or one for all: another for each appearance of an image in the run, from 0.
        indices: int64 (N,), images of the data set.
        heights: int64 (N,), of these images, pixels.
        widths: int64 (N,), likewise.
        crop_scale: smallest area of a crop, in (0, 1]; None for whole images.
        hflip, vflip: probability of mirroring an image from left to right, from top to bottom.
        rot90: whether it is also turned by 0, 90, 180 or 270 degrees.
    """
    found, of_image = np.unique(np.broadcast_to(draws, indices.shape), return_inverse=True)
    keys = np.array([_key(seed, draw) for draw in found.tolist()], dtype=np.uint64).T
    words = random_words(keys if len(found) == 1 else keys[:, of_image], indices)  # mostly the epoch's only
    fractions = words * 2.0**-32
    turns = _turns(fractions[:, FLIP] < hflip, words[:, TURN], vflip, rot90)
    if crop_scale is None:
        return Crops(np.zeros_like(heights), np.zeros_like(widths), heights, widths, turns)
    areas = (crop_scale + (1 - crop_scale) * fractions[:, :TRIES]) * (heights * widths)[:, None]
    low, high = np.log(RATIO)
    aspects = np.exp(low + (high - low) * fractions[:, TRIES : 2 * TRIES])
    tried = np.rint(np.sqrt(areas / aspects)).astype(np.int64), np.rint(np.sqrt(areas * aspects)).astype(np.int64)
    fits = (tried[0] > 0) & (tried[0] <= heights[:, None]) & (tried[1] > 0) & (tried[1] <= widths[:, None])
    chosen, found = np.arange(len(indices)), fits.any(1)
    first = fits.argmax(1)
    rows, columns = _largest_windows(heights, widths)
    rows = np.where(found, tried[0][chosen, first], rows)
    columns = np.where(found, tried[1][chosen, first], columns)
    tops = np.where(found, _below(words[:, ROW], heights - rows + 1), (heights - rows) // 2)
    lefts = np.where(found, _below(words[:, COLUMN], widths - columns + 1), (widths - columns) // 2)
    return Crops(tops, lefts, rows, columns, turns)


def _turns(is_mirrored: NDArray[np.bool_], words: NDArray[np.uint64], vflip: float, rot90: bool) -> NDArray[np.int64]:
    """`Crops.turns`. A quarter turn to the left is a mirror image whose rows become columns."""
    quarters = (words >> np.uint64(30)).astype(np.int64) if rot90 else 0
    is_upside_down = (words & np.uint64(2**30 - 1)) * 2.0**-30 < vflip
    mirrored = np.choose(quarters, (0, 1, 3, 2)) ^ is_mirrored ^ (2 * is_upside_down)
    return mirrored + 4 * (quarters & 1)


def _largest_windows(heights: NDArray[np.int64], widths: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Rows and columns of the largest window with an allowed aspect."""
    aspects = widths / heights
    rows = np.where(aspects < RATIO[0], np.rint(widths / RATIO[0]), heights).astype(np.int64)
    columns = np.where(aspects > RATIO[1], np.rint(heights * RATIO[1]), widths).astype(np.int64)
    return rows, columns


def _below(words: NDArray[np.uint64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers in [0, bounds) from random numbers of 32 bits; bounds are far below 2**32."""
    return ((words * bounds.astype(np.uint64)) >> _HALF).astype(np.int64)


@functools.lru_cache(maxsize=1024)  # with --balance an image may come a hundred times in an epoch
def _key(seed: int, epoch: int) -> tuple[int, int]:
    first, second = seed_sequence(Stream.CROPS, seed, epoch).generate_state(2).tolist()
    return first, second


def random_words(keys: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`WORDS` random numbers of 32 bits for each of the `indices`: uint64 (N, WORDS).

    `keys` are those of `philox`, one for all images, (2, 1), or for each, (2, N).
    """
    blocks = -(-WORDS // 4)
    images = indices.astype(np.uint64)[:, None]
    counters = np.zeros((4, len(indices), blocks), dtype=np.uint64)
    counters[0], counters[1], counters[2] = np.arange(blocks, dtype=np.uint64), images & _LOW, images >> _HALF
    return np.moveaxis(philox(counters, keys.reshape(2, -1, 1)), 0, 2).reshape(len(indices), 4 * blocks)[:, :WORDS]


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10: four random numbers of 32 bits for each counter of 128 bits.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11), section 3.3.

    Args:
        counters: uint64 (4, ...), each below 2**32, least significant first.
        keys: uint64 (2, ...), two numbers below 2**32, which are broadcast to the counters.
    """
    a, b, c, d = counters
    for number in range(ROUNDS):
        first, second = (keys[0] + number * 0x9E3779B9) & _LOW, (keys[1] + number * 0xBB67AE85) & _LOW
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (right >> _HALF) ^ b ^ first, right & _LOW
        c, d = (left >> _HALF) ^ d ^ second, left & _LOW
    return np.stack([a, b, c, d])
