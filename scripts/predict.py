#!/usr/bin/env python3
"""Predict the classes of images with a checkpoint, on the terminal or to a table with a row for each.

    scripts/predict.py CHECKPOINT PHOTO...
    scripts/predict.py CHECKPOINT SOURCE... --output-dir DIR
    torchrun --nproc_per_node=8 scripts/predict.py CHECKPOINT SOURCE... --output-dir DIR

CHECKPOINT is a file or the output folder of a run, whose best.pt is taken. A SOURCE is an image, a folder, a pattern in
quotes or a shard, in any format that train.py reads. Sizes, normalization and precision are those of the checkpoint,
and the numbers those of train.py --evaluate.

With --calibrate, fits the temperature of CHECKPOINT on images of known class instead, and writes it into the file.

Prints a line for each image. With --output-dir, writes predictions.csv instead; where folders or shards give the
classes, also per_class.csv and confusion.csv. An image that cannot be read gets a line with the reason. With --heatmap,
heatmaps/ has pictures of the first images that show where their answer is seen (requirements-report.txt).

A file has its name when it is complete. The same command starts over.

Exit status: 0 done, 1 failed, 2 wrong usage, 143 stopped by a signal.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.distributed.startup import print_once, start_imports, start_program
from utils.errors import UserError
from utils.inference.inputs import expand_sources
from utils.inference.predictions import (
    EMBEDDING_FORMATS,
    Format,
    OutputType,
    PredictOptions,
    require_captum,
    require_pyarrow,
)
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.limits import MIN_1, Limit
from utils.options.readers import choice_option, number_option
from utils.progress import end_status

WHOLE = number_option(int)
PROBABILITY = Limit(minimum=0, maximum=1, noun="probability")
FormatOption = Annotated[
    Format | None,
    typer.Option(help="Of the files.", show_default="csv; npy of embeddings", **choice_option(Format)),
]
OutputTypeOption = Annotated[
    OutputType,
    typer.Option(
        help="Probabilities, the network's outputs, or features before its head.", **choice_option(OutputType)
    ),
]
TIMEOUT = 600.0  # seconds to wait for another process, as train.py


@with_train_flags(
    train_flag(
        "output_dir", help="Where predictions.csv and the other files go.", shown="none, the predictions are printed"
    ),
    train_flag("batch_size", help="Images per process and batch.", shown="as in the run"),
    train_flag("workers"),
    train_flag("device", help="Where to compute."),
    train_flag("eval_flip", help="Mean of an image's and its mirror's logits."),
)
def read_options(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A file, or the output folder of a run.")],
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Images, folders, patterns in quotes, or shards.")
    ],
    topk: Annotated[int, typer.Option(help="Classes for each image, or all if there are fewer.", **WHOLE)] = 5,
    format: FormatOption = None,
    output_type: OutputTypeOption = "prob",
    ema: Annotated[
        bool | None, typer.Option(help="Use the moving average of the weights.", show_default="the better one")
    ] = None,
    min_prob: Annotated[
        float | None,
        typer.Option(
            help="Answer unknown where the largest probability is lower.",
            show_default="always answer",
            **number_option(float),
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the temperature of CHECKPOINT on validation images of known class.")
    ] = False,
    heatmap: Annotated[
        int | None,
        typer.Option(help="Draw where in the first N images their answer is seen.", show_default="none", **WHOLE),
    ] = None,
    *,
    batch_size: int | None,
    workers: int | None,
    device: str,
    output_dir: Path | None,
    eval_flip: bool,
) -> PredictOptions:
    """Predict the classes of images with a checkpoint, on the terminal or to a table with a row for each.

    Exit status: 0 done, 1 failed, 2 wrong usage, 143 stopped by a signal; the same command starts over.
    """
    MIN_1.check("--heatmap", heatmap)
    format = format or (EMBEDDING_FORMATS[0] if output_type == "embedding" else "csv")
    options = PredictOptions(
        checkpoint, sources, topk, format, output_type, ema, batch_size, workers, device, output_dir, eval_flip,
        min_prob, calibrate, heatmap or 0,
    )  # fmt: skip
    _check_probabilities(options)
    _check_files(options)
    _check_heatmap(options)
    return options


def _check_files(options: PredictOptions) -> None:
    """Refuse a form that does not go with what is written."""
    form, is_embedding = options.format, options.output_type == "embedding"
    if options.output_dir is None and is_embedding:
        raise UserError("--output-type embedding without --output-dir: embeddings are files; give --output-dir DIR")
    if options.output_dir is None and form != "csv":
        raise UserError(f"--format {form} without --output-dir: predictions are printed; give --output-dir DIR")
    if is_embedding and form not in EMBEDDING_FORMATS:
        raise UserError(
            f"--format {form} with --output-type embedding: is for numbers that people read; give --format npy or "
            "--format parquet"
        )
    if form == "npy" and not is_embedding:
        raise UserError(
            f"--format npy with --output-type {options.output_type}: holds embeddings only; give --output-type "
            "embedding or --format parquet"
        )
    if form == "parquet":
        require_pyarrow()


def _check_probabilities(options: PredictOptions) -> None:
    """Refuse numbers, and what does not go with `--min-prob`, and with `--calibrate`, which predicts nothing."""
    MIN_1.check("--topk", options.topk)
    PROBABILITY.check("--min-prob", options.min_prob)
    if not options.calibrate:
        if options.min_prob is not None and options.output_type == "logit":
            raise UserError(
                f"--min-prob {options.min_prob:g} with --output-type logit: it compares probabilities; leave one of "
                "them out"
            )
        return
    others = {
        "--min-prob": options.min_prob is not None,
        "--output-type": options.output_type != "prob",
        "--format": options.format != "csv",
        "--heatmap": options.heatmap > 0,
    }
    for name in (name for name, is_given in others.items() if is_given):
        raise UserError(f"--calibrate with {name}: nothing is predicted; leave {name} out")
    if options.eval_flip:
        raise UserError(
            "--calibrate with --eval-flip: a temperature is of the network without mirror images; leave --eval-flip out"
        )


def _check_heatmap(options: PredictOptions) -> None:
    """Refuse what does not go with `--heatmap`."""
    given = f"--heatmap {options.heatmap}"
    if not options.heatmap:
        return
    if options.output_dir is None:
        raise UserError(f"{given} without --output-dir: heat maps are files; give --output-dir DIR")
    if options.output_type == "embedding":
        raise UserError(f"{given} with --output-type embedding: a heat map is of an answer; give them to two commands")
    try:
        require_captum()
    except UserError as error:
        raise UserError(f"{given}: {error}") from None


def check_paths(options: PredictOptions) -> None:
    """Raise UserError for paths that are not there, before the imports that take seconds."""
    if not os.path.exists(options.checkpoint):
        raise UserError(f"CHECKPOINT {options.checkpoint}: no such file or folder; give that of a run")
    expand_sources(options.sources)


def run(options: PredictOptions) -> None:
    """Predict.

    Raises:
        UserError: as `check_paths` and `utils.inference.predict.predict`.
        RunFailed: the processes do not meet, or one is lost.
    """
    # What takes seconds comes after the checks of the command line.

    from utils.distributed.group import process_group
    from utils.distributed.ownership import own_process
    from utils.distributed.stop import StopRequest
    from utils.distributed.watchdog import watchdog
    from utils.inference.predict import predict
    from utils.inference.recalibrate import recalibrate

    check_paths(options)
    device = own_process(options.device)
    with (
        process_group(device, TIMEOUT, PROGRAM.print_error) as env,
        contextlib.ExitStack() as stack,
        env.guard(PROGRAM.print_error),
        watchdog(env, PROGRAM.print_error),
        StopRequest(monitor=env.monitor).handling_signals(),
    ):
        (recalibrate if options.calibrate else predict)(options, env, stack)


PROGRAM = Program("predict.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    try:
        return PROGRAM.run(argv, run, functools.partial(print_once, PROGRAM))
    finally:
        end_status()


if __name__ == "__main__":
    given = start_program(PROGRAM, sys.argv[1:], check_paths)
    start_imports(given.device)
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(main)(sys.argv[1:]))  # so that torchrun's report has its exception
