"""`--balance` in whole runs: a resume is exact, and another value is refused."""

from pathlib import Path

import pytest

from tests.conftest import TINY, assert_same_run, write_data
from tests.forked import launch_series
from tests.harness import assert_refused


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data", train=(40, 7, 1), val=(5, 5, 5))


@pytest.mark.dist
@pytest.mark.parametrize("loader", ["dali", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_stopped_run_ends_as_the_uninterrupted_one(uneven: Path, tmp_path: Path, loader: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ("--data-dir", uneven, *TINY, "--batch-size", 8, "--epochs", 2, "--balance", 1, "--loader", loader)
    stopped = (*flags, "--output-dir", cut, "--time-limit", 0.001)
    done = launch_series((*flags, "--output-dir", whole), stopped, stopped, (*flags, "--output-dir", cut))
    assert [run.status for run in done] == [0, 143, 143, 0], done
    assert " classes  3, blue 40 to red 1 image, 40 : 1" in done[0].out
    assert "resumed at epoch 1, step 2" in done[3].out
    assert_same_run(whole, cut)
    (changed,) = launch_series((*flags, "--output-dir", cut, "--balance", 0.5))
    assert_refused(changed, "--balance: 1 then, 0.5 now")
