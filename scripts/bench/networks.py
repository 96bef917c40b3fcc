"""Brisk's training step beside timm's, for some networks: images/s and the peak of memory.

    python scripts/bench networks resnet50 vit_small_patch16_224 convnext_tiny --optimizer adamw
    python scripts/bench networks resnet50 --data-dir DIR      # also fed by DALI

Brisk's step is that of train.py. timm's is that of its `benchmark.py --bench train`, with --channels-last, --amp and,
where Brisk compiles, --torchcompile. Both train on one batch of random images, in windows that alternate, and must fit
beside each other. The peak of memory is that of weights, optimizer and step. Writes networks.json after each network.
"""

import dataclasses
from typing import Annotated, Any

import typer

from scripts.bench.comparison import MIN_WINDOWS, Comparison, Seconds, Windows, loader_flags
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.options.validation import require_folder
from utils.progress import end_status, start_status


@dataclasses.dataclass(frozen=True)
class Networks(Comparison):
    """The command line; `config` has no `arch` of its own."""

    archs: tuple[str, ...]


@with_train_flags(
    *(each for each in loader_flags("networks") if each.name != "arch"),
    train_flag("data_dir", help="Folder of images to feed.", shown="not fed"),
    train_flag("amp"),
    train_flag("optimizer"),
    train_flag("compile", help="torch.compile both steps.", shown="on CUDA"),
)
def read_options(
    archs: Annotated[list[str], typer.Argument(metavar="ARCH...", help="Names that timm knows.")],
    windows: Windows = MIN_WINDOWS,
    window_seconds: Seconds = 2.0,
    **flags: Any,
) -> Networks:
    """Compare Brisk's step with timm's."""
    config = TrainConfig(loader="synthetic", resume="none", **flags)
    if config.data_dir is not None:
        require_folder(config.data_dir)
    return Networks(config, windows, window_seconds, tuple(dict.fromkeys(archs)))


def run(options: Networks) -> None:
    """Measure all networks, print their table, and write networks.json."""
    start_status("loading torch, DALI and timm")
    from scripts.bench.steps import compare_networks

    end_status()
    compare_networks(options)


PROGRAM = Program("bench networks", read_options)
