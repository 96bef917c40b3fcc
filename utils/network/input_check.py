"""Whether a network takes the images of a run: tried on the CPU, before anything is placed on a device."""

import copy
import itertools
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from utils.errors import UserError, first_line
from utils.options.resolved import ResolvedConfig
from utils.options.schedules import size_schedule
from utils.options.sizes import ImageSize, as_image_size, sides_of


def check_inputs(model: nn.Module, config: ResolvedConfig, batch_size: int) -> None:
    """Raise UserError unless `model` computes logits of images of every size of the run.

    Args:
        model: on the CPU, for training or evaluation as it will be used.
        batch_size: images that batch norm takes together.
    """
    output = check_input(model, config.arch, config.image_size, batch_size)
    for size in size_schedule(config).values():
        check_input(model, config.arch, size, batch_size, "--resize-schedule, image size")
    if config.val_image_size != config.image_size:
        check_input(model, config.arch, config.val_image_size, batch_size, "--val-image-size")
    if config.model_args and getattr(output, "shape", ())[1:] != (config.num_classes,):
        raise UserError(
            f"--model-args {config.model_args}: {config.arch} has no logits of {config.num_classes} classes with "
            "it; leave out what changes the head"
        )


def check_input(
    model: nn.Module, arch: str, image_size: ImageSize, batch_size: int, source: str = "--image-size"
) -> Any:
    """Raise UserError unless the network, as it is (for training or not), takes a batch of such images.

    Most need so many pixels; batch norm in training needs more than one value per channel. Only shapes are computed
    (on torch's meta device), and if that fails, which may be the device's fault, one or two images.

    Args:
        model: on the CPU; neither it nor the random numbers change.
        arch: its name.
        image_size: of the images.
        batch_size: images at once.
        source: of the size, for the message.

    Returns:
        What the network computes of one or two images.
    """
    shape = (min(batch_size, 2), 3, *sides_of(image_size))
    values = itertools.chain(model.named_parameters(), model.named_buffers())
    on_meta = {name: value.detach().to("meta") for name, value in values}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return functional_call(model, on_meta, torch.zeros(shape, device="meta"))
    except Exception:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return copy.deepcopy(model)(torch.zeros(shape))
        except Exception as error:
            made_for = as_image_size(*cast(Any, model).pretrained_cfg["input_size"][1:])
            raise UserError(
                f"{source} {image_size}: {arch} cannot compute a batch of {batch_size} such images "
                f"({first_line(error, 200)}); its weights were made for {made_for}, give that or another --batch-size",
                on_all_ranks=True,
            ) from error
