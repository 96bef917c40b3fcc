"""Curves in block characters."""

from pathlib import Path

import pytest

from tests.report.test_run_story import STARTED, interval, run_with
from utils.report.terminal import _fit, draw_blocks, record_line, screen


def test_bars_reach_from_the_least_to_the_largest_value() -> None:
    assert draw_blocks([0, 1, 2, 7], rows=1) == ["▁▂▃█"]
    assert draw_blocks([0.0, 15.0, 7.5], rows=2) == [" █▁", "▁██"]
    assert draw_blocks([3.0, 3.0], rows=1) == ["▁▁"]


def test_values_are_averaged_or_repeated() -> None:
    assert _fit([1, 3, 5, 7], 2) == [2, 6]
    assert _fit([1, 3], 4) == [1, 1, 3, 3]
    assert _fit([1, 3, 5, 7], 2, [3, 1, 1, 1]) == [1.5, 6]


def test_a_screen_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    metrics = [interval(step, **{"train/loss": 5 / step}) for step in range(1, 500)]
    run = run_with(tmp_path, metrics=[*metrics, {"epoch": 1, "step": 500, "val/top1": 12.5}], events=[STARTED])
    lines = screen(run)
    assert max(map(len, lines)) < 60
    assert [line.split()[0] for line in lines if "%" in line] == ["1/2", "val", "12.50", "12.50", "data"]
    assert screen(run_with(tmp_path))[-1] == "no log interval yet"


def test_a_record_is_a_line() -> None:
    line = record_line(interval(5, lr=None), "top1")
    assert line == "epoch 1  step 5  train loss 1.0000  images/s 10  data wait 25.0%"
