"""What a run's files add up to: lines, marks, time, names."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from utils.report.charts import Mark
from utils.report.output_folder import RunInfo
from utils.report.page import Story, compare_classes, create_charts, render, short_names
from utils.report.pictures import Pictures
from utils.report.run_story import marks, steps_per_epoch, time_parts, wait_verdict


def run_with(tmp_path: Path, **values: Any) -> RunInfo:
    values.setdefault("folder", tmp_path)
    values["folder"].mkdir(exist_ok=True)
    defaults: dict[str, Any] = {"config": {"arch": "resnet50", "epochs": 2}, "metrics": [], "events": [], "summary": {}}
    return RunInfo(**(defaults | {"is_locked": False} | values))


def interval(step: int, **values: Any) -> dict[str, Any]:
    usual = {"epoch": 1, "step": step, "train/loss": 1.0, "lr": 0.1, "images_per_second": 10.0, "data_wait": 0.25}
    return usual | {"seconds": 8.0, "checkpoint_seconds": 1.0} | values


STARTED = {"event": "started", "time": 0.0, "step": 1, "seconds": 0.0, "processes": 1, "steps_per_epoch": 20}


def test_time_is_divided_and_adds_up(tmp_path: Path) -> None:
    started = STARTED | {"startup_seconds": 5.0, "first_step_seconds": 2.0}
    events = [started, {"event": "finished", "time": 60.0, "step": 20, "seconds": 50.0, "checkpoint_seconds": 3.0}]
    evaluation = {"epoch": 1, "step": 20, "val/top1": 50.0, "val/seconds": 4.0}
    run = run_with(tmp_path, metrics=[interval(10), interval(20), evaluation], events=events, summary={"seconds": 50.0})
    assert {part.name: part.seconds for part in time_parts(run)} == {
        "earlier": 0.0, "start": 5.0, "training": 10.0, "waiting": 4.0, "evaluation": 4.0, "checkpoints": 5.0,
        "other": 22.0,
    }  # fmt: skip
    without = [{"epoch": 1, "step": 1, "images_per_second": 1.0}]
    assert time_parts(run_with(tmp_path, metrics=without)) == [], "Brisk 0.1 wrote no seconds"


def test_the_time_of_the_run_that_one_goes_on_from_has_a_part(tmp_path: Path) -> None:
    """Its launches were in another folder, but count."""
    started = STARTED | {"step": 11, "seconds": 47.0, "startup_seconds": 7.0, "first_step_seconds": 1.0}
    events = [started, {"event": "finished", "time": 60.0, "step": 20, "seconds": 60.0}]
    run = run_with(tmp_path, metrics=[interval(20, data_wait=0.0)], events=events, summary={"seconds": 60.0})
    found = {part.name: part.seconds for part in time_parts(run)}
    assert (found["earlier"], found["start"], found["training"], found["other"]) == (40.0, 7.0, 7.0, 5.0)


def test_the_rest_of_an_epoch_is_joined_to_the_interval_before(tmp_path: Path) -> None:
    """65 steps by 50: a point is of 65 images or more. Lines of one length stay, as do those of another epoch."""
    rest = {"train/loss": 4.0, "data_wait": 0.5, "seconds": 2.0, "lr": 0.2, "grad_norm": None, "skipped_steps": 1}
    metrics = [
        interval(50, grad_norm=1.0, skipped_steps=2), interval(65, **rest), {"epoch": 1, "step": 65, "val/top1": 50.0},
        interval(75, epoch=2), interval(85, epoch=2), interval(90, epoch=3),
    ]  # fmt: skip
    drawn = run_with(tmp_path, metrics=metrics).without_remainders()
    assert [record["step"] for record in drawn.metrics] == [65, 65, 75, 85, 90]
    assert drawn.metrics[0] == interval(
        65, lr=0.2, grad_norm=None, skipped_steps=3, seconds=10.0, checkpoint_seconds=2.0, data_wait=0.3,
        **{"train/loss": pytest.approx((50 * 1.0 + 15 * 4.0) / 65)},
    )  # fmt: skip
    (chart, *_) = create_charts([Story(0, "run", run_with(tmp_path, metrics=metrics), None)])
    assert len(chart.lines[0].dots) == 4


def test_classes_of_several_runs_are_side_by_side(tmp_path: Path) -> None:
    def story(number: int, **correct: int) -> Story:
        classes = [{"name": name, "count": 10, "correct": right} for name, right in correct.items()]
        return Story(number, str(number), run_with(tmp_path), Pictures({}, classes, [], [], []))

    without = Story(1, "1", run_with(tmp_path), None)
    rows = compare_classes([story(0, red=9, blue=4), without, story(2, red=5, green=8)])
    assert [(name, [(number, each.get("correct")) for number, each in entries]) for name, entries in rows] == [
        ("blue", [(0, 4), (2, None)]), ("red", [(0, 9), (2, 5)]), ("green", [(0, None), (2, 8)]),
    ]  # fmt: skip
    assert compare_classes([story(0, red=9), without]) == []


def test_one_class_more_is_no_classes(tmp_path: Path) -> None:
    classes = [{"name": str(number), "count": 1, "correct": 1} for number in range(21)]
    pictures = Pictures({}, classes, [], [], [])
    (tmp_path / "report.json").write_text(json.dumps(dataclasses.asdict(pictures)))
    page = render([run_with(tmp_path)])
    assert "1 more class<" in page
    assert "Confusion matrix" not in page


def test_kills_stops_and_deaths_are_marked(tmp_path: Path) -> None:
    stopped = {"event": "stopped", "time": 2.0, "step": 30, "seconds": 9.0, "reason": "SIGTERM"}
    events = [STARTED, STARTED | {"step": 11}, stopped, STARTED | {"step": 31}]
    found = marks(run_with(tmp_path, metrics=[interval(36)], events=events), 20)
    assert [(mark.x, mark.kind) for mark in found] == [(0.5, "killed"), (1.5, "resumed"), (1.8, "died")]
    assert found[1].title == "stopped by SIGTERM at step 30, and resumed"


def test_a_launch_that_begins_with_an_evaluation_is_noted_before_its_first_step(tmp_path: Path) -> None:
    events = [STARTED, STARTED | {"step": 20, "startup_seconds": None}]
    run = run_with(tmp_path, metrics=[interval(20)], events=events)
    assert marks(run, 20)[0] == Mark(1.0, "killed", "killed later than step 20, and resumed here")
    assert Story(0, "run", run, None).launches[1].endswith("first step 21")


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        # Killed before a checkpoint: its time is lost, too.
        ([STARTED | {"startup_seconds": 5.0, "first_step_seconds": 2.0}], {"start": 6.0, "training": 13.0}),
        # Stopped before the end of a log interval: its first step is in none.
        (
            [
                STARTED | {"startup_seconds": 5.0, "first_step_seconds": 2.0},
                {"event": "stopped", "time": 2.0, "step": 3, "seconds": 4.0},
            ],
            {"start": 11.0, "training": 13.0},
        ),
    ],
)
def test_time_of_several_launches(tmp_path: Path, first: list[dict[str, Any]], expected: dict[str, float]) -> None:
    step = first[-1]["step"] + 1 if len(first) > 1 else 1
    events = [
        *first, STARTED | {"step": step, "startup_seconds": 6.0, "first_step_seconds": 3.0},
        {"event": "finished", "time": 60.0, "step": 20, "seconds": 50.0},
    ]  # fmt: skip
    metrics = [interval(10, data_wait=0.0), interval(20, data_wait=0.0)]
    run = run_with(tmp_path, metrics=metrics, events=events, summary={"seconds": 50.0})
    found = {part.name: part.seconds for part in time_parts(run)}
    assert {name: found[name] for name in expected} == expected
    assert sum(found.values()) == 50.0


def test_an_evaluation_of_a_run_that_died_does_not_lengthen_it(tmp_path: Path) -> None:
    run = run_with(tmp_path, events=[STARTED])
    for name, written in (("metrics.jsonl", 30), ("evaluation.json", 9000), ("tracking.json", 9000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (written, written))
    assert (run.state, run.seconds) == ("died", 30.0)


def test_a_first_value_of_zero(tmp_path: Path) -> None:
    metrics = [interval(5, grad_norm=0.0), interval(10, grad_norm=3.0)]
    assert "Gradient norm by epoch" in render([run_with(tmp_path, metrics=metrics, events=[STARTED])])


@pytest.mark.parametrize(
    ("events", "metrics", "steps"),
    [
        ([STARTED], [], 20.0),
        ([], [{"epoch": 2, "step": 50, "val/top1": 1.0}], 25.0),
        ([], [interval(5)], None),
    ],
)
def test_how_long_an_epoch_is(tmp_path: Path, events: Any, metrics: Any, steps: float | None) -> None:
    assert steps_per_epoch(run_with(tmp_path, events=events, metrics=metrics)) == steps


@pytest.mark.parametrize(
    ("wait", "seconds", "verdict"),
    [
        (0.02, 9000, "2.0%: input is fast enough"),
        (0.024, 70, "2.4%"),  # 1.7 s are no news
        (0.024, 9000, "2.4%: input is late; scripts/benchmark.py finds why"),
        (None, 70, "not known yet"),
    ],
)
def test_the_verdict_on_data_wait(tmp_path: Path, wait: float | None, seconds: float, verdict: str) -> None:
    metrics = [] if wait is None else [interval(1, data_wait=wait)]
    events = [STARTED, {"event": "stopped", "time": 0.0, "step": 1, "seconds": seconds}]
    assert wait_verdict(run_with(tmp_path, metrics=metrics, events=events)) == verdict


def test_records_of_any_content_make_a_page(tmp_path: Path) -> None:
    """Of a later version, or edited by hand."""
    odd = [interval(5, lr="high", data_wait=None, images_per_second=True), {"epoch": 1, "step": 6, "val/top1": None}]
    run = run_with(
        tmp_path, metrics=odd, events=[{"event": "started", "facts": [["a"], 1], "time": "x"}], is_locked=True
    )
    assert "▶</span> running" in render([run])


def test_steps_are_the_axis_where_epochs_are_not_known(tmp_path: Path) -> None:
    page = render([run_with(tmp_path, metrics=[interval(5), interval(10)])])
    assert "Training loss by step." in page
    assert create_charts([]) == []


def test_three_long_runs_make_less_than_a_megabyte(tmp_path: Path) -> None:
    metrics = [interval(step, **{"train/loss": 1 + step % 7 / 9}) for step in range(10, 450_000, 50)]
    runs = [
        run_with(tmp_path, folder=tmp_path / name, metrics=metrics, events=[STARTED], is_locked=True) for name in "abc"
    ]
    assert len(render(runs).encode()) < 1_000_000


def test_names_are_short_and_different() -> None:
    assert short_names([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert short_names([Path("/one/run"), Path("/two/run")]) == ["one/run", "two/run"]
    assert short_names([Path("/runs/a")]) == ["a"]
