"""Which images validate, how often, and when that ends a run; all of it over resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts import runs
from tests.conftest import CLASSES, TINY, assert_same_run, write_data
from tests.forked import launch_ranks, launch_series
from tests.harness import assert_refused, read_checkpoint, read_metrics
from utils.data.images.listing import load_listing
from utils.training.state.checkpoint import EARLIER, LAST


def evaluation(folder: Path) -> dict[str, Any]:
    """The numbers of evaluation.json."""
    found = json.loads((folder / "evaluation.json").read_text())
    return {name: found[name] for name in ("top1", "loss", "count")}


@pytest.mark.dist
def test_a_run_on_held_out_images(tmp_path: Path) -> None:
    """On two processes and on one, over a resume, and evaluated anywhere: the same images."""
    root, run, other = tmp_path / "data", tmp_path / "run", tmp_path / "other"
    write_data(root)
    (root / "val").rename(root / "test")
    flags = ("--data-dir", root, *TINY, "--val-fraction", 0.3, "--output-dir", run)
    first, second = launch_ranks(*flags, "--batch-size", 4, "--epochs", 1)
    assert (first.status, second.status) == (0, 0), (first.err, second.err)
    held_out = list(load_listing(run, "val"))
    shares = f"images  {41 - len(held_out)} train, {len(held_out)} val (the held-out part of train/, "
    assert shares in first.out
    beside = ("--data-dir", root / "train", *TINY, "--epochs", 1, "--output-dir")
    resumed, plain, elsewhere, given, changed, tenth, every = launch_series(
        (*flags, "--epochs", 2),
        ("--evaluate", "--output-dir", run, "--resume", run / LAST, "--workers", 1),
        ("--evaluate", "--output-dir", other, "--resume", run / LAST, "--workers", 1, "--val-split", "test"),
        ("--evaluate", "--output-dir", other, "--resume", run / LAST, "--workers", 1, "--data-dir", root),
        (*flags, "--epochs", 2, "--val-fraction", 0.2),
        (*beside, tmp_path / "tenth"),
        (*beside, tmp_path / "every", "--val-fraction", 0),
    )
    assert resumed.status == 0, resumed.err
    assert shares in resumed.out
    assert not resumed.written & {"digests.json", "listing.zip"}
    expected = {name: read_metrics(run)[-1][f"val/{name}"] for name in ("top1", "loss", "count")}
    assert [plain.status, elsewhere.status, given.status] == [0, 0, 0], (plain.err, elsewhere.err, given.err)
    assert expected["count"] == len(held_out)
    assert evaluation(run) == expected
    assert evaluation(other) == expected
    assert " count 41" in elsewhere.out
    assert "note: --val-split test, its run had val\nnote: --val-fraction 0.0, its run had 0.3\n" in elsewhere.out
    assert [tenth.status, every.status] == [0, 0], (tenth.err, every.err)
    assert " val (the held-out part of train/, " in tenth.out
    assert "; --val-fraction 0.1: there is no train/ and no val/; " in tenth.out
    assert read_checkpoint(tmp_path / "tenth")["config"]["val_fraction"] == 0.1
    assert "images  41 train, 41 val" in every.out
    assert "warning: all images train and validate: accuracy says how well they are known" in every.out
    assert_refused(changed, "--val-fraction: 0.3 then, 0.2 now", "the held-out part of train/ has ", "fewer (")


def folder_at(run: Path, checkpoint: str, folder: Path) -> Path:
    """What `run` was when one of its earlier checkpoints was the last."""
    shutil.copytree(run, folder)
    for name in (LAST, "summary.json", *EARLIER[:2]):
        (folder / name).unlink()
    shutil.copy(run / checkpoint, folder / LAST)
    return folder


@pytest.mark.slow
def test_evaluations_that_end_a_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first evaluation is the best, after epoch 2, and two later is the end: every class has the same image."""
    root, whole = tmp_path / "data", tmp_path / "whole"
    (root / "val").mkdir(parents=True)
    (root / "train").symlink_to(data / "train")
    for name in CLASSES:
        (root / "val" / name).mkdir()
        shutil.copy(data / "val" / "red" / "red-000.jpg", root / "val" / name)
    cheap = ("--data-dir", root, *TINY, "--batch-size", 8, "--deterministic")
    flags = (*cheap, "--epochs", 9, "--checkpoint-steps", 2, "--eval-every", 2)
    (done,) = launch_series((*flags, "--patience", 2, "--output-dir", whole))
    assert done.status == 0, done.err
    reason = "ended after epoch 6 of 9: the last 2 evaluations brought no better top-1 than the 33.33 % of epoch 2"
    assert done.out.count(f"{reason} (--patience 2); a higher --patience, or 0, trains on") == 1
    assert "epoch 5/9  not evaluated\n" in done.out
    assert [record["epoch"] for record in read_metrics(whole) if "val/top1" in record] == [2, 4, 6]
    assert json.loads((whole / "summary.json").read_text())["epochs"] == 6
    assert [read_checkpoint(whole, name)["step"] for name in (LAST, *EARLIER[:2])] == [30, 30, 28]
    assert read_checkpoint(whole, "best.pt")["step"] == 10

    within, before = (folder_at(whole, name, tmp_path / name) for name in (EARLIER[1], EARLIER[0]))
    # From step 28, in the sixth epoch: with fewer epochs what there is is evaluated. Other validation counts again.
    cut, sized = (folder_at(whole, name, tmp_path / f"{name} again") for name in (EARLIER[1], LAST))
    accept = ("--resume", sized / LAST, "--accept-changes", "--val-resize", 40)
    over = tmp_path / "over"
    unchanged, in_epoch, at_end, further, fewer, again, elsewhere = launch_series(
        (*flags, "--patience", 2, "--output-dir", whole),
        (*flags, "--patience", 2, "--output-dir", within),
        (*flags, "--patience", 2, "--output-dir", before),
        (*flags, "--patience", 3, "--epochs", 7, "--output-dir", before),
        (*flags, "--patience", 2, "--epochs", 5, "--output-dir", cut),
        (*flags, "--patience", 1, *accept, "--output-dir", sized),
        (*flags, "--patience", 2, "--output-dir", over, "--resume", whole / LAST),
    )
    assert [run.status for run in (fewer, again, elsewhere)] == [0, 0, 0], (fewer.err, again.err, elsewhere.err)
    assert (json.loads((cut / "summary.json").read_text())["epochs"], read_checkpoint(cut)["step"]) == (5, 28)
    assert [record["epoch"] for record in read_metrics(sized) if "val/top1" in record] == [2, 4, 6, 8, 9]
    assert read_checkpoint(sized, "best.pt")["step"] == 40, "the first evaluation on other pixels is the best"
    assert json.loads((over / "config.json").read_text())["patience"] == 2
    assert (unchanged.status, unchanged.written) == (0, frozenset())
    assert unchanged.out.count(reason) == 1
    assert [in_epoch.status, at_end.status, further.status] == [0, 0, 0], (in_epoch.err, at_end.err, further.err)
    assert_same_run(whole, within)
    assert "--patience 2 -> 3" in further.out
    assert "ended after" not in further.out
    assert [record["epoch"] for record in read_metrics(before) if "val/top1" in record] == [2, 4, 6, 7]
    assert read_checkpoint(before)["evaluations_since_best"] == 3
    assert runs.main([str(tmp_path)]) == 0
    listed = {Path(row.split()[0]).name: row.split()[1:4] for row in capsys.readouterr().out.splitlines()[1:]}
    assert listed["whole"] == ["finished", "test_resnet", "6/9"]


@pytest.mark.slow  # one evaluation schedule is quick
def test_the_last_epoch_is_evaluated(data: Path, tmp_path: Path) -> None:
    """Also where a resume makes an epoch the last that has ended without an evaluation."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--eval-every", 5)
    (done,) = launch_series((*flags, "--epochs", 3, "--output-dir", tmp_path / "run"))
    assert done.status == 0, done.err
    shorter = folder_at(tmp_path / "run", EARLIER[1], tmp_path / "shorter")
    assert (read_checkpoint(shorter)["epoch"], read_checkpoint(shorter)["result"]) == (2, {})
    finished, repeated = launch_series(*[(*flags, "--epochs", 2, "--output-dir", shorter)] * 2)
    assert finished.status == 0, finished.err
    assert [record["epoch"] for record in read_metrics(shorter) if "val/top1" in record] == [2]
    assert json.loads((shorter / "summary.json").read_text())["epochs"] == 2
    assert (repeated.status, repeated.written) == (0, frozenset())
    assert "All 2 epochs are done" in repeated.out
