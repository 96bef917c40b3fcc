"""Architecture name -> nn.Module: every timm model, its head sized from the data, in channels_last memory."""

import copy
import difflib
import itertools
import os
import warnings
from pathlib import Path
from typing import Any, cast

import timm
import timm.models
import torch
from torch import nn
from torch.func import functional_call

from utils.errors import UserError


def check_arch(arch: str) -> None:
    """Raise UserError, with the closest names, unless timm knows the architecture."""
    name, _, tag = arch.partition(".")  # timm writes pretrained variants as arch.tag
    if not timm.is_model(name):
        close = ", ".join(difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.0))
        raise UserError(f"--arch {arch}: unknown to timm; the closest are {close}")
    variants = timm.list_pretrained(f"{name}.*")
    if tag and arch not in variants:
        close = ", ".join(difflib.get_close_matches(arch, variants, n=3, cutoff=0.0)) or f"{name} alone"
        raise UserError(f"--arch {arch}: timm has no such pretrained variant; the closest are {close}")


def create_model(
    arch: str, num_classes: int, pretrained: str | None = None, image_size: int = 224, need_head: bool = False
) -> nn.Module:
    """Build a network.

    Args:
        arch: timm name, optionally with a pretrained tag (`resnet50.a1_in1k`).
        num_classes: outputs of the head.
        pretrained: None, "timm" for timm's published weights, or a local file (.safetensors, .pt, a checkpoint of
            Brisk); the head is left at its random start where its shape differs.
        image_size: side of the input, for networks that are built for one size (vision transformers).
        need_head: whether pretrained weights must have a head of that shape, as for an evaluation.

    Raises:
        UserError: unknown name, weights that cannot be had or do not fit, or a size that the network rejects.
    """
    check_arch(arch)
    sized = timm.get_pretrained_cfg(arch)
    if need_head and pretrained == "timm" and sized is not None and sized.num_classes != num_classes:
        raise UserError(
            f"--evaluate --pretrained: timm's weights for {arch} tell {sized.num_classes} classes apart, not the "
            f"{num_classes} of the data; give --resume PATH of a run on that data"
        )
    options = {"img_size": image_size} if sized is not None and sized.fixed_input_size else {}
    try:
        model: nn.Module = timm.create_model(arch, pretrained=pretrained == "timm", num_classes=num_classes, **options)
    except Exception as error:
        if pretrained == "timm":
            raise UserError(
                f"--pretrained: timm's weights for {arch} cannot be had ({_first_line(error)}); give a local file"
            ) from error
        raise UserError(
            f"--arch {arch}: timm cannot build it at --image-size {image_size} ({_first_line(error)})"
        ) from error
    if pretrained not in (None, "timm"):
        _load_weights(model, Path(pretrained), need_head)
    return model.to(memory_format=torch.channels_last)


def check_input(model: nn.Module, arch: str, image_size: int, batch_size: int) -> None:
    """Raise UserError unless the network, as it is (for training or not), takes a batch of such images.

    Most need so many pixels; batch norm in training needs more than one value per channel. Only shapes are computed
    (on torch's meta device), and if that fails, which may be the device's fault, one or two images.

    Args:
        model: on the CPU; neither it nor the random numbers change.
        arch: its name.
        image_size: side of the images.
        batch_size: images at once.
    """
    shape = (min(batch_size, 2), 3, image_size, image_size)
    values = itertools.chain(model.named_parameters(), model.named_buffers())
    on_meta = {name: value.detach().to("meta") for name, value in values}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            functional_call(model, on_meta, torch.zeros(shape, device="meta"))
    except Exception:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                copy.deepcopy(model)(torch.zeros(shape))
        except Exception as error:
            made_for = cast(Any, model).pretrained_cfg["input_size"][-1]
            raise UserError(
                f"--image-size {image_size}: {arch} cannot compute a batch of {batch_size} such images "
                f"({_first_line(error)}); its weights were made for {made_for}, give that or another --batch-size",
                common=True,
            ) from error


def normalization(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, of images in [0, 1], that the network's weights were made for."""
    settings: Any = model.pretrained_cfg
    return tuple(settings["mean"]), tuple(settings["std"])


def _load_weights(model: nn.Module, path: Path, need_head: bool) -> None:
    if not os.path.isfile(path):  # unlike Path.is_file, False for what may not be looked at
        raise UserError(f"--pretrained {path}: no such file; give a weights file, or no value for timm's weights")
    try:
        with warnings.catch_warnings():  # torch warns of some damage before it raises
            warnings.simplefilter("ignore")
            loaded = timm.models.load_state_dict(str(path), use_ema=True, weights_only=True)
    except Exception as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(
            f"--pretrained {path}: damaged, or not a readable weights file ({reason}); give a .safetensors or .pt file"
        ) from error
    wanted = model.state_dict()
    settings: Any = model.pretrained_cfg
    head = tuple(f"{name}." for name in _as_tuple(settings.get("classifier")))
    for name in list(loaded):
        if not need_head and name.startswith(head) and name in wanted and loaded[name].shape != wanted[name].shape:
            del loaded[name]
    absent = [name for name in wanted if name not in loaded and (need_head or not name.startswith(head))]
    unfit = [name for name in loaded if name not in wanted or loaded[name].shape != wanted[name].shape]
    if absent or unfit:
        raise UserError(
            f"--pretrained {path}: does not fit --arch ({len(absent)} weights missing, {len(unfit)} unknown or of "
            f"another shape, first: {(absent + unfit)[0]}); give the architecture that it was trained with"
        )
    model.load_state_dict(loaded, strict=False)


def _as_tuple(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
