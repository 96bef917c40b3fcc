"""Augmentation of a batch on the device: normalization, mixes and their shares, erasing."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, ks_2samp
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import v2

from tests.conftest import resolved
from utils.network.augment import BatchAugment, Normalize
from utils.targets import Targets

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CPU = torch.device("cpu")
MIN_CHANCE = 1e-3  # of statistics as far from what is expected; seeds are fixed


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randint(0, 256, (size, 16, 16, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    return images, torch.arange(size) % 5


def augment(dtype: torch.dtype = torch.float32, **values: Any) -> BatchAugment:
    config = resolved(**values)
    return BatchAugment(config, Normalize(MEAN, STD, dtype, CPU), Targets(5), CPU)


def test_normalize_is_torchvisions() -> None:
    images, targets = batch()
    found, same_targets = augment()(images, targets)
    torch.testing.assert_close(found, v2.Normalize(MEAN, STD)(images / 255), rtol=1e-5, atol=1e-6)
    assert same_targets is targets
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_normalize_gives_the_type_of_mixed_precision() -> None:
    assert augment(torch.bfloat16)(*batch())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("values", [{"mixup": 1.0}, {"cutmix": 1.0}, {"mixup": 1.0, "cutmix": 1.0}])
def test_mixes_weigh_targets_as_images(values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    images, _ = batch()
    # Images of one brightness for each class: the mean of a mix shows its weights.
    targets = torch.arange(8) % 5
    images = (targets * 50).to(torch.uint8).view(8, 1, 1, 1).expand(8, 3, 16, 16).contiguous()
    images = images.contiguous(memory_format=torch.channels_last)
    mixer = augment(**values)
    plain = mixer.normalize(images)[:, 0, 0, 0]
    slope = plain[1] - plain[0]
    mixed_any = False
    for _ in range(10):
        mixed, soft = mixer(images, targets)
        assert soft.shape == (8, 5)
        torch.testing.assert_close(soft.sum(1), torch.ones(8))
        assert mixed.is_contiguous(memory_format=torch.channels_last)
        expected = plain[0] + slope * (soft * torch.arange(5)).sum(1)
        torch.testing.assert_close(mixed[:, 0].mean(dim=(1, 2)), expected, rtol=1e-4, atol=1e-4)
        mixed_any |= bool((soft.max(1).values < 1).any())
    assert mixed_any


def test_mixes_end_with_their_last_epoch() -> None:
    """Targets keep their type, as a captured step has one type of them."""
    mixer = augment(mixup=1.0, mixup_off_epoch=2)
    images, targets = batch()
    for epoch, mixes in ((0, True), (1, True), (2, False), (3, False)):
        mixer.start_epoch(epoch)
        found, soft = mixer(images, targets)
        assert soft.dtype == torch.float32
        assert torch.equal(found, mixer.normalize(images)) != mixes
        assert torch.equal(soft, torch.eye(5)[targets]) != mixes
    always = augment(mixup=1.0)
    always.start_epoch(1000)
    assert not torch.equal(always(images, targets)[1], torch.eye(5)[targets])


def shares_of(mixer: BatchAugment, draws: int, side: int = 16) -> tuple[list[float], list[float]]:
    """Of batches of a black and a white image: the target's share of the first one, and its share of the pixels."""
    images = torch.zeros(2, side, side, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    images[1] = 255
    black, white = mixer.normalize(images)[:, 0, 0, 0]
    found = [mixer(images, torch.arange(2)) for _ in range(draws)]
    pixels = [float(((white - mixed[0, 0]) / (white - black)).mean()) for mixed, _ in found]
    return [float(soft[0, 0]) for _, soft in found], pixels


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_of_mixup_follow_numpys_beta(alpha: float) -> None:
    torch.manual_seed(0)
    shares, pixels = shares_of(augment(mixup=alpha), 2000)
    expected = np.random.default_rng(0).beta(alpha, alpha, 20_000)
    assert ks_2samp(shares, expected).pvalue > MIN_CHANCE
    np.testing.assert_allclose(pixels, shares, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_boxes_of_cutmix_follow_numpys_beta(alpha: float) -> None:
    """A box has the share 1 - lambda of the area, a random center, and is cut off at the border."""
    side, random = 32, np.random.default_rng(0)
    half = (side * 0.5 * np.sqrt(1 - random.beta(alpha, alpha, 20_000))).astype(int)
    column, row = random.integers(side, size=(2, 20_000))
    width, height = (np.clip(at + half, 0, side) - np.clip(at - half, 0, side) for at in (column, row))
    torch.manual_seed(0)
    shares, pixels = shares_of(augment(cutmix=alpha), 2000, side)
    assert ks_2samp(shares, 1 - width * height / side**2).pvalue > MIN_CHANCE
    np.testing.assert_allclose(pixels, shares, atol=1e-5)


def test_mixup_and_cutmix_get_half_of_the_batches_each() -> None:
    torch.manual_seed(0)
    mixer = augment(mixup=1.0, cutmix=1.0)
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 16, 16).contiguous()
    mixed = [mixer(images, torch.arange(2))[0][0, 0] for _ in range(1000)]
    mixup = sum(bool((image == image[0, 0]).all()) for image in mixed)  # and boxes that are too small to have a pixel
    assert abs(mixup - 500) < 80


def test_erased_rectangles_are_timms() -> None:
    """Rate, areas and aspects of RandomErasing with its own defaults, which are the paper's."""
    probability, side, count = 0.25, 48, 4000
    images = torch.full((count, side, side, 3), 255, dtype=torch.uint8).permute(0, 3, 1, 2)
    random.seed(0)
    ours = augment(random_erase=probability)(images, torch.zeros(count, dtype=torch.int64))[0][:, 0] == 0
    random.seed(1)
    theirs = RandomErasing(1.0, device="cpu")(torch.ones(count, 1, side, side))[:, 0] == 0
    rate = int(ours.flatten(1).any(1).sum())
    assert binomtest(rate, count, probability).pvalue > MIN_CHANCE
    shapes = []
    for erased in (ours, theirs):
        erased = erased[erased.flatten(1).any(1)]
        height, width = (erased.any(axis).sum(1).double() for axis in (2, 1))
        assert torch.equal(erased.sum((1, 2)), height * width), "rectangles"
        shapes.append((height * width, height / width))
    for one, other in zip(*shapes, strict=True):
        assert ks_2samp(one, other).pvalue > MIN_CHANCE
    assert 0.01 < float(shapes[0][0].min()) / side**2 < 0.04
    assert 0.3 < float(shapes[0][0].max()) / side**2 < 0.36


def test_random_erase_probability() -> None:
    images, targets = batch(64)
    images = images.clamp(min=1)
    plain = augment()(images, targets)[0]
    assert torch.equal(augment(random_erase=0.0)(images, targets)[0], plain)
    erased = (augment(random_erase=1.0)(images, targets)[0] != plain).flatten(1).any(1)
    assert erased.float().mean() > 0.9
