"""What the files of an output folder say about its run: state, time, accuracy, launches."""

import dataclasses
import fcntl
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from utils.config import CHOSEN
from utils.errors import UserError
from utils.log import EVENTS, METRICS, SUMMARY

OF_TRAINING = (METRICS, EVENTS, "last.pt")  # that nothing but training writes
DATA_WAIT_WARNING = 0.02  # data wait above which a run should have faster input


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What the files of an output folder say.

    Attributes:
        folder: the output folder.
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
        return [record for record in self.metrics if "val/top1" in record]

    @property
    def epochs(self) -> int:
        """Epochs that are done."""
        # A record of training is of the epoch under way. Of an epoch without evaluation there is no other.
        return max((record["epoch"] - ("val/top1" not in record) for record in self.metrics), default=0)

    @property
    def best_top1(self) -> float | None:
        """Percent, of the model or of its moving average, whichever is better; None without an evaluation."""
        found = [number(each, name) for each in self.evaluations for name in ("val/top1", "val/ema_top1")]
        return max((value for value in found if value is not None), default=None)

    def speed(self, key: str) -> float | None:
        """`images_per_second` or `data_wait`: of a finished run the mean, else of the last log interval."""
        source = self.summary if self.state == "finished" else (self.intervals or [{}])[-1]
        return number(source, key)


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
    """Whether a run holds the lock of its output folder; see `utils.training.output.lock_output`."""
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
