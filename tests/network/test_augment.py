"""Augmentation of a batch on the device: normalisation is torchvision's, mixes weigh targets as images."""

from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from tests.conftest import resolved
from utils.network.augment import BatchAugment, Normalize

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CPU = torch.device("cpu")


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randint(0, 256, (size, 16, 16, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    return images, torch.arange(size) % 5


def augment(dtype: torch.dtype = torch.float32, **values: Any) -> BatchAugment:
    config = resolved(**values)
    return BatchAugment(config, Normalize(MEAN, STD, dtype, CPU), 5, CPU)


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


def test_random_erase_probability() -> None:
    images, targets = batch(64)
    images = images.clamp(min=1)
    plain = augment()(images, targets)[0]
    assert torch.equal(augment(random_erase=0.0)(images, targets)[0], plain)
    erased = (augment(random_erase=1.0)(images, targets)[0] != plain).flatten(1).any(1)
    assert erased.float().mean() > 0.9
