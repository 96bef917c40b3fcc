"""Runs reach a tracker once and whole, and no tracker can slow, change or end a run."""

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts import track
from tests.conftest import TINY, Refused
from tests.forked import launch_series
from tests.harness import Finished, Started, launch, read_metrics, start
from tests.tracker import FOLLOW, PARENT, SHORT, FileTracker
from utils.report.tracking.sender import Sender

STEPS = [{"epoch": 1, "step": step, "train/loss": 1 / step, "lr": 0.1} for step in (1, 2, 3)]
EVALUATION = {"epoch": 1, "step": 3, "val/top1": 50.0, "val/loss": None}
SENT = [(step["step"], {"epoch": 1, "train/loss": step["train/loss"], "lr": 0.1}) for step in STEPS]


def calls(folder: Path, name: str = "log") -> list[Any]:
    """What the tracker of a folder has got from calls of one method."""
    file = folder / "tracker"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [tuple(words) for kind, *words in lines if kind == name]


def write_lines(path: Path, *records: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def create_sender(folder: Path, with_checkpoint: bool = False) -> Sender:
    return Sender(folder, "file", lambda: FileTracker(folder / "tracker"), with_checkpoint)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An output folder with three log intervals and an evaluation, which has the step of the last one."""
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "config.json").write_text('{"arch": "resnet50"}')
    write_lines(folder / "metrics.jsonl", *STEPS, EVALUATION)
    write_lines(folder / "events.jsonl", {"event": "started"})
    return folder


def test_each_line_is_sent_once_without_null(run: Path) -> None:
    sender = create_sender(run)
    sender.send()
    sender.send()
    assert calls(run, "open") == [(None, "my-run", {"arch": "resnet50"})]
    assert calls(run) == [*SENT, (3, {"epoch": 1, "val/top1": 50.0})]


def test_a_line_that_is_being_written_waits(run: Path) -> None:
    sender = create_sender(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "step": 4, "train/l')
    sender.send()
    assert len(calls(run)) == 4
    with (run / "metrics.jsonl").open("a") as file:
        file.write('oss": 0.5}\n')
    sender.send()
    assert calls(run)[4:] == [(4, {"epoch": 2, "train/loss": 0.5})]


def test_the_next_launch_continues_the_tracked_run(run: Path) -> None:
    create_sender(run).send()
    # It goes on from step 1, and repeats the steps whose checkpoint a crash has lost.
    (run / "metrics.jsonl").unlink()
    write_lines(run / "metrics.jsonl", *STEPS, EVALUATION, {"epoch": 2, "step": 4, "lr": 0.2})
    create_sender(run).send()
    assert [run_id for run_id, *_ in calls(run, "open")] == [None, "first"]
    assert calls(run)[4:] == [(4, {"epoch": 2, "lr": 0.2})]


EXACT: dict[str, Any] = {"arch": "resnet50", "device": "cpu"}
ON_A_GPU = EXACT | {"device": "cuda", "deterministic": False}
OTHERS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "loss": (EXACT, [STEPS[0], STEPS[1] | {"train/loss": 0.500001}]),
    "lr": (ON_A_GPU, [STEPS[0], STEPS[1] | {"lr": 0.1001}]),
    "finite": (ON_A_GPU, [*STEPS, EVALUATION | {"val/loss": 2.0}]),
    "diverged": (ON_A_GPU, [STEPS[0], STEPS[1] | {"train/loss": None}]),
    "evaluation": (EXACT, [*STEPS, EVALUATION | {"val/top1": 50.25}]),
    "other distances": (EXACT, [STEPS[0], STEPS[2]]),
    "no evaluation": (EXACT, [*STEPS, {"epoch": 2, "step": 4, "train/loss": 1.0, "lr": 0.1}]),
    "GPU, far": (ON_A_GPU, [STEPS[0] | {"train/loss": 1.02}]),
    "GPU, deterministic": (ON_A_GPU | {"deterministic": True}, [STEPS[0] | {"train/loss": 1.001}]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_launch_that_repeats_steps_with_other_values_begins_another_tracked_run(run: Path, case: str) -> None:
    """After another --lr, say: what was sent cannot be taken back."""
    config, records = OTHERS[case]
    (run / "config.json").write_text(json.dumps(config | {"chosen": {}}))
    create_sender(run).send()
    (run / "metrics.jsonl").unlink()
    write_lines(run / "metrics.jsonl", *records)
    for _ in range(2):
        create_sender(run).send()
    values = [(each["step"], {name: value for name, value in each.items() if value is not None}) for each in records]
    assert calls(run, "open")[:3] == [(None, "my-run", config), ("first", "my-run", config), (None, "my-run-2", config)]
    assert [run_id for run_id, *_ in calls(run, "open")[3:]] == ["run 2"]
    assert calls(run, "finish") == [("died", {}, None)]
    assert [(step, {"step": step} | sent) for step, sent in calls(run)[4:]] == values
    write_lines(run / "metrics.jsonl", STEPS[2] | {"step": 9})
    create_sender(run).send()
    assert [step for step, _ in calls(run)[4:]] == [step for step, _ in values] + [9]


@pytest.mark.parametrize(("config", "factor"), [(EXACT, 1.0), (ON_A_GPU, 1.001)])
def test_other_times_and_a_gpus_rounding_are_no_other_values(run: Path, config: dict[str, Any], factor: float) -> None:
    (run / "config.json").write_text(json.dumps(config))
    create_sender(run).send()
    (run / "metrics.jsonl").unlink()
    times = {
        "images_per_second": 9.5,
        "data_wait": 0.5,
        "seconds": 3.0,
        "checkpoint_seconds": 1.0,
        "gpu_memory_mb": 2.5,
    }
    write_lines(run / "metrics.jsonl", *(each | times | {"train/loss": each["train/loss"] * factor} for each in STEPS))
    write_lines(run / "metrics.jsonl", EVALUATION | {"val/seconds": 1.5}, {"epoch": 2, "step": 4, "lr": 0.2})
    create_sender(run).send()
    assert calls(run)[4:] == [(4, {"epoch": 2, "lr": 0.2})]
    assert calls(run, "finish") == []


def test_lines_that_a_finished_run_does_not_have_are_in_no_tracked_run(run: Path) -> None:
    """A resume with fewer epochs ends before the steps that a crash has lost."""
    create_sender(run).send()
    (run / "metrics.jsonl").unlink()
    write_lines(run / "metrics.jsonl", *STEPS[:2])
    create_sender(run).send()
    assert len(calls(run)) == 4, "the rest may come"
    write_lines(run / "events.jsonl", {"event": "finished"})
    create_sender(run).send()
    assert calls(run)[4:] == SENT[:2]
    assert [name for _, name, _ in calls(run, "open")] == ["my-run", "my-run", "my-run", "my-run-2"]


def test_an_error_on_the_way_to_another_tracked_run_loses_nothing(run: Path) -> None:
    sender = create_sender(run)
    sender.send()
    (run / "metrics.jsonl").unlink()
    write_lines(run / "metrics.jsonl", STEPS[0] | {"lr": 0.2})
    (run / "broken").touch()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            sender.send()
    (run / "broken").unlink()
    sender.send()
    assert calls(run)[4:] == [(1, {"epoch": 1, "train/loss": 1.0, "lr": 0.2})]


@pytest.mark.slow
def test_the_tracked_run_of_a_run_that_was_changed_is_what_its_files_say(data: Path, tmp_path: Path) -> None:
    """It was given another rate, and then another layout, after the loss of an epoch; the trainer's own files."""
    folder = tmp_path / "my-run"
    flags = ("--data-dir", data, *TINY, "--output-dir", folder, "--epochs", 2)
    back = ("--resume", folder / "last-2.pt", "--overwrite")
    for count, words in enumerate(
        (("--batch-size", 8), ("--batch-size", 8, *back, "--lr", 1e3, "--max-bad-steps", 0),
         ("--batch-size", 4, "--grad-accum-steps", 2, *back)), start=1,
    ):  # fmt: skip
        (done,) = launch_series((*flags, *words))
        assert done.status == 0, done.err
        sender = create_sender(folder)
        sender.send()
        sender.finish()
        names = [name for _, name, _ in calls(folder, "open")]
        assert names[-1] == ("my-run" if count == 1 else f"my-run-{count}")
        expected = [
            (each["step"], {name: value for name, value in each.items() if value is not None and name != "step"})
            for each in read_metrics(folder)
        ]
        assert calls(folder)[-len(expected) :] == expected
    (overwritten,) = launch_series((*flags, "--batch-size", 8, "--resume", "none", "--overwrite", "--epochs", 1))
    assert overwritten.status == 0
    assert not list(folder.glob("tracking*"))


@pytest.mark.parametrize("sent", [0, 2])
def test_after_an_error_nothing_is_lost_and_nothing_sent_twice(run: Path, sent: int) -> None:
    (run / "metrics.jsonl").unlink()
    write_lines(run / "metrics.jsonl", *STEPS[:sent])
    sender = create_sender(run)
    if sent:
        sender.send()
    write_lines(run / "metrics.jsonl", *STEPS[sent:])
    (run / "broken").touch()
    with pytest.raises(ConnectionError):
        sender.send()
    (run / "broken").unlink()
    create_sender(run).send()
    sender.send()
    assert calls(run)[:3] == SENT


@pytest.mark.parametrize(
    ("events", "outcome"), [(["started"], "died"), (["started", "stopped"], "stopped"), (["finished"], "finished")]
)
def test_the_end_has_outcome_and_summary_and_a_finished_run_its_weights(
    run: Path, events: list[str], outcome: str
) -> None:
    (run / "events.jsonl").unlink()
    write_lines(run / "events.jsonl", *({"event": event} for event in events))
    (run / "best.pt").touch()
    (run / "summary.json").write_text('{"top1": 50.0}')
    create_sender(run).finish()
    create_sender(run, with_checkpoint=True).finish()
    weights = "best.pt" if outcome == "finished" else None
    assert calls(run, "finish") == [(outcome, {"top1": 50.0}, None), (outcome, {"top1": 50.0}, weights)]


# ---------------------------------------------------------------------------------------------------------------------
# The process that sends, started by another one as train.py starts it


def follow(folder: Path) -> Started:
    return start(folder, os.getpid(), program=FOLLOW)


def test_new_lines_are_sent_while_the_run_goes_on_and_the_rest_when_it_ends(run: Path) -> None:
    with follow(run) as started:
        started.wait_for(lambda: len(calls(run)) == 4)
        write_lines(run / "metrics.jsonl", {"epoch": 2, "step": 4, "lr": 0.2})
        started.wait_for(lambda: len(calls(run)) == 5)
        write_lines(run / "events.jsonl", {"event": "finished"})
        started.send(signal.SIGTERM, started.pid)
        done = started.end()
    assert (done.status, done.out, done.err) == (0, "", "")
    assert calls(run, "finish") == [("finished", {}, None)]
    assert (run / "tracking.log").read_text() == "of the package\n"


def test_a_failure_is_printed_once_and_tried_again(run: Path) -> None:
    (run / "broken").touch()
    with follow(run) as started:
        started.wait_for(lambda: started.err.count("\n") == 1)
        time.sleep(0.5)  # for further attempts
        (run / "broken").unlink()
        started.wait_for(lambda: len(calls(run)) == 4)
        (run / "broken").touch()
        started.send(signal.SIGTERM, started.pid)
        done = started.end()
    assert done.status == 1
    assert done.err.splitlines() == [
        "--track file: no route to the tracker; training goes on, and so do the attempts",
        f"--track file: no route to the tracker; scripts/track.py {run} --track file sends the rest",
    ]


def test_it_sends_the_rest_when_its_parent_was_killed(run: Path) -> None:
    with start(run, program=PARENT) as started:
        started.wait_for(lambda: len(calls(run)) == 4)
        started.descendants()
        write_lines(run / "metrics.jsonl", {"epoch": 2, "step": 4, "lr": 0.2})
        os.kill(started.pid, signal.SIGKILL)
        started.check_nothing_left()
    assert calls(run)[4:] == [(4, {"epoch": 2, "lr": 0.2})]
    assert calls(run, "finish") == [("died", {}, None)]


def test_a_run_that_ends_at_once_is_sent(run: Path) -> None:
    assert launch(run, program=SHORT) == Finished(0, "", "")
    assert calls(run) == [*SENT, (3, {"epoch": 1, "val/top1": 50.0})]
    assert len(calls(run, "finish")) == 1


def test_the_next_process_waits_and_goes_on_from_what_the_first_has_sent(run: Path) -> None:
    (run / "hangs").touch()
    with follow(run) as first:
        first.wait_for((run / "tracking.log").exists)
        with follow(run) as second:
            waits = f"-> FLOCK  ADVISORY  WRITE {second.pid} "
            second.wait_for(lambda: waits in Path("/proc/locks").read_text())
            (run / "hangs").unlink()
            for started in (first, second):
                started.send(signal.SIGTERM, started.pid)
                assert started.end().status == 0
    assert [run_id for run_id, *_ in calls(run, "open")] == [None, "first"]
    assert calls(run) == [*SENT, (3, {"epoch": 1, "val/top1": 50.0})]


def test_what_a_tracker_leaves_running_does_not_keep_others_out(run: Path) -> None:
    (run / "forks").touch()
    with follow(run) as first:
        first.wait_for(lambda: len(calls(run)) == 4)
        first.send(signal.SIGTERM, first.pid)
        assert first.end().status == 0
        (run / "forks").unlink()
        with follow(run) as second:
            second.wait_for(lambda: len(calls(run, "open")) == 2)


def test_a_package_that_exits_is_a_failure(run: Path) -> None:
    (run / "exits").touch()
    with follow(run) as started:
        line = "--track file: not logged in; training goes on, and so do the attempts\n"
        started.wait_for(lambda: started.err == line)
        (run / "exits").unlink()
        started.wait_for(lambda: len(calls(run)) == 4)


def test_what_a_package_prints_does_not_fill_the_disk(run: Path) -> None:
    (run / "hangs").touch()
    log = run / "tracking.log"
    with follow(run) as started:
        started.wait_for(lambda: log.exists() and log.stat().st_size > 900)
        started.wait_for(lambda: log.stat().st_size < 500)


def test_it_ends_though_the_tracker_hangs(run: Path) -> None:
    (run / "hangs").touch()
    (run / "forks").touch()
    with start(run, program=PARENT) as started:
        started.wait_for(lambda: len(started.descendants()) == 3)
        os.kill(started.pid, signal.SIGKILL)
        started.check_nothing_left()
    assert calls(run, "open") == []


# ---------------------------------------------------------------------------------------------------------------------
# Command lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--track", "clearml"), "Invalid value for '--track': 'clearml' is not one of none, trackio, wandb, mlflow;"),
        (("--track-project", "flowers"), "--track-project flowers without --track: nothing is sent; give --track NAME"),
        (("--track-checkpoint",), "--track-checkpoint without --track: nothing is sent; give --track NAME"),
    ],
)
def test_refusals(refused: Refused, flags: tuple[str, ...], message: str) -> None:
    refused("--loader", "synthetic", *flags)(f"train.py: {message}")


def test_a_missing_package_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = "--track wandb: the package wandb is missing; pip install wandb"
    refused("--loader", "synthetic", "--track", "wandb")(f"train.py: {message}")
    refused(run, "--track", "wandb", main=track.main, program="track.py")(f"track.py: {message}")


def test_what_cannot_be_sent_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Path
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", sys)  # as if it were installed
    refuse = functools.partial(refused, main=track.main, program="track.py")
    refuse(tmp_path, "--track", "trackio")(f"track.py: {tmp_path}: has no metrics.jsonl; give the output folder of a")
    (run / "tracking.log").mkdir()
    refuse(run, "--track", "trackio")(f"track.py: {run}: cannot be written (Is a directory), and the tracker's run is")
