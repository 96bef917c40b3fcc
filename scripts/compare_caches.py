#!/usr/bin/env python3
"""Compare where small images stay: as files, in the host's memory, or in the GPU's, with DALI's crops or one kernel's.

    scripts/compare_caches.py --arch resnet18 --image-size 64 --images 50000 --side 64
    scripts/compare_caches.py --arch resnet18 --image-size 64 --data-dir /data/small

The table has images/s of the loader alone and of training with it, median and range of the windows, and the share of
the training time in which the device waited for input. Windows of all are interleaved, as those of
scripts/benchmark.py. Files are decoded as train.py would choose. Without a GPU the host's memory is both.
"""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import typer
from PIL import Image

from utils.benchmark.verdict import Rate
from utils.errors import UserError
from utils.files import write_json
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.options.limits import ABOVE_0, MIN_1, MIN_8
from utils.options.readers import number_option
from utils.options.validation import require_folder, validate
from utils.progress import end_status, start_status
from utils.text import count

if TYPE_CHECKING:
    from utils.benchmark.loaders import Loader
    from utils.benchmark.measure import Window
    from utils.data.images.batch import TrainLoader
    from utils.data.images.manifest import Manifest
    from utils.training.run import Run

MIN_WINDOWS = 5
NUM_CLASSES = 10  # of generated images
FILES, HOST, BY_DALI, BY_KERNEL = "files", "host's memory", "GPU's memory, DALI", "GPU's memory, one kernel"
Results = Mapping[str, Mapping[str, Sequence["Window"]]]  # by place, of the loader `alone` and of `training`


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; `config` is that of the training run whose step is timed."""

    config: TrainConfig
    data_dir: Path | None
    images: int
    side: int
    windows: int
    window_seconds: float


@with_train_flags(
    train_flag("arch"),
    train_flag("data_dir", help="Folder of images.", shown="generated"),
    train_flag("output_dir", default=Path("runs/caches"), help="Where caches.json goes."),
    train_flag("batch_size", help="Images per step.", shown="256, 32 on the CPU"),
    train_flag("image_size"),
    train_flag("workers", help="CPU threads per loader.", shown="the cores"),
    train_flag("device"),
)
def read_options(
    images: Annotated[int, typer.Option(help="Images to generate.", **number_option(int))] = 50_000,
    side: Annotated[int, typer.Option(help="Side of generated images, pixels.", **number_option(int))] = 64,
    windows: Annotated[int, typer.Option(help="Measurements of each, 5 or more.", **number_option(int))] = MIN_WINDOWS,
    window_seconds: Annotated[float, typer.Option(help="Length of one, seconds.", **number_option(float))] = 2.0,
    **flags: Any,
) -> Options:
    """Compare where small images stay: as files, or decoded in the memory of the host or the GPU."""
    if windows < MIN_WINDOWS:
        raise UserError(f"--windows {windows}: a median needs {MIN_WINDOWS} or more")
    ABOVE_0.check("--window-seconds", window_seconds)
    MIN_8.check("--side", side)
    MIN_1.check("--images", images)
    data_dir = flags.pop("data_dir")
    if data_dir is not None:
        require_folder(data_dir)
    config = TrainConfig(loader="synthetic", resume="none", **flags)
    validate(config)
    return Options(config, data_dir, images, side, windows, window_seconds)


def generate(folder: Path, count: int, side: int) -> None:
    """Write JPEGs of colored clouds, a class folder for every tenth image."""
    draw = np.random.default_rng(0)
    for number in range(NUM_CLASSES):
        (folder / "train" / f"class{number}").mkdir(parents=True)
    for index in range(count):
        colors = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        image = colors.resize((side, side), Image.Resampling.BICUBIC)
        image.save(folder / "train" / f"class{index % NUM_CLASSES}" / f"{index:06}.jpg", quality=90)


def open_loaders(run: "Run", images: "Manifest", stack: contextlib.ExitStack) -> "dict[str, Loader]":
    """A loader for each place, in use; `stack` closes them."""
    import pipelines
    from utils.benchmark.loaders import READ_AHEAD, Loader
    from utils.data.loaders.dali_loader import DaliTrainLoader

    sampler = dataclasses.replace(run.sampler, num_images=len(images))
    config = dataclasses.replace(run.config, loader="dali")
    streams: dict[str, TrainLoader] = {}
    for name, cache in ((FILES, "none"), (HOST, "host"), (BY_DALI, "gpu"), (BY_KERNEL, "gpu")):
        decode: Any = config.decode if cache == "none" else "full"
        of_cache = dataclasses.replace(config, cache=cache, decode=decode)  # type: ignore[arg-type]
        if name == BY_DALI:
            if run.env.device.type == "cpu":
                continue
            streams[name] = DaliTrainLoader(of_cache, images, sampler, run.env, 0, None, pipelines.train_pipeline)
        else:
            streams[name] = pipelines.create_train_loader(of_cache, images, sampler, run.env)
        stack.callback(streams[name].close)
    loaders = {}
    for name, stream in streams.items():
        queue = 0 if name == BY_KERNEL else config.prefetch + READ_AHEAD
        loaders[name] = Loader(f"dali-{config.decode}", stream, queue, 1, 0.0, None)
    return loaders


def compare(options: Options) -> None:
    """Measure all, print their table, and write caches.json.

    Raises:
        UserError: the folder holds no images, or flags do not fit.
        Stopped: a signal came; nothing was written.
    """
    start_status("loading torch, DALI and timm")

    from train import train_step
    from utils.benchmark.images import read_images
    from utils.benchmark.run import comparison, measure_loaders, open_run
    from utils.training.build import build

    end_status()
    output_dir = options.config.output_dir
    with comparison(options.config) as (env, stack, work):
        if options.data_dir is None:
            generate(work, options.images, options.side)
        images = read_images(options.data_dir or work, output_dir, env)
        batch_size = options.config.batch_size or (256 if env.device.type == "cuda" else 32)
        if len(images) < batch_size:
            raise UserError(
                f"--batch-size {batch_size}: there {'is' if len(images) == 1 else 'are'} "
                f"{count(len(images), 'image')}; lower it"
            )
        config = dataclasses.replace(options.config, batch_size=batch_size)
        run, _ = open_run(config, images, env, work / "run", stack, build)
        loaders = open_loaders(run, images, stack)
        results = measure_loaders(run, loaders, train_step, options.windows, options.window_seconds)
    write_json(output_dir / "caches.json", _json(results, batch_size))
    print("\n".join(table(results, batch_size)))


def _json(results: Results, batch_size: int) -> dict[str, Any]:
    return {
        name: {
            kind: {
                "images_per_second": [window.rate(batch_size) for window in windows],
                "data_wait": [window.data_wait for window in windows],
            }
            for kind, windows in kinds.items()
        }
        for name, kinds in results.items()
    }


def table(results: Results, batch_size: int) -> Iterator[str]:
    """Lines of Markdown: images/s, median and range, and the median share of time in which the device waited."""
    yield "| images | loader alone, images/s | training, images/s | data wait |"
    yield "|---|---|---|---|"
    for name, kinds in results.items():
        wait = statistics.median(window.data_wait for window in kinds["training"])
        alone = _shown(kinds["alone"], batch_size) if "alone" in kinds else ""
        yield f"| {name} | {alone} | {_shown(kinds['training'], batch_size)} | {wait:.1%} |"


def _shown(windows: "Sequence[Window]", batch_size: int) -> str:
    return str(Rate(tuple(window.rate(batch_size) for window in windows)))


PROGRAM = Program("compare_caches.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, compare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
