#!/usr/bin/env python3
"""List runs: what was trained, how far, how well, and whether it still runs.

    scripts/runs.py                 # all in runs/
    scripts/runs.py runs /data/old  # these folders, and those one level below them

State: running (a process holds the folder's lock), finished, stopped (by a signal or the time limit, with a
checkpoint), died (the last launch has not come to its end). A run on another machine is seen as running where the file
system shares locks.
"""

import dataclasses
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from tqdm import tqdm

from utils.cli import Program
from utils.config import RUNS
from utils.errors import UserError, escape_control_chars
from utils.log import EVENTS, METRICS, SUMMARY

HEADER = ("run", "state", "arch", "epochs", "best top-1", "images/s", "time", "data")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What the files of an output folder say.

    Attributes:
        folder: the output folder.
        config: content of config.json.
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
        last = str(self.events[-1]["event"])
        return "died" if last == "started" else last

    @property
    def seconds(self) -> float:
        """Wall time of all launches, without what was lost; that of a launch that died ends with its last files."""
        if self.state == "finished":
            return float(self.summary.get("seconds", 0.0))
        if not self.events:
            return 0.0
        last = self.events[-1]
        if last["event"] != "started":
            return float(last["seconds"])
        written = max(path.stat().st_mtime for path in self.folder.iterdir() if path.is_file())
        return float(last["seconds"] + max(0.0, (time.time() if self.is_locked else written) - last["time"]))

    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        evaluations = [record for record in self.metrics if "val/top1" in record]
        # A record of training is of the epoch under way. Of an epoch without evaluation there is no other.
        epochs = (record["epoch"] - ("val/top1" not in record) for record in self.metrics)
        best = max((max(each["val/top1"], each.get("val/ema_top1", 0.0)) for each in evaluations), default=None)
        rates = [record["images_per_second"] for record in self.metrics if "images_per_second" in record]
        if self.state == "finished":  # the mean instead of the last interval
            rates.append(self.summary.get("images_per_second", 0.0))
        return (
            str(self.folder),
            self.state,
            str(self.config.get("arch")),
            f"{max(epochs, default=0)}/{self.config.get('epochs')}",
            "" if best is None else f"{best:.2f} %",
            f"{rates[-1]:,.0f}" if rates else "",
            tqdm.format_interval(self.seconds),
            str(self.config.get("data_dir") or "synthetic"),
        )


def read_run(folder: Path) -> RunInfo | None:
    """The run whose output folder this is; None if it is none."""
    config = read_object(folder / "config.json")
    if "arch" not in config:
        return None
    return RunInfo(
        folder=folder,
        config=config,
        metrics=read_lines(folder / METRICS),
        events=read_lines(folder / EVENTS),
        summary=read_object(folder / SUMMARY),
        is_locked=is_locked(folder),
    )


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
        lines = path.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


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


def find_runs(folders: Sequence[Path]) -> Iterator[RunInfo]:
    """The runs in `folders` and one level below them, those that were written last first.

    Raises:
        UserError: a folder cannot be read.
    """
    candidates = []
    for folder in folders:
        try:
            below = [path for path in folder.iterdir() if path.is_dir()]
        except OSError as error:
            raise UserError(f"{folder}: cannot be read ({error.strerror}); give folders of runs") from None
        candidates += [folder, *below]
    found = [run for path in dict.fromkeys(candidates) if (run := read_run(path)) is not None]
    yield from sorted(found, key=lambda run: run.events[-1]["time"] if run.events else 0.0, reverse=True)


def read_options(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER...", help="Output folders, or folders of them.", show_default=str(RUNS)),
    ] = None,
) -> list[Path]:
    """List runs with state, architecture, epochs, best top-1, speed and time."""
    return folders or ([RUNS] if RUNS.is_dir() else [])


def list_runs(folders: Sequence[Path]) -> None:
    """Print the table."""
    rows = [HEADER, *(run.row() for run in find_runs(folders))]
    if len(rows) == 1:
        print(f"no runs in {', '.join(map(str, folders or [RUNS]))}")
        return
    widths = [max(len(escape_control_chars(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (escape_control_chars(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


PROGRAM = Program("runs.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, list_runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
