"""Kill and resume: weights and losses must be those of an uninterrupted run, to the last bit."""

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, assert_same, assert_same_run
from tests.forked import launch_series, run_train
from tests.harness import assert_refused, launch, read_checkpoint, read_losses, read_metrics
from tests.held import hold_and_end

EPOCHS, STEPS = 3, 5  # 41 images, a global batch of 8
PLAIN: tuple[str, ...] = ("--workers", "2")
EVERYTHING = (
    "--augment", "trivialaugment", "--mixup", "0.2", "--cutmix", "1", "--random-erase", "0.3", "--ema-decay", "0.9",
    "--grad-accum-steps", "2", "--clip-grad", "1", "--fused-layers", "--cache", "host", "--grad-exchange", "flat",
)  # fmt: skip


def flags_for(data: Path, processes: int, extra: tuple[str, ...]) -> tuple[Any, ...]:
    batch_size = 8 // processes // (2 if "--grad-accum-steps" in extra else 1)
    on_all_ranks = ("--data-dir", data, *TINY, "--deterministic", "--epochs", EPOCHS, "--batch-size", batch_size)
    return (*on_all_ranks, *extra)


@pytest.mark.dist
@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "extra", [pytest.param(EVERYTHING, id="everything"), pytest.param(PLAIN, id="plain", marks=pytest.mark.slow)]
)
def test_an_interrupted_run_ends_as_the_uninterrupted_one(
    data: Path, tmp_path: Path, processes: int, extra: tuple[str, ...]
) -> None:
    flags = flags_for(data, processes, extra)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = run_train(*flags, "--output-dir", whole, processes=processes)
    assert done.status == 0, done.err

    # Killed in mid-epoch 1, after a checkpoint at step 3.
    mid_epoch = (*flags, "--output-dir", cut, "--checkpoint-steps", 3)
    hold_and_end(*mid_epoch, at=3, processes=processes)
    assert read_checkpoint(cut)["step"] == 3

    # Asked to stop in mid-epoch 2.
    stopped = (*flags, "--output-dir", cut)
    status = hold_and_end(*stopped, at=STEPS + 2, number=signal.SIGTERM, processes=processes)
    if processes == 1:
        assert status == 143
    assert read_checkpoint(cut)["step"] == STEPS + 2 + processes

    at = f"epoch 2, step {STEPS + 2 + processes}"
    if extra != EVERYTHING or processes > 1:  # killed in epoch 3, when the last checkpoint is the end of epoch 2
        hold_and_end(*stopped, at=2 * STEPS + 2, processes=processes)
        assert (read_checkpoint(cut)["step"], read_checkpoint(cut)["epoch"]) == (2 * STEPS, 2)
        at = "epoch 3, step 10"

    done = run_train(*stopped, processes=processes)
    assert done.status == 0, done.err
    assert f"resumed at {at}" in done.out

    assert_same_run(whole, cut)
    assert [step for step, _ in read_losses(cut)] == list(range(1, EPOCHS * STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch", "proxy"])
def test_other_loaders_resume(data: Path, tmp_path: Path, loader: str) -> None:
    """`torch` in mid-epoch; `proxy` at an epoch's end, and in mid-epoch it says what it cannot do."""
    log_steps = 2 if loader == "torch" else 1  # then the cut after step 3 is in the midst of an interval
    flags = (*flags_for(data, 1, ("--augment", "trivialaugment")), "--loader", loader, "--log-steps", log_steps)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert launch(*flags, "--output-dir", whole).status == 0
    if loader == "torch":
        hold_and_end(*flags, "--output-dir", cut, "--checkpoint-steps", 3, at=3)
        assert read_checkpoint(cut)["step"] == 3
    else:
        hold_and_end(*flags, "--output-dir", cut, at=STEPS + 2)
        assert read_checkpoint(cut)["step"] == STEPS
    done = launch(*flags, "--output-dir", cut)
    assert done.status == 0, done.err
    assert_same(read_checkpoint(whole)["model"], read_checkpoint(cut)["model"])
    assert read_losses(whole) == read_losses(cut)
    if loader == "proxy":
        middle = tmp_path / "middle"
        hold_and_end(*flags, "--output-dir", middle, "--checkpoint-steps", 3, at=3)
        assert "the proxy loader resumes its random draws at epochs only" in launch(*flags, "--output-dir", middle).out


@pytest.mark.slow
def test_killed_between_training_and_evaluation(data: Path, tmp_path: Path) -> None:
    """A checkpoint of an epoch's last step, not yet evaluated, goes straight to the evaluation."""
    flags = (*flags_for(data, 1, PLAIN), "--output-dir", tmp_path)
    status = hold_and_end(*flags, at="evaluation", number=signal.SIGTERM)
    assert status == 143
    done = launch(*flags)
    assert done.status == 0, done.err
    records = read_metrics(tmp_path)
    order = [("val" if "val/top1" in record else "train", record["step"]) for record in records]
    expected = itertools.chain.from_iterable(
        [*(("train", epoch * STEPS + step + 1) for step in range(STEPS)), ("val", (epoch + 1) * STEPS)]
        for epoch in range(EPOCHS)
    )
    assert order == list(expected)


def test_a_finished_run_is_left_as_it_is(data: Path, tmp_path: Path) -> None:
    run, other, again = (tmp_path / name for name in ("run", "other", "again"))
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", run, "--epochs")
    elsewhere = ("--resume", run, "--output-dir", other)
    evaluates = ("--resume", run, "--output-dir", again, "--accept-changes", "--val-resize", 40)
    first, finished, moved, evaluated, more = launch_series(
        (*flags, 1), (*flags, 1, "--lr", 9), (*flags, 1, *elsewhere), (*flags, 1, *evaluates), (*flags, 2)
    )
    done = (first, finished, evaluated, more)
    assert [each.status for each in done] == [0] * 4, done
    assert read_checkpoint(again, "best.pt")["epoch"] == 1, "what it may evaluate in another way is left to do"
    assert "The epoch is done" in finished.out
    assert finished.written == frozenset()
    assert_refused(moved, f"--resume {run}/last.pt: its run is finished, epoch 1 of 1; give more --epochs and ")
    assert not other.exists()
    assert read_checkpoint(run)["epoch"] == 2


@pytest.mark.slow
def test_resume_takes_the_decode_path_of_the_checkpoint(data: Path, tmp_path: Path) -> None:
    """`auto` depends on the machine, and a run can be resumed on another one."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path)
    first, resumed, refused = launch_series(
        (*flags, "--epochs", 1, "--decode", "full"),
        (*flags, "--epochs", 2),
        (*flags, "--epochs", 3, "--decode", "fused"),
    )
    assert [first.status, resumed.status] == [0, 0], resumed.err
    assert "resumed at epoch 2" in resumed.out
    assert "--decode full: as in the checkpoint" in resumed.out
    assert_refused(refused, "--decode: full then, fused now")
