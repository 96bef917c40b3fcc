"""Sizes, crop and interpolation are those of the weights, where they are not given."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.data
import torch

from tests.conftest import TINY, resolved
from tests.contract import assert_keys
from tests.forked import launch_series
from tests.harness import assert_refused, read_checkpoint, read_metrics
from tests.training.checkpoints import checkpoint_of
from utils.data.loaders.settings import resolve_pixels
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.arguments import model_arguments
from utils.options.cli import parse
from utils.options.config import TrainConfig
from utils.options.sizes import as_image_size, crop_pct, sides_before_crop, sides_of
from utils.training.resume.changes import changed_names
from utils.training.settings.preprocessing import TIMM_CROPS, adopt_arch, fill_preprocessing
from utils.training.state.checkpoint import FORMAT, Checkpoint

A1 = "resnet50.a1_in1k"  # 224 px with a crop of 0.95, tested at 288 with one of 1.0
VIT = "vit_tiny_patch16_384.augreg_in21k_ft_in1k"


def filled(*words: str, saved: Checkpoint | None = None) -> TrainConfig:
    config = parse(["--data-dir", "images", *words])
    return fill_preprocessing(config, saved)[0]


def pixels(config: TrainConfig) -> tuple[Any, ...]:
    """Sizes of training and evaluation, the latter before the crop, crop and interpolation."""
    values = resolve_pixels(config)
    return (
        config.image_size,
        *(values[name] for name in ("val_image_size", "val_resize", "val_crop", "interpolation")),
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (A1, (224, 288, 288, "center", "bicubic")),
        ("resnet50", (224, 288, 288, "center", "bicubic")),  # whose default variant it is
        (f"{A1} --evaluate", (224, 288, 288, "center", "bicubic")),
        (f"{A1} --image-size 160", (160, 160, 168, "center", "bicubic")),
        (f"{A1} --image-size 288", (288, 288, 288, "center", "bicubic")),
        (f"{A1} --image-size 224", (224, 288, 288, "center", "bicubic")),
        (f"{A1} --image-size 224 --evaluate", (224, 224, 235, "center", "bicubic")),
        (f"{A1} --val-image-size 320", (224, 320, 336, "center", "bicubic")),
        (f"{A1} --val-image-size 224 --val-resize 256", (224, 224, 256, "center", "bicubic")),
        (f"{A1} --interpolation random --val-crop squash", (224, 288, 288, "squash", "random")),
        (f"{A1} --train-crop pad", (224, 224, 224, "pad", "bicubic")),
        (f"{A1} --train-crop center --val-image-size 288", (224, 288, 288, "center", "bicubic")),
        (f"{A1} --train-crop squash --val-crop center --val-resize 256", (224, 224, 256, "center", "bicubic")),
        (f"{A1} --train-crop pad --evaluate", (224, 288, 288, "center", "bicubic")),
        ("resnet18.tv_in1k --val-crop pad", (224, 224, 224, "pad", "bilinear")),
        ("resnet18.tv_in1k --val-crop pad --val-resize 200", (224, 224, 200, "pad", "bilinear")),
        ("resnet18.tv_in1k", (224, 224, 256, "center", "bilinear")),
        ("fasternet_t0.in1k", (224, 224, 248, "center", "bicubic")),  # a crop of its own for the test at the same size
        (VIT, (384, 384, 384, "center", "bicubic")),
        (f"{VIT} --image-size 224", (224, 224, 224, "center", "bicubic")),
        ("convnext_tiny.fb_in22k_ft_in1k_384", (224, 224, 224, "squash", "bicubic")),
        ("convnext_tiny.fb_in22k_ft_in1k_384 --evaluate", (384, 384, 384, "squash", "bicubic")),
    ],
)
def test_what_is_not_given_is_that_of_timms_weights(flags: str, expected: tuple[Any, ...]) -> None:
    assert pixels(filled("--pretrained", "--arch", *flags.split())) == expected


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_an_evaluation_has_the_preprocessing_of_timms_validation(every: int) -> None:
    """Of all weights that timm knows, but for those that are refused."""
    refused = []
    for name in timm.list_pretrained()[::every]:
        config = TrainConfig(data_dir=Path("images"), arch=name, pretrained="timm", evaluate=True)
        settings = timm.get_pretrained_cfg(name)
        assert settings is not None
        wanted = timm.data.resolve_data_config({}, pretrained_cfg=settings.to_dict(), use_test_size=True)
        try:
            found = fill_preprocessing(config, None)[0]
        except UserError:
            assert wanted["crop_pct"] > 1
            refused.append(name)
            continue
        size, share = as_image_size(*wanted["input_size"][1:]), wanted["crop_pct"]
        shorter = min(sides_of(size))
        assert (found.val_image_size, found.val_resize) == (size, math.floor(shorter / share)), name
        assert (found.val_crop, found.interpolation) == (TIMM_CROPS[wanted["crop_mode"]], wanted["interpolation"]), name
    assert len(refused) < 20


@pytest.mark.parametrize(
    ("arch", "message", "remedy"),
    [
        ("volo_d4_448.sail_in1k", "evaluates with a black border (crop_pct 1.15)", "--val-resize 448"),
    ],
)
def test_weights_that_want_what_there_is_not(arch: str, message: str, remedy: str) -> None:
    if arch not in timm.list_pretrained():
        pytest.skip("of a later timm")
    with pytest.raises(UserError) as caught:
        filled("--pretrained", "--arch", arch)
    assert str(caught.value).startswith(f"--pretrained: timm's {arch} {message}")
    assert str(caught.value).endswith(f"give {remedy}")
    filled("--pretrained", "--arch", arch, *remedy.split())


def test_a_resize_that_is_smaller_than_the_size_of_the_weights() -> None:
    with pytest.raises(
        UserError, match=r"^--val-resize 256: smaller than --val-image-size 288; .* try --val-resize 329"
    ):
        filled("--pretrained", "--arch", A1, "--val-resize", "256")
    assert pixels(filled("--pretrained", "--arch", "test_vit", "--val-resize", "200"))[:3] == (160, 160, 200)


def test_the_arguments_of_the_architecture_are_those_of_the_weights(tmp_path: Path) -> None:
    """Of a run and of timm's config.json, whose other arguments are flags; another architecture has its own."""
    run, model = str(tmp_path / "best.pt"), timm.create_model("test_resnet", num_classes=3).state_dict()
    torch.save({"model": model, "config": resolved(arch="test_resnet", model_args="bn_eps=1e-3").to_dict()}, run)
    beside = write_weights(tmp_path / "timm", input_size=[3, 64, 64])
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    arguments = {"global_pool": "max", "img_size": 64, "depths": [1, 2], "act_layer": None, "drop_rate": 0.1}
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config | {"model_args": arguments}))
    for flags, expected in (
        ((run, "--arch", "test_resnet"), {"bn_eps": 1e-3}),
        ((run, "--arch", "test_resnet", "--model-args", "bn_eps=1e-4"), {"bn_eps": 1e-4}),
        ((run, "--arch", "test_resnet", "--model-args", ""), {}),
        ((run, "--arch", "resnet18"), {}),
        ((beside, "--arch", "test_resnet"), {"global_pool": "max", "depths": [1, 2], "act_layer": None}),
        ((beside, "--arch", "test_resnet", "--evaluate"), {"global_pool": "max", "depths": [1, 2], "act_layer": None}),
        ((beside, "--arch", "resnet18"), {}),
    ):
        assert model_arguments(filled("--pretrained", *flags)) == expected, flags
    saved = checkpoint_of(resolved(pretrained=run, arch="test_resnet", model_args="bn_eps=1e-3"))
    assert filled("--pretrained", run, "--arch", "test_resnet", saved=saved).model_args == "bn_eps=1e-3"


def write_weights(folder: Path, **settings: Any) -> str:
    """Weights with timm's config.json beside them, if there are `settings`."""
    folder.mkdir()
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), folder / "model.pt")
    if settings:
        content = {"architecture": "test_resnet", "label_names": ["a", "b", "c"], "pretrained_cfg": settings}
        (folder / "config.json").write_text(json.dumps(content))
    return str(folder / "model.pt")


def test_what_says_how_a_file_was_trained(tmp_path: Path) -> None:
    bare = write_weights(tmp_path / "bare")
    beside = write_weights(
        tmp_path / "timm", input_size=[3, 64, 64], crop_pct=0.5, interpolation="bicubic", crop_mode="squash", unknown=1
    )
    before = resolved(image_size=48, val_image_size=64, val_resize=70, interpolation="random", arch="test_resnet")
    run = str(tmp_path / "best.pt")
    torch.save({"model": torch.load(bare), "config": before.to_dict()}, run)
    for flags, expected in (
        (("--pretrained", bare), (224, 224, 256, "center", "bilinear")),
        (("--pretrained", bare, "--arch", A1), (224, 288, 288, "center", "bicubic")),
        (("--pretrained", beside), (224, 224, 448, "squash", "bicubic")),
        (("--pretrained", beside, "--arch", A1), (224, 224, 448, "squash", "bicubic")),
        (("--pretrained", beside, "--evaluate"), (64, 64, 128, "squash", "bicubic")),
        (("--pretrained", run, "--arch", "test_resnet"), (224, 224, 245, "center", "random")),
        (("--pretrained", run, "--image-size", "48"), (48, 64, 70, "center", "random")),
    ):
        assert pixels(filled(*flags)) == expected, flags


def test_a_file_names_its_architecture(tmp_path: Path, cpu: DistEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the output folder; not where `--arch` is given, nor where the file does not know."""
    monkeypatch.chdir(tmp_path)
    bare, beside = write_weights(tmp_path / "bare"), write_weights(tmp_path / "timm", input_size=[3, 64, 64])
    saved = torch.load(bare)
    torch.save({"state_dict": saved, "arch": "test_vit.r160_in1k"}, "other.pt")
    torch.save({"model": saved, "config": resolved(arch="test_resnet").to_dict()}, "best.pt")
    for flags, arch, folder in (
        ((beside,), "test_resnet", "images-test_resnet"),
        (("best.pt",), "test_resnet", "images-test_resnet"),
        (("other.pt",), "test_vit.r160_in1k", "images-test_vit.r160_in1k"),
        (("best.pt", "--name", "mine"), "test_resnet", "mine"),
        (("best.pt", "--output-dir", "runs/there", "--evaluate"), "test_resnet", "there"),
        (("best.pt", "--arch", "test_vit"), "test_vit", "images-test_vit"),
        ((bare,), "resnet50", "images-resnet50"),
        (("gone.pt",), "resnet50", "images-resnet50"),
    ):
        config = adopt_arch(parse(["--data-dir", "images", "--pretrained", *flags]), cpu)
        assert (config.arch, str(config.output_dir)) == (arch, f"runs/{folder}"), flags
        told = {} if flags == ("gone.pt",) else fill_preprocessing(config, None)[1]
        assert told.get("arch") == (flags[0] if arch not in ("resnet50", "test_vit") else None), flags
    resumed = filled("--pretrained", "gone.pt", saved=checkpoint_of(resolved(pretrained="gone.pt", arch="test_vit")))
    assert resumed.arch == "test_vit"


@pytest.mark.parametrize("text", ["{", '{"pretrained_cfg": 3}', '{"pretrained_cfg": {}}', '{"pretrained_cfg": []}'])
def test_a_config_beside_weights_that_is_damaged(tmp_path: Path, text: str) -> None:
    bare = write_weights(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"model.pt: config.json beside it is not timm's \(.*\); repair or remove it"):
        filled("--pretrained", bare)


def test_a_resume_takes_what_the_run_used() -> None:
    """Not what the weights say: they may be gone, or timm's settings others."""
    before = resolved(
        pretrained="gone.pt", image_size=160, val_image_size=192, val_resize=200, val_crop="squash",
        interpolation="bicubic",
    )  # fmt: skip
    saved = checkpoint_of(before)
    config = ("--pretrained", "gone.pt")
    assert pixels(filled(*config, saved=saved)) == (160, 192, 200, "squash", "bicubic")
    assert pixels(filled(*config, "--image-size", "64", saved=saved)) == (64, 64, 73, "squash", "bicubic")
    assert pixels(filled(*config, "--interpolation", "bilinear", saved=saved))[-1] == "bilinear"
    assert pixels(filled(*config, "--train-crop", "pad", saved=saved)) == (160, 192, 192, "pad", "bicubic")
    assert pixels(filled(*config, "--val-crop", "pad", saved=saved)) == (160, 192, 192, "pad", "bicubic")
    from_scratch = checkpoint_of(dataclasses.replace(before, pretrained=None))
    assert pixels(filled(saved=from_scratch)) == (224, 224, 256, "center", "bilinear")


def test_a_checkpoint_without_the_flags_was_trained_with_their_defaults(tmp_path: Path) -> None:
    new = ("val_image_size", "val_crop", "interpolation")
    content = checkpoint_of(resolved(image_size=64, val_resize=73)).to_dict() | {"format": FORMAT}
    content["config"] = {name: value for name, value in content["config"].items() if name not in new}
    saved = Checkpoint.from_dict(content)
    assert [getattr(saved.config, name) for name in new] == [64, "center", "bilinear"]
    now = {"--val-image-size": 64, "--val-crop": "center", "--interpolation": "bilinear"}
    assert changed_names(saved, now) == []
    assert changed_names(saved, now | {"--interpolation": "bicubic"}) == ["--interpolation"]


def test_timm_computes_the_size_before_the_crop() -> None:
    for size in range(8, 600, 13):
        for before in range(size, 2 * size, 7):
            assert math.floor(size / crop_pct(size, before)) == before
            assert crop_pct(size, before) == pytest.approx(size / before)
            assert sides_before_crop(size, before) == (before, before)


@pytest.mark.parametrize(("size", "before", "expected"), [("192x320", 219, (219, 365)), ("320x192", 192, (320, 192))])
def test_of_a_rectangle_both_sides_are_resized_alike(size: str, before: int, expected: tuple[int, int]) -> None:
    found = sides_before_crop(size, before)
    assert found == expected
    assert found == tuple(math.floor(side / crop_pct(size, before)) for side in sides_of(size))


@pytest.mark.slow  # what is filled in is quick
def test_a_run_its_resume_and_its_evaluation(data: Path, tmp_path: Path) -> None:
    """A network that is built for 160 px, with the mean 0.5; the second launch does not need the weights."""
    arch, weights, run = "test_vit.r160_in1k", tmp_path / "weights.pt", tmp_path / "run"
    torch.save(timm.create_model(arch, num_classes=3).state_dict(), weights)
    flags = ("--data-dir", data, "--arch", arch, "--batch-size", 8, *TINY[TINY.index("--workers") :], "--output-dir")
    first, evaluated, smaller = launch_series(
        (*flags, run, "--pretrained", weights, "--epochs", 1),
        (*flags, tmp_path / "evaluated", "--pretrained", weights, "--evaluate"),
        (*flags, tmp_path / "smaller", "--pretrained", weights, "--image-size", 96, "--epochs", 1),
    )
    assert first.status == 0, first.err
    wanted = timm.data.resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(arch).to_dict())
    before = math.floor(160 / wanted["crop_pct"])
    assert f"bicubic; evaluated bicubic at 160 px of {before}; mean 0.5 0.5 0.5, std 0.5 0.5 0.5 of timm's" in first.out
    assert "--image-size 160, --val-image-size 160, --val-resize" in first.out
    assert f"--val-crop center, --interpolation bicubic: timm's {arch}" in first.out
    saved = read_checkpoint(run)
    assert (saved["config"]["image_size"], saved["config"]["interpolation"]) == (160, "bicubic")
    assert saved["normalization"] == {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert evaluated.status == 0, evaluated.err
    assert f"note: --image-size 160, --val-image-size 160, --val-resize {before}, --val-crop center" in evaluated.out
    result = json.loads((tmp_path / "evaluated" / "evaluation.json").read_text())
    assert_keys("evaluation.json", result, "pretrained")
    assert (result["image_size"], result["val_resize"], result["interpolation"]) == (160, before, "bicubic")
    assert smaller.status == 0, smaller.err
    assert f"weights of {weights} (converted by timm), head kept" in smaller.out  # resized position embeddings
    weights.unlink()
    resumed, reevaluated = launch_series(
        (*flags, run, "--epochs", 2), ("--evaluate", "--output-dir", run, "--device", "cpu", "--workers", 1)
    )
    assert resumed.status == 0, resumed.err
    assert re.search(r"--image-size 160, .* --interpolation bicubic: as in the checkpoint", resumed.out)
    assert reevaluated.status == 0, reevaluated.err
    assert json.loads((run / "evaluation.json").read_text())["image_size"] == 160


def test_an_evaluation_at_another_size_than_training(data: Path, tmp_path: Path) -> None:
    """Also where the training size changes; `--evaluate` does what the run did, or what `--image-size` says."""
    run, other = tmp_path / "run", tmp_path / "other"
    wanted = ("--val-image-size", 48, "--val-resize", 60, "--val-crop", "squash", "--interpolation", "bicubic")
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2, "--resize-schedule", "1:40")
    done, evaluated, smaller, refused = launch_series(
        (*flags, *wanted, "--output-dir", run),
        ("--evaluate", "--output-dir", run, "--resume", run / "last.pt", "--device", "cpu", "--workers", 1),
        ("--evaluate", "--output-dir", other, "--resume", run / "last.pt", "--image-size", 40, "--device", "cpu"),
        (*flags, *wanted[:-1], "random", "--output-dir", run, "--epochs", 3),
    )
    assert done.status == 0, done.err
    assert "bicubic; evaluated bicubic at 48 px of 60, squashed; mean 0.5 0.5 0.5" in done.out
    assert evaluated.status == 0, evaluated.err
    assert "note" not in evaluated.out
    found = json.loads((run / "evaluation.json").read_text())
    assert_keys("evaluation.json", found, "checkpoint")
    assert (found["image_size"], found["val_resize"], found["val_crop"]) == (48, 60, "squash")
    assert found["loss"] == read_metrics(run)[-1]["val/loss"]
    assert smaller.status == 0, smaller.err
    assert "note: --val-image-size 40, its run had 48" in smaller.out
    found = json.loads((other / "evaluation.json").read_text())
    assert (found["image_size"], found["val_resize"]) == (40, 50)
    assert_refused(refused, "--interpolation: bicubic then, random now")
