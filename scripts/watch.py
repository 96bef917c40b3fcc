#!/usr/bin/env python3
"""Show a run from another terminal: its state and curves, until it ends.

    scripts/watch.py runs/imagenet-resnet50
    scripts/watch.py runs/imagenet-resnet50 > progress.txt    # without a terminal: a line for each log interval

Reads the output folder alone. Ctrl-C ends the display, not the run.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.errors import UserError
from utils.options.cli import Program
from utils.options.readers import number_option
from utils.progress import is_terminal
from utils.report.output_folder import RunInfo, is_evaluation, open_run
from utils.report.terminal import headline, record_line, screen


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """The command line; `interval` is in seconds."""

    run: Path
    interval: float


def read_options(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Output folder of train.py.")],
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", **number_option(float))] = 2.0,
) -> WatchOptions:
    """Show a run's state and curves until it ends."""
    if not 0.1 <= interval <= 3600:
        raise UserError(f"--interval {interval:g}: must be from 0.1 to 3600 seconds")
    return WatchOptions(run, interval)


def watch(options: WatchOptions) -> None:
    """Show the run until it ends.

    Raises:
        UserError: the folder holds no run, or its files are broken.
    """
    show = _Screen() if is_terminal(sys.stdout) else _Lines()
    while True:
        run = open_run(options.run)
        show(run)
        if run.state != "running":
            return
        time.sleep(options.interval)


class _Screen:
    """Draws the run over what was drawn before."""

    def __init__(self) -> None:
        self._drawn = 0  # lines

    def __call__(self, run: RunInfo) -> None:
        lines = screen(run)
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        sys.stdout.write(up + "\x1b[J" + "\n".join(lines) + "\n")
        sys.stdout.flush()
        self._drawn = len(lines)


class _Lines:
    """Prints the records that have come, and at the end the result."""

    def __init__(self) -> None:
        self._printed: tuple[int, int, bool] = (-1, 0, False)

    def __call__(self, run: RunInfo) -> None:
        for record in run.metrics:
            position = (record["step"], record["epoch"], is_evaluation(record))
            if position > self._printed:
                print(record_line(record, run.best_by), flush=True)
                self._printed = position
        if run.state != "running":
            print(*headline(run), sep="\n", flush=True)


PROGRAM = Program("watch.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, watch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
