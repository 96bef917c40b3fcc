"""scripts/probe.py as a command: real embeddings, and a copy of an image in the other split that it finds."""

import csv
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts import make_digits, predict, probe
from tests.conftest import TINY
from tests.contract import CONTRACT, assert_keys
from tests.forked import launch_series
from tests.inference.embedded import write_embeddings
from tests.inference.exported import write_checkpoint


def run_here(*words: object) -> None:
    assert probe.main([*map(str, words)]) == 0


def embed(checkpoint: Path, sources: Sequence[Path], folder: Path, *words: str) -> Path:
    flags = ("--output-type", "embedding", "--output-dir", str(folder), *words)
    assert predict.main([str(checkpoint), *map(str, sources), *flags]) == 0
    return folder


def read_pairs(folder: Path) -> list[dict[str, str]]:
    with (folder / "near_duplicates.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_planted_copies_are_found(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One image of train in val, saved again, and in train with another class."""
    tree = tmp_path / "tree"
    shutil.copytree(data, tree)
    image = sorted((tree / "train" / "red").iterdir())[0]
    for copy in (tree / "val" / "red" / "copy.jpg", tree / "train" / "blue" / "copy.jpg"):
        with Image.open(image) as file:
            file.save(copy, quality=85)
    checkpoint = write_checkpoint(tmp_path / "run" / "best.pt")
    train = embed(checkpoint, [tree / "train"], tmp_path / "train", "--format", "parquet")
    val = embed(checkpoint, [tree / "val"], tmp_path / "val")
    capsys.readouterr()
    run_here(train, val, "--output-dir", tmp_path / "out", "--report", "--threshold", 0.5)
    out = capsys.readouterr().out
    pairs = read_pairs(tmp_path / "out")
    assert list(pairs[0]) == CONTRACT["files"]["near_duplicates.csv"]
    planted = {frozenset((str(image), str(copy))) for copy in tree.glob("*/*/copy.jpg")}
    planted |= {frozenset(map(str, tree.glob("*/*/copy.jpg")))}
    assert {frozenset((pair["path"], pair["other_path"])) for pair in pairs[:3]} == planted, "before all others"
    assert {(pair["split"], pair["other_split"]) for pair in pairs[:3]} == {("val", "train"), ("train", "train")}
    result = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert_keys("probe.json", result)
    assert (result["num_train"], result["num_val"]) == (42, 42)
    found = re.search(r"([\d,]+) across splits, ([\d,]+) across classes", out)
    assert found is not None
    counts = result["near_duplicates"]
    assert [int(each.replace(",", "")) for each in found.groups()] == [*counts.values()]
    assert counts["across_splits"] == sum(pair["split"] != pair["other_split"] for pair in pairs)
    page = (tmp_path / "out" / "near_duplicates.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 2 * min(200, len(pairs))
    assert page.index(pairs[0]["path"]) < page.index(pairs[199]["path"])
    assert "<script" not in page
    run_here(train, val, "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out" / "near_duplicates.html").exists(), "it was of another threshold"


def test_without_pictures_and_with_any_name(tmp_path: Path) -> None:
    features = np.eye(4, 4)
    train = write_embeddings(tmp_path / "train", features, ("<script>", "b", "b", "b"))
    val = write_embeddings(tmp_path / "val", features[::-1], ("<script>", "b", "a class of val only", ""))
    run_here(train, val, "--output-dir", tmp_path / "out", "--report")
    page = (tmp_path / "out" / "near_duplicates.html").read_text()
    assert page.count("no picture") == 8
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 2
    assert [float(pair["similarity"]) for pair in read_pairs(tmp_path / "out")] == [1.0] * 4
    result = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert result["nearest_neighbors"] == [{"k": 1, "top1": pytest.approx(100 / 3)}], "b alone; 4 images have no 5 next"


@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    """A small network's features say as much of digits as its head."""
    make_digits.main([str(tmp_path / "digits")])
    flags = ("--data-dir", tmp_path / "digits", *TINY, "--val-resize", 32, "--hflip", 0, "--crop-scale", 0.7)
    (done,) = launch_series((*flags, "--output-dir", tmp_path / "run", "--epochs", 4, "--batch-size", 64))
    assert done.status == 0, done.err
    train, val = (embed(tmp_path / "run", [tmp_path / "digits" / name], tmp_path / name) for name in ("train", "val"))
    run_here(train, val, "--output-dir", tmp_path / "out")
    result = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert result["top1"] == json.loads((tmp_path / "run" / "summary.json").read_text())["best_top1"] > 90
    for each in [*result["nearest_neighbors"], *result["logistic_regression"]]:
        assert each["top1"] > result["top1"] - 2, each
