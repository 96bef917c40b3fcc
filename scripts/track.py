#!/usr/bin/env python3
"""Send a run to an experiment tracker: what its files hold and the tracker has not got yet.

    scripts/track.py runs/imagenet-resnet50 --track wandb

`train.py --track NAME` does this while it trains. This command sends what is left after a tracker was down, and runs
that were trained without it. The tracker's own environment variables say where its server and the account are.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.errors import UserError
from utils.log import METRICS
from utils.options.cli import REQUIRED, Program, train_flag, with_train_flags
from utils.options.readers import number_option
from utils.options.validation import require_tracker
from utils.report.tracking.sender import send_run
from utils.report.tracking.trackers import TRACKERS


@dataclass(frozen=True)
class Options:
    """The command line."""

    run: Path
    track: str
    track_project: str | None
    track_checkpoint: bool
    follow: int | None


@with_train_flags(
    train_flag("track", default=REQUIRED, help="Tracker."),
    train_flag("track_project"),
    train_flag("track_checkpoint"),
)
def read_options(
    run: Annotated[Path, typer.Argument(help="Output folder of a run.")],
    follow: Annotated[
        int | None, typer.Option(help="For train.py: go on while this parent process lives.", **number_option(int))
    ] = None,
    **flags: object,
) -> Options:
    """Send a run to an experiment tracker: what its files hold and the tracker has not got yet."""
    options = Options(run=run, follow=follow, **flags)  # type: ignore[arg-type]
    if options.track not in TRACKERS:
        raise UserError(f"--track {options.track}: no tracker; give one of {', '.join(TRACKERS)}")
    return options


def send(options: Options) -> int:
    """Send the run; returns the exit status.

    Raises:
        UserError: there is no run, the tracker's package is missing, or the folder cannot be written.
    """
    require_tracker(options.track)
    if not (options.run / METRICS).is_file():
        raise UserError(f"{options.run}: has no {METRICS}; give the output folder of a run")
    create = functools.partial(TRACKERS[options.track], options.track_project, options.run)
    try:
        return send_run(options.run, options.track, create, options.track_checkpoint, options.follow)
    except OSError as error:
        raise UserError(
            f"{options.run}: cannot be written ({error.strerror}), and the tracker's run is noted there; make room"
        ) from error


PROGRAM = Program("track.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
