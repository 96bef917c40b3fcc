"""Evaluations on other images: classes that val lacks, `--eval-classes present`, and `--real-labels`."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import TINY, write_data
from tests.forked import launch_ranks, launch_series
from tests.harness import assert_refused, read_metrics
from utils.data.formats.folder import scan, scan_splits
from utils.errors import UserError
from utils.inference.real_labels import RealAccuracy, read_real_labels

NAMES = ("top1", "macro_recall", "loss", "count")


def evaluation(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


@pytest.mark.slow  # several runs
@pytest.mark.dist
def test_a_split_without_some_classes(tmp_path: Path) -> None:
    """Train with all classes; evaluate on fewer, which keep the checkpoint's numbers."""
    root, other, run = write_data(tmp_path / "data", val=(5, 0, 6)), tmp_path / "other", tmp_path / "run"
    shutil.rmtree(root / "val" / "green")
    shutil.copytree(root / "val" / "red", other / "val" / "red")
    answers = {
        path.name: ("green|red" if at % 2 else "") for at, path in enumerate(sorted((root / "val").rglob("*.jpg")))
    }
    (tmp_path / "real.csv").write_text("file,label\n" + "".join(f"{name},{label}\n" for name, label in answers.items()))
    trained, *ranks = (
        *launch_series(("--data-dir", root, *TINY, "--batch-size", 8, "--epochs", 1, "--output-dir", run)),
        *launch_ranks("--evaluate", "--resume", run / "last.pt", "--data-dir", root, "--output-dir", tmp_path / "two"),
    )
    flags = ("--evaluate", "--resume", run / "last.pt", "--workers", 1, "--data-dir")
    whole, part, present, real, wrong = launch_series(
        (*flags, root, "--output-dir", tmp_path / "whole"),
        (*flags, other, "--output-dir", tmp_path / "part"),
        (*flags, other, "--output-dir", tmp_path / "present", "--eval-classes", "present"),
        (*flags, root, "--output-dir", tmp_path / "real", "--real-labels", tmp_path / "real.csv"),
        (*flags, other, "--output-dir", tmp_path / "wrong", "--real-labels", tmp_path / "none.csv"),
    )
    assert [done.status for done in (trained, *ranks, whole, part, present, real)] == [0] * 7, (trained, part, real)
    assert "warning: 1 class without validation images (green): no figure says how it does" in trained.out
    last = read_metrics(run)[-1]
    assert [evaluation(tmp_path / "whole")[name] for name in NAMES] == [last[f"val/{name}"] for name in NAMES]
    assert evaluation(tmp_path / "two")["top1"] == last["val/top1"]
    found = evaluation(tmp_path / "part")
    assert found["count"] == 6
    only = evaluation(tmp_path / "present")
    assert (only["top1"], only["loss"], only["eval_classes"], only["count"]) == (100, 0, 1, 6)
    assert evaluation(tmp_path / "real")["real_count"] == 5
    assert_refused(wrong, f"{tmp_path / 'none.csv'}: cannot be read (No such file or directory)")


def test_real_accuracy() -> None:
    random = np.random.default_rng(0)
    logits, answers = torch.from_numpy(random.normal(size=(50, 8))), random.random((50, 8)) < 0.15
    metric = RealAccuracy(torch.from_numpy(answers), torch.device("cpu"))
    order = logits.argsort(dim=1, descending=True)
    for start in range(0, 50, 7):
        rows = slice(start, start + 7)
        metric.update(logits[rows], order[rows, :5], torch.zeros(len(logits[rows])))
    labeled = answers.any(axis=1)
    for name, k in (("real_top1", 1), ("real_top5", 5)):
        hits = [answers[row, order[row, :k]].any() for row in np.flatnonzero(labeled)]
        assert metric.compute(metric.state, 50)[name] == pytest.approx(100 * np.mean(hits))
    assert metric.compute(metric.state, 50)["real_count"] == labeled.sum()


def test_real_json_numbers_imagenets_images(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    for split in ("train", "val"):
        paths = sorted((tmp_path / "data" / split).rglob("*.jpg"), key=lambda path: path.name[::-1])
        for number, path in enumerate(paths, start=1):
            path.rename(path.with_name(f"ILSVRC2012_val_{number:08}.JPEG"))
    val = scan_splits(tmp_path / "data")[1]
    (tmp_path / "real.json").write_text(json.dumps([[number % 3, 2] if number % 5 else [] for number in range(1, 42)]))
    answers = read_real_labels(tmp_path / "real.json", val, 5)
    assert answers.shape == (41, 5)
    for row, name in enumerate(val.names()):
        number = int(name.partition("_val_")[2][:8])
        assert set(np.flatnonzero(answers[row])) == ({number % 3, 2} if number % 5 else set())
    (tmp_path / "real.json").write_text(json.dumps([[2**70]] * 41))
    with pytest.raises(UserError, match=f"has label {2**70} for ILSVRC2012_val_.*, but there are 3 classes"):
        read_real_labels(tmp_path / "real.json", val, 5)


MISTAKES = {
    "no list": ("{}", "no list of lists of numbers"),
    "no JSON": ("[[0]", r"cannot be read \(no JSON\)"),
    "too many brackets": ("[" * 100_000, r"cannot be read \(no JSON\)"),
    "too short": ("[[0]]", r"lacks 41 images \(blue-000.jpg, "),
    "a class too many": (
        "file,label\nblue-000.jpg,pink\n",
        "line 2 has the label 'pink', which is none of the 3 classes",
    ),
    "another split": ("file,label\nx.jpg,red\n", "lacks 41 images"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_in_real_labels(data: Path, tmp_path: Path, case: str) -> None:
    text, expected = MISTAKES[case]
    path = tmp_path / ("real.csv" if "file" in text else "real.json")
    path.write_text(text)
    with pytest.raises(UserError, match=expected):
        read_real_labels(path, scan(data, "val"), 3)
