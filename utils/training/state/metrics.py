"""Figures of training that metrics.jsonl has for each log interval: a class each."""

from typing import ClassVar

import torch
from torch import Tensor


class TrainMetric:
    """The weighted mean of a figure over a log interval and all ranks.

    Another figure is another class in `TRAIN_METRICS`. It is then in metrics.jsonl, TensorBoard, trackers and
    checkpoints, and with a `label` in the line of the interval.

    Attributes:
        key: in metrics.jsonl.
        label: in the line of an interval; "" for none.
        total: of value x weight on this rank, float64 (), on the device.
        weight: of all values together.
    """

    key: ClassVar[str]
    label: ClassVar[str] = ""

    def __init__(self, device: torch.device) -> None:
        self.total, self.weight = torch.zeros((), dtype=torch.float64, device=device), 0.0

    def add(self, value: Tensor, weight: float = 1.0) -> None:
        """Add a value, a scalar on the device, which is not waited for."""
        self.total.add_(value.detach(), alpha=weight)
        self.weight += weight

    def reset(self) -> None:
        """Begin the next interval."""
        self.total.zero_()
        self.weight = 0.0

    def after_batch(self, loss: Tensor, num_images: int) -> None:
        """Called for each batch, with its mean loss."""

    def after_clipping(self, grad_norm: Tensor) -> None:
        """Called for each step with `--clip-grad`, with the norm of all gradients before it."""


class MeanLoss(TrainMetric):
    """Mean over the images."""

    key, label = "train/loss", "loss"

    def after_batch(self, loss: Tensor, num_images: int) -> None:
        self.add(loss, num_images)


class GradNorm(TrainMetric):
    """Mean over the steps whose gradients were clipped; the ranks have the same."""

    key = "grad_norm"

    def after_clipping(self, grad_norm: Tensor) -> None:
        self.add(grad_norm)


# The bar of a terminal shows the first.
TRAIN_METRICS: tuple[type[TrainMetric], ...] = (MeanLoss, GradNorm)
