"""`~/` is the home folder in every path of every program. A shell replaces it neither behind = nor in a recipe."""

from pathlib import Path
from typing import Any

import pytest

from tests.test_contract import PROGRAMS
from utils.data.feed.options import create_config
from utils.inference.inputs import expand_sources
from utils.options.cli import TRAIN, Program
from utils.options.config import TrainConfig, flag_fields
from utils.options.flags import flag, flag_info, kinds

PATHS = [field for field in flag_fields() if Path in kinds(field) or flag_info(field).is_path]
WORDS = {
    "bench caches": "--data-dir=~/x --output-dir=~/x",
    "bench formats": "~/x ~/y --output-dir=~/x",
    "bench launch": "--limit=1 --terminate-after=~/x -- true",
    "bench networks": "resnet18 --data-dir=~/x --output-dir=~/x",
    "bench recipes": "a b --data-dir=~/x --output-dir=~/x",
    "bench scaling": "--data-dir=~/x --output-dir=~/x",
    "bench series": "--data-dir=~/x --output-dir=~/x",
    "bench starts": "--data-dir=~/x --output-dir=~/x",
    "benchmark.py": "--data-dir=~/x --output-dir=~/x --stage-dir=~/x",
    "check_dataset.py": "~/x --output-dir=~/x --stage-dir=~/x",
    "convert_dataset.py": "~/x ~/y --class-names=~/x --stage-dir=~/x",
    "download.py": "imagenette --output-dir=~/x",
    "export.py": "~/x --format=timm --output-dir=~/x --check-data=~/x",
    "find_label_errors.py": "~/x ~/y --output-dir=~/x",
    "make_digits.py": "~/x",
    "predict.py": "~/x x --output-dir=~/x",
    "probe.py": "~/x ~/y --output-dir=~/x",
    "report.py": "~/x ~/y --output=~/x",
    "runs.py": "~/x ~/y",
    "track.py": "~/x --track=wandb",
    "watch.py": "~/x",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_which_flags_take_paths() -> None:
    assert {field.name for field in PATHS} == {
        "data_dir", "output_dir", "config", "class_names", "stage_dir", "train_data", "val_data", "resume",
        "pretrained", "transform", "dali_plugin", "class_weights", "real_labels", "teacher",
    }  # fmt: skip


@pytest.mark.parametrize("field", PATHS, ids=lambda field: field.name)
def test_flags_and_recipes_of_train(home: Path, field: Any) -> None:
    name = "x/f.py:name" if field.name == "transform" else "x/f"
    (home / "x" / "f").write_text("lr: 0.5\n")
    others = ["--data-dir", "x"] + (["--transform", "x/f.py:name"] if field.name == "dali_plugin" else [])
    others += ["--evaluate"] if field.name == "real_labels" else []

    def check(*words: str) -> None:
        config = TRAIN.parse([*others, *words])
        assert str(getattr(config, field.name)) == str(home / name)
        assert field.name != "config" or config.lr == 0.5

    check(f"{flag(field.name)}=~/{name}")
    check(flag(field.name), f"~/{name}")
    if field.name not in ("config", "data_dir"):
        (home / "recipe.yaml").write_text(f"{flag(field.name)[2:]}: ~/{name}\n")
        check("--config=~/recipe.yaml")
        (home / "recipe.yaml").write_text(f'{field.name}: "~/{name}"\n')
        check("--config", "recipe.yaml")


@pytest.mark.parametrize("program", PROGRAMS[2:], ids=lambda program: str(program.name))
def test_scripts(home: Path, program: Program[Any]) -> None:
    words = WORDS[program.name]
    options = repr(program.parse(words.split()))
    assert "~" not in options
    assert options.count(str(home)) >= words.count("~/")


def test_sources_and_feeds(home: Path) -> None:
    (home / "x" / "a.jpg").write_bytes(b"x")
    assert expand_sources(["~/x/*.jpg", "~/y"]) == [str(home / "x" / "a.jpg"), str(home / "y")]
    (home / "~").mkdir()
    assert expand_sources(["~"]) == ["~"], "a folder of that name"
    assert create_config("~/x", "train", {"stage_dir": "~/y"}).data_dir == home / "x"


def test_what_is_no_path_stays(home: Path) -> None:
    for words in ("--resume=auto", "--resume=none --overwrite", "--pretrained=timm"):
        config = TRAIN.parse(["--data-dir=./~", *words.split()])
        assert (config.data_dir, config.resume in ("auto", "none")) == (Path("./~"), True)
    assert TRAIN.parse(["--data-dir=~nobody-has-this-name/x"]).data_dir == Path("~nobody-has-this-name/x")
    assert TrainConfig.from_dict(TRAIN.parse(["--data-dir=~/x"]).to_dict()).data_dir == home / "x"
