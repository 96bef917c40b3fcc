#!/usr/bin/env python3
"""Find wrong labels: rank all training images by predictions of networks that have not seen them.

    for k in 1 2 3 4; do python train.py --data-dir /data/waste --fold $k/4 --name waste-fold-$k; done
    scripts/find_label_errors.py runs/waste-fold-* --output-dir runs/waste-labels

Each run of --fold K/N predicts the part that it held out; cleanlab ranks the labels by these predictions. Writes
label_errors.csv, a row for each image, the most doubtful label first; label_errors.html, a page with pictures of the
worst; and cleaned.csv, which train.py --train-data takes: the images without those whose label may be wrong.

Needs requirements-labels.txt. Exit status: 0 done, 1 failed, 2 wrong usage.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.errors import UserError
from utils.options.cli import REQUIRED, Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.progress import end_status


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        runs: output folders or checkpoints, one of each fold.
        config: where results go, and how images are predicted.
        relabel: whether cleaned.csv has proposed labels in place of wrong ones.
    """

    runs: list[Path]
    config: TrainConfig
    relabel: bool


@with_train_flags(
    train_flag("output_dir", default=REQUIRED, shown=False, help="Where label_errors.csv and the other files go."),
    train_flag("data_dir", help="The images of the runs.", shown="where the runs read them"),
    train_flag("batch_size", help="Images per batch.", shown="as in the runs"),
    train_flag("workers"),
    train_flag("device", help="Where to compute."),
)
def read_options(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The runs of all folds, or checkpoints.")],
    relabel: Annotated[
        bool, typer.Option("--relabel", help="Give wrong labels in cleaned.csv the proposed ones, leave none out.")
    ] = False,
    *,
    output_dir: Path,
    data_dir: Path | None,
    batch_size: int | None,
    workers: int | None,
    device: str,
) -> Options:
    """Find wrong labels in the training images of runs with --fold, one run of each fold.

    Exit status: 0 done, 1 failed, 2 wrong usage.
    """
    given = {"output_dir": output_dir, "data_dir": data_dir, "batch_size": batch_size, "workers": workers}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    config = TrainConfig(evaluate=True, device=device, given=frozenset(values), **values)
    return Options(runs, config, relabel)


def find(options: Options) -> None:
    """Find the wrong labels.

    Raises:
        UserError: as `utils.inference.label_errors.find_label_errors`.
    """
    for path in options.runs:
        if not os.path.exists(path):
            raise UserError(f"RUN {path}: no such file or folder; give the output folder of a run")
    # What takes seconds comes after the checks of the command line.
    from utils.distributed.group import DistEnv
    from utils.distributed.ownership import own_process
    from utils.inference.label_errors import find_label_errors

    env = DistEnv.single(own_process(options.config.device))
    with contextlib.ExitStack() as stack:
        find_label_errors(options.runs, options.config, options.relabel, env, stack)


PROGRAM = Program("find_label_errors.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    try:
        return PROGRAM.run(argv, find)
    finally:
        end_status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
