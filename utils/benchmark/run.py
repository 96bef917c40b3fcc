"""The training run that a benchmark times: opened, described, and measured with every loader."""

import contextlib
import dataclasses
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

from utils.benchmark.images import repeat, sample_images
from utils.benchmark.loaders import PREFETCH, FilesReader, Loader, TrainStep
from utils.benchmark.measure import Case, Window, measure
from utils.benchmark.verdict import LoaderMeasurement, Measurements, Rate
from utils.data.dali import DALI_VERSION
from utils.data.images.manifest import Manifest
from utils.data.loaders.cache import decoded_bytes, mean_decoded_bytes
from utils.data.loaders.settings import choose_loader_settings
from utils.data.splits.selection import Splits
from utils.distributed.group import DistEnv
from utils.distributed.machine import Machine, inspect_machine
from utils.distributed.stop import StopRequest
from utils.network.compiler import enable_compile_cache
from utils.options.config import TrainConfig
from utils.options.data_flags import BATCH_SIZE
from utils.options.resolved import ResolvedConfig
from utils.training.run import Run
from utils.training.settings.autotune import resolve
from utils.training.state.output import prepare_output

BuildRun = Callable[[ResolvedConfig, Splits, Splits, DistEnv, contextlib.ExitStack, StopRequest], Run]
MIN_BATCHES = 2000  # per epoch, so that no loader meets the end of one in a window


def describe(run: Run, images: Manifest, generated: bool, windows: int, window_seconds: float) -> dict[str, Any]:
    """What is measured, and on what: the part of benchmark.json that holds no measurements.

    Args:
        run: the run whose step is timed.
        images: the different images, each once.
        generated: whether the benchmark generated them.
        windows: number of windows per case.
        window_seconds: wanted length of a window.
    """
    config = run.config
    width, height, size = sample_images(images)
    on_cuda, machine = run.env.device.type == "cuda", inspect_machine(run.env)
    return {
        "arch": config.arch,
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "augment": config.augment,
        "amp": config.amp,
        "optimizer": config.optimizer,
        "teacher": config.teacher,
        "compile": config.compile,
        "fused_layers": config.fused_layers,
        "cuda_graph": config.cuda_graph,
        "workers": config.workers,
        "device": config.device,
        "device_name": torch.cuda.get_device_name(run.env.device) if on_cuda else cpu_name(),
        "jpeg_engines": machine.jpeg_engines,
        "kept": _would_cache(config, machine, images),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "dali": DALI_VERSION,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
        },
        "generated": generated,
        "num_images": len(images),
        "num_classes": len(images.classes),
        "image_width": width,
        "image_height": height,
        "image_bytes": size,
        "windows": windows,
        "window_seconds": window_seconds,
    }


def _would_cache(config: ResolvedConfig, machine: Machine, images: Manifest) -> bool:
    """Whether train.py would keep the images decoded, if there are enough for a batch."""
    choice = choose_loader_settings(TrainConfig(augment=config.augment), machine, decoded_bytes(images))
    return choice.cache != "none" and len(images) >= config.batch_size


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


def open_run(
    config: TrainConfig, images: Manifest, env: DistEnv, work: Path, stack: contextlib.ExitStack, build: BuildRun
) -> tuple[Run, Manifest]:
    """A training run on synthetic images, and the manifest of the real ones for the loaders.

    Args:
        config: its loader is `synthetic`.
        images: repeated until an epoch is long enough.
        work: temporary folder for the files of the run.
        stack: closes the run.
        build: train.py's.

    Raises:
        UserError: the flags do not fit the machine or the images.
    """
    manifest = repeat(images, MIN_BATCHES * (config.batch_size or BATCH_SIZE))
    choice = choose_loader_settings(config, inspect_machine(env), 0, mean_decoded_bytes(images))
    given = dataclasses.replace(config, output_dir=work)
    resolved = resolve(given, manifest.classes, env, choice, task=manifest.task)
    prepare_output(work, env)
    stop = StopRequest()
    stack.enter_context(stop.handling_signals())
    splits = {"train": manifest, "val": manifest}
    if resolved.compile:
        enable_compile_cache()
    run = build(resolved, splits, splits, env, stack, stop)
    stop.enable(env)
    return run, manifest


def collect(
    facts: dict[str, Any], run: Run, train_step: TrainStep, loaders: Sequence[Loader], files: FilesReader
) -> Measurements:
    """Measure everything that the verdict needs; `facts` as `describe` returns them.

    Raises:
        Stopped: a signal came.
    """
    batch_size = run.config.batch_size
    cases = [
        Case("training on synthetic images", lambda: train_step(run), meter=run.state.meter),
        Case("files, not decoded", files.__next__, files, PREFETCH * files.readers, files.readers),
        *(case for loader in loaders for case in (loader.alone(), loader.training(run, train_step))),
    ]
    synthetic, read, *of_loaders = measure(cases, run, facts["windows"], facts["window_seconds"])
    measured = zip(loaders, of_loaders[::2], of_loaders[1::2], strict=True)
    return Measurements(
        num_images=facts["num_images"],
        generated=facts["generated"],
        image_width=facts["image_width"],
        image_height=facts["image_height"],
        image_size=facts["image_size"],
        workers=facts["workers"],
        cores=facts["cores"],
        on_gpu=facts["device"] == "cuda",
        jpeg_engines=facts["jpeg_engines"] if run.config.hw_decoder_load > 0 else 0,
        would_cache=facts["kept"],
        unused=unused_flags(run.config),
        synthetic=_rate(synthetic, batch_size),
        files=_rate(read, batch_size),
        loaders=tuple(_of_loader(loader, alone, training, batch_size) for loader, alone, training in measured),
    )


def _of_loader(
    loader: Loader, alone: Sequence[Window], training: Sequence[Window], batch_size: int
) -> LoaderMeasurement:
    cpu_seconds = sum(window.cpu_seconds for window in alone)
    return LoaderMeasurement(
        name=loader.name,
        alone=_rate(alone, batch_size),
        training=_rate(training, batch_size),
        cpu_seconds=1000 * cpu_seconds / (batch_size * sum(window.steps for window in alone)),
        data_wait=statistics.median(window.data_wait for window in training),
        cores_busy=cpu_seconds / sum(window.seconds for window in alone),
        first_batch=loader.first_batch,
        gpu_memory=loader.gpu_memory,
    )


def _rate(windows: Sequence[Window], batch_size: int) -> Rate:
    return Rate(tuple(window.rate(batch_size) for window in windows))
