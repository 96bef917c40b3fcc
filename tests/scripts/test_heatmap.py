"""scripts/predict.py --heatmap and the maps of a report: files, other runs, a package that is missing."""

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import train
from scripts import predict
from tests import damage
from tests.conftest import TINY, Refused, call_main
from tests.forked import launch_series
from tests.harness import ROOT, launch
from tests.inference.exported import write_checkpoint

SCRIPT = ROOT / "scripts" / "predict.py"
REMEDY = "pip install -r requirements-report.txt -c constraints.txt"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("run") / "best.pt", image_size=64, val_resize=64)


def run_here(*words: object) -> None:
    assert predict.main([*map(str, words)]) == 0


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_maps_of_the_first_images(data: Path, checkpoint: Path, tmp_path: Path) -> None:
    words = (checkpoint, data / "val" / "green", "--workers", 1, "--output-dir", tmp_path)
    run_here(*words)
    table = (tmp_path / "predictions.csv").read_bytes()
    run_here(*words, "--heatmap", 3, "--batch-size", 2)
    assert (tmp_path / "predictions.csv").read_text().splitlines()[:3] == table.decode().splitlines()[:3]
    found = content_of(tmp_path / "heatmaps")
    assert list(found) == [f"{row:03}-green-{row - 1:03}.png" for row in (1, 2, 3)]
    for content in found.values():
        picture = Image.open(io.BytesIO(content))
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (64, 64))
    run_here(*words, "--heatmap", 100, "--format", "jsonl", "--eval-flip")
    again = content_of(tmp_path / "heatmaps")
    assert len(again) == 14
    assert {name: again[name] for name in found} == found, "of the image, in any batch"
    run_here(*words)
    assert not (tmp_path / "heatmaps").exists(), "they would be of other predictions"


def test_an_image_that_cannot_be_read_has_no_map(data: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(damage.ARITHMETIC[:50])
    good = data / "val" / "red" / "red-000.jpg"
    run_here(checkpoint, tmp_path / "bad.jpg", good, "--heatmap", 2, "--workers", 1, "--output-dir", tmp_path / "out")
    assert list(content_of(tmp_path / "out" / "heatmaps")) == ["002-red-000.png"]


def test_maps_of_several_labels(data: Path, tmp_path: Path) -> None:
    """Of the class with the highest probability."""
    several: dict[str, Any] = {"task": "multilabel", "loss": "bce", "label_smoothing": 0.0, "best_by": "map"}
    paths = [write_checkpoint(tmp_path / "one" / "best.pt", image_size=64, val_resize=64)]
    paths += [write_checkpoint(tmp_path / "several" / "best.pt", image_size=64, val_resize=64, **several)]
    images = data / "val" / "blue"
    for path in paths:
        run_here(path, images, "--heatmap", 5, "--workers", 1, "--output-dir", path.parent / "out")
    one, other = (content_of(path.parent / "out" / "heatmaps") for path in paths)
    assert one == other, "sigmoid and softmax have the same order"


@pytest.mark.dist
@pytest.mark.slow
def test_several_processes_draw_the_same_maps(data: Path, checkpoint: Path, tmp_path: Path) -> None:
    words = (checkpoint, data / "val", "--batch-size", 3, "--heatmap", 10, "--device", "cpu", "--workers", 1)
    for processes in (1, 2, 3):
        done = launch(*words, "--output-dir", tmp_path / f"{processes}", program=SCRIPT, processes=processes)
        assert done.status == 0, done.err
    one, *others = (content_of(tmp_path / f"{processes}" / "heatmaps") for processes in (1, 2, 3))
    assert len(one) == 10
    assert others == [one, one]


def test_refusals(
    checkpoint: Path, data: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (checkpoint, data / "val", "--workers", 1, "--heatmap", 2)
    check = refused(*words, "--output-dir", tmp_path, main=predict.main, program="predict.py")
    (tmp_path / "heatmaps").touch()
    check(f"{tmp_path}/heatmaps is a file, not a folder")
    (tmp_path / "heatmaps").unlink()
    monkeypatch.setitem(sys.modules, "captum", None)
    check("--heatmap 2: the package captum is missing", REMEDY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # quick: tests/scripts/test_report.py
def test_maps_of_a_report(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the wrong answer and of the right one; without captum the report is there all the same."""
    flags = ("--data-dir", data, *TINY, "--image-size", 64, "--val-resize", 64, "--batch-size", 16, "--epochs", 1)
    (done,) = launch_series((*flags, "--lr", 0.001, "--output-dir", tmp_path / "run", "--report"))
    assert done.status == 0, done.err
    before = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (len(before["worst"]) > 5, before["no_heatmaps"]) == (True, "")
    for each in before["worst"]:
        assert [one["class"] for one in each["heatmaps"]] == [each["predicted"], each["target"]]
        sizes = {Image.open(io.BytesIO(base64.b64decode(one["jpeg"]))).size for one in [each, *each["heatmaps"]]}
        assert sizes == {(64, 64)}
    assert (tmp_path / "run" / "report.html").read_text().count('alt="heat map of class') == 2 * len(before["worst"])
    monkeypatch.setitem(sys.modules, "captum", None)
    done = call_main(train.main, ("--evaluate", "--report", "--output-dir", tmp_path / "run"), capsys)
    assert done.status == 0, done.err
    after = json.loads((tmp_path / "run" / "report.json").read_text())
    without = [each | {"heatmaps": []} for each in before["worst"]]
    assert after["worst"] == without
    assert REMEDY in after["no_heatmaps"]
    assert f"report.html, report.json, without heat maps ({after['no_heatmaps']})" in done.out
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Without heat maps: the package captum is missing" in page
    assert "heat map of" not in page
