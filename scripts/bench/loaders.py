"""The loaders that `bench caches` and `bench formats` compare, measured interleaved in one process."""

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import pipelines
from scripts.bench.caches import Caches
from scripts.bench.comparison import Comparison
from scripts.bench.formats import Formats
from scripts.bench.table import markdown
from train import train_step
from utils.benchmark.images import read_images, repeat
from utils.benchmark.loaders import READ_AHEAD, Loader, open_loader
from utils.benchmark.measure import Case, measure
from utils.benchmark.run import MIN_BATCHES, open_run
from utils.benchmark.verdict import SYNTHETIC, Rate
from utils.data.images.batch import TrainLoader
from utils.data.images.manifest import Manifest
from utils.data.loaders.dali_loader import DaliTrainLoader
from utils.distributed.group import DistEnv, process_group
from utils.distributed.ownership import own_process
from utils.errors import UserError
from utils.files import write_json
from utils.text import count
from utils.training.build import build
from utils.training.run import Run
from utils.training.state.output import prepare_output

NUM_CLASSES = 10  # of generated images
FILES, HOST, BY_DALI, BY_KERNEL = "files", "host's memory", "GPU's memory, DALI", "GPU's memory, one kernel"
CACHES: dict[str, Any] = {FILES: "none", HOST: "host", BY_DALI: "gpu", BY_KERNEL: "gpu"}  # values of --cache
STOCK = ", --loader stock"
Results = Mapping[str, Mapping[str, "Measured"]]  # by loader: `alone`, and in `training`; synthetic images are not read


@dataclasses.dataclass(frozen=True)
class Measured:
    """Windows of a loader; `waits` are shares of the time, 0 to 1, in which the device waited for input."""

    rate: Rate
    waits: list[float]


def compare_caches(options: Caches) -> None:
    """Measure all places, print their table, and write caches.json."""

    def read(env: DistEnv, work: Path, batch_size: int) -> dict[str, Manifest]:
        if options.data_dir is None:
            generate(work, options.images, options.side)
        images = read_images(options.data_dir or work, options.config.output_dir, env)
        if len(images) < batch_size:
            raise UserError(
                f"--batch-size {batch_size}: there {'is' if len(images) == 1 else 'are'} "
                f"{count(len(images), 'image')}; lower it"
            )
        return {name: images for name in CACHES if name != BY_DALI or env.device.type == "cuda"}

    results = measure_loaders(options, read, open_cache)
    finish(
        options.config.output_dir / "caches.json",
        results,
        lambda each: {"images_per_second": each.rate.windows, "data_wait": each.waits},
    )


def compare_formats(options: Formats) -> None:
    """Measure all forms, print their table, and write formats.json."""

    def read(env: DistEnv, work: Path, batch_size: int) -> dict[str, Manifest]:
        folders = {folder: read_images(folder, options.config.output_dir, env) for folder in options.folders}
        first, wanted = next((folder, len(images)) for folder, images in folders.items())
        forms: dict[str, Manifest] = {}
        for folder, images in folders.items():
            if len(images) != wanted:
                raise UserError(
                    f"{folder}: has {count(len(images), 'image')}, but {first} has {wanted:,}; give the same images"
                )
            name = f"{folder}: {images.source}"
            names = [name, f"{name}{STOCK}"] if images.source == "class folders" else [name]
            forms |= dict.fromkeys(names, images)
        return forms

    def open_form(name: str, images: Manifest, run: Run) -> Loader:
        loader = "stock" if name.endswith(STOCK) else f"dali-{options.decode}"
        return open_loader(loader, run, repeat(images, MIN_BATCHES * run.config.batch_size))

    results = measure_loaders(options, read, open_form)
    finish(
        options.config.output_dir / "formats.json",
        results,
        lambda each: {"median": each.rate.median, "windows": each.rate.windows},
    )


def generate(folder: Path, count: int, side: int) -> None:
    """Write JPEGs of colored clouds, a class folder for every tenth image."""
    draw = np.random.default_rng(0)
    for number in range(NUM_CLASSES):
        (folder / "train" / f"class{number}").mkdir(parents=True)
    for index in range(count):
        colors = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        image = colors.resize((side, side), Image.Resampling.BICUBIC)
        image.save(folder / "train" / f"class{index % NUM_CLASSES}" / f"{index:06}.jpg", quality=90)


def open_cache(name: str, images: Manifest, run: Run) -> Loader:
    """The loader of one of CACHES."""
    sampler = dataclasses.replace(run.sampler, num_images=len(images))
    decode = run.config.decode if name == FILES else "full"
    config = dataclasses.replace(run.config, loader="dali", cache=CACHES[name], decode=decode)
    stream: TrainLoader
    if name == BY_DALI:
        stream = DaliTrainLoader(config, images, sampler, run.env, 0, None, pipelines.train_pipeline)
    else:
        stream = pipelines.create_train_loader(config, images, sampler, run.env)
    queue = 0 if name == BY_KERNEL else config.prefetch + READ_AHEAD
    return Loader(f"dali-{run.config.decode}", stream, queue, 1, 0.0, None)


def measure_loaders(
    options: Comparison,
    read: Callable[[DistEnv, Path, int], Mapping[str, Manifest]],
    open: Callable[[str, Manifest, Run], Loader],
) -> Results:
    """The windows of training on synthetic images, and of each loader, alone and in training, all interleaved.

    Args:
        read: returns the images of each loader, by its name; gets an empty folder and the size of a batch.

    Raises:
        UserError: images or flags do not fit.
        Stopped: a signal came.
    """
    config, cases = options.config, {}
    device = own_process(config.device, deterministic=False)
    with process_group(device, config.timeout) as env, contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comparison-")))
        prepare_output(config.output_dir, env)
        batch_size = config.batch_size or (256 if env.device.type == "cuda" else 32)
        images = read(env, work, batch_size)
        config = dataclasses.replace(config, batch_size=batch_size)
        run, _ = open_run(config, next(iter(images.values())), env, work / "run", stack, build)
        cases[SYNTHETIC, "training"] = Case(SYNTHETIC, lambda: train_step(run), meter=run.state.meter)
        for name, manifest in images.items():
            loader = open(name, manifest, run)
            stack.callback(loader.stream.close)
            for kind, case in (("alone", loader.alone()), ("training", loader.training(run, train_step))):
                cases[name, kind] = dataclasses.replace(case, name=f"{name}, {kind}")
        found = measure(list(cases.values()), run, options.windows, options.window_seconds)
    results: dict[str, dict[str, Measured]] = {}
    for (name, kind), windows in zip(cases, found, strict=True):
        rate = Rate(tuple(window.rate(batch_size) for window in windows))
        results.setdefault(name, {})[kind] = Measured(rate, [window.data_wait for window in windows])
    return results


def finish(path: Path, results: Results, to_json: Callable[[Measured], dict[str, Any]]) -> None:
    """Write the results, and print their table."""
    write_json(path, {name: {kind: to_json(each) for kind, each in kinds.items()} for name, kinds in results.items()})
    print(table(results))


def table(results: Results) -> str:
    """Images/s, median and range, parts of the first loader, and the median share of the time that training waited."""
    rows = [["images", "loader alone, images/s", "of the first", "training, images/s", "of the first", "data wait"]]
    first = next(kinds for name, kinds in results.items() if name != SYNTHETIC)
    for name, kinds in results.items():
        cells = [name]
        for kind in ("alone", "training"):
            rate = kinds[kind].rate if kind in kinds else None
            cells += ["", ""] if rate is None else [str(rate), f"{rate.median / first[kind].rate.median:.3f}"]
        rows.append([*cells, f"{statistics.median(kinds['training'].waits):.1%}"])
    return markdown(*rows)
