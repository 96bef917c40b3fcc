"""The network of a checkpoint as plain timm layers, with its classes, normalization and geometry."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models import create_model
from utils.errors import UserError, readable
from utils.figures import MAIN_FIGURE, describe_figure
from utils.inference.weights import choose_network, find_best_checkpoints, temperature_of, thresholds_of
from utils.network.weight_files import Normalization
from utils.options.arguments import model_options
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import as_image_size, crop_pct, timm_size
from utils.text import count
from utils.training.state.checkpoint import Checkpoint, Temperature, load
from utils.training.state.train_state import NETWORKS

MODEL, EMA = NETWORKS


@dataclasses.dataclass(frozen=True)
class Trained:
    """A network that is ready to be used.

    Attributes:
        model: timm's layers in evaluation mode, float32, on the CPU; images (N, 3, height, width) of
            val_image_size to logits (N, num_classes).
        classes: names in label order. There may be fewer than the head has outputs, if `--num-classes` said so.
        normalization: mean and standard deviation per channel, of images in [0, 1].
        weights: which of the checkpoint's networks it is: "model" or "model_ema".
        figure: name and value of its accuracy, such as ("top1", 76.3); None if these weights were not evaluated.
        thresholds: where an image has any number of classes, the probability of each output from which it counts as
            predicted, after the division by the temperature; () otherwise.
        saved: the checkpoint that it is of.
        temperature: by which logits are divided before they become probabilities, of several labels one for each
            output; None without one.
    """

    model: nn.Module
    config: ResolvedConfig
    classes: tuple[str, ...]
    normalization: Normalization
    weights: str
    figure: tuple[str, float] | None
    thresholds: tuple[float, ...]
    path: Path
    saved: Checkpoint
    temperature: Temperature | None = None

    @property
    def crop_pct(self) -> float:
        """Share of the shorter side that the center crop takes, from which timm computes exactly `val_resize`."""
        return crop_pct(self.config.val_image_size, self.config.val_resize)

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
            "image_size": timm_size(self.config.val_image_size),
            "val_resize": timm_size(as_image_size(*self.config.val_sides_before_crop)),
            "interpolation": self.config.val_interpolation,
            "crop": self.config.val_crop,
            "padding": list(self.config.padding),
            "weights": self.weights,
            **dict([self.figure or (MAIN_FIGURE[self.config.task], None)]),
            **({"thresholds": list(self.thresholds)} if self.thresholds else {}),
            **({} if self.temperature is None else {"temperature": self.temperature}),
        }

    @property
    def accuracy(self) -> str:
        """Such as "top-1 76.30 %"; "" if these weights were not evaluated."""
        return describe_figure(*self.figure) if self.figure else ""


def load_trained(path: Path, ema: bool | None = None) -> Trained:
    """Read the network of a checkpoint.

    Args:
        path: as for `find_best_checkpoints`.
        ema: as for `choose_network`.

    Raises:
        UserError: no such checkpoint, a damaged one, one without a moving average where that is wanted, or weights that
            do not fit its architecture.
    """
    saved = load(find_best_checkpoints(path)[0], "CHECKPOINT")
    assert saved.path is not None, "read from a file"
    weights = choose_network(saved, ema)
    config, tensors = saved.config, saved.state.networks[weights]
    options = model_options(config)
    model = create_model(config.arch, config.num_classes, image_size=config.image_size, options=options)
    try:
        model.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(
            f"{saved.path}: its weights do not fit {config.arch} with {count(config.num_classes, 'class')}; give "
            "another file"
        ) from None
    name = MAIN_FIGURE[config.task]
    value = saved.state.own_result.get(f"val/{name}" if weights == MODEL else f"val/ema_{name}")
    return Trained(
        model=model.to(memory_format=torch.contiguous_format).eval(),  # which safetensors wants
        config=config.padded_with(saved.record.normalization[0]),
        classes=tuple(map(readable, saved.record.classes)),
        normalization=saved.record.normalization,
        weights=weights,
        figure=None if value is None else (name, value),
        thresholds=tuple(thresholds_of(saved, weights)) if config.task == "multilabel" else (),
        path=saved.path,
        saved=saved,
        temperature=temperature_of(saved, weights) if weights in saved.temperature else None,
    )
