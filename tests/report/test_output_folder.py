"""What an output folder says of its best epoch: what best.pt holds, whatever else was evaluated."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import runs
from tests.conftest import TINY, resolved
from tests.forked import launch_series
from tests.harness import read_metrics
from tests.training.checkpoints import checkpoint_of
from utils.report.output_folder import read_best, read_run
from utils.report.terminal import epoch_table, headline
from utils.training.state.checkpoint import save
from utils.training.state.train_state import BestEpoch

EVALUATIONS = [{"epoch": epoch, "step": epoch, "val/top1": top1} for epoch, top1 in ((1, 30.0), (2, 80.0), (3, 40.0))]


def write_run(folder: Path, **summary: float) -> None:
    """A run whose second save failed: best.pt is of the third epoch."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"arch": "resnet50", "epochs": 3}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in EVALUATIONS))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))


def write_best(folder: Path, best: BestEpoch | None) -> None:
    """last.pt and, where there is a best epoch, best.pt, with tensors of several types."""
    checkpoint = checkpoint_of(resolved())
    model = torch.nn.BatchNorm2d(3).to(torch.bfloat16)
    networks = {"model": {**model.state_dict(), "ints": torch.arange(3), "half": torch.zeros(2, dtype=torch.half)}}
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).state_dict()
    state = dataclasses.replace(checkpoint.state, networks=networks, optimizer=optimizer, best=best)
    assert save(dataclasses.replace(checkpoint, state=state), folder, is_best=best is not None) is None


@pytest.mark.parametrize("is_finished", [False, True])
def test_the_best_is_what_best_pt_holds(tmp_path: Path, is_finished: bool) -> None:
    write_run(tmp_path, **({"best_top1": 40.0} if is_finished else {}))
    write_best(tmp_path, BestEpoch(3, 3, 40.0))
    run = read_run(tmp_path)
    assert run is not None
    assert run.best == {"epoch": 3, "step": 3, "top1": 40.0, "by": "top1", "value": 40.0}
    assert "best top-1 40.00 %" in headline(run)[1]
    assert [line.split()[0] for line in epoch_table(run) if line.endswith("*")] == ["3"]
    assert runs.table_row(run)[4] == "top-1 40.00 %"


def best_of(folder: Path) -> Any:
    run = read_run(folder)
    assert run is not None
    return run.best and (run.best["epoch"], run.best["top1"])


def test_folders_without_a_best_checkpoint(tmp_path: Path) -> None:
    """Of a copy without checkpoints the files say it; where no save of a best epoch has succeeded there is none."""
    write_run(tmp_path)
    assert best_of(tmp_path) == (2, 80.0)
    write_run(tmp_path, best_top1=40.0)
    assert best_of(tmp_path) == (3, 40.0)
    (tmp_path / "summary.json").unlink()
    write_best(tmp_path, None)
    assert best_of(tmp_path) is None
    run = read_run(tmp_path)
    assert run is not None
    assert "best top-1" not in headline(run)[1]
    assert not [line for line in epoch_table(run) if line.endswith("*")]
    assert runs.table_row(run)[4] == ""


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_a_damaged_checkpoint_has_no_best(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "best.pt").write_bytes(content)
    assert read_best(tmp_path / "best.pt") is None


@pytest.mark.slow  # several runs
def test_a_run_whose_save_failed_shows_the_best_epoch_that_was_saved(data: Path, tmp_path: Path) -> None:
    """The second epoch is better, and its checkpoint cannot be written: a folder is where it is written first."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path)
    (begun,) = launch_series((*flags, "--lr", 1e-12, "--epochs", 1))
    (tmp_path / ".last.pt.tmp").mkdir()
    (failed,) = launch_series((*flags, "--epochs", 2, "--warmup-epochs", 0))
    assert (begun.status, failed.status) == (0, 1), (begun, failed)
    first, second = (each["val/top1"] for each in read_metrics(tmp_path) if "val/top1" in each)
    assert second > first
    assert best_of(tmp_path) == (1, first)
    shutil.rmtree(tmp_path / ".last.pt.tmp")
    (done,) = launch_series((*flags, "--epochs", 2, "--warmup-epochs", 0))
    assert done.status == 0, done.err
    assert best_of(tmp_path) == (2, json.loads((tmp_path / "summary.json").read_text())["best_top1"])
