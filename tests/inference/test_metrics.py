"""Figures of evaluations are those of scikit-learn, on any number of processes."""

import json
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from numpy.typing import NDArray

from tests.conftest import TINY, Refused
from tests.forked import launch_ranks, launch_series
from tests.harness import read_checkpoint, read_metrics
from utils.figures import better_network, better_value, is_better
from utils.inference.metrics import MacroAverages, Ranking
from utils.inference.per_class import class_figures

CPU = torch.device("cpu")


def figures(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Of batches of 7 images, on one process."""
    found: dict[str, float] = {}
    for metric in (each(logits.shape[1], CPU) for each in (MacroAverages, Ranking)):
        for batch, labels in zip(torch.split(logits, 7), torch.split(targets, 7), strict=True):
            metric.update(batch, batch.topk(min(5, batch.shape[1]), dim=1).indices, labels)
        found |= metric.compute(metric.state, len(targets))
    return found


def expected(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> dict[str, float]:
    """By scikit-learn, in percent."""
    predicted = logits.argmax(axis=1)
    found = {"macro_recall": reference.balanced_accuracy_score(targets, predicted)}
    for name, score in (("macro_precision", reference.precision_score), ("macro_f1", reference.f1_score)):
        found[name] = score(targets, predicted, average="macro", zero_division=0)
    if logits.shape[1] == 2:
        scores = logits[:, 1].astype(np.float64) - logits[:, 0]
        found["auc"] = reference.roc_auc_score(targets, scores)
        found["average_precision"] = reference.average_precision_score(targets, scores)
    return {name: 100 * value for name, value in found.items()}


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize(("num_classes", "seed"), [(2, 0), (2, 1), (3, 0), (12, 0), (40, 0)])
def test_they_are_scikit_learns(num_classes: int, seed: int) -> None:
    """Of uneven classes, of which some have no image or are never predicted, and of two with scores that are alike."""
    random = torch.Generator().manual_seed(seed)
    targets = (torch.rand(61, generator=random) ** 2 * num_classes).long()
    logits = torch.randn(61, num_classes, generator=random) + torch.eye(num_classes)[targets]
    if num_classes == 2:
        logits[:, 1] = logits[:, 0] + (logits[:, 1] - logits[:, 0]).mul(2).floor() / 2 + 0.25
    found = figures(logits, targets)
    assert found == pytest.approx(expected(logits.numpy(), targets.numpy()), abs=1e-9)


def test_a_class_without_images_or_predictions() -> None:
    recall, precision, f1 = class_figures(*np.array([[4.0, 0, 0, 2], [3, 1, 0, 0], [3, 0, 0, 0]]))
    assert recall.tolist() == pytest.approx([75, np.nan, np.nan, 0], nan_ok=True)
    assert precision.tolist() == pytest.approx([100, 0, np.nan, 0], nan_ok=True)
    assert f1.tolist() == pytest.approx([600 / 7, 0, np.nan, 0], nan_ok=True)


def test_a_score_that_is_not_a_number_is_the_lowest() -> None:
    logits = torch.tensor([[0.0, 1], [0, -1], [torch.nan, 0], [0, torch.inf]])
    assert figures(logits, torch.tensor([1, 0, 0, 1]))["auc"] == 100
    assert figures(logits, torch.tensor([0, 0, 1, 1]))["auc"] == 50
    assert "auc" not in figures(logits, torch.tensor([1, 1, 1, 1]))


@pytest.mark.parametrize(
    ("name", "value", "other", "better"),
    [
        ("top1", 50.0, 40.0, True), ("top1", 40.0, 40.0, False), ("loss", 1.0, 2.0, True), ("loss", 2.0, 1.0, False),
        ("loss", float("nan"), 2.0, False), ("loss", 2.0, float("nan"), True), ("auc", None, 1.0, False),
        ("auc", 0.0, None, True), ("own", 2.0, 1.0, True), ("loss", float("nan"), None, True),
        ("loss", float("nan"), float("nan"), False), ("loss", None, None, False),
    ],
)  # fmt: skip
def test_which_value_is_better(name: str, value: float | None, other: float | None, better: bool) -> None:
    assert is_better(name, value, other) is better


def test_which_network_is_better() -> None:
    result = {"val/top1": 50.0, "val/ema_top1": 60.0, "val/loss": 1.0, "val/ema_loss": 2.0, "val/auc": 5.0}
    found = [better_network(result, name) for name in ("top1", "loss", "auc", "top5")]
    assert found == ["model_ema", "model", "model", "model"]


@pytest.fixture
def two_classes(data: Path, tmp_path: Path) -> Path:
    """The fixture `data` without green, and few red ones in train/."""
    for split in ("train", "val"):
        for name in ("blue", "red"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            images = sorted((data / split / name).iterdir())
            for path in images[: 5 if (split, name) == ("train", "red") else None]:
                (tmp_path / "data" / split / name / path.name).symlink_to(path)
    return tmp_path / "data"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(), (2, 3)], ids=["alone", "several"])
def test_the_best_epoch_by_another_figure(two_classes: Path, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """best.pt, the network that is evaluated, the lines and the files follow it, also over a resume."""
    out = tmp_path / "run"
    flags = ("--data-dir", two_classes, *TINY, "--lr", 0.1, "--batch-size", 6, "--ema-decay", 0.7, "--output-dir", out)
    (tmp_path / "one" / "val").mkdir(parents=True)
    (tmp_path / "one" / "val" / "red").symlink_to(two_classes / "val" / "red")
    first, resumed, evaluated, of_one = launch_series(
        (*flags, "--epochs", 2, "--best-by", "loss"),
        (*flags, "--epochs", 4, "--best-by", "auc"),
        (*flags, "--evaluate", "--report"),
        (*flags, "--evaluate", "--report", "--data-dir", tmp_path / "one", "--resume", out / "best.pt",
         "--output-dir", tmp_path / "of_one"),
    )  # fmt: skip
    assert [done.status for done in (first, resumed, evaluated, of_one)] == [0] * 4, (first, resumed, evaluated, of_one)
    assert "AUC" not in json.loads((tmp_path / "of_one" / "report.json").read_text())["source"]
    records = [record for record in read_metrics(out) if "val/top1" in record]
    losses = [value for record in records[:2] if (value := better_value(record, "loss")) is not None]
    assert f"  best loss {min(losses):.4f}  " in first.out
    areas = [value for record in records[2:] if (value := better_value(record, "auc")) is not None]
    best = read_checkpoint(out, "best.pt")["best"]
    assert (best["by"], best["value"], best["epoch"]) == ("auc", max(areas), 3 + areas.index(max(areas)))
    assert f"AUC {records[2]['val/auc']:.2f} %" in resumed.out
    assert "AUC" not in first.out
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["best_by"], summary["best_value"], summary["best_top1"]) == ("auc", max(areas), best["top1"])
    result = json.loads((out / "evaluation.json").read_text())
    better = better_network(result, "auc", prefix="")
    shown = json.loads((out / "report.json").read_text())["source"]
    assert (shown["network"], shown["AUC"]) == (better, f"{max(result['auc'], result['ema_auc']):.2f} %")

    for processes in numbers:
        ranks = launch_ranks(*flags, "--evaluate", processes=processes)
        assert {done.status for done in ranks} == {0}, ranks
        same = json.loads((out / "evaluation.json").read_text())
        names = [name for name in result if not name.endswith("loss")]
        assert {name: same[name] for name in names} == {name: result[name] for name in names}


def test_a_figure_that_evaluations_would_not_have(
    data: Path, two_classes: Path, tmp_path: Path, refused: Refused
) -> None:
    flags = (*TINY, "--batch-size", 6, "--output-dir", tmp_path / "run")
    refused("--data-dir", data, *flags, "--best-by", "auc")(
        "--best-by auc: is of two classes, and the network has 3 classes; give macro_recall or another figure"
    )
    refused("--data-dir", data, *flags, "--best-by", "top2")("'top2' is not one of top1, top5, loss, macro_recall")
    assert not (tmp_path / "run").exists()
