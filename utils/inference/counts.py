"""What is counted of predictions: right and wrong answers by class and by their probability."""

import collections
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from utils.files import atomic_write_text
from utils.inference.inputs import NO_TARGET
from utils.inference.per_class import class_figures
from utils.inference.predictions import ANSWERED, CONFUSION, PER_CLASS, TOP, csv_text

THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


class Answered:
    """How many images get an answer, and how many of these are right, if an answer needs a least probability.

    Args:
        thresholds: least probabilities, 0 to 1.
    """

    def __init__(self, thresholds: Sequence[float] = THRESHOLDS) -> None:
        self._thresholds = sorted({*thresholds})
        self._counts = np.zeros((2, len(self._thresholds)), np.int64)  # answered, and right
        self._images = 0

    def update(self, probabilities: NDArray[np.floating], right: NDArray[np.bool_]) -> None:
        """Count images: the probabilities of their likeliest classes, and whether those are right, both (N,)."""
        is_answered = probabilities[:, None] >= np.array(self._thresholds, probabilities.dtype)
        self._counts += np.stack([is_answered.sum(0), (is_answered & right[:, None]).sum(0)])
        self._images += len(probabilities)

    def add(self, other: "Answered") -> None:
        """Add those of another rank, of the same thresholds."""
        self._counts += other._counts
        self._images += other._images

    def rows(self) -> list[tuple[float, float, float | None]]:
        """Threshold, share answered and accuracy of what is answered, both in percent; [] for no image.

        The accuracy is None where nothing is answered.
        """
        return [
            (threshold, 100 * answered / self._images, 100 * right / answered if answered else None)
            for threshold, answered, right in zip(self._thresholds, *self._counts.tolist(), strict=True)
            if self._images
        ]

    def __str__(self) -> str:
        """A table for people; "" for no image."""
        lines = [
            f"{threshold:>8g}  {answered:>7.2f} %  {'-' if right is None else f'{right:.2f} %':>9}"
            for threshold, answered, right in self.rows()
        ]
        return "\n".join(["min-prob   answered   accuracy", *lines]) if lines else ""


class ClassCounts:
    """How often each class was predicted for images of each class.

    Attributes:
        confusion: (target, predicted) -> images.
        hits: target -> images whose class is among the first `TOP`.
        answered: by the probability of the likeliest class; of no image where probabilities are not known.

    Args:
        min_prob: that `answered` has besides `THRESHOLDS`.
    """

    def __init__(self, min_prob: float = 0.0) -> None:
        self.confusion: collections.Counter[tuple[int, int]] = collections.Counter()
        self.hits: collections.Counter[int] = collections.Counter()
        self.answered = Answered([*THRESHOLDS, min_prob])

    def update(
        self,
        targets: NDArray[np.int64],
        indices: NDArray[np.int64],
        probabilities: NDArray[np.floating] | None = None,
    ) -> None:
        """Count images.

        Args:
            targets: int64 (num_images,); `NO_TARGET` is not counted.
            indices: of the likeliest classes, `TOP` or all of fewer: int64 (num_images, n).
            probabilities: of the likeliest class, (num_images,).
        """
        known = targets != NO_TARGET
        targets, indices = targets[known], indices[known, :TOP]
        if probabilities is not None:
            self.answered.update(probabilities[known], indices[:, 0] == targets)
        self.confusion.update(zip(targets.tolist(), indices[:, 0].tolist(), strict=True))
        self.hits.update(targets[(indices == targets[:, None]).any(axis=1)].tolist())

    def add(self, other: "ClassCounts") -> None:
        """Add those of another rank."""
        self.confusion.update(other.confusion)
        self.hits.update(other.hits)
        self.answered.add(other.answered)

    def summary(self) -> dict[str, float | int]:
        """`top1` and `top5` in percent, and `count`, as an evaluation has them; {} for no image."""
        count = self.confusion.total()
        if not count:
            return {}
        top1 = sum(images for (target, predicted), images in self.confusion.items() if target == predicted)
        return {"top1": 100 * top1 / count, "top5": 100 * self.hits.total() / count, "count": count}

    def write(self, folder: Path, classes: Sequence[str]) -> None:
        """Write per_class.csv, confusion.csv with a line for each pair that occurs, and min_prob.csv.

        Raises:
            OSError: they cannot be written.
        """
        size = max((1 + max(pair) for pair in self.confusion), default=0)
        table = np.zeros((3, max(size, len(classes))))  # images, predicted, correct
        for (target, predicted), number in self.confusion.items():
            table[0, target] += number
            table[1, predicted] += number
            table[2, target] += number * (target == predicted)
        figures = zip(*class_figures(*table), strict=True)
        lines: list[list[Any]] = [["class", "images", "top1", "top5", "precision", "recall", "f1"]]
        for label, (name, (recall, precision, f1)) in enumerate(zip(classes, figures, strict=False)):
            images = int(table[0, label])
            top5 = 100 * self.hits[label] / images if images else math.nan
            values = (recall, top5, precision, recall, f1)
            lines.append([name, images, *("" if math.isnan(each) else round(float(each), 2) for each in values)])
        atomic_write_text(folder / PER_CLASS, csv_text(lines))
        lines = [["target", "predicted", "count"]]
        for (target, predicted), number in sorted(self.confusion.items()):
            lines.append([classes[target], classes[predicted] if predicted < len(classes) else "", number])
        atomic_write_text(folder / CONFUSION, csv_text(lines))
        if rows := self.answered.rows():
            lines = [["min_prob", "answered", "accuracy"]]
            lines += [[f"{least:g}", *("" if each is None else round(each, 2) for each in row)] for least, *row in rows]
            atomic_write_text(folder / ANSWERED, csv_text(lines))
