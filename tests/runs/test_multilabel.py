"""Whole runs on images that have any number of classes: a table of labels, files, resume, predictions, exports."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as reference
from PIL import Image

from scripts import export, predict
from tests.conftest import TINY, assert_same_run
from tests.forked import launch_ranks, launch_series
from tests.harness import Finished, assert_refused, read_checkpoint, read_metrics
from utils.inference.weights import scale_thresholds

COLORS = ("red", "green", "blue")
FLAGS = (*TINY, "--epochs", 2, "--lr", 0.5, "--batch-size", 8, "--ema-decay", 0.8)


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are red, green and blue at the same time, or nothing, with train.csv, val.csv and all.csv."""
    root = tmp_path_factory.mktemp("colors")
    random = np.random.default_rng(0)
    rows: dict[str, list[str]] = {"train": [], "val": []}
    (root / "images").mkdir()
    for number in range(80 + 41):
        split = "train" if number < 80 else "val"
        has = random.random(3) < (0.6, 0.4, 0.2)
        pixels = random.integers(0, 90, (40, 44, 3)) + 140 * has
        Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"{number:03}.jpg")
        rows[split].append(f"{number:03}.jpg,{'|'.join(np.array(COLORS)[has])},g{number // 3}")
    for split, lines in rows.items():
        (root / f"{split}.csv").write_text("\n".join(["file,label,group", *lines]))
    (root / "all.csv").write_text("\n".join(["file,label,group", *rows["train"], *rows["val"]]))
    return root


def predictions(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.dist
def test_a_run_and_what_is_made_of_it(colors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training stops and goes on exactly; figures, thresholds, predictions and exports agree."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    mixed = ("--mixup", 0.2, "--cutmix", 1, "--loss", "asymmetric", "--class-weights", "auto", "--balance", 0.5)
    flags = ("--data-dir", colors, *FLAGS, *mixed, "--deterministic", "--report")
    stopped = (*flags, "--output-dir", cut, "--time-limit", 0.001)
    evaluate = ("--evaluate", "--output-dir", whole, "--workers", 1)
    done = launch_series((*flags, "--output-dir", whole), stopped, stopped, (*flags, "--output-dir", cut), evaluate)
    assert [run.status for run in done] == [0, 143, 143, 0, 0], done
    assert_same_run(whole, cut)
    sizes = r" classes  3, red \d+ to blue \d+ images, .* : 1; 0 to 3 an image, 1\.\d+ on average; weights in the loss "
    assert re.search(sizes, done[0].out)
    assert re.search(r"epoch 2/2  val mAP [\d.]+ %  micro F1 [\d.]+ %  loss [\d.]+  on 41 images  EMA mAP", done[0].out)
    assert "top-1" not in done[0].out
    config, summary = (json.loads((whole / name).read_text()) for name in ("config.json", "summary.json"))
    chosen = [config[name] for name in ("task", "loss", "label_smoothing", "best_by")]
    assert chosen == ["multilabel", "asymmetric", 0, "map"]
    assert (summary["best_by"], summary["best_top1"]) == ("map", None)
    best = read_checkpoint(whole, "best.pt")
    found = json.loads((whole / "evaluation.json").read_text())
    assert {f"val/{name}": found[name] for name in ("map", "micro_f1", "thresholds", "ema_thresholds")}.items() <= (
        best["result"].items()
    )
    assert all("val/thresholds" not in record for record in read_metrics(whole))
    check_predictions(colors, whole, tmp_path, best)
    check_report(whole)
    words = (whole, "--format", "onnx", "--int8", "--max-loss", 100, "--output-dir", tmp_path / "onnx")
    assert export.main(list(map(str, words))) == 0
    assert "41 images of" in (text := capsys.readouterr().out)
    assert "probabilities differ from torch's by at most" in text
    of_best = max(found["map"], found["ema_map"])  # which is exported
    assert f"calibrated on 76 of 80 training images; mAP on 41 validation images: {of_best:.2f} % in float32" in text


def check_predictions(colors: Path, run: Path, tmp_path: Path, best: dict[str, Any]) -> None:
    """The figures of the evaluation follow from the table, and its labels from the thresholds."""
    words = (run, colors / "images", "--output-dir", tmp_path / "predictions", "--no-ema", "--workers", 1)
    assert predict.main(list(map(str, words))) == 0
    of_name = {Path(row["path"]).name: row for row in predictions(tmp_path / "predictions")}
    with (colors / "val.csv").open(newline="") as file:
        rows = [(of_name[row["file"]], row["label"].split("|")) for row in csv.DictReader(file)]
    classes = sorted(COLORS)
    targets = np.array([[name in labels for name in classes] for _, labels in rows])
    scores = np.array([[float(row[f"prob_{name}"]) for name in classes] for row, _ in rows])
    assert best["result"]["val/map"] == pytest.approx(100 * reference.average_precision_score(targets, scores))
    assert best["result"]["val/micro_f1"] == pytest.approx(
        100 * reference.f1_score(targets, scores >= 0.5, average="micro", zero_division=0)
    )
    thresholds = scale_thresholds(best["result"]["val/thresholds"], best["temperature"].get("model", 1.0))
    for row, of_row in zip((row for row, _ in rows), scores, strict=True):
        expected = [name for name, score, least in zip(classes, of_row, thresholds, strict=True) if score >= least]
        assert row["labels"] == "|".join(expected)


def check_report(run: Path) -> None:
    content = json.loads((run / "report.json").read_text())
    assert [each["name"] for each in content["classes"]] == sorted(COLORS)
    worst = content["worst"][0]
    added, missed = (set(worst[name].split(", ")) - {"nothing"} for name in ("predicted", "target"))
    shown = [one["class"] for one in worst["heatmaps"]]
    assert [name in added for name in shown] + [name in missed for name in shown] in (
        [True, False], [False, True], [True, False, False, True]
    )  # fmt: skip
    assert set(worst["target"].split(", ")) | set(worst["predicted"].split(", ")) <= {*COLORS, "nothing"}
    assert (run / "report.html").is_file()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_figures_do_not_depend_on_the_number_of_processes(colors: Path, tmp_path: Path, processes: int) -> None:
    flags = ("--data-dir", colors, *FLAGS, "--output-dir", tmp_path / "run")
    (done,) = launch_series(flags)
    assert done.status == 0, done.err
    evaluate = ("--evaluate", "--resume", tmp_path / "run" / "best.pt", "--batch-size", 4, "--output-dir")
    (alone,) = launch_series((*evaluate, tmp_path / "1"))
    ranks = launch_ranks(*evaluate, tmp_path / "several", processes=processes)
    assert [run.status for run in (alone, *ranks)] == [0] * (processes + 1)
    one, several = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("1", "several"))
    assert one.pop("thresholds") == pytest.approx(several.pop("thresholds"), abs=1e-6)
    assert one.pop("ema_thresholds") == pytest.approx(several.pop("ema_thresholds"), abs=1e-6)
    numbers = {name: value for name, value in one.items() if isinstance(value, float)}
    assert numbers == pytest.approx({name: several[name] for name in numbers}, abs=1e-6)


@pytest.mark.slow  # quick: tests/data/formats/test_label_sets.py
def test_held_out_images_have_every_class(colors: Path, tmp_path: Path) -> None:
    """Without groups by the rarest class of an image; a rare combination of classes does not matter."""
    (tmp_path / "labels.csv").write_text((colors / "all.csv").read_text().replace("group", "camera"))
    (tmp_path / "images").symlink_to(colors / "images")
    flags = ("--data-dir", tmp_path, *FLAGS, "--epochs", 1, "--val-fraction", 0.2, "--output-dir", tmp_path / "run")
    alone, grouped = launch_series(flags, (*flags, "--val-group", "camera", "--output-dir", tmp_path / "grouped"))
    assert (alone.status, grouped.status) == (0, 0), (alone.err, grouped.err)
    held = re.search(r"(\d+) val \(the held-out part of train/, (\d+) to (\d+) of each class\)", alone.out)
    assert held, alone.out
    assert 10 < int(held[1]) < 40
    assert int(held[2]) > 0
    assert re.search(r"\d+ of 41 groups: ", grouped.out)


REFUSED = {
    "one class an image": (
        ("--task", "multiclass"),
        r"train\.csv: line \d+ has several labels \([\w|]+\) for \d+\.jpg; --task multiclass takes one: keep one",
    ),
    "a loss of one class": (("--loss", "cross-entropy"), "--loss cross-entropy with --task multilabel: is for another"),
    "a flag of such a loss": (("--focal", 2), "--focal 2 with --loss bce: not used; leave it out$"),
    "a figure of one class": (("--best-by", "top1"), "--best-by top1 with --task multilabel: there is no such figure"),
}


def test_refusals(colors: Path, tmp_path: Path) -> None:
    words = [("--data-dir", colors, *FLAGS, "--output-dir", tmp_path, *extra) for extra, _ in REFUSED.values()]
    for done, (_, message) in zip(launch_series(*words), REFUSED.values(), strict=True):
        assert_is_refused(done, message)
    of_one_class = ("--loader", "synthetic", *FLAGS, "--output-dir", tmp_path)
    asymmetric, figure = launch_series((*of_one_class, "--loss", "asymmetric"), (*of_one_class, "--best-by", "map"))
    assert_is_refused(asymmetric, "--loss asymmetric with --task multiclass: is for another task; give --loss cross")
    assert_is_refused(figure, "--best-by map with --task multiclass: there is no such figure; give top1")


def assert_is_refused(done: Finished, message: str) -> None:
    assert_refused(done, "")
    assert re.search(message, done.err.strip()), done.err


@pytest.mark.slow
def test_one_class_and_random_images(colors: Path, tmp_path: Path) -> None:
    """A question with yes and no, in a run with a report; and more classes than sets of them, of which none is read."""
    (tmp_path / "images").symlink_to(colors / "images")
    for split, names in (("train", range(16)), ("val", range(16, 24))):
        lines = [f"{at:03}.jpg,{'defect' if at % 3 else ''}" for at in names]
        (tmp_path / f"{split}.csv").write_text("\n".join(["file,label", *lines]))
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "images").symlink_to(colors / "images")
    for split, names in (("train", range(16)), ("val", range(16, 24))):
        lines = [f"{at:03}.jpg,{'a|b|c' if at % 2 else 'd|e|f'}" for at in names]
        (tmp_path / "wide" / f"{split}.csv").write_text("\n".join(["file,label", *lines]))
    one = ("--data-dir", tmp_path, "--task", "multilabel", "--report", "--output-dir", tmp_path / "one")
    wide = ("--data-dir", tmp_path / "wide", "--loader", "synthetic", "--output-dir", tmp_path / "sets")
    done = launch_series(*((*FLAGS, "--epochs", 1, *words) for words in (one, wide)))
    assert [run.status for run in done] == [0, 0], done
    assert "only one class" not in done[0].out


@pytest.mark.slow
def test_class_folders_as_questions_of_their_own(data: Path, tmp_path: Path) -> None:
    """Each image has the one class of its folder; what the loader gives is the same."""
    flags = ("--data-dir", data, *FLAGS, "--epochs", 1, "--output-dir", tmp_path)
    (done,) = launch_series((*flags, "--task", "multilabel"))
    assert done.status == 0, done.err
    assert "; 1 to 1 an image, 1 on average" in done.out
    assert read_checkpoint(tmp_path)["config"]["loss"] == "bce"
