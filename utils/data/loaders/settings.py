"""Settings of the input pipeline that the user left open, chosen from the machine and the size of the images."""

import dataclasses
import math
from typing import Any, Literal

from utils.distributed.group import DistEnv
from utils.distributed.machine import Machine
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.options.data_flags import PREFETCH
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import sides_of
from utils.text import count

SMALL = 1 / 8  # of the free memory: decoded images that take no more are cached by default, on the CPU
SMALL_ON_GPU = 1 / 4  # of the GPU's, where one kernel makes the batches
LARGEST = 0.8  # of the free memory, for the cache
SMALL_IMAGE = 3 * 80**2  # bytes, decoded; the JPEG engines need longer for such images than CPU threads and CUDA cores
VAL_BATCH = 256  # images of a validation batch, where those of training are smaller
BY_DALI = ("dali", "stock", "proxy")  # loaders whose images DALI decodes; others have no use for --decode and its like


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """Settings of the input pipeline; `reasons` is for the user, by flag. `workers` may be fewer than `cpu_threads`."""

    cpu_threads: int
    workers: int
    decode: Literal["fused", "full"]
    hw_decoder_load: float
    cache: Literal["none", "gpu", "host"]
    prefetch: int
    reasons: dict[str, str]


def feeds_from_memory(config: TrainConfig) -> bool:
    """Whether a `MemoryTrainLoader` makes the batches: one bilinear crop of each image, and nothing on top of it.

    Policies, jitter and `--transform` are made of DALI's operators. Copies of an image need draws of their own.
    """
    return (
        (config.loader, config.cache, config.augment) == ("dali", "gpu", "none")
        and config.transform is None
        and not config.color_jitter
        and config.repeated_augmentation == 1
        and config.interpolation in (None, "bilinear")
        and config.train_crop in ("random", "squash")  # a crop or a border after a resize is DALI's
    )


def choose_loader_settings(
    config: TrainConfig, machine: Machine, decoded: int, mean_image: float = 0.0
) -> LoaderSettings:
    """Fill in what the user left open; measured on an H100, see docs/performance.md.

    Args:
        config: as the user gave it.
        machine: of this process.
        decoded: bytes of all training images, decoded; 0 if they cannot be cached.
        mean_image: bytes of one, decoded, on average; 0 if that is not known.
    """
    reasons = {}
    small = 0 < mean_image <= SMALL_IMAGE
    workers = config.workers
    if workers is None:
        workers, reasons["workers"] = machine.cpu_threads, "this process's share of the CPU threads"
    cache: Literal["none", "gpu", "host"] = "none"
    if config.cache != "auto":
        cache = config.cache
    elif config.decode != "fused" and decoded and not machine.gpu:
        cache = "host" if decoded <= SMALL * machine.host_memory else "none"
        free = _gigabytes(machine.host_memory)
        reasons["cache"] = f"decoded, the training images take {_gigabytes(decoded)}; {free} are free"
    elif config.decode != "fused" and decoded and not config.augment_schedule:
        on_gpu = feeds_from_memory(dataclasses.replace(config, cache="gpu"))
        if on_gpu and decoded <= SMALL_ON_GPU * machine.gpu_memory:
            cache, free = "gpu", _gigabytes(machine.gpu_memory)
            reasons["cache"] = f"decoded, the training images take {_gigabytes(decoded)}; the GPU has {free} free"
    decode, reason = _choose_decode(config, machine, cache, small)
    reasons |= {"decode": reason} if reason else {}
    load = config.hw_decoder_load
    if load is None:
        load = 0.0 if small else 0.65 if decode == "fused" else 0.9
        if machine.jpeg_engines:
            reasons["hw_decoder_load"] = "the images are small" if small else f"for {decode} decoding"
    if config.loader not in BY_DALI:
        reasons = {name: reason for name, reason in reasons.items() if name == "workers"}
    prefetch = PREFETCH if config.prefetch is None else config.prefetch
    return LoaderSettings(machine.cpu_threads, workers, decode, load, cache, prefetch, reasons)


def _choose_decode(
    config: TrainConfig, machine: Machine, cache: str, small: bool
) -> tuple[Literal["fused", "full"], str]:
    """What DALI decodes, and why; "" where the user says so."""
    if config.decode != "auto":
        return config.decode, ""
    if cache != "none":
        return "full", "whole images are cached"
    if config.train_crop != "random":
        return "full", f"--train-crop {config.train_crop} needs whole images"
    if not machine.gpu:
        return "fused", "the CPU decodes no more than the crop"
    if not machine.jpeg_engines:
        return "fused", "no hardware decoder"
    if small:
        return "fused", "the images are small"
    return "full", f"{count(machine.jpeg_engines, 'hardware decoder')}, for whole images only"


def resolve_pixels(config: TrainConfig) -> dict[str, Any]:
    """Sizes, crop and interpolation, where the user, the weights and the checkpoint leave them open.

    A network that is trained on whole images is evaluated on whole ones.
    """
    size = config.val_image_size or config.image_size
    shorter = min(sides_of(size))
    is_random = config.train_crop == "random"
    crop = config.val_crop or ("center" if is_random else config.train_crop)
    return {
        "val_image_size": size,
        "val_resize": config.val_resize or (round(shorter * 8 / 7) if is_random and crop != "pad" else shorter),
        "val_crop": crop,
        "interpolation": config.interpolation or "bilinear",
    }


def check_cache_fits(cache: str, machine: Machine, decoded: int, remedy: str) -> UserError | None:
    """What is wrong with caching `decoded` bytes of images where `--cache` says; None for nothing."""
    memory = {"none": None, "gpu": machine.gpu_memory, "host": machine.host_memory}[cache]
    if memory is None or decoded <= LARGEST * memory:
        return None
    if cache == "gpu" and not machine.gpu:
        return UserError(f"--cache gpu without a GPU: there is none to cache images on; {remedy}")
    return UserError(
        f"--cache {cache}: decoded, the training images take {_gigabytes(decoded)}, and {_gigabytes(memory)} are free "
        f"for each process; {remedy}"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.{1 if size >= 1e8 else 3}f} GB"


def with_val_batch(config: ResolvedConfig) -> ResolvedConfig:
    """The configuration of a run's validation loader: larger batches where small ones of training stay on the GPU.

    Small batches take the host longer to launch than the GPU to compute. An evaluation keeps nothing for a backward
    pass, so that four times as many pixels fit.
    """
    if config.cache != "gpu":
        return config
    pixels, val_pixels = (math.prod(sides_of(size)) for size in (config.image_size, config.val_image_size))
    most = 4 * config.batch_size * pixels / val_pixels
    return dataclasses.replace(config, batch_size=max(config.batch_size, min(VAL_BATCH, int(most))))


def keeps_val_batches(config: ResolvedConfig, env: DistEnv) -> bool:
    """Whether a run's validation batches stay on the device after the first evaluation, if they fit.

    With `--cache gpu`, and on a GPU where the network takes no more memory in later epochs.
    """
    grows = config.freeze_epochs > 0 or config.resize_schedule != ""
    return config.cache == "gpu" or (env.device.type == "cuda" and not grows)
