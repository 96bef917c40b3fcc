#!/usr/bin/env python3
"""Compare the forms of one data set: how fast each is read, decoded and trained on, interleaved in one process.

    scripts/compare_formats.py /data/imagenet /data/imagenet-wds /data/imagenet-tfrecord --arch resnet50

Each DIR holds the same images in another form: class folders, tars, TFRecord, ... The table has images/s of DALI's
loader alone and of training with it, median and range of the windows, and parts of the first DIR. Class folders are
also read by `--loader stock`. Windows of all are interleaved, as those of scripts/benchmark.py.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.benchmark.verdict import SYNTHETIC, Rate
from utils.errors import UserError
from utils.files import write_json
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.options.limits import ABOVE_0
from utils.options.readers import number_option
from utils.options.validation import require_folder, validate
from utils.progress import end_status, start_status
from utils.text import count

MIN_WINDOWS = 5
Rates = Mapping[str, Mapping[str, Rate]]  # by form, of the loader `alone` and of `training`


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; `config` is that of the training run whose step is timed."""

    config: TrainConfig
    folders: tuple[Path, ...]
    decode: str
    windows: int
    window_seconds: float


@with_train_flags(
    train_flag("arch"),
    train_flag("output_dir", default=Path("runs/formats"), help="Where formats.json goes."),
    train_flag("batch_size", help="Images per step.", shown="256, 32 on the CPU"),
    train_flag("image_size"),
    train_flag("workers", help="CPU threads per loader.", shown="the cores"),
    train_flag("device"),
    train_flag("decode", default="full", help="What DALI decodes."),
)
def read_options(
    folders: Annotated[list[Path], typer.Argument(help="Folders with the same images in different forms.")],
    windows: Annotated[int, typer.Option(help="Measurements of each, 5 or more.", **number_option(int))] = MIN_WINDOWS,
    window_seconds: Annotated[float, typer.Option(help="Length of one, seconds.", **number_option(float))] = 2.0,
    **flags: Any,
) -> Options:
    """Compare the forms of one data set: how fast each is read, decoded and trained on."""
    if windows < MIN_WINDOWS:
        raise UserError(f"--windows {windows}: a median needs {MIN_WINDOWS} or more")
    ABOVE_0.check("--window-seconds", window_seconds)
    for folder in folders:
        require_folder(folder)
    decode = flags.pop("decode")
    if decode == "auto":
        raise UserError("--decode auto: give full or fused, so that all forms are decoded alike")
    config = TrainConfig(loader="synthetic", resume="none", **flags)
    validate(config)
    return Options(config, tuple(dict.fromkeys(folders)), decode, windows, window_seconds)


def compare(options: Options) -> None:
    """Measure all forms, print their table, and write formats.json.

    Raises:
        UserError: the folders do not hold the same number of images, or flags do not fit.
        Stopped: a signal came; nothing was written.
    """
    start_status("loading torch, DALI and timm")

    from train import train_step
    from utils.benchmark.images import read_images, repeat
    from utils.benchmark.loaders import open_loader
    from utils.benchmark.run import MIN_BATCHES, comparison, measure_loaders, open_run
    from utils.training.build import build

    end_status()
    output_dir = options.config.output_dir
    with comparison(options.config) as (env, stack, work):
        forms = {folder: read_images(folder, output_dir, env) for folder in options.folders}
        for folder, images in forms.items():
            first, wanted = next((folder, len(images)) for folder, images in forms.items())
            if len(images) != wanted:
                raise UserError(
                    f"{folder}: has {count(len(images), 'image')}, but {first} has {wanted:,}; give the same images"
                )
        batch_size = options.config.batch_size or (256 if env.device.type == "cuda" else 32)
        config = dataclasses.replace(options.config, batch_size=batch_size)
        run, _ = open_run(config, next(iter(forms.values())), env, work / "run", stack, build)
        loaders = {}
        for folder, images in forms.items():
            is_folder = images.source == "class folders"
            for name in (f"dali-{options.decode}", "stock")[: 1 + is_folder]:
                loader = open_loader(name, run, repeat(images, MIN_BATCHES * batch_size))
                stack.callback(loader.stream.close)
                form = f"{folder}: {images.source}" + (", --loader stock" if name == "stock" else "")
                loaders[form] = loader
        measured = measure_loaders(run, loaders, train_step, options.windows, options.window_seconds)
    results = {
        form: {kind: Rate(tuple(window.rate(batch_size) for window in windows)) for kind, windows in kinds.items()}
        for form, kinds in measured.items()
    }
    write_json(output_dir / "formats.json", {form: _json(rates) for form, rates in results.items()})
    print("\n".join(table(results)))


def _json(rates: Mapping[str, Rate]) -> dict[str, Any]:
    return {name: {"median": rate.median, "windows": rate.windows} for name, rate in rates.items()}


def table(results: Rates) -> Iterator[str]:
    """Lines of Markdown: images/s, median and range, and parts of the first form."""
    yield "| form | loader alone, images/s | of the first | training, images/s | of the first |"
    yield "|---|---|---|---|---|"
    first = next(rates for name, rates in results.items() if name != SYNTHETIC)
    for name, rates in results.items():
        cells = [name]
        for kind in ("alone", "training"):
            rate = rates.get(kind)
            cells += ["", ""] if rate is None else [str(rate), f"{rate.median / first[kind].median:.3f}"]
        yield f"| {' | '.join(cells)} |"


PROGRAM = Program("compare_formats.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, compare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
