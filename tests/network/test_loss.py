"""The loss of training beside timm's."""

import math
from collections.abc import Sequence

import pytest
import timm.loss
import torch
from timm.data.mixup import mixup_target
from torch import nn
from torch.nn.functional import one_hot

from tests.conftest import resolved
from utils.network.loss import create_criterion

CLASSES = 5
CPU = torch.device("cpu")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, CLASSES), torch.randint(0, CLASSES, (8,))


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms(smoothing: float, threshold: float | None) -> None:
    """timm's train.py smooths mixed targets in its mixup, others in the loss."""
    logits, targets = batch()
    ours = create_criterion(resolved(loss="bce", label_smoothing=smoothing, bce_target_thresh=threshold), CPU)
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
    criterion = create_criterion(resolved(loss="bce"), CPU)
    low = logits.bfloat16()
    assert torch.equal(criterion(low, targets), criterion(low.float(), targets))


def test_the_asymmetric_loss_is_timms() -> None:
    """But for the mean in place of a sum, which releases of timm take over other things."""
    logits, targets = batch()
    hot = one_hot(targets, CLASSES).float()
    ours = create_criterion(resolved(loss="asymmetric", task="multilabel"), CPU)
    found = [ours(scale * logits, each) for scale in (1, 30) for each in (hot, 0.7 * hot + 0.3 * hot.flip(0))]
    plain = timm.loss.AsymmetricLossMultiLabel()
    expected = [plain(scale * logits, each) for scale in (1, 30) for each in (hot, 0.7 * hot + 0.3 * hot.flip(0))]
    ratios = torch.stack(expected) / torch.stack(found)
    torch.testing.assert_close(ratios, ratios[:1].expand(4), rtol=1e-5, atol=0)
    assert ratios[0].item() == pytest.approx(CLASSES) or ratios[0].item() == pytest.approx(8 * CLASSES)


def test_class_weights_of_the_asymmetric_loss() -> None:
    logits, targets = batch()
    hot = one_hot(targets, CLASSES).float()
    config = resolved(loss="asymmetric", task="multilabel")
    of_class = [create_criterion(config, CPU)(logits[:, [at]], hot[:, [at]]) for at in range(CLASSES)]
    weighted = create_criterion(config, CPU, (1, 2, 3, 4, 5))(logits, hot)
    expected = sum((at + 1) * loss for at, loss in enumerate(of_class)) / CLASSES
    torch.testing.assert_close(weighted, expected)


def test_cross_entropy_without_it() -> None:
    logits, targets = batch()
    expected = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, targets)
    assert torch.equal(create_criterion(resolved(), CPU)(logits, targets), expected)


WEIGHTS = (0.2, 3.0, 1.0, 0.0, 0.8)


def in_float64(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, focal: float, weights: Sequence[float]
) -> float:
    """The mean over images of -sum w y (1 - p)**focal log p, by a loop."""
    total = 0.0
    for row, target in zip(logits.double().tolist(), targets.tolist(), strict=True):
        hot = target if isinstance(target, list) else [float(at == target) for at in range(CLASSES)]
        for value, share, weight in zip(row, hot, weights, strict=True):
            p = 1 / sum(math.exp(other - value) for other in row)
            total -= weight * (share * (1 - smoothing) + smoothing / CLASSES) * (1 - p) ** focal * math.log(p)
    return total / len(logits)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("focal", "weights"), [(0.0, WEIGHTS), (2.0, None), (0.5, WEIGHTS)])
def test_class_weights_and_focal_loss(
    focal: float, weights: Sequence[float] | None, smoothing: float, is_mixed: bool
) -> None:
    logits, targets = batch()
    if is_mixed:
        hot = one_hot(targets, CLASSES).float()
        targets = 0.7 * hot + 0.3 * hot.flip(0)
    config = resolved(label_smoothing=smoothing, focal=focal)
    found = create_criterion(config, CPU, weights)(logits, targets)
    expected = in_float64(logits, targets, smoothing, focal, weights or (1.0,) * CLASSES)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_a_weighted_loss_is_a_mean_over_images() -> None:
    """So that the gradients of two processes are those of one."""
    logits, targets = batch()
    criterion = create_criterion(resolved(focal=1.0), CPU, WEIGHTS)
    halves = [criterion(logits[part], targets[part]) for part in (slice(4), slice(4, 8))]
    torch.testing.assert_close(sum(halves) / 2, criterion(logits, targets))


@pytest.mark.parametrize("is_mixed", [False, True])
def test_weights_of_binary_cross_entropy_are_torchs(is_mixed: bool) -> None:
    logits, targets = batch()
    hot = one_hot(targets, CLASSES).float()
    hot = 0.7 * hot + 0.3 * hot.flip(0) if is_mixed else hot
    expected = nn.BCEWithLogitsLoss(weight=torch.tensor(WEIGHTS))(logits, hot)
    criterion = create_criterion(resolved(loss="bce", label_smoothing=0.0), CPU, WEIGHTS)
    torch.testing.assert_close(criterion(logits, hot if is_mixed else targets), expected)


@pytest.mark.parametrize("focal", [0.5, 2.0])
def test_gradients_of_a_sure_network_are_finite(focal: float) -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    criterion = create_criterion(resolved(focal=focal), CPU)
    for target in (0, 1):
        (gradient,) = torch.autograd.grad(criterion(logits, torch.tensor([target])), logits)
        assert torch.isfinite(gradient).all()
