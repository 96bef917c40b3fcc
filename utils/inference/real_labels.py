"""`--real-labels`: several right labels an image, such as ImageNet's ReaL labels (arXiv:2006.07159)."""

import itertools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from utils.data.formats.label_rows import read_label_sets
from utils.data.formats.tables import is_table
from utils.data.images.manifest import Manifest
from utils.errors import UserError, some
from utils.inference.metrics import EvalMetric
from utils.text import count

_NUMBERED = re.compile(r"_(\d{8})\.\w+$")  # of ImageNet's validation images, from 1 on


class RealAccuracy(EvalMetric):
    """Share of the images of which a right label is the likeliest, or among the five likeliest.

    Images without a right label do not count.

    Args:
        answers: which labels are right, for this rank's images in their order: bool (N, num_classes), on the CPU.
    """

    def __init__(self, answers: Tensor, device: torch.device) -> None:
        self.state = torch.zeros(3, dtype=torch.float64, device=device)
        self._answers, self._done = answers, 0

    def update(self, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        answers = self._answers[self._done : self._done + len(targets)].to(logits.device)
        self._done += len(targets)
        hits = answers.gather(1, predicted)
        self.state[0] += hits[:, 0].sum()
        self.state[1] += hits.any(dim=1).sum()
        self.state[2] += answers.any(dim=1).sum()

    def compute(self, state: Tensor, num_images: int) -> dict[str, float]:
        top1, top5, labeled = state.tolist()
        return {"real_top1": 100 * top1 / labeled, "real_top5": 100 * top5 / labeled, "real_count": labeled}


def read_real_labels(path: Path, manifest: Manifest, num_classes: int) -> NDArray[np.bool_]:
    """Which labels are right for each image: bool (num_images, num_classes).

    Args:
        num_classes: outputs of the network, at least one for each class.
        path: a JSON list with a list of numbers for each of ImageNet's validation images, as `real.json`; or a label
            file, whose rows have any number of labels, divided by `|`, and whose files are found by their names.

    Raises:
        UserError: it cannot be read, lacks an image, has a label that is no class, or names two images alike.
    """
    if manifest.images is None:
        raise UserError(f"--real-labels {path}: synthetic images have no names; leave it out")
    names = [os.path.basename(manifest.name(index)) for index in range(len(manifest))]
    sets = _of_rows(path, manifest) if is_table(path.name) else _of_json(path, names)
    if len(set(names)) < len(names):
        raise UserError(
            f"--real-labels {path}: two images of the split have the name {_first_twice(names)}, by which labels are "
            "found; rename one"
        )
    answers = np.zeros((len(manifest), num_classes), dtype=bool)
    if missing := [name for name in names if name not in sets]:
        raise UserError(
            f"--real-labels {path}: lacks {count(len(missing), 'image')} ({some(missing)}); give the file of this split"
        )
    for row, name in enumerate(names):
        for label in sets[name]:
            if not 0 <= label < len(manifest.classes):
                raise UserError(
                    f"--real-labels {path}: has label {label} for {name}, but there are "
                    f"{count(len(manifest.classes), 'class')}; give the file of this data set"
                )
        answers[row, sets[name]] = True
    if not answers.any():
        raise UserError(f"--real-labels {path}: has no label for any image; give the file of this split")
    return answers


def _first_twice(names: list[str]) -> str:
    ordered = sorted(names)
    return next(one for one, other in itertools.pairwise(ordered) if one == other)


def _of_json(path: Path, names: list[str]) -> Mapping[str, list[int]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no JSON"
        raise UserError(f"--real-labels {path}: cannot be read ({reason}); give real.json or a label file") from None
    if not isinstance(found, list) or not all(
        isinstance(each, list) and all(isinstance(label, int) for label in each) for each in found
    ):
        raise UserError(f"--real-labels {path}: no list of lists of numbers; give real.json or a label file")
    numbers = {name: int(match[1]) for name in names if (match := _NUMBERED.search(name))}
    return {name: found[number - 1] for name, number in numbers.items() if 0 < number <= len(found)}


def _of_rows(path: Path, manifest: Manifest) -> Mapping[str, list[int]]:
    known = {name: label for label, name in enumerate(manifest.classes)}
    sets: dict[str, list[int]] = {}
    for line, file, labels in read_label_sets(path):
        if unknown := [name for name in labels if name not in known]:
            raise UserError(
                f"--real-labels {path}: line {line} has the label {unknown[0]!r}, which is none of the "
                f"{count(len(known), 'class')}; correct it"
            )
        sets[os.path.basename(file)] = [known[name] for name in labels]
    return sets
