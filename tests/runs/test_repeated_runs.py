"""A run is repeated from its config.json, also after a stop; what was chosen follows other flags and other data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, assert_same, assert_same_run
from tests.forked import launch_series
from tests.harness import read_checkpoint, read_losses

OPEN = ("--arch", "test_resnet", "--image-size", 32, "--device", "cpu", "--batch-size", 8, "--log-steps", 1)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def recipe_line(out: str) -> str:
    return next((line for line in out.splitlines() if line.startswith("  recipe  ")), "")


@pytest.mark.slow  # what is chosen again is quick
def test_a_repeated_run_keeps_its_checkpoints(data: Path, tmp_path: Path) -> None:
    """Though the first was begun by `--resume none --overwrite`; so does an old config.json, which has these."""
    first, repeated, old = (tmp_path / name for name in ("first", "repeated", "old"))
    old.mkdir()
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 1, "--deterministic")
    repeat = ("--config", first / "config.json", "--output-dir", repeated)
    by_old = ("--config", old / "recipe.json", "--output-dir", old)
    (begun,) = launch_series((*flags, "--output-dir", first, "--resume", "none", "--overwrite", "--time-limit", 600))
    assert begun.status == 0, begun.err
    of_launch = {"resume": "none", "overwrite": True, "time_limit": 1e-3, "evaluate": False, "max_restarts": 2}
    earlier = {name: value for name, value in config_of(first).items() if name != "chosen"}
    (old / "recipe.json").write_text(json.dumps(earlier | of_launch))
    stop = ("--time-limit", 0.001)
    done = launch_series((*repeat, *stop), repeat, (*by_old, *stop), by_old)
    assert [run.status for run in done] == [143, 0, 143, 0], done
    for count, folder in ((1, repeated), (3, old)):
        assert f"resumed at epoch 1, step 1, from {folder}/last.pt" in done[count].out
        assert_same_run(first, folder)
        assert not {"resume", "overwrite", "time_limit", "evaluate", "max_restarts"} & config_of(folder).keys()
    assert recipe_line(done[1].out) == ""
    assert (
        "does not say what was given and what was chosen; kept: --epochs 1, --batch-size 8, --lr 0.5, "
        in recipe_line(done[3].out)
    )


@pytest.mark.slow  # that each value is chosen again is quick: tests/options/test_config.py
def test_what_was_chosen_follows_other_flags_and_data(data: Path, tmp_path: Path) -> None:
    first, other, edited = (tmp_path / name for name in ("first", "other", "edited"))
    two = tmp_path / "two"
    shutil.copytree(data, two)
    for split in ("train", "val"):
        shutil.rmtree(two / split / "red")
    recipe = ("--config", first / "config.json")
    done = launch_series(
        ("--data-dir", data, *OPEN, "--epochs", 1, "--output-dir", first),
        (*recipe, "--output-dir", other, "--data-dir", two, "--image-size", 48, "--epochs", 4, "--optimizer", "adamw",
         "--time-limit", 0.001),
    )  # fmt: skip
    assert [run.status for run in done] == [0, 143], done
    assert recipe_line(done[0].out) == ""
    assert "48 px of 55" in done[1].out
    changed = config_of(other)
    names = ("val_image_size", "val_resize", "num_classes", "warmup_epochs", "lr", "weight_decay", "image_size")
    assert [changed[name] for name in names] == [48, 55, 2, 0.4, 0.0005, 0.05, 48]
    changes = recipe_line(done[1].out)
    expected = ("--val-resize 37 -> 55", "--num-classes 3 -> 2", "--lr 0.256 -> 0.0005", "--warmup-epochs 0.1 -> 0.4")
    assert [change for change in expected if change not in changes] == []
    assert "--image-size" not in changes, "which is given"
    assert "--output-dir" not in changes
    # As it is, the recipe gives the same run; with a value that somebody has changed in the file it has that one.
    edited.mkdir()
    (edited / "recipe.json").write_text(json.dumps(config_of(first) | {"val_resize": 40}))
    same, changed_file = launch_series(
        (*recipe, "--output-dir", tmp_path / "same"), ("--config", edited / "recipe.json", "--output-dir", edited)
    )
    assert (same.status, changed_file.status) == (0, 0), (same, changed_file)
    assert read_losses(tmp_path / "same") == read_losses(first)
    assert_same(read_checkpoint(tmp_path / "same")["model"], read_checkpoint(first)["model"])
    assert config_of(tmp_path / "same") == config_of(first) | {"output_dir": str(tmp_path / "same")}
    assert config_of(edited)["val_resize"] == 40
    assert "val_resize" not in config_of(edited)["chosen"]
