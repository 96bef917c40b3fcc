"""Runs on whole images: resumed, evaluated, predicted and exported with the geometry that they were trained with."""

import json
from pathlib import Path

import pytest

from scripts import export, predict
from tests.conftest import TINY, assert_same_run
from tests.forked import launch_series
from tests.harness import read_checkpoint, read_metrics

FLAGS = (*TINY[:2], "--image-size", "32", *TINY[6:], "--batch-size", "8", "--epochs", "2", "--deterministic")
TURNS = ("--vflip", "0.5", "--rot90")


@pytest.mark.slow  # a rectangle goes the same way, and the pixels of every geometry are quick
@pytest.mark.parametrize(("crop", "loader"), [("pad", "dali"), ("center", "dali"), ("squash", "torch")])
def test_a_run_and_what_is_made_of_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], crop: str, loader: str
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ("--data-dir", data, *FLAGS, *TURNS, "--train-crop", crop, "--loader", loader)
    done, stopped, resumed, evaluated = launch_series(
        (*flags, "--output-dir", whole),
        (*flags, "--output-dir", cut, "--time-limit", 0.001),
        (*flags, "--output-dir", cut),
        ("--evaluate", "--output-dir", whole, "--resume", whole / "last.pt", "--device", "cpu", "--workers", 1),
    )
    assert [each.status for each in (done, stopped, resumed, evaluated)] == [0, 143, 0, 0], resumed.err
    assert "resumed at epoch 1, step 1," in resumed.out
    assert_same_run(whole, cut)
    config = json.loads((whole / "config.json").read_text())
    assert (config["val_crop"], config["val_resize"], config["val_image_size"]) == (crop, 32, 32)
    shown = {"pad": "trained on padded images; evaluated bilinear at 32 px of 32, padded;"}
    shown |= {"center": "trained on centers; evaluated bilinear at 32 px of 32;"}
    shown |= {"squash": "trained on squashed images; evaluated bilinear at 32 px of 32, squashed;"}
    assert shown[crop] in done.out
    last = read_metrics(whole)[-1]
    expected = last["val/top1"]
    found = json.loads((whole / "evaluation.json").read_text())
    assert (found["top1"], found["loss"], found["val_crop"]) == (expected, last["val/loss"], crop)
    assert read_checkpoint(whole)["config"]["train_crop"] == crop

    arguments = [str(whole / "last.pt"), str(data / "val"), "--output-dir", str(tmp_path / "predictions")]
    assert predict.main([*arguments, "--device", "cpu"]) == 0
    assert f"top1 {expected:.2f}  " in capsys.readouterr().out
    exported = [str(whole), "--format", "timm", "--output-dir", str(tmp_path / "timm")]
    assert export.main(exported) == 0  # compares the images of the run
    settings = json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]
    assert (settings["crop_mode"], settings["crop_pct"]) == ({"pad": "border"}.get(crop, crop), 1.0)


@pytest.mark.parametrize("arch", ["test_vit", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_rectangles(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arch: str) -> None:
    """Trained, resumed, evaluated, predicted and exported: a network built for its size, and one that is not."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ("--data-dir", data, *FLAGS, "--arch", arch, "--image-size", "32x64", "--val-resize", 40)
    evaluate = ("--evaluate", "--resume", whole / "last.pt", "--device", "cpu", "--workers", 1)
    done, stopped, resumed, evaluated, *refused = launch_series(
        (*flags, "--output-dir", whole),
        (*flags, "--output-dir", cut, "--time-limit", 0.001),
        (*flags, "--output-dir", cut),
        (*evaluate, "--output-dir", whole),
        (*flags[:-2], "--rot90", "--output-dir", cut),
        (*flags[:-2], "--image-size", "64x32", "--output-dir", cut),
    )
    assert [each.status for each in (done, stopped, resumed, evaluated)] == [0, 143, 0, 0], done.err + resumed.err
    assert_same_run(whole, cut)
    assert "32x64 px" in done.out
    last, found = read_metrics(whole)[-1], json.loads((whole / "evaluation.json").read_text())
    expected = last["val/top1"]
    assert (found["top1"], found["loss"], found["image_size"]) == (expected, last["val/loss"], "32x64")
    assert [each.status for each in refused] == [2, 2]
    assert "--rot90 with images of 32x64 px: a quarter turn exchanges height and width" in refused[0].err
    assert "--image-size" in refused[1].err

    arguments = [str(whole / "last.pt"), str(data / "val"), "--output-dir", str(tmp_path / "predictions")]
    assert predict.main([*arguments, "--device", "cpu"]) == 0
    assert f"top1 {expected:.2f}  " in capsys.readouterr().out
    for name in ("timm", "onnx") if arch == "resnet18" else ("timm",):  # ONNX takes its time
        assert export.main([str(whole), "--format", name, "--output-dir", str(tmp_path / name)]) == 0  # and compares
    settings = json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]
    assert settings["input_size"] == [3, 32, 64]
    assert settings["crop_pct"] == 32 / 40


@pytest.mark.slow
def test_an_evaluation_with_a_border_cuts_nothing(data: Path, tmp_path: Path) -> None:
    """Of a run with center crops, whose resize was larger than the size; nor does an accepted change of the run."""
    flags = ("--data-dir", data, *FLAGS, "--output-dir", tmp_path / "run", "--epochs")
    evaluate = ("--evaluate", "--resume", tmp_path / "run/last.pt", "--device", "cpu", "--workers", 1)
    changed = ("--resume", tmp_path / "run/last.pt", "--accept-changes", "--train-crop", "pad")
    done = launch_series(
        (*flags, 1),
        (*evaluate, "--val-crop", "pad", "--output-dir", tmp_path / "padded"),
        (*evaluate, "--val-crop", "pad", "--val-resize", 30, "--output-dir", tmp_path / "smaller"),
        (*flags[:-2], tmp_path / "changed", "--epochs", 2, *changed),
    )
    assert [each.status for each in done] == [0, 0, 0, 0], done
    for name, resize in (("padded", 32), ("smaller", 30)):
        found = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert (found["val_crop"], found["val_resize"], found["image_size"]) == ("pad", resize, 32)
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert (config["val_crop"], config["val_resize"], config["decode"]) == ("pad", 32, "full")


@pytest.mark.slow
def test_an_evaluation_of_other_weights_follows_the_training(data: Path, tmp_path: Path) -> None:
    """Those of timm want a center crop; and flags decide."""
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    flags = ("--data-dir", data, *FLAGS, "--epochs", 1)
    weights = ("--pretrained", first / "last.pt")
    done = launch_series(
        (*flags, "--output-dir", first),
        (*flags, *weights, "--train-crop", "squash", "--output-dir", second),
        (*flags, *weights, "--train-crop", "squash", "--val-crop", "center", "--val-resize", 40, "--output-dir", third),
    )
    assert [each.status for each in done] == [0, 0, 0], done
    found = []
    for folder in (first, second, third):
        config = json.loads((folder / "config.json").read_text())
        found.append((config["train_crop"], config["val_crop"], config["val_resize"]))
    assert found == [("random", "center", 37), ("squash", "squash", 32), ("squash", "center", 40)]
