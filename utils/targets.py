"""What the integer labels of batches stand for: a class each, or a set of classes."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from utils.figures import Task


class Targets:
    """Labels of a split as targets of a loss and of metrics.

    Loaders give integers whatever the task, so that none of them has to know it.

    Args:
        num_classes: outputs of the network, the classes and maybe more.
        label_sets: of the split's manifest.
    """

    def __init__(
        self, num_classes: int, label_sets: NDArray[np.bool_] | None = None, device: torch.device | None = None
    ) -> None:
        self.num_classes = num_classes
        self._sets: Tensor | None = None
        if label_sets is not None:
            sets = np.zeros((len(label_sets), num_classes), dtype=np.float32)
            sets[:, : label_sets.shape[1]] = label_sets
            self._sets = torch.from_numpy(sets).to(device)

    @property
    def task(self) -> Task:
        """Whether an image has one class, or any number."""
        return "multiclass" if self._sets is None else "multilabel"

    def __call__(self, labels: Tensor) -> Tensor:
        """int64 (N,) -> the same, or float32 (N, num_classes) of 0 and 1."""
        return labels if self._sets is None else self._sets[labels]
