"""Figures of an evaluation, exact on any number of ranks: a class each."""

import abc
import random
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from utils.inference.per_class import class_figures


class EvalMetric(abc.ABC):
    """Figures that follow from all evaluated images.

    Another figure is another class in `EVAL_METRICS`, or in `MULTILABEL_METRICS` of `utils.inference.multilabel`. It is
    then in metrics.jsonl, evaluation.json, summary.json, the lines of evaluations, TensorBoard, trackers, watch.py and
    the report. A figure is in percent unless `utils.figures.FIGURES` has its name.

    Attributes:
        reduce: how the states of all ranks become one: their sum, or their rows, in any order.
        state: float64, or float32 rows, on the device; (N, columns) with N images of this rank, or of any shape where
            it is summed up. Counts are exact up to 2**53.
    """

    reduce: ClassVar[Literal["sum", "cat"]] = "sum"
    state: Tensor

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.state = torch.zeros(1, dtype=torch.float64, device=device)

    @abc.abstractmethod
    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        """Add a batch of this rank.

        Args:
            logits: float32 (N, num_classes).
            predicted: the five likeliest classes, or all of fewer, likeliest first, int64 (N, 5).
            targets: int64 (N,); where images have any number of classes, float32 (N, num_classes) of 0 and 1.
        """

    @abc.abstractmethod
    def compute(self, state: Tensor, num_images: int) -> dict[str, Any]:
        """The figures by name; `state` as of the attribute, on the CPU, of all `num_images` images."""


class TopK(EvalMetric):
    """Share of the images whose class is the likeliest, or among the five likeliest."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.state = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        hits = predicted == targets[:, None]
        self.state[0] += hits[:, 0].sum()
        self.state[1] += hits.sum()

    def compute(self, state: Tensor, num_images: int) -> dict[str, float]:
        top1, top5 = state.tolist()
        return {"top1": 100 * top1 / num_images, "top5": 100 * top5 / num_images}


class CrossEntropy(EvalMetric):
    """Mean cross entropy without smoothing."""

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        self.state[0] += cross_entropy(logits, targets, reduction="sum")

    def compute(self, state: Tensor, num_images: int) -> dict[str, float]:
        return {"loss": state.item() / num_images}


class MacroAverages(EvalMetric):
    """Means over classes, as scikit-learn's: each class counts alike, however many images it has.

    Recall is the mean over the classes that have images: balanced accuracy. Precision and F1 are means over those that
    have images or were predicted. A class that was never predicted has a precision of 0.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.state = torch.zeros(3, num_classes, dtype=torch.float64, device=device)

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        likeliest, ones = predicted[:, 0], torch.ones_like(targets, dtype=torch.float64)
        hits = (likeliest == targets).double()  # `bincount` would wait for the device
        for row, labels, counted in zip(self.state, (targets, likeliest, targets), (ones, ones, hits), strict=True):
            row.index_add_(0, labels, counted)

    def compute(self, state: Tensor, num_images: int) -> dict[str, float]:
        recall, precision, f1 = class_figures(*state.numpy())
        return {
            "macro_recall": float(np.nanmean(recall)),
            "macro_precision": float(np.nanmean(precision)),
            "macro_f1": float(np.nanmean(f1)),
        }


class Ranking(EvalMetric):
    """How well the score of class 1 orders the images of two classes: area under the ROC curve, average precision.

    There are no figures of other numbers of classes, nor where one of the two has no image. The score is the difference
    of the logits; one that is not a number is the lowest.
    """

    reduce = "cat"

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self._is_binary = num_classes == 2
        self.state = torch.zeros(0, 2, dtype=torch.float64, device=device)

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        if self._is_binary:
            scores = logits[:, 1].double() - logits[:, 0].double()
            scores = scores.nan_to_num(nan=torch.finfo(torch.float64).min)
            self.state = torch.cat([self.state, torch.stack([scores, targets.double()], dim=1)])

    def compute(self, state: Tensor, num_images: int) -> dict[str, float]:
        scores, targets = state.numpy().T
        if len(np.unique(targets)) < 2:
            return {}
        reference = scikit_learn_metrics()
        return {
            "auc": 100 * float(reference.roc_auc_score(targets, scores)),
            "average_precision": 100 * float(reference.average_precision_score(targets, scores)),
        }


def scikit_learn_metrics() -> Any:
    """The module, imported at its first use, as that takes a second.

    The import draws from Python's generator, at another moment in a run that was stopped; so the generator is put back.
    """
    before = random.getstate()
    import sklearn.metrics

    random.setstate(before)
    return sklearn.metrics


EVAL_METRICS: tuple[type[EvalMetric], ...] = (TopK, CrossEntropy, MacroAverages, Ranking)
