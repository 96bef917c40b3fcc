"""Options of a feed: their checks and messages, the process that it belongs to, and what its saved state must fit."""

import contextlib
import dataclasses
import numbers
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist

from utils.data.images.manifest import OR_SKIP, Manifest
from utils.data.loaders.cache import mean_decoded_bytes
from utils.data.loaders.settings import check_cache_fits, choose_loader_settings, resolve_pixels
from utils.distributed.device import choose_device, require_gpu
from utils.distributed.group import DistEnv
from utils.distributed.launcher import read_launch
from utils.distributed.machine import inspect_machine
from utils.errors import BadFile, UserError
from utils.options.config import TrainConfig, choices, flag_fields
from utils.options.data_flags import EPOCHS
from utils.options.flags import flag, kinds
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import ImageSize, as_image_size
from utils.options.validation import validate

STATE_FORMAT = 1
# Training settings of ResolvedConfig, which no loader reads.
UNUSED: dict[str, Any] = {
    "compile": False, "fused_layers": False, "cuda_graph": False, "warmup_epochs": 0.0, "lr_scaling": "none",
    "lr": 0.0, "momentum": 0.0, "weight_decay": 0.0, "amp": "none", "loss": "cross-entropy", "label_smoothing": 0.0,
    "best_by": "top1", "epochs": EPOCHS, "val_fraction": 0.0,
}  # fmt: skip
# What decides the batches, besides the images and the processes.
PIXELS = {
    "train": (
        "batch_size", "image_size", "seed", "augment", "randaugment_magnitude", "randaugment_ops", "randaugment_std",
        "color_jitter", "repeated_augmentation", "balance", "hflip", "vflip", "rot90", "train_crop", "crop_scale",
        "interpolation", "decode", "cache", "device",
    ),
    "val": ("batch_size", "image_size", "val_resize", "val_crop", "interpolation", "device"),
}  # fmt: skip


class DataOptions(TypedDict, total=False):
    """Options of a feed with the names, defaults and limits of train.py's flags.

    Attributes:
        workers: CPU threads; by default the threads that this process may use, divided by the processes that torchrun
            or Slurm has started on this machine.
        augment: policy after crop and flip.
        randaugment_magnitude: of the policy randaugment, out of 30.
        randaugment_ops: its operations per image.
        randaugment_std: standard deviation of its magnitude.
        color_jitter: brightness, contrast and saturation by a factor of 1 ± this at most.
        repeated_augmentation: copies of an image in an epoch, which then has one of so many images.
        balance: how evenly classes come; 1 is equally often.
        hflip: probability of mirroring an image.
        vflip: probability of turning one upside down.
        rot90: whether images are turned by 0, 90, 180 or 270 degrees.
        train_crop: random, or center, squash or pad, as val_crop.
        crop_scale: smallest area of a crop, as a fraction of the image.
        interpolation: of crops and validation images, by default bilinear; random is of crops alone.
        val_resize: shorter side before the center crop, pixels, with pad the longer one; by default image_size x 8/7,
            with pad or another train_crop than random image_size.
        val_crop: center, the default, or as train_crop; squash, which resizes both sides; or pad, which adds the mean
            color of ImageNet.
        train_split: folder of the split train.
        val_split: folder of the split val.
        decode: what DALI decodes, the crop alone or all.
        hw_decoder_load: share of a batch that the GPU's JPEG engines decode.
        cache: where training images stay decoded.
        prefetch: batches that DALI prepares ahead.
        stage_dir: where a data_dir s3://... or gs://... is copied to.
    """

    workers: int | None
    augment: str
    randaugment_magnitude: int
    randaugment_ops: int
    randaugment_std: float
    color_jitter: float
    repeated_augmentation: int
    balance: float
    hflip: float
    vflip: float
    rot90: bool
    train_crop: Literal["random", "center", "squash", "pad"]
    crop_scale: float
    interpolation: Literal["bilinear", "bicubic", "random"] | None
    val_resize: int | None
    val_crop: Literal["center", "squash", "pad"] | None
    train_split: str
    val_split: str
    decode: Literal["auto", "fused", "full"]
    hw_decoder_load: float | None
    cache: Literal["auto", "none", "gpu", "host"]
    prefetch: int | None
    stage_dir: str | os.PathLike[str] | None


OPTIONS = ("data_dir", "batch_size", "image_size", "seed", *DataOptions.__annotations__)  # that are flags, too


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """Errors name options instead of flags: batch_size, not --batch-size."""
    try:
        yield
    except BadFile as error:
        raise BadFile(error.path, error.reason, error.rank, remedy="delete or replace it") from error.__cause__
    except UserError as error:
        text = _own_remedies(str(error).replace(OR_SKIP, ""))
        for field in sorted(flag_fields(), key=lambda field: -len(field.name)):
            text = re.sub(rf"(?<!\S){flag(field.name)}(?![\w-])", field.name, text)
        raise UserError(text) from None


def _own_remedies(text: str) -> str:
    """`text` without the remedies, behind its last semicolon, that name flags of which a feed has no option."""
    problem, _, remedy = text.rpartition("; ")
    others = {flag(field.name) for field in flag_fields()} - {flag(name) for name in OPTIONS}
    kept = [part for part in remedy.split(", or ") if others.isdisjoint(re.findall(r"--[a-z\d-]+", part))]
    return "; ".join([*([problem] if problem else []), *([", or ".join(kept)] if kept else [])])


def create_config(data_dir: str | os.PathLike[str], split: str, values: Mapping[str, Any]) -> TrainConfig:
    """The configuration that the options of a feed are.

    Raises:
        UserError: there is no such option, or its value is wrong.
    """
    if split not in ("train", "val"):
        raise UserError(f"split {split!r}: must be train or val; train_split and val_split name other folders")
    for name, value in values.items():
        if name not in OPTIONS:
            raise UserError(f"{name}: no such option; there are {', '.join(DataOptions.__annotations__)}")
        if name != "image_size":
            _check_type(name, value)
    given = {name: value for name, value in values.items() if value is not None}
    given["image_size"] = _image_size(given.get("image_size", TrainConfig.image_size))
    if "stage_dir" in given:
        given["stage_dir"] = Path(os.path.expanduser(given["stage_dir"]))
    folder = Path(os.path.expanduser(data_dir))
    config = TrainConfig(data_dir=folder, evaluate=split == "val", given=frozenset(given), **given)
    validate(config)
    return config


def _image_size(value: Any) -> ImageSize:
    height, width = value if isinstance(value, Sequence) and len(value) == 2 else (value, value)
    for side in (height, width):
        if isinstance(side, bool) or not isinstance(side, numbers.Integral):
            raise UserError(f"image_size {value!r}: must be int or (height, width)")
    return as_image_size(int(height), int(width))


def _check_type(name: str, value: Any) -> None:
    """Raise UserError unless a value has a type of the field `name`, and is one of its words."""
    field = TrainConfig.__dataclass_fields__[name]
    words, may_be_none = choices(name), field.default is None
    accepted: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, Path: (str, os.PathLike)}
    types = tuple(accepted.get(kind, kind) for kind in kinds(field)) if not words else ()
    if value in words or (value is None and may_be_none) or (types and isinstance(value, types) and value is not True):
        return
    expected = " or ".join(words) if words else kinds(field)[0].__name__
    raise UserError(f"{name} {value!r}: must be {expected}{' or None' if may_be_none else ''}")


def choose_env(device: str | torch.device, rank: int | None, world_size: int | None) -> DistEnv:
    """This process and its device; see `BaseFeed`.

    Raises:
        UserError: ranks or device are wrong.
    """
    launch = read_launch()
    if (rank is None) != (world_size is None):
        raise UserError(f"rank {rank} with world_size {world_size}: give both or neither")
    if rank is None or world_size is None:
        rank, world_size = launch.rank, launch.world_size
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} with world_size {world_size}: must be 0 or more and less than world_size")
    return DistEnv(rank, launch.local_rank, world_size, launch.local_world_size, _choose_device(device))


def _choose_device(choice: str | torch.device) -> torch.device:
    try:
        device = torch.device(choice if choice != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {choice}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu" or not torch.cuda.is_available():
        return choose_device(device.type, read_launch())  # refuses cuda
    gpus = torch.cuda.device_count()
    if device.index is None:
        current = torch.cuda.current_device()
        return torch.device("cuda", current) if current or gpus == 1 else choose_device("cuda", read_launch())
    require_gpu(device, gpus, "device")
    return device


def resolve_options(given: TrainConfig, manifest: Manifest, env: DistEnv) -> ResolvedConfig:
    """Choose what was left open, as train.py does for one process; it asks no other.

    Raises:
        UserError: the images do not fit into the memory that `cache` names.
    """
    alone = inspect_machine(DistEnv.single(env.device))
    machine = dataclasses.replace(
        alone,
        cpu_threads=max(1, alone.cpu_threads // env.local_world_size),
        host_memory=alone.host_memory // env.local_world_size,
    )
    mean = 0.0 if given.evaluate else mean_decoded_bytes(manifest)
    decoded = round(len(manifest) * mean) if given.cache != "none" else 0
    settings = choose_loader_settings(given, machine, decoded, mean)
    if error := check_cache_fits(settings.cache, machine, decoded, "use cache none"):
        raise error
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)} | UNUSED
    names = ("workers", "decode", "hw_decoder_load", "cache", "prefetch")
    values |= {name: getattr(settings, name) for name in names} | {
        "processes": env.world_size,
        "num_classes": len(manifest.classes),
        "task": manifest.task,
        **resolve_pixels(given),
        "device": env.device.type,
    }
    return ResolvedConfig(**values)


def state_identity(config: ResolvedConfig, split: str, manifest: Manifest, env: DistEnv) -> dict[str, Any]:
    """What must be the same where a state is loaded, by name."""
    return {
        "format": STATE_FORMAT,
        "split": split,
        "images": manifest.fingerprint,
        "world_size": env.world_size,
        "rank": env.rank,
        **{name: getattr(config, name) for name in PIXELS[split]},
    }


def check_state(state: Mapping[str, Any], given: TrainConfig, identity: Mapping[str, Any]) -> None:
    """Raise UserError unless a state is of this feed; `decode` and `cache` may differ where they were left open."""
    try:
        saved: Mapping[str, Any] = state["feed"]
        complete = {"epoch", "batch", "loader"} <= state.keys()
    except (TypeError, KeyError):
        complete = False
    if not complete:
        raise UserError("load_state_dict: not the state of a feed; give what state_dict() of a feed has returned")
    for name, value in identity.items():
        before = saved.get(name, getattr(TrainConfig, name, None))  # an option that came later had its default
        if before == value or (name in ("decode", "cache") and getattr(given, name) == "auto"):
            continue
        if name == "images":
            raise UserError("load_state_dict: the state is of other images; give the data set that it was saved with")
        advice = "; each rank saves and loads its own state" if name == "rank" else ""
        raise UserError(f"load_state_dict: {name} was {before}, and is {value}; open the feed as it was{advice}")


def pixel_settings(
    given: TrainConfig, config: ResolvedConfig, saved: Mapping[str, Any], manifest: Manifest, env: DistEnv
) -> ResolvedConfig:
    """`config` with the decode path and the cache of a saved state, where these were left open.

    Raises:
        UserError: the images do not fit into the memory that they were cached in.
    """
    pixels = {name: saved[name] for name in ("decode", "cache") if name in saved}
    if all(getattr(config, name) == value for name, value in pixels.items()):
        return config
    return resolve_options(dataclasses.replace(given, **pixels), manifest, env)
