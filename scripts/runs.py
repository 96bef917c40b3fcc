#!/usr/bin/env python3
"""List runs: what was trained, how far, how well, and whether it still runs.

    scripts/runs.py                 # all in runs/
    scripts/runs.py runs /data/old  # these folders, and those one level below them

State: running (a process holds the folder's lock), finished, stopped (by a signal or the time limit, with a
checkpoint), died (the last launch has not come to its end). A run on another machine is seen as running where the file
system shares locks.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from tqdm import tqdm

from utils.errors import UserError, escape_control_chars
from utils.options.cli import Program
from utils.options.config import RUNS
from utils.report.output_folder import RunInfo, read_run

HEADER = ("run", "state", "arch", "epochs", "best", "images/s", "time", "data")


def table_row(run: RunInfo) -> tuple[str, ...]:
    """The cells of the table."""
    best, rate = run.best_figure, run.speed("images_per_second")
    return (
        str(run.folder),
        run.state,
        str(run.config.get("arch")),
        f"{run.epochs}/{run.config.get('epochs')}",
        "" if best is None else " ".join(best),
        "" if rate is None else f"{rate:,.0f}",
        tqdm.format_interval(run.seconds),
        str(run.config.get("data_dir") or "synthetic"),
    )


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
    """List runs with state, architecture, epochs, best figure, speed and time."""
    return folders or ([RUNS] if RUNS.is_dir() else [])


def list_runs(folders: Sequence[Path]) -> None:
    """Print the table."""
    rows = [HEADER, *map(table_row, find_runs(folders))]
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
