"""Recall, precision and F1 of each class, from counts."""

import numpy as np
from numpy.typing import NDArray


def class_figures(
    images: NDArray[np.float64], predicted: NDArray[np.float64], correct: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Recall, precision and F1 of each class in percent, float64 (num_classes,).

    A class without images has no recall, NaN; if it was not predicted either, it has no precision and F1.

    Args:
        images: of each class, (num_classes,).
        predicted: how often each class was predicted.
        correct: how often of these rightly.
    """
    occurs = images + predicted > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = 100 * correct / images
        precision = np.where(occurs, 100 * correct / np.maximum(predicted, 1), np.nan)
        f1 = 200 * correct / (images + predicted)
    return recall, precision, f1
