"""Figures, thresholds and tables of images with any number of classes."""

import itertools

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from numpy.typing import NDArray

from utils.figures import THRESHOLDS
from utils.inference.multilabel import MULTILABEL_METRICS, MeanAveragePrecision, fit_threshold
from utils.inference.predictions import MultilabelColumns, Rows
from utils.targets import Targets

CPU = torch.device("cpu")


def draw(num_images: int, num_classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, some of them alike, and targets, of which the last class has none."""
    random = torch.Generator().manual_seed(seed)
    targets = (torch.rand(num_images, num_classes, generator=random) < 0.3).float()
    targets[:, -1] = 0
    logits = (torch.randn(num_images, num_classes, generator=random) + targets).mul(4).round() / 4
    return logits, targets


def figures(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Of batches of 7 images, on one process."""
    found: dict[str, float] = {}
    for metric in (each(logits.shape[1], CPU) for each in MULTILABEL_METRICS):
        for batch, labels in zip(torch.split(logits, 7), torch.split(targets, 7), strict=True):
            metric.update(batch, batch.topk(1, dim=1).indices, labels)
        found |= metric.compute(metric.state, len(targets))
    return found


@pytest.mark.parametrize(("num_classes", "seed"), [(3, 0), (5, 1), (40, 2)])
def test_figures_are_scikit_learns(num_classes: int, seed: int) -> None:
    logits, targets = draw(61, num_classes, seed)
    found, answers = figures(logits, targets), (logits >= 0).numpy()
    known = targets.any(0).numpy()
    used = known | answers.any(axis=0)  # a class that is in no image and in no answer does not count
    expected = {
        "map": reference.average_precision_score(targets.numpy()[:, known], logits.numpy()[:, known], average="macro"),
        "micro_f1": reference.f1_score(targets, answers, average="micro"),
        "macro_f1": reference.f1_score(targets[:, used], answers[:, used], average="macro", zero_division=0),
        "macro_precision": reference.precision_score(
            targets[:, used], answers[:, used], average="macro", zero_division=0
        ),
        "macro_recall": reference.recall_score(targets[:, known], answers[:, known], average="macro"),
    }
    percent = {name: 100 * value for name, value in expected.items()}
    assert {name: found[name] for name in expected} == pytest.approx(percent, abs=1e-9)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), targets.double())
    assert found["loss"] == pytest.approx(losses.item(), rel=1e-6)


def best_f1(scores: NDArray[np.float32], targets: NDArray[np.float32], threshold: float) -> float:
    answers = 1 / (1 + np.exp(-scores.astype(np.float64))) >= threshold
    return float(reference.f1_score(targets, answers, zero_division=0))


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_is_better(seed: int) -> None:
    logits, targets = (each.numpy()[:, 0] for each in draw(30, 3, seed))
    logits = logits.round()  # many are alike
    found = fit_threshold(logits, targets)
    values = sorted({*(1 / (1 + np.exp(-logits.astype(np.float64)))), 0.0, 1.0})
    others = [*values, *((a + b) / 2 for a, b in itertools.pairwise(values))]
    assert best_f1(logits, targets, found) == pytest.approx(max(best_f1(logits, targets, each) for each in others))


def test_thresholds_of_a_class_without_images_and_of_scores_that_are_no_numbers() -> None:
    assert fit_threshold(np.array([1.0, 2.0]), np.zeros(2)) == 0.5
    metric = MeanAveragePrecision(2, CPU)
    metric.update(torch.tensor([[torch.nan, 3.0], [torch.inf, -3]]), torch.tensor([[0], [0]]), torch.eye(2).flip(1))
    found = metric.compute(metric.state, 2)
    assert found["map"] == 100
    assert found[THRESHOLDS] == [pytest.approx(0.5), pytest.approx(0.5)]


def test_labels_stand_for_sets() -> None:
    sets = np.array([[True, False], [True, True], [False, False]])
    targets = Targets(3, sets)
    assert targets(torch.tensor([2, 1])).tolist() == [[0, 0, 0], [1, 1, 0]]
    assert (targets.task, Targets(3).task) == ("multilabel", "multiclass")
    assert Targets(3)(torch.tensor([2, 1])).tolist() == [2, 1]


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_a_table_has_the_classes_and_a_column_of_each(format: str) -> None:
    columns = MultilabelColumns(
        format=format,  # type: ignore[arg-type]
        classes=("a", "b|c"), output_type="prob", topk=3, has_targets=False, thresholds=[0.25, 0.5, 0.5],
    )  # fmt: skip
    scores = np.array([[0.25, 0.75, 1], [0.125, 0.25, 1], [0, 0, 0]], dtype=np.float32)
    paths, nothing = ["1.jpg", "2.jpg", "3.jpg"], np.zeros((3, 3), np.int64)
    rows = Rows(paths, nothing, scores, nothing[0], [None, None, "bad"])
    text = (columns.heading() + columns.encode(rows)).decode().splitlines()
    assert (
        text
        == {
            "csv": [
                "path,labels,prob_a,prob_b|c,error",
                "1.jpg,a|b|c,0.25,0.75,",
                "2.jpg,,0.125,0.25,",
                "3.jpg,,,,bad",
            ],
            "jsonl": [
                '{"path": "1.jpg", "labels": "a|b|c", "prob_a": 0.25, "prob_b|c": 0.75, "error": null}',
                '{"path": "2.jpg", "labels": "", "prob_a": 0.125, "prob_b|c": 0.25, "error": null}',
                '{"path": "3.jpg", "labels": null, "prob_a": null, "prob_b|c": null, "error": "bad"}',
            ],
        }[format]
    )
