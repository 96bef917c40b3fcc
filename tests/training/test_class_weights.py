"""`--class-weights`: auto is scikit-learn's `balanced`, of the images that come; a file names each class."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from tests.conftest import resolved
from utils.data.images.manifest import Manifest, synthetic
from utils.training.settings.class_weights import class_weights

LABELS = np.repeat(np.arange(4), [1000, 300, 100, 10])


def manifest(weights: list[float] | None = None) -> Manifest:
    of_image = None if weights is None else np.array(weights)[LABELS]
    return dataclasses.replace(synthetic(len(LABELS), 4), labels=LABELS, weights=of_image)


def test_auto_is_balanced() -> None:
    expected = compute_class_weight("balanced", classes=np.arange(4), y=LABELS)
    config = resolved(class_weights="auto", num_classes=6)
    assert class_weights(config, manifest()) == pytest.approx([*expected, 1, 1])
    assert class_weights(resolved(), manifest()) is None


@pytest.mark.parametrize(("balance", "weights", "shares"), [
    (1.0, None, [1, 1, 1, 1]),
    (0.5, None, [1000**0.5, 300**0.5, 10, 10**0.5]),
    (0.0, [1, 2, 0, 4], [1000, 600, 0, 40]),
    (1.0, [1, 2, 0, 4], [1, 1, 0, 1]),
])  # fmt: skip
def test_auto_follows_the_images_that_come(balance: float, weights: list[float] | None, shares: list[float]) -> None:
    config = resolved(class_weights="auto", num_classes=4, balance=balance)
    expected = [sum(shares) / (4 * share) if share else 1 for share in shares]
    assert class_weights(config, manifest(weights)) == pytest.approx(expected)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.csv"
    path.write_text("Class;Weight\n3;0\n1;2.5\n0;1\n2;4\n")
    assert class_weights(resolved(class_weights=str(path), num_classes=5), manifest()) == (1, 2.5, 4, 0, 1)
