"""A run with --fold: on two processes and on one, over a resume, evaluated anywhere, beside a val/ of its own."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY, write_data
from tests.forked import launch_ranks, launch_series
from tests.harness import assert_refused, read_checkpoint, read_metrics
from utils.data.formats.folder import scan
from utils.data.images.listing import load_listing
from utils.data.splits.holdout import choose_by_content, divide
from utils.distributed.group import DistEnv
from utils.options.folds import Fold


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_with_a_fold(tmp_path: Path, cpu: DistEnv) -> None:
    root, run = write_data(tmp_path / "data"), tmp_path / "run"
    flags = ("--data-dir", root, *TINY, "--fold", "2/3", "--output-dir", run)
    first, second = launch_ranks(*flags, "--batch-size", 4, "--epochs", 1)
    assert (first.status, second.status) == (0, 0), (first.err, second.err)
    assert "27 train, 14 val (the held-out part of train/, 4 to 5 of each class)" in first.out
    assert " ignored  val/, as --fold 2/3 holds out images of train/\n" in first.out
    held_out = list(load_listing(run, "val"))
    resumed, same, own, changed = launch_series(
        (*flags, "--epochs", 2),
        ("--evaluate", "--output-dir", run, "--resume", run / "last.pt", "--workers", 1, "--data-dir", root),
        ("--evaluate", "--output-dir", run, "--workers", 1, "--val-split", "val"),
        (*flags, "--epochs", 2, "--fold", "1/3"),
    )
    assert [each.status for each in (resumed, same, own)] == [0] * 3, resumed.err + own.err
    top1 = read_metrics(run)[-1]["val/top1"]
    assert f" top1 {top1:.2f} " in same.out
    assert " count 14\n" in same.out
    assert " count 41\n" in own.out
    assert "note: --fold None, its run had 2/3\n" in own.out
    assert_refused(changed, "--fold: 2/3 then, 1/3 now")
    listed = scan(root, "train")
    one = divide(listed, choose_by_content(listed, Fold(2, 3), tmp_path, 1, cpu))
    assert one["val"].names() == held_out, "on any number of processes"
    assert read_checkpoint(run)["config"]["fold"] == "2/3"
    assert json.loads((run / "config.json").read_text())["val_fraction"] == 0.0
