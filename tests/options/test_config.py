"""One set of flags: command line over recipe over default, and a --help that a person can read."""

import dataclasses
import json
import math
import os
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import resolved
from tests.harness import ROOT
from utils.errors import UserError
from utils.options.cli import parse
from utils.options.config import TrainConfig, flag_fields, flags_with
from utils.options.flags import flag, flag_info
from utils.options.limits import Limit
from utils.options.resolved import ResolvedConfig

FIELDS = flag_fields()
# A value other than the default for every field, so that none can be forgotten on the way.
OTHER: dict[str, Any] = {
    "best_by": "loss", "task": "multilabel",
    "teacher": "teacher.pt", "teacher_weight": 0.7, "teacher_temperature": 3.0,
    "balance": 0.5, "val_group": "patient", "focal": 2.0, "class_weights": "auto", "eval_classes": "present",
    "real_labels": Path("real.json"),
    "data_dir": Path("some/images"), "output_dir": Path("some/run"), "arch": "resnet18", "epochs": 7,
    "batch_size": 12, "lr": 3e-05, "loader": "torch", "decode": "full", "image_size": 64, "val_resize": 72,
    "val_image_size": 72, "val_crop": "squash", "interpolation": "random",
    "hw_decoder_load": 0.5, "prefetch": 4, "cache": "none", "cuda_graph": False, "fused_layers": False,
    "grad_exchange": "flat",
    "grad_compression": "bf16",
    "workers": 3, "augment": "randaugment", "randaugment_magnitude": 20, "randaugment_ops": 3, "randaugment_std": 1.5,
    "color_jitter": 0.4, "repeated_augmentation": 3, "eval_flip": True,
    "train_crop": "pad", "crop_scale": 0.25, "hflip": 0.25, "vflip": 0.1, "rot90": True, "mixup": 0.2, "cutmix": 1.0,
    "random_erase": 0.1, "pretrained": "some.pt", "pretrained_ema": False, "pretrained_head": "new",
    "num_classes": 11, "compile": False, "grad_accum_steps": 2,
    "optimizer": "lamb", "momentum": 0.9, "weight_decay": 1e-4, "warmup_epochs": 0.5, "label_smoothing": 0.0,
    "ema_decay": 0.9999, "clip_grad": 1.0, "amp": "none", "device": "cuda", "resume": "some/last.pt",
    "checkpoint_steps": 100, "overwrite": True, "evaluate": True, "seed": 42, "deterministic": True, "log_steps": 5,
    "report": True, "tensorboard": True, "timeout": 60.0, "time_limit": 3600.0, "bad_files": "skip", "max_bad_steps": 3,
    "keep": 3, "processes": 2, "max_restarts": 1, "mixup_off_epoch": 5, "resize_schedule": "2:32,5:64",
    "augment_schedule": "3:none", "accept_changes": True, "transform": "a.py:f", "dali_plugin": "lib.so",
    "train_data": "a-*.tar", "val_data": "b-*.tar", "class_names": Path("names.txt"),
    "stage_dir": Path("stage"),
    "train_split": "training", "val_split": "valid", "val_fraction": 0.1, "fold": "2/4", "eval_every": 2, "patience": 5,
    "model_args": "a=1", "drop_rate": 0.1, "drop_path": 0.2, "loss": "bce", "bce_target_thresh": 0.5,
    "schedule": "linear", "min_lr": 1e-5, "cooldown_epochs": 3, "decay_epochs": 2.5, "decay_rate": 0.5,
    "lr_scaling": "none", "optimizer_args": "b=[1,2]", "layer_decay": 0.75, "head_lr_scale": 10.0, "freeze_epochs": 1,
    "grad_checkpointing": True, "sync_bn": True,
    "track": "mlflow", "track_project": "flowers", "track_checkpoint": True,
}  # fmt: skip
OF_LAUNCH = (
    "resume", "max_restarts", "accept_changes", "overwrite", "evaluate", "eval_flip", "eval_classes", "real_labels",
    "time_limit",
)  # fmt: skip
# Without flags that exclude each other.
COMPLETE: dict[str, dict[str, Any]] = {
    "linear": {
        name: value
        for name, value in OTHER.items()
        if not name.startswith(("decay_", "focal", "val_data", "fold", "teacher"))
    },
    "fold": {
        name: value for name, value in OTHER.items() if not name.startswith(("decay_", "focal", "val_", "teacher"))
    },
    "step": {
        name: value
        for name, value in OTHER.items()
        if name not in ("min_lr", "cooldown_epochs", "focal", "val_fraction", "fold") and "teacher" not in name
    }
    | {"schedule": "step"},
}


def recipe(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_command_line_over_recipe_over_default(tmp_path: Path) -> None:
    path = recipe(tmp_path, "data-dir: images\nepochs: 3\nlr: 0.5\ncompile: true\nloader: torch\nevaluate: true\n")
    config = parse(["--lr", "0.25", "--config", path, "--no-compile", "--loader", "proxy"])
    assert (config.lr, config.compile, config.loader) == (0.25, False, "proxy")  # command line
    assert (config.epochs, config.data_dir, config.evaluate) == (3, Path("images"), True)  # recipe
    assert (config.batch_size, config.momentum) == (TrainConfig.batch_size, TrainConfig.momentum)  # default


@pytest.mark.parametrize("name", ["deterministic", "evaluate", "tensorboard", "compile"])
def test_command_line_turns_off_what_a_recipe_turns_on(tmp_path: Path, name: str) -> None:
    path = recipe(tmp_path, f"data-dir: images\n{name}: true\n")
    assert getattr(parse(["--config", path]), name) is True
    assert getattr(parse(["--config", path, f"--no-{name}"]), name) is False


@pytest.mark.parametrize(
    ("lines", "words", "expected"),
    [
        ("", ["--bce-loss"], "bce"),
        ("", ["--no-bce-loss"], None),
        ("bce-loss: true", [], "bce"),
        ("bce_loss: false", ["--loss", "bce"], "bce"),  # config.json of an earlier version, and another loss
        ("bce-loss: true", ["--loss", "cross-entropy"], "cross-entropy"),
        ("loss: bce", ["--no-bce-loss"], None),
        ("loss: cross-entropy", ["--bce-loss"], "bce"),
    ],
)
def test_a_spelling_of_a_flag(tmp_path: Path, lines: str, words: list[str], expected: str | None) -> None:
    config = parse(["--config", recipe(tmp_path, f"data-dir: images\n{lines}\n"), *words])
    assert (config.loss, config.bce_loss, "loss" in config.given) == (expected, False, True)
    assert "bce_loss" not in config.to_dict().keys() | config.given
    assert TrainConfig.from_dict({"bce_loss": True}).loss == "bce"  # of an older checkpoint


@pytest.mark.parametrize("key", ["label-smoothing", "label_smoothing"])
def test_keys_with_dashes_or_underscores(tmp_path: Path, key: str) -> None:
    assert parse(["--config", recipe(tmp_path, f"data_dir: images\n{key}: 0.25\n")]).label_smoothing == 0.25


def test_yaml_reads_floats_that_yaml_1_1_calls_text(tmp_path: Path) -> None:
    config = parse(["--config", recipe(tmp_path, "data-dir: images\nlr: 3e-4\nweight-decay: 1E-5\nepochs: 10\n")])
    assert (config.lr, config.weight_decay, config.epochs) == (0.0003, 0.00001, 10)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("output-dir", name) for name in ("2026_11_22", "1.10", "0123", "0x1F", "1e3", "12:30:45", "+1", ".inf")),
        *(("output-dir", name) for name in ("2026-11-22", "2026-22-11", "2026-11-22 10:00:00")),
        *(("pretrained", "0123"), ("resume", "1_0"), ("arch", "1.0")),
        *(("seed", "010"), ("seed", "1_000"), ("lr", "1_0.50"), ("lr", "1e-3"), ("weight-decay", ".5e-4")),
    ],
)
def test_a_recipe_means_what_the_same_text_on_the_command_line_means(tmp_path: Path, key: str, text: str) -> None:
    # YAML 1.1 has numbers to the base of 8, 16 and 60, underscores in them, and dates.
    expected = parse(["--data-dir", "images", f"--{key}", text])
    for line in (
        f"{key}: {text}",
        f"{key}: '{text}'",
        f"data-dir: &name {text}\n{key}: *name",
        f'{{"{key}": "{text}"}}',
    ):
        read = parse(["--data-dir", "images", "--config", recipe(tmp_path, line)])
        assert dataclasses.replace(read, config=None) == expected


@pytest.mark.parametrize("name", ["\U0001f600", "\u00e4 'b'\n", os.fsdecode(b"not UTF-8 \xff")])
def test_config_json_keeps_names_of_any_letters(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    TrainConfig(data_dir=Path(name), output_dir=Path(name)).save(path)
    read = parse(["--config", str(path)])
    assert (read.data_dir, read.output_dir) == (Path(name), Path(name))


@pytest.mark.parametrize(
    ("key", "text"), [("seed", "1:30"), ("epochs", "0x10"), ("lr", "1:30.5"), ("lr", "2026-11-22")]
)
def test_a_recipe_is_refused_as_the_same_text_on_the_command_line(tmp_path: Path, key: str, text: str) -> None:
    for words in ([f"--{key}", text], ["--config", recipe(tmp_path, f"{key}: {text}\n")]):
        with pytest.raises(UserError, match=rf"'--{key}': '{re.escape(text)}' is not a"):
            parse(["--data-dir", "images", *words])


def test_another_schedule_or_optimizer_than_a_recipes_drops_what_belongs_to_it(tmp_path: Path) -> None:
    """The user could not leave it out; on one command line, or within one recipe, it is a mistake."""
    steps = recipe(
        tmp_path, "data-dir: x\nschedule: step\ndecay-epochs: 2\noptimizer: lamb\noptimizer-args: eps=1e-5\n"
    )
    other = parse(["--config", steps, "--schedule", "cosine", "--optimizer", "adamw"])
    assert (other.decay_epochs, other.optimizer_args) == (None, TrainConfig().optimizer_args)
    assert not {"decay_epochs", "optimizer_args"} & other.given
    same = parse(["--config", steps, "--schedule", "step", "--optimizer", "lamb"])
    assert (same.decay_epochs, same.optimizer_args) == (2, "eps=1e-5")
    with pytest.raises(UserError, match=r"--decay-epochs 3 with --schedule cosine"):
        parse(["--config", steps, "--schedule", "cosine", "--decay-epochs", "3"])
    with pytest.raises(UserError, match=r"--min-lr 0.01 with --schedule step"):
        parse(["--config", recipe(tmp_path, "data-dir: x\nschedule: step\nmin-lr: 0.01\n")])
    decay = recipe(tmp_path, "data-dir: x\nlr: 0.5\nmin-lr: 0.01\ncooldown-epochs: 3\n")
    assert parse(["--config", decay, "--schedule", "step"]).min_lr == 0


def test_empty_recipe_and_null_change_nothing(tmp_path: Path) -> None:
    assert parse(["--data-dir", "images"]) == TrainConfig(data_dir=Path("images"))
    for text in ("", "# nothing\n", "epochs: null\nlr:\npretrained: false\n"):
        path = recipe(tmp_path, text)
        assert parse(["--data-dir", "images", "--config", path]) == TrainConfig(
            data_dir=Path("images"), config=Path(path)
        )


@pytest.mark.parametrize("schedule", COMPLETE)
def test_every_flag_reaches_its_field(schedule: str) -> None:
    words = []
    for name, value in COMPLETE[schedule].items():
        words += [flag(name)] if value is True else [f"--no-{flag(name)[2:]}"] if value is False else []
        words += [] if isinstance(value, bool) else [flag(name), str(value)]
    words[words.index("--resume") + 1] = "some.pt"  # `--evaluate --resume none` is refused without weights
    config = parse(words)
    assert config.to_dict() == TrainConfig(**COMPLETE[schedule] | {"resume": "some.pt"}).to_dict()
    given = OTHER | {"resume": "some.pt"}
    assert [name for name in OF_LAUNCH if getattr(config, name) != given[name]] == [], "which to_dict leaves out"


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["--data-dir", "/data/imagenet/", "--arch", "vit_small_patch16_224.augreg_in1k"],
         "runs/imagenet-vit_small_patch16_224.augreg_in1k"),
        (["--data-dir", "my photos", "--arch", "hf-hub:a/b"], "runs/my-photos-hf-hub-a-b"),
        (["--loader", "synthetic"], "runs/synthetic-resnet50"),
        (["--data-dir", "x", "--name", "second"], "runs/second"),
        (["--evaluate", "--resume", "out/best.pt"], "out"),
        (["--evaluate", "--resume", "configs"], "configs"),  # a folder that is there
        (["--evaluate", "--resume", "out/best.pt", "--name", "second"], "runs/second"),
        (["--config", "RECIPE", "--name", "second"], "runs/second"),
        (["--config", "RECIPE", "--output-dir", "out"], "out"),
        (["--config", "RECIPE"], "first"),
    ],
)  # fmt: skip
def test_output_folder(words: list[str], folder: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, "data-dir: x\noutput-dir: first\n")
    assert parse([path if word == "RECIPE" else word for word in words]).output_dir == Path(folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "a", "--output-dir", "b"], "--name a with --output-dir b: two folders; give one of them"),
        (["--name", "a/b"], "--name a/b: must be one word without /; --output-dir takes a path"),
        (["--name", ""], "--name : must be one word without /; --output-dir takes a path"),
    ],
)
def test_two_output_folders_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        parse(["--data-dir", "x", *words])


@pytest.mark.parametrize("schedule", COMPLETE)
def test_saved_config_is_a_recipe_of_the_same_run(tmp_path: Path, schedule: str) -> None:
    config = TrainConfig(**COMPLETE[schedule])
    assert OTHER.keys() == {field.name for field in FIELDS} - {"config", "name", "bce_loss"}  # which others hold
    assert not [field.name for field in FIELDS if field.name in OTHER and OTHER[field.name] == field.default]
    for saved in (config, TrainConfig(data_dir=Path("images"), weight_decay=1 / 32768)):
        saved.save(tmp_path / "config.json")
        read = parse(["--config", str(tmp_path / "config.json"), "--evaluate"])  # which excludes less
        of_launch: dict[str, Any] = {name: TrainConfig.__dataclass_fields__[name].default for name in OF_LAUNCH}
        of_launch["evaluate"] = True
        assert dataclasses.replace(read, config=None) == dataclasses.replace(saved, **of_launch)


def test_a_recipe_with_a_teacher(tmp_path: Path) -> None:
    """config.json repeats a run with it, and evaluates without it; what is given beside it is refused."""
    of_teacher = {name: OTHER[name] for name in OTHER if name.startswith("teacher")}
    TrainConfig(data_dir=Path("images"), **of_teacher).save(tmp_path / "config.json")
    words = ["--config", str(tmp_path / "config.json")]
    again, evaluated = parse(words), parse([*words, "--evaluate"])
    assert {name: getattr(again, name) for name in of_teacher} == of_teacher
    assert (evaluated.teacher, evaluated.teacher_weight, evaluated.teacher_temperature) == (None, 0.5, 4.0)
    with pytest.raises(UserError, match=r"^--teacher net.pt with --evaluate: only training has a teacher"):
        parse([*words, "--evaluate", "--teacher", "net.pt"])


def test_config_json_has_no_flag_of_a_launch_and_an_old_one_that_has_is_harmless(tmp_path: Path) -> None:
    """It would remove the checkpoints that a repeated run goes on from, or end that run early."""
    path = tmp_path / "config.json"
    saved = TrainConfig(data_dir=Path("images"))
    assert not {*OF_LAUNCH, "config"} & saved.to_dict().keys()
    others = {name: OTHER[name] for name in OF_LAUNCH}
    path.write_text(json.dumps(saved.to_dict() | others, default=str))
    read = parse(["--config", str(path)])
    assert [name for name in OF_LAUNCH if getattr(read, name) == OTHER[name]] == []
    assert parse(["--config", str(path), "--time-limit", "7"]).time_limit == 7
    path.write_text("data-dir: x\nresume: none\noverwrite: true\n")  # a recipe that somebody has written
    assert parse(["--config", str(path)]).overwrite


def test_every_value_that_may_be_open_is_chosen_again_or_a_constant() -> None:
    constants = {"batch_size", "prefetch", "processes"}
    assert ResolvedConfig.__annotations__.keys() - {"padding"} == {*flags_with(chosen=True)} - {
        "output_dir", "image_size", "grad_exchange"
    } | constants  # fmt: skip


def test_what_a_run_has_chosen_is_not_given_by_its_config_json(tmp_path: Path) -> None:
    """Unless somebody has changed it there, or the file does not say what was chosen."""
    path = tmp_path / "config.json"
    given = frozenset({"data_dir", "epochs", "momentum"})
    resolved(data_dir=Path("x"), output_dir=Path("runs/x-resnet50"), epochs=3, lr=0.5, given=given).save(path)
    content = json.loads(path.read_text())
    assert content["chosen"].keys() == {*flags_with(chosen=True)} - given
    assert {name: content[name] for name in content["chosen"]} == content["chosen"]
    read = parse(["--config", str(path), "--val-resize", "300"])
    assert (read.lr, read.momentum, read.val_resize, read.num_classes) == (None, content["momentum"], 300, None)
    assert (read.device, read.decode, read.image_size, read.epochs) == ("auto", "auto", 224, 3)
    assert read.recipe_chosen == {name: content[name] for name in content["chosen"] if name != "val_resize"}
    assert parse(["--config", str(path), "--data-dir", "other"]).output_dir == Path("runs/other-resnet50")
    path.write_text(json.dumps(content | {"lr": 0.25}))
    read = parse(["--config", str(path)])
    assert (read.lr, "lr" in read.given, "lr" in read.recipe_chosen) == (0.25, True, False)
    del content["chosen"]
    path.write_text(json.dumps(content | {name: OTHER[name] for name in OF_LAUNCH}, default=str))
    read = parse(["--config", str(path), "--val-resize", "300"])
    assert (read.lr, read.val_resize, read.num_classes) == (0.5, 300, content["num_classes"])
    assert read.recipe_chosen["lr"] == 0.5
    assert "val_resize" not in read.recipe_chosen


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--pretrained"], "timm"),
        (["--pretrained", "--epochs", "2"], "timm"),
        (["--pretrained", "--config", "/dev/null"], "timm"),
        (["--pretrained", "weights.pt"], "weights.pt"),
        (["--pretrained=weights.pt", "--epochs", "2"], "weights.pt"),
        (["--pretrained", "weights.pt", "--pretrained"], "timm"),
        ([], None),
    ],
)
def test_pretrained_with_and_without_file(words: list[str], expected: str | None) -> None:
    config = parse(["--data-dir", "images", *words])
    assert config.pretrained == expected
    assert config.epochs == (2 if "--epochs" in words else TrainConfig.epochs)


@pytest.mark.parametrize(("value", "expected"), [("true", "timm"), ("false", None), ("weights.pt", "weights.pt")])
def test_pretrained_in_a_recipe(tmp_path: Path, value: str, expected: str | None) -> None:
    path = recipe(tmp_path, f"data-dir: images\npretrained: {value}\n")
    assert parse(["--config", path]).pretrained == expected


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field.name))
def test_every_field_explains_itself(field: dataclasses.Field[Any]) -> None:
    assert re.fullmatch(r"\S.*\S\.", flag_info(field).help)
    optional = types.NoneType in typing.get_args(field.type)
    assert (field.default is None) == (optional or field.name == "output_dir")  # which TrainConfig fills in


@pytest.mark.parametrize(("text", "size"), [("32", 32), ("32x64", "32x64"), ("64x64", 64)])
def test_sizes(tmp_path: Path, text: str, size: int | str) -> None:
    """A square is a number, in config.json, too, which is a recipe."""
    config = parse(["--data-dir", "images", "--image-size", text])
    assert config.image_size == size
    config.save(tmp_path / "config.json")
    assert TrainConfig.from_dict(json.loads((tmp_path / "config.json").read_text())).image_size == size
    again = parse(["--config", str(tmp_path / "config.json")])
    assert again.image_size == size


def test_every_number_has_limits() -> None:
    """The limits of each flag are tested with its messages in tests/runs/test_refused_flags.py."""
    numbers = [field for field in FIELDS if {int, float} & {field.type, *typing.get_args(field.type)}]
    assert len(numbers) > 20
    assert [field.name for field in numbers if not flag_info(field).limits] == []


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        (Limit(minimum=1), 0, "0: must be 1 or more"),
        (Limit(minimum=0), -0.5, "-0.5: must be 0 or more and finite"),
        (Limit(above=0), 0.0, "0.0: must be more than 0 and finite"),
        (Limit(above=0), math.nan, "nan: must be more than 0 and finite"),
        (Limit(maximum=1), -math.inf, "-inf: must be at most 1"),
        (Limit(above=0, maximum=1), 1.5, "1.5: must be more than 0 and at most 1"),
        (Limit(minimum=0, below=1), 1.0, "1.0: must be at least 0 and less than 1"),
        (Limit(below=2**31), 2**31, "2147483648: must be less than 2147483648"),
        (Limit(minimum=0, maximum=1, noun="share"), -1.0, "-1.0: a share, from 0 to 1"),
        (Limit(maximum=1e6), 1e10, "1e+10: must be at most 1000000 seconds"),
    ],
)
def test_a_limit_names_its_bounds(limit: Limit, value: float, message: str) -> None:
    with pytest.raises(UserError, match=f"^--flag {re.escape(message)}$"):
        limit.check("--flag", value, "seconds" if "seconds" in message else "")
    limit.check("--flag", None)
    limit.check("--flag", 0.5 if limit.maximum == 1 or limit.below == 1 else 1)


def test_roles_name_flags_in_the_order_of_the_fields() -> None:
    assert flags_with(role="fixed")[:4] == ("arch", "loader", "image_size", "val_resize")
    assert flags_with(role="logged")[:4] == ("epochs", "lr", "train_split", "val_split")
    assert flags_with(role="logged_if_several") == ("grad_exchange", "grad_compression", "sync_bn")
    assert "overwrite" in flags_with(role="free")
    assert flags_with(of_launch=True) == (*OF_LAUNCH, "config")
    assert flags_with(from_checkpoint=True)[-2:] == ("amp", "best_by")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert parse(["--data-dir", "images", "--config", str(path)]).arch in path.read_text()
