"""Where small images stay: as files, in the host's memory, or in the GPU's, with DALI's crops or one kernel.

    python scripts/bench caches --arch resnet18 --image-size 64 --images 50000 --side 64
    python scripts/bench caches --arch resnet18 --image-size 64 --data-dir /data/small

The table has images/s of the loader alone and of training with it, median and range of the windows, parts of what files
reach, and the share of the training time in which the device waited for input. Windows of all are interleaved, as those
of scripts/benchmark.py. Files are decoded as train.py would choose. Without a GPU the host's memory is both.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.bench.comparison import MIN_WINDOWS, Comparison, Seconds, Windows, loader_flags
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.options.limits import MIN_1, MIN_8
from utils.options.readers import number_option
from utils.options.validation import require_folder
from utils.progress import end_status, start_status


@dataclasses.dataclass(frozen=True)
class Caches(Comparison):
    """The command line."""

    data_dir: Path | None
    images: int
    side: int


@with_train_flags(*loader_flags("caches"), train_flag("data_dir", help="Folder of images.", shown="generated"))
def read_options(
    images: Annotated[int, typer.Option(help="Images to generate.", **number_option(int))] = 50_000,
    side: Annotated[int, typer.Option(help="Side of generated images, pixels.", **number_option(int))] = 64,
    windows: Windows = MIN_WINDOWS,
    window_seconds: Seconds = 2.0,
    **flags: Any,
) -> Caches:
    """Compare where small images stay: as files, or decoded in the memory of the host or the GPU."""
    MIN_8.check("--side", side)
    MIN_1.check("--images", images)
    data_dir = flags.pop("data_dir")
    if data_dir is not None:
        require_folder(data_dir)
    config = TrainConfig(loader="synthetic", resume="none", **flags)
    return Caches(config, windows, window_seconds, data_dir, images, side)


def run(options: Caches) -> None:
    """Measure all places, print their table, and write caches.json."""
    start_status("loading torch, DALI and timm")
    from scripts.bench.loaders import compare_caches

    end_status()
    compare_caches(options)


PROGRAM = Program("bench caches", read_options)
