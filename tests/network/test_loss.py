"""The loss of training beside timm's."""

import pytest
import timm.loss
import torch
from timm.data.mixup import mixup_target
from torch import nn
from torch.nn.functional import one_hot

from tests.conftest import resolved
from utils.network.loss import create_criterion

CLASSES = 5


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, CLASSES), torch.randint(0, CLASSES, (8,))


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms(smoothing: float, threshold: float | None) -> None:
    """timm's train.py smooths mixed targets in its mixup, others in the loss."""
    logits, targets = batch()
    ours = create_criterion(resolved(loss="bce", label_smoothing=smoothing, bce_target_thresh=threshold))
    plain = timm.loss.BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    assert torch.equal(ours(logits, targets), plain(logits, targets))
    for lam in (0.3, 0.85, 1.0):
        hot = one_hot(targets, CLASSES).float()
        mixed = lam * hot + (1 - lam) * hot.flip(0)
        smoothed = mixup_target(targets, CLASSES, lam, smoothing)
        expected = timm.loss.BinaryCrossEntropy(target_threshold=threshold)(logits, smoothed)
        torch.testing.assert_close(ours(logits, mixed), expected, rtol=1e-6, atol=0)


def test_binary_cross_entropy_is_computed_in_float32() -> None:
    logits, targets = batch()
    criterion = create_criterion(resolved(loss="bce"))
    low = logits.bfloat16()
    assert torch.equal(criterion(low, targets), criterion(low.float(), targets))


def test_cross_entropy_without_it() -> None:
    logits, targets = batch()
    expected = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, targets)
    assert torch.equal(create_criterion(resolved())(logits, targets), expected)
