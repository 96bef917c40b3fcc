"""How pretrained weights want their images: sizes, crop and interpolation, for what the user left open."""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from timm.models import PretrainedCfg

import models
from utils.distributed.collective import collective
from utils.distributed.collectives import broadcast, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.network.weight_files import Weights, read_weights
from utils.network.weight_names import current_name
from utils.options.config import TrainConfig, choices
from utils.options.flags import flag
from utils.options.sizes import ImageSize, as_image_size, crop_pct, sides_of
from utils.options.validation import check_sizes
from utils.training.state.checkpoint import Checkpoint

SIZES = ("val_image_size", "val_resize")
PIXELS = (*SIZES, "val_crop", "interpolation")
TIMM_CROPS = {"center": "center", "squash": "squash", "border": "pad"}  # names of timm, and values of --val-crop


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Of pretrained weights, in training and evaluation.

    Attributes:
        source: what says so, for the user.
        image_size: of the training images.
        is_fixed: whether the network is built for one size.
        val_image_size: of the evaluated images.
        crop_pct: share of the shorter side that the center crop takes, at other sizes than `val_image_size`.
        val_crop_pct: the same, at `val_image_size`.
        val_crop, interpolation: values of the flags.
        model_args: that of the network, where its architecture is the run's.
    """

    source: str
    image_size: ImageSize
    is_fixed: bool
    val_image_size: ImageSize
    crop_pct: float
    val_crop_pct: float
    val_crop: str
    interpolation: str
    model_args: str | None = None


@collective
def adopt_arch(config: TrainConfig, env: DistEnv) -> TrainConfig:
    """The configuration with the architecture that the file of `--pretrained` names, where `--arch` was not given.

    The output folder that was not given is named after it. A file that is gone changes nothing: a resume has no need
    of it.

    Raises:
        UserError: on all ranks: rank 0 cannot read the file.
    """
    arch = None
    with sync_errors(env):
        if env.is_main and _takes_arch(config) and os.path.exists(str(config.pretrained)):
            arch = read_weights(Path(str(config.pretrained))).arch
    arch = broadcast(arch, env)
    if arch is None:
        return config
    by_default: dict[str, Any] = {"output_dir": None}
    is_default = config.output_dir == dataclasses.replace(config, **by_default).output_dir
    return dataclasses.replace(config, arch=arch, **(by_default if is_default else {}))


def _takes_arch(config: TrainConfig) -> bool:
    """Whether the architecture is that of a file."""
    return config.pretrained not in (None, "timm") and "arch" not in config.given


def fill_preprocessing(config: TrainConfig, saved: Checkpoint | None) -> tuple[TrainConfig, dict[str, str]]:
    """The configuration with the sizes, crop, interpolation and `--model-args` of its weights, if these were not given.

    Args:
        config: as the user gave it, with the `--pretrained` of the run.
        saved: the checkpoint that the run goes on from.

    Returns:
        The configuration, and by flag where its value is from. "pretrained" is in it if the weights have a
        preprocessing that is known.

    Raises:
        UserError: the weights cannot be read, or want what there is not.
    """
    sources: dict[str, str] = {}
    if saved is not None:
        values, source = _of_checkpoint(config, saved.config), "as in the checkpoint"
    else:
        from_file = config.pretrained not in (None, "timm")
        weights = read_weights(Path(str(config.pretrained))) if from_file else None
        if weights and weights.arch and _takes_arch(config):  # by `adopt_arch`
            sources["arch"] = weights.source
        wanted = _find_preprocessing(config, weights)
        if wanted is None:
            return config, sources
        values, source = _of_weights(config, wanted), wanted.source
    filled = dataclasses.replace(config, **values)
    check_sizes(filled, is_final=True)
    return filled, sources | dict.fromkeys((*values, "pretrained"), source)


def _of_checkpoint(config: TrainConfig, before: TrainConfig) -> dict[str, Any]:
    """What a resume takes over; of a run that began without weights nothing, as its command says it all."""
    if before.pretrained is None:
        return {}
    values: dict[str, Any] = {"arch": before.arch} if _takes_arch(config) else {}
    values |= {} if "image_size" in config.given else {"image_size": before.image_size}
    same_size = (vars(config) | values)["image_size"] == before.image_size
    names: tuple[str, ...] = (*PIXELS, "model_args") if before.model_args is not None else PIXELS
    if config.train_crop != before.train_crop or _pads(config, before.val_crop):
        names = tuple(name for name in names if name not in ("val_resize", "val_crop"))
    open_names = [name for name in names if getattr(config, name) is None and (same_size or name not in SIZES)]
    return values | {name: getattr(before, name) for name in open_names}


def _of_weights(config: TrainConfig, wanted: Preprocessing) -> dict[str, Any]:
    """What a run takes over from weights: their test size where it trains at their training size."""
    values: dict[str, Any] = {}
    if config.model_args is None and wanted.model_args is not None:
        values["model_args"] = wanted.model_args
    given = "image_size" in config.given
    if not given and (wanted.is_fixed or config.evaluate):
        values["image_size"] = wanted.image_size
    image_size: ImageSize = values.get("image_size", config.image_size)
    size = config.val_image_size
    is_whole = config.train_crop != "random" and not config.evaluate  # judged as it is trained, not as the weights were
    if size is None:
        follows = not is_whole and image_size == wanted.image_size and not (given and config.evaluate)
        size = values["val_image_size"] = wanted.val_image_size if follows else image_size
    if config.val_resize is None and not is_whole and not _pads(config, wanted.val_crop):
        share = wanted.val_crop_pct if size == wanted.val_image_size else wanted.crop_pct
        if share > 1 and wanted.val_crop != "pad":
            raise UserError(
                f"--pretrained: {wanted.source} evaluates with a black border (crop_pct {share:g}), which there is not "
                f"here; give --val-resize {min(sides_of(size))}"
            )
        values["val_resize"] = math.floor(min(sides_of(size)) / share)
    for name in ("interpolation",) if is_whole else ("val_crop", "interpolation"):
        if getattr(config, name) is None:
            value = values[name] = getattr(wanted, name)
            if value not in choices(name):
                raise UserError(
                    f"--pretrained: {wanted.source} wants {flag(name)} {value}, which there is not here; give "
                    f"{flag(name)} {choices(name)[0]}"
                )
    return values


def _pads(config: TrainConfig, before: str | None) -> bool:
    """Whether `--val-crop` asks for whole images where there were none: the size before a crop has no meaning then."""
    return config.val_crop == "pad" and before != "pad"


def _find_preprocessing(config: TrainConfig, weights: Weights | None) -> Preprocessing | None:
    """Of the weights that `--pretrained` names, `weights` of a file; None where nothing says what they want."""
    if config.pretrained is None:
        return None
    models.check_arch(config.arch)
    if weights is not None:
        model_args = (
            weights.model_args if weights.arch and current_name(weights.arch) == current_name(config.arch) else None
        )
        if weights.settings is not None:
            return dataclasses.replace(_of_run(weights.settings, weights.source), model_args=model_args)
        if weights.timm_settings is not None:
            return dataclasses.replace(_of_timm(weights.timm_settings, weights.source), model_args=model_args)
        if models.base_arch(config.arch) == config.arch:
            return None
    settings = timm.get_pretrained_cfg(config.arch)
    assert settings is not None, "timm knows the architecture"
    name = f"{models.base_arch(config.arch)}.{settings.tag}" if settings.tag else config.arch
    return _of_timm(settings, f"timm's {name}")


def _of_timm(settings: PretrainedCfg, source: str) -> Preprocessing:
    """As `timm.data.resolve_data_config` reads them, with and without its `use_test_size`."""
    return Preprocessing(
        source=source,
        image_size=as_image_size(*settings.input_size[1:]),
        is_fixed=settings.fixed_input_size,
        val_image_size=as_image_size(*(settings.test_input_size or settings.input_size)[1:]),
        crop_pct=settings.crop_pct,
        val_crop_pct=settings.test_crop_pct or settings.crop_pct,
        val_crop=TIMM_CROPS.get(settings.crop_mode, settings.crop_mode),
        interpolation=settings.interpolation,
    )


def _of_run(settings: Mapping[str, Any], source: str) -> Preprocessing:
    """Of the configuration that a checkpoint of Brisk holds."""
    before = TrainConfig.from_dict(settings)
    size = before.val_image_size or before.image_size
    share = crop_pct(size, before.val_resize or min(sides_of(size)))
    built_for = timm.get_pretrained_cfg(before.arch)
    return Preprocessing(
        source=source,
        image_size=before.image_size,
        is_fixed=built_for is not None and built_for.fixed_input_size,
        val_image_size=size,
        crop_pct=share,
        val_crop_pct=share,
        val_crop=before.val_crop or "center",
        interpolation=before.interpolation or "bilinear",
    )
