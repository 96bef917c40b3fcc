"""Crops and flips of whole batches: torchvision's distribution, and for each image draws of its own."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torchvision.transforms import v2

from utils.data.augmentation.crop_draws import FLIP, WORDS, Crops, draw_crops, philox, random_words
from utils.data.augmentation.policies import RATIO
from utils.data.loaders.sampler import RandomSampler

SIGNIFICANCE = 1e-4  # a right distribution fails one test of 10,000; the draws are the same in every run


def draw(count: int, size: tuple[int, int], crop_scale: float, seed: int = 0, epoch: int = 0) -> Crops:
    """Of `count` images of the same height and width."""
    heights, widths = (np.full(count, side) for side in size)
    return draw_crops(seed, epoch, np.arange(count), heights, widths, crop_scale, 0.5)


def torchvisions(count: int, size: tuple[int, int], crop_scale: float) -> NDArray[np.int64]:
    """Tops, lefts, heights and widths: (4, count)."""
    torch.manual_seed(0)
    transform = v2.RandomResizedCrop(8, scale=(crop_scale, 1.0), ratio=RATIO)
    image = torch.empty(3, *size, dtype=torch.uint8)
    drawn = (transform.make_params([image]) for _ in range(count))
    return np.array([[each[name] for name in ("top", "left", "height", "width")] for each in drawn]).T


def quantities(boxes: Sequence[NDArray[np.int64]], size: tuple[int, int]) -> dict[str, NDArray[np.float64]]:
    """What is compared of crops: area, aspect and place; tops, lefts, heights and widths of all, (N,) each."""
    tops, lefts, heights, widths = boxes
    return {
        "area": heights * widths / (size[0] * size[1]),
        "aspect": np.log(widths / heights),
        "row": (tops + 0.5) / (size[0] - heights + 1),
        "column": (lefts + 0.5) / (size[1] - widths + 1),
        "top": tops / size[0],
        "left": lefts / size[1],
    }


def assert_same_distribution(ours: NDArray[np.float64], theirs: NDArray[np.float64], name: str) -> None:
    """Chi-square test of two samples, over bins with as many of them; equal values stay in one bin."""
    edges = np.unique(np.quantile(theirs, np.linspace(0, 1, 21)))
    if len(edges) < 2:
        assert (ours == edges[0]).all(), name
        return
    edges[0], edges[-1] = -np.inf, np.inf
    counts = np.stack([np.histogram(values, edges)[0] for values in (ours, theirs)])
    assert stats.chi2_contingency(counts).pvalue > SIGNIFICANCE, (name, counts)


@pytest.mark.parametrize(
    ("size", "crop_scale"),
    [((64, 64), 0.08), ((375, 500), 0.08), ((33, 47), 0.35), ((40, 160), 0.08), ((160, 20), 0.08), ((64, 48), 1.0)],
)
def test_crops_have_torchvisions_distribution(size: tuple[int, int], crop_scale: float) -> None:
    """1:4 and 8:1 images too, of whose crops 12 and 59 % find no window that fits."""
    ours = quantities(draw(50_000, size, crop_scale)[:4], size)
    theirs = quantities(list(torchvisions(4_000, size, crop_scale)), size)
    for name, values in ours.items():
        assert_same_distribution(values, theirs[name], name)


def test_a_crop_that_finds_no_window_is_torchvisions() -> None:
    """From the center, the largest of the nearest aspect, to the pixel."""
    for size in [(40, 160), (160, 40), (1, 9), (9, 1), (7, 100), (33, 99)]:
        found, expected = draw(4, size, 1.0), torchvisions(1, size, 1.0)
        for ours, theirs in zip(found, expected, strict=False):
            assert (ours == theirs[0]).all(), size


def test_crops_lie_within_their_images() -> None:
    random = np.random.default_rng(0)
    heights, widths = random.integers(1, 40, (2, 20_000))
    found = draw_crops(3, 1, np.arange(20_000), heights, widths, 0.08, 0.5)
    assert (found.heights > 0).all()
    assert (found.widths > 0).all()
    assert (found.tops >= 0).all()
    assert (found.lefts >= 0).all()
    assert (found.tops + found.heights <= heights).all()
    assert (found.lefts + found.widths <= widths).all()
    assert (found.tops + found.heights == heights).any(), "the last row is used"
    assert (found.lefts + found.widths == widths).any(), "the last column is used"


def test_flips_have_their_probability() -> None:
    sides = np.full(50_000, 64)
    for hflip in (0.0, 0.1, 0.5, 1.0):
        flips = draw_crops(0, 0, np.arange(50_000), sides, sides, 0.08, hflip).turns
        assert stats.binomtest(int(flips.sum()), 50_000, hflip).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("hflip", "vflip", "rot90"), [(0.3, 0.2, True), (0.3, 0.2, False), (0.0, 1.0, True)])
def test_turns_have_their_probabilities(hflip: float, vflip: float, rot90: bool) -> None:
    """Of each of eight images of a square: mirrored, or not, and then turned by quarters to the left."""
    sides, square = np.full(50_000, 64), np.arange(9).reshape(3, 3)
    expected: defaultdict[bytes, float] = defaultdict(float)
    for mirrored, upside_down, quarters in itertools.product((0, 1), (0, 1), range(4) if rot90 else (0,)):
        share = (hflip if mirrored else 1 - hflip) * (vflip if upside_down else 1 - vflip) / (4 if rot90 else 1)
        flipped = square[:: -1 if upside_down else 1, :: -1 if mirrored else 1]
        expected[np.rot90(flipped, quarters).tobytes()] += share
    turns = draw_crops(0, 0, np.arange(50_000), sides, sides, 0.08, hflip, vflip, rot90).turns
    found: Counter[bytes] = Counter()
    for turn, number in Counter(turns.tolist()).items():
        image = square[:: -1 if turn & 2 else 1, :: -1 if turn & 1 else 1]
        found[(image.T if turn & 4 else image).tobytes()] += number
    kinds = [kind for kind, share in expected.items() if share > 0]
    assert found.keys() <= set(kinds)
    assert stats.chisquare([found[kind] for kind in kinds], [50_000 * expected[kind] for kind in kinds]).pvalue > 1e-4


def test_whole_images_are_turned_as_their_crops() -> None:
    heights, widths = np.array([5, 7, 9]), np.array([8, 3, 4])
    whole = draw_crops(1, 2, np.arange(3), heights, widths, None, 0.5, 0.5, True)
    assert (whole.tops.tolist(), whole.lefts.tolist()) == ([0, 0, 0], [0, 0, 0])
    assert (whole.heights.tolist(), whole.widths.tolist()) == ([5, 7, 9], [8, 3, 4])
    assert whole.turns.tolist() == draw_crops(1, 2, np.arange(3), heights, widths, 0.3, 0.5, 0.5, True).turns.tolist()


def test_an_image_has_the_same_draws_in_every_batch() -> None:
    random = np.random.default_rng(0)
    heights, widths = random.integers(8, 90, (2, 1_000))
    whole = draw_crops(5, 2, np.arange(1_000), heights, widths, 0.08, 0.5)
    for count in (1, 7, 256):
        some = random.permutation(1_000)[:count]
        for found, expected in zip(draw_crops(5, 2, some, heights[some], widths[some], 0.08, 0.5), whole, strict=True):
            assert (found == expected[some]).all()


def test_an_image_has_the_same_draws_on_any_number_of_processes() -> None:
    """Of three epochs of 100 images: crops by (epoch, image) of 1, 2 and 4 processes, which share a global batch."""
    found = []
    for world_size in (1, 2, 4):
        crops: dict[tuple[int, int], list[Any]] = {}
        for rank in range(world_size):
            sampler = RandomSampler(100, 24 // world_size, rank=rank, world_size=world_size)
            for batch in range(3 * sampler.batches_per_epoch):
                epoch, indices = sampler.epoch_of(batch), sampler.indices(batch)
                sides = np.full(len(indices), 64)
                drawn = draw_crops(0, epoch, indices, sides, sides, 0.08, 0.5)
                crops |= {(epoch, index): crop for index, *crop in zip(indices.tolist(), *drawn, strict=True)}
        found.append(crops)
    assert len(found[0]) == 3 * 96
    assert found[0] == found[1] == found[2]


def test_draws_of_seeds_epochs_and_neighbors_are_independent() -> None:
    streams = {
        f"seed {seed}, epoch {epoch}": draw(20_000, (64, 64), 0.08, seed, epoch)
        for seed, epoch in itertools.product(range(2), range(3))
    }
    first = streams["seed 0, epoch 0"]
    streams["the next image"] = Crops(
        np.roll(first.tops, 1),
        np.roll(first.lefts, 1),
        np.roll(first.heights, 1),
        np.roll(first.widths, 1),
        np.roll(first.turns, 1),
    )
    for (one, left), (other, right) in itertools.combinations(streams.items(), 2):
        for name, a, b in zip(Crops._fields, left, right, strict=True):
            correlation = np.corrcoef(a.astype(float), b.astype(float))[0, 1]
            assert abs(correlation) < 4.5 / np.sqrt(20_000), (one, other, name)


def test_the_generator_gives_the_published_numbers() -> None:
    """The known answers of Philox4x32-10 that its authors publish with their code (Random123)."""
    full = 2**32 - 1
    cases = [
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([full] * 4, (full, full), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in cases:
        counters, keys = (np.array(numbers, dtype=np.uint64)[:, None] for numbers in (counter, key))
        assert philox(counters, keys)[:, 0].tolist() == expected


def test_draws_are_frozen() -> None:
    # A checkpoint written years ago resumes with these. If this fails, `checkpoint.FORMAT` must rise.
    indices = np.array([0, 1, 2**33 + 1])
    words = random_words(np.array([[1], [2]], dtype=np.uint64), indices)
    assert words.shape == (3, WORDS)
    assert len(np.unique(words)) == words.size
    assert words[:, FLIP].tolist() == [3145958172, 125819018, 3827297294]
    heights, widths = np.array([64, 375, 40]), np.array([64, 500, 200])
    frozen = [[4, 42, 2], [10, 115, 21], [55, 298, 33], [42, 344, 39], [1, 0, 0]]
    assert [values.tolist() for values in draw_crops(7, 3, indices, heights, widths, 0.08, 0.5)] == frozen
