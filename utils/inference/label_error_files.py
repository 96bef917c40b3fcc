"""What is written of wrong labels: a table of all images, a page with the worst, and a label file to train on."""

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from utils.data.formats.shards import ShardTable
from utils.data.images.manifest import Manifest
from utils.data.reading.decoding import upright_rgb
from utils.data.reading.reader import read_image
from utils.errors import readable
from utils.files import atomic_write_text
from utils.inference.predictions import csv_text
from utils.report.label_page import Doubt, render_label_page
from utils.report.pictures import encode_picture

TABLE, PAGE, CLEANED = "label_errors.csv", "label_errors.html", "cleaned.csv"
RESULTS = (TABLE, PAGE, CLEANED)
NUM_PICTURES = 100


@dataclasses.dataclass(frozen=True)
class Findings:
    """What is known of the labels of images.

    Attributes:
        images: with one label each.
        probabilities: of each class, float32 (num_images, num_classes), by networks that have not seen the image.
        scores: of the given labels, 0 to 1, the most doubtful first: float64 (num_images,).
        is_issue: whether a label counts as wrong: (num_images,).
    """

    images: Manifest
    probabilities: NDArray[np.float32]
    scores: NDArray[np.float64]
    is_issue: NDArray[np.bool_]

    @property
    def proposed(self) -> NDArray[np.int64]:
        """The most likely class of each image: (num_images,)."""
        proposed: NDArray[np.int64] = self.probabilities.argmax(axis=1).astype(np.int64)
        return proposed

    @property
    def order(self) -> NDArray[np.int64]:
        """The images, the lowest score first; equal ones in the order of the data set."""
        order: NDArray[np.int64] = np.argsort(self.scores, kind="stable")
        return order


def write_results(findings: Findings, folder: Path) -> None:
    """Write `TABLE` and `PAGE`.

    Raises:
        OSError: they cannot be written.
    """
    images, proposed, classes = findings.images, findings.proposed, findings.images.classes
    rows: list[list[Any]] = [
        ["file", "label", "proposed", "label_prob", "proposed_prob", "score", "is_issue"],
    ]
    for index in findings.order.tolist():
        label, other = int(images.labels[index]), int(proposed[index])
        of_label, of_other = (findings.probabilities[index, each] for each in (label, other))
        score, is_issue = f"{findings.scores[index]:.6g}", str(bool(findings.is_issue[index])).lower()
        rows.append([_path(images, index), classes[label], classes[other], of_label, of_other, score, is_issue])
    atomic_write_text(folder / TABLE, csv_text(rows))
    atomic_write_text(folder / PAGE, _page(findings))


def _page(findings: Findings) -> str:
    images, proposed = findings.images, findings.proposed
    names = tuple(map(readable, images.classes))
    found = [index for index in findings.order.tolist() if findings.is_issue[index]]
    pairs = Counter((names[int(images.labels[index])], names[int(proposed[index])]) for index in found)
    of_class = Counter(names[int(images.labels[index])] for index in found)
    doubts = []
    for index in found[:NUM_PICTURES]:
        label, other = int(images.labels[index]), int(proposed[index])
        of_label, of_other = (float(findings.probabilities[index, each]) for each in (label, other))
        doubts.append(
            Doubt(readable(_path(images, index)), names[label], names[other], of_label, of_other, _jpeg(images, index))
        )
    counts = dict(zip(names, map(int, images.class_counts()), strict=True))
    return render_label_page(len(images), len(found), doubts, pairs, of_class, counts)


def _jpeg(images: Manifest, index: int) -> str:
    """A small picture of an image; "" where Pillow cannot decode it, though its loader can."""
    try:
        return encode_picture(upright_rgb(read_image(images.record(index))))
    except Exception:  # Pillow's are of many kinds
        return ""


def write_cleaned(findings: Findings, val: Manifest | None, folder: Path, relabel: bool) -> list[str]:
    """Write `CLEANED`, which `--train-data` takes: the images without those whose label counts as wrong.

    A class that would have no image left keeps all: the classes of `val` and of a run do not become fewer.

    Args:
        findings: of images that are files.
        val: the data's own validation images, whose labels stay; None for none.
        relabel: whether images with a wrong label are kept, with the proposed one.

    Returns:
        The names of the classes that keep all.

    Raises:
        OSError: it cannot be written.
    """
    images, proposed = findings.images, findings.proposed
    left = np.where(findings.is_issue, proposed if relabel else -1, images.labels)
    kept = np.setdiff1d(images.labels, left)
    wrong = findings.is_issue & ~np.isin(images.labels, kept)
    # The groups of all rows are read, and the weights of train.
    has_groups = images.groups is not None and (val is None or val.groups is not None)
    extra = (["split"] if val else []) + (["group"] if has_groups else [])
    extra += [] if images.weights is None else ["weight"]
    rows: list[list[Any]] = [["file", "label", *extra]]

    def add(manifest: Manifest, index: int, label: int, split: str) -> None:
        cells = {"split": split}
        cells["group"] = str(manifest.groups[index]) if manifest.groups is not None else ""
        cells["weight"] = f"{manifest.weights[index]:.9g}" if manifest.weights is not None else ""
        rows.append([_path(manifest, index), manifest.classes[label], *(cells[name] for name in extra)])

    for index, is_wrong in enumerate(wrong.tolist()):
        if relabel or not is_wrong:
            add(images, index, int((proposed if is_wrong else images.labels)[index]), "train")
    for index in range(0 if val is None else len(val)):
        assert val is not None, "has images"
        add(val, index, int(val.labels[index]), "val")
    atomic_write_text(folder / CLEANED, csv_text(rows))
    return [images.classes[label] for label in kept.tolist()]


def _path(images: Manifest, index: int) -> str:
    """Where an image is: an absolute path, or `SHARD:KEY`."""
    name = images.record(index).name
    return name if isinstance(images.images, ShardTable) else os.path.abspath(name)
