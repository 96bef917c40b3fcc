"""Figures of an evaluation, exact on any number of ranks: a class each."""

import abc

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class EvalMetric(abc.ABC):
    """Figures that follow from sums over all evaluated images.

    Another figure is another class in `EVAL_METRICS`. It is then in metrics.jsonl, evaluation.json, summary.json,
    the lines of evaluations, TensorBoard, trackers, watch.py and the report. A figure is in percent unless
    `utils.figures.FIGURES` has its name.

    Attributes:
        sums: float64, of any shape, on the device: added up over the images of all ranks. Counts are exact up to 2**53.
    """

    sums: Tensor

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.sums = torch.zeros(1, dtype=torch.float64, device=device)

    @abc.abstractmethod
    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        """Add a batch of this rank.

        Args:
            logits: float32 (N, num_classes).
            predicted: the five likeliest classes, or all of fewer, likeliest first, int64 (N, 5).
            targets: int64 (N,).
        """

    @abc.abstractmethod
    def compute(self, sums: Tensor, num_images: int) -> dict[str, float]:
        """The figures by name; `sums` as of the attribute, on the CPU, over all `num_images` images."""


class TopK(EvalMetric):
    """Share of the images whose class is the likeliest, or among the five likeliest."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        hits = predicted == targets[:, None]
        self.sums[0] += hits[:, 0].sum()
        self.sums[1] += hits.sum()

    def compute(self, sums: Tensor, num_images: int) -> dict[str, float]:
        top1, top5 = sums.tolist()
        return {"top1": 100 * top1 / num_images, "top5": 100 * top5 / num_images}


class CrossEntropy(EvalMetric):
    """Mean cross entropy without smoothing."""

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        self.sums[0] += cross_entropy(logits, targets, reduction="sum")

    def compute(self, sums: Tensor, num_images: int) -> dict[str, float]:
        return {"loss": sums.item() / num_images}


EVAL_METRICS: tuple[type[EvalMetric], ...] = (TopK, CrossEntropy)
