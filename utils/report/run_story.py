"""What a run's files add up to: its lines by epoch, its kills and resumes, where its time went, and notes on it."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from utils.report.charts import Mark, Point
from utils.report.output_folder import LATE_SHARE, RunInfo, is_input_late, number
from utils.text import count

PARTS = {  # of a run's time: name, which is also the class in page.css, and meaning
    "earlier": "of the run in another folder that this one goes on from",
    "start": "from the start of the process to the end of the first step, of every launch",
    "training": "steps, without waiting for input",
    "waiting": "data wait: the device had nothing to do, as input was late",
    "evaluation": "of the validation images",
    "checkpoints": "checks of the weights, copies, and writes that training waited for",
    "other": "between these, and steps that a log interval does not cover",
}


class Part(NamedTuple):
    """A part of a run's time.

    Attributes:
        name: a key of PARTS.
        seconds: of all launches, on rank 0.
    """

    name: str
    seconds: float


def steps_per_epoch(run: RunInfo) -> float | None:
    """Optimizer steps of an epoch; None where the files do not say."""
    for event in reversed(run.events):
        if steps := number(event, "steps_per_epoch"):
            return steps
    return next((record["step"] / record["epoch"] for record in run.evaluations if record["epoch"] > 0), None)


def steps_before(start: dict[str, Any]) -> int:
    """Optimizer steps that were done when a launch began."""
    # Noted after its first step, or before an evaluation with which it begins.
    is_noted_before = start.get("startup_seconds", 0.0) is None
    return max(int(number(start, "step") or 0.0) - (not is_noted_before), 0)


def points(run: RunInfo, key: str, unit: float) -> list[Point]:
    """The values of a key of metrics.jsonl, at steps / `unit`."""
    return [(record["step"] / unit, number(record, key)) for record in run.metrics if key in record]


def marks(run: RunInfo, unit: float) -> list[Mark]:
    """Where launches were killed or stopped, and where they went on, at steps / `unit`."""
    starts = [index for index, event in enumerate(run.events) if event.get("event") == "started"]
    found = []
    for index in starts[1:]:
        step = steps_before(run.events[index])
        before = run.events[index - 1].get("event")
        if before == "started":
            found.append(Mark(step / unit, "killed", f"killed later than step {step}, and resumed here"))
        elif before == "stopped":
            reason = run.events[index - 1].get("reason", "a signal")
            found.append(Mark(step / unit, "resumed", f"stopped by {reason} at step {step}, and resumed"))
        else:
            found.append(Mark(step / unit, "resumed", f"trained on after its end at step {step}"))
    if run.state == "died" and run.metrics:
        step = run.metrics[-1]["step"]
        found.append(Mark(step / unit, "died", f"the last launch died after step {step}"))
    return found


def notes(run: RunInfo) -> list[str]:
    """Sentences on what a reader must know of a run."""
    found = []
    lost = [record["step"] for record in run.intervals if number(record, "train/loss") is None]
    if lost:
        found.append(
            f"The loss was not finite in {len(lost)} of {count(len(run.intervals), 'log interval')}, the first up to "
            f"step {lost[0]}: lower --lr, set --clip-grad 1, or warm up longer."
        )
    if run.state == "died":
        found.append(
            "The last launch ended without its end in events.jsonl: it was killed, or its log has the error. The same "
            "command resumes from last.pt."
        )
    if run.state == "stopped":
        reason = run.events[-1].get("reason", "a signal")
        found.append(f"Stopped by {reason}, with a checkpoint. The same command resumes.")
    if not run.metrics:
        found.append("There is no log interval yet.")
    return found


def wait_verdict(run: RunInfo) -> str:
    """A sentence on data wait."""
    wait = run.speed("data_wait")
    if wait is None:
        return "not known yet"
    if is_input_late(wait, run.seconds):
        return f"{wait:.1%}: input is late; scripts/benchmark.py finds why"
    return f"{wait:.1%}" if wait > LATE_SHARE else f"{wait:.1%}: input is fast enough"


def time_parts(run: RunInfo) -> list[Part]:
    """Where the wall time of all launches went, without what was lost; [] where the files do not say."""
    if not any("seconds" in record for record in run.intervals):
        return []
    starts = _kept_starts(run)
    earlier = _earlier_seconds(run)
    first = sum(_first_step_seconds(run, *pair) for pair in itertools.pairwise([*starts, None]))
    start = _total(starts, "startup_seconds")
    trained = max(0.0, _total(run.intervals, "seconds") - first)
    waited = sum((number(each, "data_wait") or 0.0) * (number(each, "seconds") or 0.0) for each in run.intervals)
    waited = min(waited, trained)
    evaluated = _total(run.evaluations, "val/seconds")
    saved = _total(run.intervals, "checkpoint_seconds") + _total(run.events, "checkpoint_seconds")
    other = max(0.0, run.seconds - earlier - start - trained - evaluated - saved)
    return list(map(Part, PARTS, (earlier, start, trained - waited, waited, evaluated, saved, other)))


def _earlier_seconds(run: RunInfo) -> float:
    """Time before the first launch in this folder, which a run in another folder took."""
    first = next((event for event in run.events if event.get("event") == "started"), {})
    if not steps_before(first):
        return 0.0
    return max(0.0, (number(first, "seconds") or 0.0) - (number(first, "startup_seconds") or 0.0))


def _kept_starts(run: RunInfo) -> list[dict[str, Any]]:
    """Starts of the last launch, and of those that left a checkpoint; the time of others was lost with their steps."""
    starts = [event for event in run.events if event.get("event") == "started"]
    return [
        start for count, start in enumerate(starts, start=1)
        if all(steps_before(later) > steps_before(start) for later in starts[count:])
    ]  # fmt: skip


def _first_step_seconds(run: RunInfo, start: dict[str, Any] | None, following: dict[str, Any] | None) -> float:
    """Time of a launch's first step, if it is part of a log interval: a stop or a kill may have come before its end."""
    assert start is not None, "only the last is followed by None"
    end = math.inf if following is None else steps_before(following)
    is_logged = any(steps_before(start) < record["step"] <= end for record in run.intervals)
    return (number(start, "first_step_seconds") or 0.0) if is_logged else 0.0


def _total(records: Sequence[dict[str, object]], key: str) -> float:
    return sum(number(record, key) or 0.0 for record in records)
