"""The table of epochs at the end of a run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from utils.figures import describe_figures
from utils.report.output_folder import RunInfo
from utils.report.terminal import epoch_table

RUN = RunInfo(Path("run"), config={}, metrics=[], events=[], summary={}, is_locked=False)


def records(top1s: dict[int, float], **more: float) -> list[dict[str, Any]]:
    """Two log intervals of each epoch, and an evaluation of those in `top1s`."""
    found: list[dict[str, Any]] = []
    for epoch in range(1, max(top1s) + 1):
        for loss in (3.0 / epoch, 1.0 / epoch):
            found.append({"epoch": epoch, "step": 1, "train/loss": loss, "images_per_second": 1000, "data_wait": 0.01})
        if epoch in top1s:
            found.append(
                {"epoch": epoch, "step": 1, "val/top1": top1s[epoch], "val/top5": 90.0, "val/loss": 1.0} | more
            )
    return found


def test_a_row_has_the_means_of_its_epoch() -> None:
    lines = epoch_table(dataclasses.replace(RUN, metrics=records({1: 40.0, 2: 60.5, 3: 50.0})))
    assert lines == [
        "epoch  train loss  val loss    top-1    top-5  images/s  data wait",
        "    1      2.0000    1.0000  40.00 %  90.00 %     1,000       1.0%",
        "    2      1.0000    1.0000  60.50 %  90.00 %     1,000       1.0%  *",
        "    3      0.6667    1.0000  50.00 %  90.00 %     1,000       1.0%",
    ]


def test_an_interval_counts_with_its_length() -> None:
    """The last one of an epoch has a step alone; a resume in mid-epoch has timed a part of its steps."""
    metrics: list[dict[str, Any]] = [
        {"epoch": 1, "step": 19, "train/loss": 1.5, "images_per_second": 608, "data_wait": 0.0, "seconds": 2.0},
        {"epoch": 1, "step": 20, "train/loss": 0.5, "images_per_second": 1000, "data_wait": 0.5, "seconds": 0.064},
        {"epoch": 1, "step": 20, "val/top1": 40.0, "val/top5": 90.0, "val/loss": 1.0},
        {"epoch": 2, "step": 39, "train/loss": None, "images_per_second": 100, "data_wait": 0.0, "seconds": 3.0},
        {"epoch": 2, "step": 40, "train/loss": 0.25, "images_per_second": 400, "data_wait": 0.2, "seconds": 1.0},
        {"epoch": 2, "step": 40, "val/top1": 30.0, "val/top5": 90.0, "val/loss": 1.0},
    ]
    lines = epoch_table(dataclasses.replace(RUN, metrics=metrics))
    assert [line.split() for line in lines[1:]] == [
        ["1", "1.4500", "1.0000", "40.00", "%", "90.00", "%", "620", "1.6%", "*"],
        ["2", "0.2500", "1.0000", "30.00", "%", "90.00", "%", "175", "5.0%"],
    ]
    # Brisk 0.1 wrote no seconds: images of both by the time that they took.
    old = [{name: value for name, value in record.items() if name != "seconds"} for record in metrics]
    assert epoch_table(dataclasses.replace(RUN, metrics=old))[1].split()[-3:] == ["620", "1.6%", "*"]
    # Gone on with in another folder, at step 30 of the second epoch, with lines of ten steps.
    moved = [metrics[4] | {"step": 40, "train/loss": 1.0}, metrics[4] | {"step": 45, "train/loss": 4.0}, metrics[5]]
    run = dataclasses.replace(RUN, metrics=moved, config={"log_steps": 10})
    assert epoch_table(run)[1].split()[1] == "2.0000"


def test_all_epochs_of_a_short_run_are_shown() -> None:
    for number in (12, 20):
        top1s = {epoch: 50.0 + (epoch == 11) for epoch in range(1, number + 1)}
        lines = epoch_table(dataclasses.replace(RUN, metrics=records(top1s)))
        assert [line.split()[0] for line in lines[1:]] == [str(epoch) for epoch in top1s]


@pytest.mark.parametrize("number", [21, 22, 25, 39, 90, 1000])
def test_what_is_left_out_shows_and_is_never_one_epoch(number: int) -> None:
    """The first, the best and the last epoch are there."""
    for best in (1, 2, number // 2, number - 1, number):
        top1s = {epoch: 50.0 + (epoch == best) for epoch in range(1, number + 1)}
        lines = epoch_table(dataclasses.replace(RUN, metrics=records(top1s)))
        assert 15 < len(lines) <= 21
        assert [line.split()[0] for line in lines if line.endswith("*")] == [str(best)]
        shown = [line.split()[0] for line in lines[1:]]
        assert (shown[0], shown[-1]) == ("1", str(number))
        for before, at, after in zip(shown[:-1], shown[1:], [*shown[2:], ""], strict=True):
            if at == "...":
                assert int(after) - int(before) > 2
            elif before != "...":
                assert int(at) == int(before) + 1


@pytest.mark.parametrize(("classes", "by", "shown"), [(5, "top1", False), (6, "top1", True), (5, "top5", True)])
def test_top5_of_five_classes_is_in_no_line(classes: int, by: str, shown: bool) -> None:
    config = {"num_classes": classes, "best_by": by}
    metrics = records({1: 40.0})
    assert ("top-5" in epoch_table(dataclasses.replace(RUN, metrics=metrics, config=config))[0]) == shown
    assert ("top-5 90.00 %" in describe_figures(metrics[-1], by, classes)) == shown


def test_the_best_is_that_of_the_moving_average_where_it_is_better() -> None:
    metrics = records({1: 70.0, 2: 60.0}, **{"val/ema_top1": 65.0})
    metrics[-1]["val/ema_top1"] = 75.0
    lines = epoch_table(dataclasses.replace(RUN, metrics=metrics))
    assert "EMA top-1" in lines[0]
    assert lines[2].endswith("*")


def test_a_value_that_is_not_finite_is_left_out() -> None:
    metrics = records({1: 40.0})
    metrics[0]["train/loss"] = metrics[1]["train/loss"] = None
    assert epoch_table(dataclasses.replace(RUN, metrics=metrics))[1].split() == [
        "1", "1.0000", "40.00", "%", "90.00", "%", "1,000", "1.0%", "*",
    ]  # fmt: skip
