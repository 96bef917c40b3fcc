"""The network of a checkpoint as plain timm layers, with its classes, normalisation and geometry."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models import Normalization, create_model
from utils.config import ResolvedConfig
from utils.errors import UserError
from utils.training.checkpoint import BEST, EARLIER, LAST, Checkpoint, load
from utils.training.state import NETWORKS

MODEL, EMA = NETWORKS


@dataclasses.dataclass(frozen=True)
class Trained:
    """A network that is ready to be used.

    Attributes:
        model: timm's layers in evaluation mode, float32, on the CPU; images (N, 3, image_size, image_size) to logits
            (N, num_classes).
        config: of its run.
        classes: names in label order. There may be fewer than the head has outputs, if `--num-classes` said so.
        normalization: mean and standard deviation per channel, of images in [0, 1].
        weights: which of the checkpoint's networks it is: "model" or "model_ema".
        top1: its accuracy, percent; None if it was not evaluated.
        path: of the checkpoint.
    """

    model: nn.Module
    config: ResolvedConfig
    classes: tuple[str, ...]
    normalization: Normalization
    weights: str
    top1: float | None
    path: Path

    @property
    def crop_pct(self) -> float:
        """Share of the shorter side that the centre crop takes, from which timm computes exactly `val_resize`."""
        size, resized = self.config.image_size, self.config.val_resize
        share = size / resized
        while math.floor(size / share) != resized:  # rounding
            share = math.nextafter(share, 0.0)
        return share

    @property
    def metadata(self) -> dict[str, Any]:
        """What a program needs to feed the network and to read its logits; JSON-ready."""
        mean, std = self.normalization
        return {
            "arch": self.config.arch,
            "num_classes": self.config.num_classes,
            "classes": list(self.classes),
            "mean": list(mean),
            "std": list(std),
            "image_size": self.config.image_size,
            "val_resize": self.config.val_resize,
            "interpolation": "bilinear",
            "crop": "center",
            "weights": self.weights,
            "top1": self.top1,
        }


def find_checkpoint(path: Path) -> Path:
    """The checkpoint file that a path means: itself, or of an output folder best.pt, else the newest.

    Raises:
        UserError: there is none.
    """
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        raise UserError(f"{path}: no such checkpoint; give best.pt or last.pt of a run, or its output folder")
    for name in (BEST, LAST, *EARLIER):
        if os.path.isfile(path / name):
            return path / name
    raise UserError(f"{path}: no checkpoint in it; give the output folder of a run, or a checkpoint file")


def load_trained(path: Path, ema: bool | None = None) -> Trained:
    """Read the network of a checkpoint.

    Args:
        path: as for `find_checkpoint`.
        ema: whether to take the moving average; None takes the better of the two by the checkpoint's evaluation, and
            of a checkpoint without one the model.

    Raises:
        UserError: no such checkpoint, a damaged one, one without a moving average where that is wanted, or weights that
            do not fit its architecture.
    """
    saved = load(find_checkpoint(path), "CHECKPOINT")
    assert saved.path is not None, "read from a file"
    weights = _choose_weights(saved, ema)
    config, tensors = saved.config, saved.state.networks[weights]
    model = create_model(config.arch, config.num_classes, image_size=config.image_size)
    try:
        model.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(
            f"{saved.path}: its weights do not fit {config.arch} with {config.num_classes} classes; give another file"
        ) from None
    top1 = saved.state.result.get("val/top1" if weights == MODEL else "val/ema_top1")
    return Trained(
        model=model.to(memory_format=torch.contiguous_format).eval(),  # which safetensors wants
        config=config,
        classes=saved.record.classes,
        normalization=saved.record.normalization,
        weights=weights,
        top1=top1,
        path=saved.path,
    )


def _choose_weights(saved: Checkpoint, ema: bool | None) -> str:
    if ema and EMA not in saved.state.networks:
        raise UserError(f"--ema: {saved.path} has no EMA weights; leave --ema out")
    if ema is None:
        result = saved.state.result
        ema = EMA in saved.state.networks and result.get("val/ema_top1", -1.0) > result.get("val/top1", -1.0)
    return EMA if ema else MODEL
