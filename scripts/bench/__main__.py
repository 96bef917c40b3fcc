"""The comparisons behind the figures in docs/, in one program.

    python scripts/bench starts --data-dir /data/imagenet
    python scripts/bench --help            # the names
    python scripts/bench starts --help     # the flags of one

`python -m scripts.bench NAME` does the same in the project's folder.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if not __package__:  # started by its path, so that the first folder of modules is this one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import typer

from utils.errors import UserError
from utils.options.cli import Program

NAMES = ("caches", "formats", "launch", "networks", "recipes", "scaling", "series", "starts")


def read_options(name: Annotated[str, typer.Argument(metavar="NAME", help="The comparison; its flags follow.")]) -> str:
    """Check the name, which comes before all flags."""
    if name not in NAMES:
        raise UserError(f"{name}: no such comparison; give one of {', '.join(NAMES)}")
    return name


def names_and_first_lines() -> str:
    """A line for each name, with the first of its file, which is not imported."""
    files = {name: Path(__file__).with_name(f"{name}.py") for name in NAMES}
    lines = {name: path.read_text().splitlines()[0].removeprefix('"""') for name, path in files.items()}
    return "\n".join(f"{name}: {line}" for name, line in lines.items())


PROGRAM = Program("bench", read_options, f"Compare parts and settings of Brisk.\n\n{names_and_first_lines()}")


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""

    def run(name: str) -> int:
        module = importlib.import_module(f"scripts.bench.{name}")
        status: int = module.PROGRAM.run(argv[1:], module.run)
        return status

    return PROGRAM.run(argv[:1], run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
