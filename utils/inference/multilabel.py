"""Figures of an evaluation whose images have any number of classes, and a threshold for each class."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from utils.figures import THRESHOLDS
from utils.inference.metrics import EvalMetric, scikit_learn_metrics
from utils.inference.per_class import class_figures


class BinaryCrossEntropy(EvalMetric):
    """Mean binary cross entropy over images and classes, without smoothing."""

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        losses = binary_cross_entropy_with_logits(logits, targets, reduction="none")
        self.state[0] += losses.double().mean(dim=1).sum()

    def compute(self, state: Tensor, num_images: int) -> dict[str, float]:
        return {"loss": state.item() / num_images}


class F1(EvalMetric):
    """Precision, recall and F1 where a class is predicted from a probability of 0.5 on, as scikit-learn's.

    Micro F1 counts all answers alike. Macro figures are means over classes: recall over those that have images, the
    others over those that have images or were predicted.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.state = torch.zeros(3, num_classes, dtype=torch.float64, device=device)

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        answers = (logits >= 0).double()
        self.state += torch.stack([targets.double(), answers, answers * targets]).sum(dim=1)

    def compute(self, state: Tensor, num_images: int) -> dict[str, float]:
        images, answers, hits = state.numpy()
        total = images.sum() + answers.sum()
        found = {"micro_f1": 200 * float(hits.sum() / total) if total else 0.0}
        for name, figures in zip(("recall", "precision", "f1"), class_figures(images, answers, hits), strict=True):
            known = figures[~np.isnan(figures)]
            found[f"macro_{name}"] = float(known.mean()) if len(known) else 0.0
        return found


class MeanAveragePrecision(EvalMetric):
    """Mean over classes of the average precision of their scores, as scikit-learn's, and a threshold for each class.

    Classes without images do not count. A score is a logit; one that is not a number is the lowest. Every rank keeps
    the scores of all images: 8 bytes for each image and class.
    """

    reduce = "cat"

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.state = torch.zeros(0, 2 * num_classes, device=device)

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        scores = logits.nan_to_num(nan=torch.finfo(torch.float32).min)
        self.state = torch.cat([self.state, torch.cat([scores, targets], dim=1)])

    def compute(self, state: Tensor, num_images: int) -> dict[str, Any]:
        scores, targets = np.split(state.double().numpy(), 2, axis=1)
        is_known = targets.any(axis=0)
        if not is_known.any():
            return {}
        score = scikit_learn_metrics().average_precision_score
        mean = score(targets[:, is_known], scores[:, is_known], average="macro")
        thresholds = [fit_threshold(*each) for each in zip(scores.T, targets.T, strict=True)]
        return {"map": 100 * float(mean), THRESHOLDS: thresholds}


def fit_threshold(scores: NDArray[np.floating], targets: NDArray[np.floating]) -> float:
    """The probability from which a class counts as predicted, so that F1 on these images is highest; 0.5 without any.

    It lies in the middle between the scores of two images. Of several that are as good, the highest.

    Args:
        scores: logits (num_images,).
        targets: 0 or 1, (num_images,).
    """
    if not targets.any():
        return 0.5
    order = np.argsort(-scores, kind="stable")
    sorted_scores = scores[order].astype(np.float64)
    hits = np.cumsum(targets[order].astype(np.float64))
    f1 = 2 * hits / (np.arange(1, len(scores) + 1) + hits[-1])
    is_last = np.append(np.diff(sorted_scores) != 0, True)  # of equal scores
    at = int(np.where(is_last, f1, -1.0).argmax())
    score = sorted_scores[at] if at + 1 == len(scores) else (sorted_scores[at] + sorted_scores[at + 1]) / 2
    return float(1 / (1 + np.exp(-score))) if score > -700 else 0.0


MULTILABEL_METRICS: tuple[type[EvalMetric], ...] = (MeanAveragePrecision, F1, BinaryCrossEntropy)
