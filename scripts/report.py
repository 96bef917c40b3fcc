#!/usr/bin/env python3
"""Write a page with the curves, times, flags and mistakes of runs, for any browser.

    scripts/report.py runs/imagenet-resnet50                            # report.html
    scripts/report.py runs/a runs/b runs/c --output comparison.html     # all in one pair of axes

The page is one file without scripts, and loads nothing. It reads output folders alone, also those of runs under way.
docs/report.md explains it.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.errors import UserError
from utils.files import atomic_write_text
from utils.log import emit
from utils.options.cli import Program
from utils.report.output_folder import open_run
from utils.report.page import render
from utils.text import count


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """The command line."""

    runs: list[Path]
    output: Path


def read_options(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of train.py.")],
    output: Annotated[Path, typer.Option(help="The page to write.", metavar="FILE.html")] = Path("report.html"),
) -> ReportOptions:
    """Write a page on runs: curves, times, flags, and the mistakes of the best weights."""
    return ReportOptions(list({folder.resolve(): folder for folder in reversed(runs)}.values())[::-1], output)


def write_report(options: ReportOptions) -> None:
    """Write the page.

    Raises:
        UserError: a folder holds no run, its files are broken, or the page cannot be written.
    """
    page = render([open_run(folder) for folder in options.runs])
    try:
        atomic_write_text(options.output, page, concurrent=True)
    except OSError as error:
        raise UserError(f"--output {options.output}: cannot be written ({error.strerror}); give another file") from None
    emit(f"{options.output}: {count(len(options.runs), 'run')}, {len(page) / 1000:,.0f} KB")


PROGRAM = Program("report.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, write_report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
