"""A network whose weights differ from every fresh one's, and files of them loaded as a run does it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import models
from tests.conftest import resolved
from utils.options.arguments import model_options

ARCH = "test_resnet"
StateDict = dict[str, Tensor]


def donor(num_classes: int = 3, arch: str = ARCH, **options: Any) -> StateDict:
    """Weights that differ from every fresh network's, in the buffers too."""
    torch.manual_seed(1)
    state = models.create_model(arch, num_classes, options=options).state_dict()
    return {name: value + 1 if value.is_floating_point() else value + 7 for name, value in state.items()}


def without_head(state: Mapping[str, Tensor], head: str = "fc.") -> StateDict:
    return {name: value for name, value in state.items() if not name.startswith(head)}


def prefixed(prefix: str, state: Mapping[str, Tensor]) -> StateDict:
    return {prefix + name: value for name, value in state.items()}


def load(
    path: Path,
    num_classes: int = 3,
    arch: str = ARCH,
    image_size: int = 224,
    model_args: str | None = None,
    **flags: Any,
) -> tuple[nn.Module, str]:
    """A fresh network with the weights of a file, as `--pretrained` loads them, and what the start-up block says."""
    config = resolved(
        arch=arch,
        num_classes=num_classes,
        image_size=image_size,
        model_args=model_args,
        pretrained=str(path),
        **flags,
    )
    torch.manual_seed(2)
    options = model_options(config)
    model = models.create_model(arch, num_classes, image_size=image_size, options=options)
    network = models.load_pretrained(config, model, [f"class {number}" for number in range(num_classes)])
    return network.model, network.origin.replace(str(path), "FILE")
