"""Which validation images a network gets wrong where an image has any number of classes."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from utils.data.images.manifest import Manifest
from utils.data.splits.selection import create_targets
from utils.distributed.group import DistEnv
from utils.inference.mistakes import NUM_WORST, Mistakes, Wrong
from utils.options.resolved import ResolvedConfig

NONE = "nothing"  # where no class is meant


class MultilabelMistakes(Mistakes):
    """As `Mistakes`. A class counts as predicted from a probability of 0.5 on.

    A class is confused with another where an image has the first, which is not predicted, and the second is.
    """

    def __init__(self, config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
        super().__init__(config, manifest, env)
        self._targets = create_targets(config, manifest, env)

    def add(self, images: Tensor, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        indices = self._next_indices(targets)
        expected = self._targets(targets)
        losses = binary_cross_entropy_with_logits(logits, expected, reduction="none").mean(dim=1)
        losses = losses.nan_to_num(nan=torch.inf)
        probabilities = logits.sigmoid().nan_to_num(nan=0.0)
        has, says = expected.bool(), probabilities >= 0.5
        self._found.append(torch.stack([has, says]).cpu().numpy())
        for at in losses.topk(min(NUM_WORST, len(losses))).indices.tolist():
            if not torch.equal(has[at], says[at]):
                added, missed = (says[at] & ~has[at]).nonzero()[:, 0], (has[at] & ~says[at]).nonzero()[:, 0]
                mapped = [int(added[probabilities[at][added].argmax()])] if len(added) else []
                mapped += [int(missed[probabilities[at][missed].argmin()])] if len(missed) else []
                of_wrong = probabilities[at][added]
                of_target = probabilities[at][has[at]]
                self._worst.append(
                    Wrong(
                        float(losses[at]), int(indices[at]), self._names(has[at]), self._names(says[at]),
                        float(of_wrong.max()) if len(of_wrong) else 0.0,
                        float(of_target.min()) if len(of_target) else 0.0, images[at].cpu(),
                        tuple(mapped),
                    )
                )  # fmt: skip
        self._keep_worst()

    def _summarize(
        self, found: list[NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Counter[tuple[int, int]]]:
        has, says = np.concatenate(found, axis=1)
        # Exact up to 2**24 images of a pair; a product of integers is not BLAS's.
        confused = (has & ~says).T.astype(np.float32) @ (says & ~has).astype(np.float32)
        pairs = {(int(a), int(b)): int(confused[a, b]) for a, b in zip(*np.nonzero(confused), strict=True)}
        count = len(self._classes)
        return has.sum(axis=0)[:count], (has & says).sum(axis=0)[:count], Counter(pairs)

    def _matrix(self, correct: NDArray[np.int64], pairs: Counter[tuple[int, int]]) -> list[list[int]]:
        return []  # an image has no one class

    def _label(self, label: int) -> str:
        assert self._manifest.label_sets is not None
        return self._names(torch.from_numpy(self._manifest.label_sets[label]))

    def _names(self, of_classes: Tensor) -> str:
        return ", ".join(self._class(at) for at in of_classes.nonzero()[:, 0].tolist()) or NONE


def create_mistakes(config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> Mistakes:
    """For the task of the run."""
    kind = MultilabelMistakes if config.task == "multilabel" else Mistakes
    return kind(config, manifest, env)
