#!/usr/bin/env python3
"""Measure what limits training on your images with this machine, and what DALI is worth there.

    scripts/benchmark.py --data-dir DIR --arch resnet50 --output-dir runs/benchmark

Prints a table and a verdict; writes benchmark.json and benchmark.png to --output-dir. DIR holds train/CLASS/*.jpg or
CLASS/*.jpg; without it, images are generated. Empty files are left out and named; one that cannot be decoded ends the
benchmark when a loader meets it.

Measured are every loader alone, the step of train.py on one synthetic batch, the same step fed by every loader, and
reading the files without decoding them, as this machine serves them now (from memory, if they have been read before).
scripts/measure.py says how, utils/verdict.py what follows from it, utils/report.py what the keys of benchmark.json are.
"""

import contextlib
import dataclasses
import math
import os
import platform
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import timm
import torch
import torchvision
import typer
from PIL import Image, ImageDraw

import models
from train import train_step
from utils.benchmark.measure import TIMM_POLICIES, FilesReader, Loader, measure_loaders, open_loaders
from utils.benchmark.report import benchmark_json, draw_chart, format_verdict, introduction, table
from utils.benchmark.verdict import TITLES, Measurements, diagnose
from utils.cli import USAGE_ERROR, number_option
from utils.config import BATCH_SIZE, TrainConfig, validate
from utils.data import manifest as dataset
from utils.data.dali import DALI_VERSION
from utils.data.decoding import decoded_bytes
from utils.data.formats import folder
from utils.data.manifest import Manifest
from utils.data.workers import check_sockets
from utils.distributed.group import DistEnv, process_group
from utils.distributed.launcher import read_launch
from utils.distributed.ownership import own_process
from utils.distributed.stop import StopRequest
from utils.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR, BadFile, Stopped, UserError, escape_control_chars
from utils.files import write_json
from utils.network.compiler import enable_compile_cache
from utils.training.autotune import choose_loader_settings, inspect_machine, resolve
from utils.training.build import create_run
from utils.training.output import prepare_output
from utils.training.run import Run

MIN_WINDOWS = 5
MIN_BATCHES = 2000  # per epoch, so that no loader meets the end of one in a window
GENERATED = 320  # images


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line. `config` is that of the training run whose step is timed, but for an absent `batch_size`."""

    config: TrainConfig
    batch_size: int | None
    data_dir: Path | None
    output_dir: Path
    loaders: tuple[str, ...]
    windows: int
    window_seconds: float


# ---------------------------------------------------------------------------------------------------------------------
# Images


def read_images(data_dir: Path) -> Manifest:
    """Manifest of `data_dir/train`, or of `data_dir` itself if that holds the class folders; without the bad files.

    Raises:
        UserError: as `utils.folder.scan`.
    """
    return folder.scan(data_dir, "train" if (data_dir / "train").is_dir() else ".", skip_bad=True)


def repeat(manifest: Manifest, least: int) -> Manifest:
    """The manifest's files again and again, until there are `least`."""
    times = math.ceil(least / len(manifest))
    labels, sizes, mtimes = (np.tile(values, times) for values in (manifest.labels, manifest.sizes, manifest.mtimes))
    return dataclasses.replace(manifest, files=manifest.files * times, labels=labels, sizes=sizes, mtimes=mtimes)


def sample_images(manifest: Manifest, count: int = 256) -> tuple[float, float, float]:
    """Mean width and height in pixels, and mean encoded size in bytes, of a sample of the files.

    Raises:
        UserError: Pillow can read none of them.
    """
    chosen = random.Random(0).sample(range(len(manifest)), min(count, len(manifest)))
    sizes = []
    for index in chosen:
        with (
            contextlib.suppress(OSError, ValueError, Image.DecompressionBombError),  # the loaders tell of bad files
            Image.open(manifest.path(index)) as image,
        ):
            sizes.append((*image.size, os.path.getsize(manifest.path(index))))
    if not sizes:
        raise UserError(f"--data-dir {manifest.root}: none of {len(chosen)} files is an image that Pillow can read")
    width, height, size = np.mean(sizes, axis=0)
    return float(width), float(height), float(size)


def generate_images(data_dir: Path, count: int = GENERATED, num_classes: int = 10) -> None:
    """JPEGs of ImageNet's mean size, 500 x 375 px and 110 KB: shapes on noise."""
    draw_number = np.random.default_rng(0)
    for index in range(count):
        width, height = draw_number.integers((400, 300), (601, 451))
        image = Image.new("RGB", (width, height), tuple(draw_number.integers(0, 256, 3)))
        draw = ImageDraw.Draw(image)
        for _ in range(12):
            corners = np.sort(draw_number.integers(0, (width, height), (2, 2)), axis=0)
            draw.ellipse([tuple(corner) for corner in corners.tolist()], fill=tuple(draw_number.integers(0, 256, 3)))
        noisy = np.asarray(image) + draw_number.normal(0, 20, (height, width, 3))
        path = data_dir / "train" / f"class{index % num_classes}" / f"{index:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def describe(options: Options, run: Run, manifest: Manifest, argv: Sequence[str]) -> dict[str, Any]:
    """What was measured, and on what: the part of benchmark.json that holds no figures."""
    config = run.config
    width, height, size = sample_images(manifest)
    on_cuda, machine = run.env.device.type == "cuda", inspect_machine(run.env)
    return {
        "command": shlex.join(["scripts/benchmark.py", *argv]),
        "arch": config.arch,
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "augment": config.augment,
        "amp": config.amp,
        "compile": config.compile,
        "fused_layers": config.fused_layers,
        "cuda_graph": config.cuda_graph,
        "workers": config.workers,
        "device": config.device,
        "device_name": torch.cuda.get_device_name(run.env.device) if on_cuda else cpu_name(),
        "jpeg_engines": machine.jpeg_engines,
        "kept": choose_loader_settings(TrainConfig(), machine, decoded_bytes(manifest)).cache != "none",
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "dali": DALI_VERSION,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
        },
        "generated": options.data_dir is None,
        "num_images": len(manifest),
        "num_classes": len(manifest.classes),
        "image_width": width,
        "image_height": height,
        "image_bytes": size,
        "windows": options.windows,
        "window_seconds": options.window_seconds,
    }


def unused_flags(config: TrainConfig) -> tuple[str, ...]:
    """Flags that make the step faster on a GPU and are not in use."""
    if config.device == "cpu":
        return ()
    flags = {
        "--amp bf16": config.amp != "none",
        "--compile": config.compile,
        "--fused-layers": config.fused_layers,
        "--cuda-graph": config.cuda_graph,
    }
    return tuple(flag for flag, used in flags.items() if not used)


def cpu_name() -> str:
    """The processor's name, as Linux knows it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# ---------------------------------------------------------------------------------------------------------------------
# The benchmark


def open_run(
    config: TrainConfig, images: Manifest, env: DistEnv, work: Path, stack: contextlib.ExitStack
) -> tuple[Run, Manifest]:
    """A training run on synthetic images, and the manifest of the real ones that could feed it.

    Args:
        config: its loader is `synthetic`.
        images: repeated until an epoch is long enough.
        env: this process.
        work: folder for the files of the run, which nobody reads.
        stack: closes what was opened.

    Raises:
        UserError: for what does not fit the machine or the data.
    """
    manifest = repeat(images, MIN_BATCHES * (config.batch_size or BATCH_SIZE))
    choice = choose_loader_settings(config, inspect_machine(env), decoded=0)
    resolved = resolve(dataclasses.replace(config, output_dir=work), manifest.classes, env, choice)
    prepare_output(resolved, env)
    stop = StopRequest()
    stack.enter_context(stop.handling_signals())
    splits = {"train": manifest, "val": manifest}
    if resolved.compile:
        enable_compile_cache()
    run = create_run(resolved, splits, splits, env, stack, stop, time.perf_counter(), None, {})
    stop.enable(env)
    return run, manifest


def collect(facts: dict[str, Any], run: Run, loaders: Sequence[Loader], files: FilesReader) -> Measurements:
    """Measure everything that the verdict needs."""
    synthetic, read, feeds = measure_loaders(run, train_step, loaders, files, facts["windows"], facts["window_seconds"])
    return Measurements(
        num_images=facts["num_images"],
        generated=facts["generated"],
        image_width=facts["image_width"],
        image_height=facts["image_height"],
        image_size=facts["image_size"],
        workers=facts["workers"],
        cores=facts["cores"],
        on_gpu=facts["device"] == "cuda",
        jpeg_engines=facts["jpeg_engines"],
        kept=facts["kept"],
        unused=unused_flags(run.config),
        synthetic=synthetic,
        files=read,
        feeds=feeds,
    )


def benchmark(options: Options, argv: Sequence[str]) -> None:
    """The whole benchmark, from the flags to the files.

    Raises:
        UserError: flags or data do not fit; nothing was written.
        Stopped: a signal came; nothing was written.
    """
    models.check_arch(options.config.arch)
    check_sockets("workers of torch's DataLoader")
    device = own_process(options.config.device, deterministic=False)
    with process_group(device, options.config.timeout) as env, contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        if options.data_dir is None:
            generate_images(work)
        images = read_images(options.data_dir or work)
        batch_size = options.batch_size or (256 if env.device.type == "cuda" else 32)
        config = dataclasses.replace(options.config, batch_size=batch_size)
        run, manifest = open_run(config, images, env, work / "run", stack)
        prepare_output(dataclasses.replace(run.config, output_dir=options.output_dir), env)
        facts = describe(options, run, images, argv)
        excluded_files = f"\nleft out: {escape_control_chars(dataset.describe(images.bad))}" if images.bad else ""
        print(f"{introduction(facts)}{excluded_files}\n", flush=True)
        loaders, files = open_loaders(options.loaders, run, manifest, stack)
        figures = collect(facts, run, loaders, files)
    verdict = diagnose(figures)
    write_json(options.output_dir / "benchmark.json", benchmark_json(facts, figures, verdict))
    draw_chart(options.output_dir / "benchmark.png", facts, figures)
    print(f"{table(figures)}\n\n{format_verdict(verdict)}\n\n{options.output_dir}: benchmark.json, benchmark.png")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


WHOLE, NUMBER = number_option(int), number_option(float)


def read_options(
    data_dir: Annotated[Path | None, typer.Option(help="Folder of images; without it, images are generated.")] = None,
    arch: Annotated[str, typer.Option(help="Any timm architecture.")] = "resnet50",
    output_dir: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/benchmark"),
    loaders: Annotated[
        list[str] | None, typer.Option(help=f"Which of {', '.join(TITLES)}.", show_default="all")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images per step.", show_default="256, 32 on the CPU", **WHOLE)
    ] = None,
    image_size: Annotated[int, typer.Option(help="Side of the network's input, pixels.", **WHOLE)] = 224,
    augment: Annotated[
        Literal["none", "autoaugment", "randaugment", "trivialaugment"],
        typer.Option(help="Policy after crop and flip."),
    ] = "none",
    workers: Annotated[
        int | None, typer.Option(help="CPU threads per loader.", show_default="the cores", **WHOLE)
    ] = None,
    amp: Annotated[Literal["auto", "bf16", "fp16", "none"], typer.Option(help="Mixed precision.")] = "auto",
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile the step.", show_default="on CUDA")
    ] = None,
    fused_layers: Annotated[
        bool | None,
        typer.Option("--fused-layers/--no-fused-layers", help="Brisk's own kernels.", show_default="where compiled"),
    ] = None,
    cuda_graph: Annotated[
        bool | None,
        typer.Option("--cuda-graph/--no-cuda-graph", help="Launch the step as one CUDA graph.", show_default="on CUDA"),
    ] = None,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="Where to train.")] = "auto",
    windows: Annotated[int, typer.Option(help="Measurements of each, 5 or more.", **WHOLE)] = MIN_WINDOWS,
    window_seconds: Annotated[float, typer.Option(help="Length of one, seconds.", **NUMBER)] = 2.0,
) -> Options:
    """Measure loaders and training on your images, and say what limits.

    Exit status: 0 done, 1 failed, 2 wrong usage, 143 stopped by SIGTERM.
    """
    names = tuple(dict.fromkeys(name for word in loaders or TITLES for name in word.split(",")))
    for name in names:
        if name not in TITLES:
            raise UserError(f"--loaders {name}: not one of {', '.join(TITLES)}; separate them by commas")
    if windows < MIN_WINDOWS:
        raise UserError(f"--windows {windows}: a median needs {MIN_WINDOWS} or more")
    if not 0 < window_seconds < math.inf:
        raise UserError(f"--window-seconds {window_seconds}: must be more than 0 and finite")
    if "timm" in names and augment not in TIMM_POLICIES:
        others = ",".join(name for name in TITLES if name != "timm")
        raise UserError(f"--augment {augment} with --loaders timm: timm has no such policy; add --loaders {others}")
    if read_launch().world_size > 1:
        raise UserError("started as several processes: the benchmark measures one; start it without torchrun")
    config = TrainConfig(
        loader="synthetic",
        resume="none",
        arch=arch,
        batch_size=BATCH_SIZE if batch_size is None else batch_size,
        image_size=image_size,
        augment=augment,
        workers=workers,
        amp=amp,
        compile=compile,
        fused_layers=fused_layers,
        cuda_graph=cuda_graph,
        device=device,
    )
    validate(config)
    return Options(config, batch_size, data_dir, output_dir, names, windows, window_seconds)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(read_options)
    try:
        options = typer.main.get_command(app).main(list(argv), prog_name="benchmark.py", standalone_mode=False)
        if not isinstance(options, Options):
            return EXIT_DONE  # --help
        benchmark(options, argv)
    except USAGE_ERROR as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        return _refuse(f"{message}; benchmark.py --help lists all flags")
    except BadFile as error:
        # Its own message has train.py's remedy, a flag that this command does not have.
        others = "scripts/check_dataset.py DIR --output-dir OUT"
        return _refuse(f"{error.path}: {error.reason}; remove it, and what else {others} finds")
    except UserError as error:
        return _refuse(str(error))
    except Stopped:
        return EXIT_STOPPED
    return EXIT_DONE


def _refuse(text: str) -> int:
    print(f"benchmark.py: {escape_control_chars(text)}", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
