"""What the files of an output folder say about its run: state, time, accuracy, launches."""

import dataclasses
import fcntl
import functools
import io
import itertools
import json
import math
import os
import pickle
import statistics
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.figures import MAIN_FIGURE, better_network, better_value, figure, is_better
from utils.log import EVENTS, METRICS, SUMMARY
from utils.options.resolved import CHOSEN

BEST = "best.pt"
OF_TRAINING = (METRICS, EVENTS, "last.pt")  # that nothing but training writes
LATE_SHARE, LATE_SECONDS = 0.02, 10.0  # of a run without input, above which it should have faster input


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What the files of an output folder say.

    Attributes:
        config: the flags in config.json.
        metrics, events: lines of metrics.jsonl and events.jsonl.
        summary: content of summary.json; {} if there is none.
        is_locked: whether a process is writing there.
    """

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    summary: dict[str, Any]
    is_locked: bool

    @property
    def state(self) -> str:
        """running, finished, stopped, died or unknown."""
        if self.is_locked:
            return "running"
        if not self.events:  # of an earlier version of Brisk
            return "finished" if self.summary else "unknown"
        last = str(self.events[-1].get("event"))
        return "died" if last == "started" else last

    @property
    def seconds(self) -> float:
        """Wall time of all launches, without what was lost; that of a launch that died ends with its last files."""
        if self.state == "finished":
            return number(self.summary, "seconds") or 0.0
        if not self.events:
            return 0.0
        seconds, began = (number(self.events[-1], name) or 0.0 for name in ("seconds", "time"))
        if self.events[-1].get("event") != "started":
            return seconds
        files = [self.folder / name for name in OF_TRAINING]
        written = max((path.stat().st_mtime for path in files if path.is_file()), default=began)
        return seconds + max(0.0, (time.time() if self.is_locked else written) - began)

    @property
    def intervals(self) -> list[dict[str, Any]]:
        """The log intervals of metrics.jsonl."""
        return [record for record in self.metrics if "images_per_second" in record]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of metrics.jsonl."""
        return [record for record in self.metrics if is_evaluation(record)]

    @property
    def epochs(self) -> int:
        """Epochs that are done."""
        # A record of training is of the epoch under way. Of an epoch without evaluation there is no other.
        return max((record["epoch"] - (not is_evaluation(record)) for record in self.metrics), default=0)

    @functools.cached_property
    def best(self) -> dict[str, Any] | None:
        """The evaluation that best.pt holds; None if there is none.

        It has `epoch`, `step`, `top1` of the better network, and the figure `by` which it is the best, with its
        `value`.

        Of a folder without checkpoints, as a copy may be, the best one of metrics.jsonl. That need not be the one: a
        save may have failed, or other images were evaluated before.
        """
        if (self.folder / BEST).is_file() and (best := read_best(self.folder / BEST)) is not None:
            return best
        if not self.summary and any((self.folder / name).exists() for name in OF_TRAINING if name.endswith(".pt")):
            return None
        by = self.best_by
        found = [_of_evaluation(each, by) for each in self.evaluations if better_value(each, by) is not None]
        top1, value = (number(self.summary, name) for name in ("best_top1", "best_value"))
        if top1 is None and value is None:
            best = None
            for each in found:
                if best is None or is_better(by, each["value"], best["value"]):
                    best = each
            return best
        unknown = {"epoch": None, "step": None, "top1": top1, "by": by, "value": top1 if value is None else value}
        return next((each for each in found if each["value"] == unknown["value"]), unknown)

    @property
    def best_by(self) -> str:
        """The figure by which the run chooses its best epoch."""
        return str(self.config.get("best_by") or MAIN_FIGURE[self.config.get("task") or "multiclass"])

    @property
    def num_classes(self) -> float:
        """Outputs of the head; infinite where config.json does not say."""
        return number(self.config, "num_classes") or math.inf

    @property
    def best_figure(self) -> tuple[str, str] | None:
        """Title and value of the best epoch's figure, such as ("top-1", "76.30 %"); see `best`."""
        if self.best is None or (value := number(self.best, "value")) is None:
            return None
        shown = figure(self.best["by"])
        return shown.title, shown.show.format(value)

    def weighted(self, key: str, epoch: int | None = None) -> list[tuple[float, float]]:
        """The finite values of a key of metrics.jsonl, of all epochs or of one, each with how much it counts in a mean.

        A log interval counts with its length, as the last one of an epoch is often shorter: a loss with the steps, a
        speed with the seconds.
        """
        steps = iter(self._interval_steps)
        found = []
        for record in self.metrics:
            length = next(steps) if "images_per_second" in record else 1
            if epoch in (None, record["epoch"]) and (value := number(record, key)) is not None:
                found.append((value, _length(record, length, key)))
        return found

    @functools.cached_property
    def _interval_steps(self) -> list[int]:
        """Optimizer steps of each of `intervals`."""
        ends = [record["step"] for record in self.intervals]
        steps = [end - before for before, end in itertools.pairwise([0, *ends])]
        if most := number(self.config, "log_steps"):  # the first of a run that goes on from another folder
            steps[:1] = [min(each, int(most)) for each in steps[:1]]
        return steps

    def without_remainders(self) -> "RunInfo":
        """The same run, with the rest of an epoch, shorter than a log interval, joined to the interval before it."""
        steps, last = iter(self._interval_steps), 0
        found: list[dict[str, Any]] = []
        for record in self.metrics:
            length = next(steps) if "images_per_second" in record else 0
            if 0 < length < last and found[-1]["epoch"] == record["epoch"]:
                found[-1] = _join(found[-1], last, record, length)
            else:
                found.append(record)
            last = length
        return dataclasses.replace(self, metrics=found)

    def speed(self, key: str) -> float | None:
        """`images_per_second` or `data_wait`: of a finished run the mean, else of the last log interval."""
        source = self.summary if self.state == "finished" else (self.intervals or [{}])[-1]
        return number(source, key)


def _of_evaluation(evaluation: dict[str, Any], by: str) -> dict[str, Any]:
    """`RunInfo.best` of a line of metrics.jsonl."""
    key = "val/top1" if better_network(evaluation, by) == "model" else "val/ema_top1"
    position = {"epoch": evaluation["epoch"], "step": evaluation["step"]}
    return position | {"top1": number(evaluation, key), "by": by, "value": better_value(evaluation, by)}


def _join(first: dict[str, Any], steps: int, second: dict[str, Any], more: int) -> dict[str, Any]:
    """The line of two log intervals, of `steps` and of `more` steps; null where a value of one is not finite."""
    joined = first | second
    for key in first.keys() & second.keys() - {"epoch", "step", "lr", "gpu_memory_mb"}:  # those are of its end
        values = number(first, key), number(second, key)
        if values[0] is None or values[1] is None:
            joined[key] = None
        elif key in ("seconds", "checkpoint_seconds", "skipped_steps"):
            joined[key] = values[0] + values[1]
        else:
            joined[key] = weighted_mean(
                (values[0], values[1]), (_length(first, steps, key), _length(second, more, key))
            )
    return joined


def _length(record: dict[str, Any], steps: int, key: str) -> float:
    """How much a line counts in a mean of a key; `steps` of a log interval, 1 of others."""
    if key not in ("images_per_second", "data_wait"):
        return steps
    return number(record, "seconds") or steps / (number(record, "images_per_second") or math.inf)


def weighted_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The mean of some values, one at least; all count alike where a weight is not above 0, as it is not known."""
    return statistics.fmean(values, weights if weights and min(weights) > 0 else None)


def read_best(path: Path) -> dict[str, Any] | None:
    """`RunInfo.best` of a checkpoint; None if it is not readable. Nothing in the file is executed, nor any tensor read.

    torch itself would take seconds to import, for a list of runs.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            best = _Facts(io.BytesIO(archive.read(name))).load()["best"]
        chosen = {"by": best.get("by", "top1"), "value": best.get("value", best["top1"])}  # older files chose by top-1
        return {name: best[name] for name in ("epoch", "step", "top1")} | chosen
    except Exception:  # whatever a damaged file makes pickle raise
        return None


class _Facts(pickle.Unpickler):
    """Reads the numbers and texts of a checkpoint; all other objects are `_Other`."""

    def find_class(self, module: str, name: str) -> type:
        return _Other

    def persistent_load(self, identity: Any) -> None:
        return None


class _Other(dict[Any, Any]):
    """Takes the place of an object, whatever it is made of."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def is_input_late(data_wait: float, seconds: float) -> bool:
    """Whether a run of so many seconds should have faster input; `data_wait` is a share, 0 to 1."""
    return data_wait > LATE_SHARE and data_wait * seconds > LATE_SECONDS


def is_evaluation(record: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is of an evaluation, not of a log interval."""
    return any(name.startswith("val/") for name in record)


def number(record: dict[str, Any], key: str) -> float | None:
    """A finite number of a record; None where there is none."""
    value = record.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number and value is not None else None


def read_run(folder: Path) -> RunInfo | None:
    """The run whose output folder this is; None if it is none. Broken lines are left out."""
    config = read_object(folder / "config.json")
    if "arch" not in config:
        return None
    config.pop(CHOSEN, None)
    return RunInfo(
        folder=folder,
        config=config,
        metrics=read_lines(folder / METRICS),
        events=read_lines(folder / EVENTS),
        summary=read_object(folder / SUMMARY),
        is_locked=is_locked(folder),
    )


def open_run(folder: Path) -> RunInfo:
    """The run in a folder that the user named.

    Raises:
        UserError: there is none, or its metrics.jsonl is broken before its last line.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; scripts/runs.py lists the runs")
    run = read_run(folder)
    if run is None:
        raise UserError(
            f"{folder}: not an output folder, or of a run before its first step (no config.json of train.py in it); "
            "scripts/runs.py lists the runs"
        )
    return dataclasses.replace(run, metrics=_read_metrics(folder / METRICS))


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of metrics.jsonl; a run that died can have cut off the last line, which is left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    found = []
    for count, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("epoch"), int):
            found.append(record)
        elif count < len(lines):
            raise UserError(f"{path}: line {count} of {len(lines)} is no record of train.py; remove that line")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; lines that are cut off are left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in found if isinstance(record, dict)]


def is_locked(folder: Path) -> bool:
    """Whether a run holds the lock of its output folder; see `utils.training.state.output.lock_output`."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(opened)
    return False
