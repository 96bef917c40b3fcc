"""The forms of one data set: how fast each is read, decoded and trained on.

    python scripts/bench formats /data/imagenet /data/imagenet-wds /data/imagenet-tfrecord --arch resnet50

Each DIR holds the same images in another form: class folders, tars, TFRecord, ... The table has images/s of DALI's
loader alone and of training with it, median and range of the windows, parts of the first DIR, and the share of the
training time in which the device waited for input. Class folders are also read by `--loader stock`. Windows of all are
interleaved, as those of scripts/benchmark.py.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.bench.comparison import MIN_WINDOWS, Comparison, Seconds, Windows, loader_flags
from utils.errors import UserError
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.options.validation import require_folder
from utils.progress import end_status, start_status


@dataclasses.dataclass(frozen=True)
class Formats(Comparison):
    """The command line."""

    folders: tuple[Path, ...]
    decode: str


@with_train_flags(*loader_flags("formats"), train_flag("decode", default="full", help="What DALI decodes."))
def read_options(
    folders: Annotated[list[Path], typer.Argument(help="Folders with the same images in different forms.")],
    windows: Windows = MIN_WINDOWS,
    window_seconds: Seconds = 2.0,
    **flags: Any,
) -> Formats:
    """Compare the forms of one data set: how fast each is read, decoded and trained on."""
    for folder in folders:
        require_folder(folder)
    decode = flags.pop("decode")
    if decode == "auto":
        raise UserError("--decode auto: give full or fused, so that all forms are decoded alike")
    config = TrainConfig(loader="synthetic", resume="none", **flags)
    return Formats(config, windows, window_seconds, tuple(dict.fromkeys(folders)), decode)


def run(options: Formats) -> None:
    """Measure all forms, print their table, and write formats.json."""
    start_status("loading torch, DALI and timm")
    from scripts.bench.loaders import compare_formats

    end_status()
    compare_formats(options)


PROGRAM = Program("bench formats", read_options)
