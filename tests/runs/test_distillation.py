"""Whole runs with a teacher: resumed to the last bit, refused without it, and nothing of it in what a run leaves."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, assert_same, assert_same_run, curve
from tests.forked import launch_ranks, launch_series
from tests.harness import assert_refused, read_checkpoint, read_losses
from tests.inference.exported import write_checkpoint

EVERYTHING = (
    "--mixup", "0.2", "--random-erase", "0.3", "--ema-decay", "0.9", "--grad-accum-steps", "2", "--clip-grad", "1",
    "--resize-schedule", "0:32,1:48", "--teacher-weight", "0.7", "--teacher-temperature", "2",
)  # fmt: skip


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The output folder of another run: another normalization, with a moving average that is better."""
    result = {"val/top1": 50.0, "val/ema_top1": 60.0}
    return write_checkpoint(tmp_path / "teacher" / "best.pt", arch="test_resnet", result=result, with_ema=True).parent


@pytest.mark.slow  # a teacher has no state: what resumes is as in tests/training/test_resume.py
def test_a_stopped_run_ends_as_the_uninterrupted_one(data: Path, tmp_path: Path, teacher: Path) -> None:
    whole, cut, moved = tmp_path / "whole", tmp_path / "cut", tmp_path / "moved"
    of_run = ("--data-dir", data, *TINY, "--deterministic", "--batch-size", 4, "--epochs", 2, *EVERYTHING)
    flags = (*of_run, "--output-dir")
    stop, given = ("--time-limit", 0.001), ("--teacher", teacher)  # after a step
    one, two = launch_series((*flags, whole, *given), (*flags, cut, *given, *stop))
    assert (one.status, two.status) == (0, 143), (one, two)
    assert " teacher  test_resnet, 0.37 M parameters, EMA weights of " in one.out
    assert "; 0.7 of the loss, temperature 2; a pass takes " in one.out
    assert read_checkpoint(cut)["step"] == 1

    shutil.move(teacher, moved)  # gone, another one in its place, none
    write_checkpoint(teacher / "best.pt", arch="test_resnet")
    changed, left_out = launch_series(
        (*flags, cut, *given), (*flags, cut, "--teacher-weight", 0.5, "--teacher-temperature", 4)
    )
    shutil.rmtree(teacher)
    (gone,) = launch_series((*flags, cut, *given))
    assert_refused(gone, f"--teacher {teacher}: no such file, and the run goes on with it; put it back, or give the ")
    assert_refused(changed, "(--teacher: test_resnet (SHA-256 ", " then, test_resnet (SHA-256 ", " now); restore these")
    assert_refused(left_out, "(--teacher: test_resnet (SHA-256 ", " then, None now); restore these")

    (done,) = launch_series((*flags, cut, "--teacher", moved / "best.pt"))
    assert done.status == 0, done.err
    assert "resumed at epoch 1, step 1" in done.out
    assert_same_run(whole, cut)
    assert json.loads((cut / "config.json").read_text())["teacher"] == str(moved / "best.pt")


@pytest.mark.slow
def test_a_run_may_go_on_without_its_teacher(data: Path, tmp_path: Path, teacher: Path) -> None:
    words = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2, "--output-dir")
    first, cut = tmp_path / "first", ("--teacher", teacher, "--time-limit", 0.001)
    accepted = ("--resume", first / "last.pt", "--accept-changes")
    stopped, done = launch_series((*words, first, *cut), (*words, tmp_path / "second", *accepted))
    assert (stopped.status, done.status) == (143, 0), (stopped, done)
    assert "accepted changes: --teacher: test_resnet (SHA-256 " in done.out
    assert " then, None now" in done.out


def test_nothing_of_the_teacher_is_in_what_a_run_leaves(data: Path, tmp_path: Path, teacher: Path) -> None:
    """And with a weight of 0 it is the run without one, to the last bit."""
    alone, none, half = (tmp_path / name for name in ("alone", "none", "half"))
    flags = ("--data-dir", data, *TINY, "--deterministic", "--batch-size", 8, "--epochs", 1, "--ema-decay", 0.9)
    given = ("--teacher", teacher)
    first, second, third, again = launch_series(
        (*flags, "--output-dir", alone),
        (*flags, *given, "--teacher-weight", 0, "--output-dir", none),
        (*flags, *given, "--output-dir", half),
        ("--config", half / "config.json", "--evaluate", "--output-dir", half),
    )
    for done in (first, second, third, again):
        assert done.status == 0, done
    expected, found = read_checkpoint(alone), read_checkpoint(none)
    for part in ("model", "model_ema", "optimizer", "result"):
        assert_same(expected[part], found[part], part)
    assert curve(alone) == curve(none)
    with_teacher = read_checkpoint(half)
    assert with_teacher.keys() == expected.keys()
    assert with_teacher["model"].keys() == expected["model"].keys()
    assert (half / "last.pt").stat().st_size == pytest.approx((alone / "last.pt").stat().st_size, rel=0.01)
    assert read_losses(half) != read_losses(alone)
    assert with_teacher["fingerprint"]["--teacher"].startswith("test_resnet (SHA-256 ")
    assert expected["fingerprint"]["--teacher"] is None
    assert "test_resnet, 0.37 M parameters, 3 classes\n" in third.out


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ddp", "flat"])
def test_two_processes_and_a_head_that_trains_alone(data: Path, tmp_path: Path, teacher: Path, exchange: str) -> None:
    """Stopped in mid-epoch and resumed; the weights are the same on both, or the save would fail."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ("--data-dir", data, *TINY, "--deterministic", "--batch-size", 4, "--epochs", 2, "--teacher", teacher)
    flags = (*words, "--freeze-epochs", 1, "--pretrained", teacher / "best.pt", "--grad-exchange", exchange)
    for folder, more in ((whole, ()), (cut, ("--time-limit", 0.001)), (cut, ())):
        for done in launch_ranks(*flags, "--output-dir", folder, *more):
            assert done.status == (143 if more else 0), done.err
    assert_same_run(whole, cut)


@pytest.mark.slow
def test_another_teacher_on_another_rank(data: Path, tmp_path: Path, teacher: Path) -> None:
    other = write_checkpoint(tmp_path / "b" / "teacher" / "best.pt", arch="test_resnet")
    saved = read_checkpoint(other.parent, "best.pt")
    torch.save(saved | {"model": {name: value + 1 for name, value in saved["model"].items()}}, other)
    flags = ("--data-dir", data, *TINY, "--batch-size", 4, "--epochs", 1, "--teacher", "teacher/best.pt")
    done = launch_ranks(*flags, "--output-dir", tmp_path / "run", cwds=[tmp_path, tmp_path / "b"])
    assert done[0].status == 2  # which ends the others
    assert_refused(done[0], "--teacher teacher/best.pt: not the same on rank 0 (test_resnet (SHA-256 ", "shared folder")
