"""The table of epochs at the end of a run."""

import dataclasses
from pathlib import Path
from typing import Any

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


def test_a_long_run_keeps_the_first_the_best_and_the_last_epoch() -> None:
    top1s = {epoch: 50.0 + (epoch == 33) for epoch in range(2, 91, 2)} | {33: 60.0}
    lines = epoch_table(dataclasses.replace(RUN, metrics=records(top1s)), rows=12)
    assert len(lines) <= 13
    epochs = [int(line.split()[0]) for line in lines[1:]]
    assert epochs[0] == 2
    assert epochs[-1] == 90
    assert [line.split()[0] for line in lines if line.endswith("*")] == ["33"]
    assert epochs == sorted(set(epochs))


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
