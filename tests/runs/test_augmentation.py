"""Whole runs with the augmentation of published recipes: stopped in mid-epoch and resumed, to the last bit."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY, assert_same_run
from tests.forked import launch_series
from tests.harness import assert_refused, read_checkpoint

RANDAUGMENT = (
    "--augment-schedule", "0:randaugment,1:none", "--randaugment-magnitude", 21, "--randaugment-ops", 1,
    "--randaugment-std", 1.5,
)  # fmt: skip
THREE_AUGMENT = ("--augment", "three-augment", "--color-jitter", 0.3, "--repeated-augmentation", 3)


@pytest.mark.slow  # the loaders' own resume is in tests/test_pipelines.py, copies in tests/data/test_sampler.py
@pytest.mark.parametrize("recipe", [RANDAUGMENT, THREE_AUGMENT], ids=["randaugment", "three-augment"])
def test_a_stopped_run_ends_as_the_uninterrupted_one(data: Path, tmp_path: Path, recipe: tuple[object, ...]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2, *recipe, "--output-dir")
    stop = ("--time-limit", 0.001)  # after a step of each launch
    others = ("--resume", cut / "last.pt", recipe[-2], 2, "--output-dir")
    done = launch_series(
        (*flags, whole),
        *[(*flags, cut, *stop)] * 3,
        (*flags[:-1], *others, tmp_path / "other"),
        (*flags, cut),
    )
    assert [run.status for run in done] == [0, 143, 143, 143, 2, 0], done
    assert_refused(done[4], f"({recipe[-2]}: {recipe[-1]} then, 2 now); restore these")
    assert "resumed at epoch 1, step 3" in done[5].out
    assert_same_run(whole, cut)
    assert json.loads((cut / "config.json").read_text())["augment"] == ("none" if recipe is RANDAUGMENT else recipe[1])
    assert read_checkpoint(cut)["step"] == 10
