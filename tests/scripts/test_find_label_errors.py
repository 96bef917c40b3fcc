"""scripts/find_label_errors.py: planted wrong labels, its files, its page in a browser, what train.py takes back."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts import find_label_errors, predict
from tests.browser import open_browser
from tests.conftest import CLASSES, TINY, Refused, write_images
from tests.contract import CONTRACT
from tests.forked import launch_series
from utils.data.formats.folder import scan, scan_splits
from utils.data.images.listing import load_listing
from utils.data.splits.selection import read_data
from utils.distributed.group import DistEnv
from utils.inference.label_error_files import Findings, write_cleaned, write_results
from utils.inference.label_errors import why_not_cleaned
from utils.options.config import TrainConfig

HOSTILE = "<img src=x onerror=alert(1)>'\"&"
FLAGS = (*TINY[:-4], "--device", "cpu", "--lr", 1, "--batch-size", 8, "--epochs", 12, "--train-crop", "squash")
WRONG = {"blue-002.jpg": "red", "green-011.jpg": "blue", "red-007.jpg": "green"}  # file -> label that it gets


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two folds of 60 photographs in a table, of which three have a wrong label; and of val, which has none."""
    pytest.importorskip("cleanlab", reason="pip install -r requirements-labels.txt")
    root = tmp_path_factory.mktemp("labels")
    write_images(root / "data" / "all", (20, 20, 20))
    paths = sorted((root / "data").rglob("*.jpg"))
    names = [path.relative_to(root / "data") for path in paths]
    rows = [f"{name},{WRONG.get(name.name, name.parent.name)},g{at}" for at, name in enumerate(names)]
    (root / "data" / "labels.csv").write_text("\n".join(["file,label,group", *rows]))
    flags = ("--data-dir", root / "data", *FLAGS)
    done = launch_series(*((*flags, "--fold", f"{k}/2", "--output-dir", root / f"run-{k}") for k in (1, 2)))
    assert [each.status for each in done] == [0, 0], done
    return [root / "run-1", root / "run-2"]


@pytest.mark.slow  # two trainings
def test_planted_errors_are_found(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, flags = tmp_path / "out", ("--device", "cpu", "--workers", "1")
    assert find_label_errors.main([*map(str, reversed(runs)), "--output-dir", str(out), *flags]) == 0
    printed = capsys.readouterr().out
    rows = table(out / "label_errors.csv")
    assert list(rows[0]) == CONTRACT["files"]["label_errors.csv"]
    assert {(Path(row["file"]).name, row["label"]) for row in rows[:3]} == set(WRONG.items())
    issues = [Path(row["file"]).name for row in rows if row["is_issue"] == "true"]
    assert 2 <= len(issues) <= 3, "confident learning is careful with few images"
    assert set(issues) <= WRONG.keys()
    assert f"{len(issues)} of 60 labels may be wrong" in printed
    agree = sum(row["label"] == row["proposed"] for row in rows)
    assert f"; top-1 of the networks out of fold {100 * agree / 60:.2f} %" in printed
    assert all(row["proposed"] == Path(row["file"]).parent.name for row in rows[:3])
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores)
    cleaned = table(out / "cleaned.csv")
    assert list(cleaned[0]) == ["file", "label", "group"]
    assert len(cleaned) == 60 - len(issues)
    assert {Path(row["file"]).name for row in cleaned}.isdisjoint(issues)

    # Each image was judged by the run that had not seen it, with the logits of predict.py.
    by_file = {row["file"]: row for row in rows}
    for run in runs:
        words = [str(run), *by_file, "--output-dir", str(tmp_path / run.name), "--output-type", "logit", "--topk", "3"]
        assert predict.main([*words, *flags]) == 0
    answers = [{row["path"]: row for row in table(tmp_path / run.name / "predictions.csv")} for run in runs]
    for number, run in enumerate(runs):
        held_out = [name.partition("/")[2] for name in load_listing(run, "val")]
        assert len(held_out) == 30
        for name in held_out:
            row = next(row for file, row in by_file.items() if file.endswith(name))
            answer = answers[number][row["file"]]
            assert row["proposed"] == answer["label"]
            powers = np.exp([float(answer[name]) for name in ("logit", "logit_2", "logit_3")])
            assert float(row["proposed_prob"]) == pytest.approx(powers[0] / powers.sum(), rel=1e-4)

    assert find_label_errors.main([*map(str, runs), "--output-dir", str(out), "--relabel", *flags]) == 0
    relabeled = table(out / "cleaned.csv")
    right = [row["label"] == Path(row["file"]).parent.name for row in relabeled]
    assert (len(right), right.count(False)) == (60, 3 - len(issues))
    again = ("--data-dir", runs[0].parent / "data", *FLAGS, "--epochs", 1, "--train-data", out / "cleaned.csv")
    (done,) = launch_series((*again, "--val-fraction", 0.2, "--output-dir", tmp_path / "again"))
    assert done.status == 0, done.err
    assert "classes  3, " in done.out
    assert not (tmp_path / "again" / "digests.json").exists(), "the groups divide it"


@pytest.mark.slow
def test_data_that_changed_is_refused(runs: list[Path], tmp_path: Path, refused: Refused) -> None:
    """A label that was corrected after one of the trainings, and a run that holds other images."""
    labels = runs[0].parent / "data" / "labels.csv"
    text = labels.read_text()
    flags = (*runs, "--output-dir", tmp_path / "out", "--device", "cpu", "--workers", "1")
    check = refused(*flags, main=find_label_errors.main, program="find_label_errors.py")
    labels.write_text(text.replace(",red,", ",blue,", 1))
    check(f"RUN {runs[0]}: its images or labels have changed since; train the folds again")
    labels.unlink()
    check(f"--data-dir {labels.parent}: ")
    labels.write_text(text)


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """With names that are HTML, at two widths, light and dark."""
    write_images(tmp_path / "train", (4, 4, 4))
    (tmp_path / "train" / "red").rename(tmp_path / "train" / HOSTILE)
    images = scan(tmp_path, "train")
    random = np.random.default_rng(0)
    probabilities = random.dirichlet(np.ones(3), size=12).astype(np.float32)
    is_issue = probabilities.argmax(1) != images.labels
    scores = probabilities[np.arange(12), images.labels].astype(np.float64)
    write_results(Findings(images, probabilities, scores, is_issue), tmp_path)
    with open_browser(tmp_path / "profile") as browser:
        for width in (400, 1600):
            for scheme in ("light", "dark"):
                browser.open(tmp_path / "label_errors.html", width, scheme)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                assert browser.evaluate("document.images.length") == is_issue.sum()
                shown = "[...document.images].every(each => each.complete && each.naturalWidth > 0)"
                assert browser.evaluate(shown), "a picture cannot be shown"
                assert HOSTILE in browser.evaluate("document.body.textContent")
                assert browser.problems() == []
                assert browser.requests() == [(tmp_path / "label_errors.html").as_uri()]


def test_the_label_file_has_val_and_weights(tmp_path: Path) -> None:
    """Where the data has validation images of its own, which keep their labels."""
    write_images(tmp_path / "train", (2, 2, 2))
    write_images(tmp_path / "val", (1, 1, 1))
    train, val = scan_splits(tmp_path, False, "val", "train")
    train = dataclasses.replace(train, weights=np.arange(6) / 3)
    is_issue = np.arange(6) == 1
    findings = Findings(train, np.eye(3, dtype=np.float32)[[0, 2, 1, 1, 2, 2]], np.ones(6), is_issue)
    write_cleaned(findings, val, tmp_path, relabel=False)
    rows = table(tmp_path / "cleaned.csv")
    assert [row["split"] for row in rows] == ["train"] * 5 + ["val"] * 3
    assert [row["weight"] for row in rows] == ["0", "0.666666667", "1", "1.33333333", "1.66666667", "", "", ""]
    assert set(CONTRACT["files"]["cleaned.csv"]) - set(rows[0]) == {"group"}
    write_cleaned(findings, val, tmp_path, relabel=True)
    assert [row["label"] for row in table(tmp_path / "cleaned.csv")][:3] == ["blue", CLASSES[2], "green"]


@pytest.mark.parametrize("relabel", [False, True])
def test_no_class_loses_all_its_images(tmp_path: Path, relabel: bool) -> None:
    """Such a file would be of other classes. A file's name may have the end of a line in it."""
    write_images(tmp_path / "train", (2, 3, 2))
    first = min((tmp_path / "train" / CLASSES[0]).iterdir())
    first.rename(first.with_name("a\rb\nc.jpg"))
    images = scan(tmp_path, "train")
    is_issue = np.arange(7) < 3
    findings = Findings(images, np.eye(3, dtype=np.float32)[[2] * 7], np.ones(7), is_issue)
    assert write_cleaned(findings, None, tmp_path, relabel) == [CLASSES[0]]
    expected = [0, 0, *([2] if relabel else []), 1, 1, 2, 2]
    assert [row["label"] for row in table(tmp_path / "cleaned.csv")] == [CLASSES[label] for label in expected]
    config = TrainConfig(data_dir=tmp_path, train_data="cleaned.csv", val_fraction=0.2)
    read = read_data(config, DistEnv.single(torch.device("cpu")))["train"]
    assert (len(read), read.classes) == (len(expected), images.classes)


@pytest.mark.slow
def test_what_is_odd_is_said(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = (runs[1] / "summary.json").read_text()
    (runs[1] / "summary.json").unlink()
    assert find_label_errors.main([*map(str, runs), "--output-dir", str(tmp_path), "--device", "cpu"]) == 0
    (runs[1] / "summary.json").write_text(summary)
    out = capsys.readouterr().out
    assert f"warning: RUN {runs[1]}: its run has not ended; its part is judged by the network of epoch " in out
    assert f"warning: RUN {runs[0]}" not in out


@pytest.mark.slow
def test_images_that_have_moved(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, flags = runs[0].parent / "data", (*map(str, runs), "--device", "cpu", "--output-dir")
    assert find_label_errors.main([*flags, str(tmp_path / "here")]) == 0
    data.rename(tmp_path / "moved")
    try:
        assert find_label_errors.main([*flags, str(tmp_path / "there")]) == 2
        assert f"--data-dir {data}: no such folder" in capsys.readouterr().err
        assert find_label_errors.main([*flags, str(tmp_path / "there"), "--data-dir", str(tmp_path / "moved")]) == 0
    finally:
        (tmp_path / "moved").rename(data)
    for name in ("label_errors.csv", "cleaned.csv"):
        expected = (tmp_path / "here" / name).read_text().replace(str(data), str(tmp_path / "moved"))
        assert (tmp_path / "there" / name).read_text() == expected


def test_a_class_that_a_label_file_would_divide(tmp_path: Path) -> None:
    write_images(tmp_path / "train", (1, 1, 1))
    assert why_not_cleaned(scan(tmp_path, "train")) == ""
    (tmp_path / "train" / CLASSES[0]).rename(tmp_path / "train" / "a|b")
    assert why_not_cleaned(scan(tmp_path, "train")) == "a label file takes a|b for several labels; rename it"
