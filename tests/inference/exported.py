"""Checkpoints of networks with random weights, as a run writes them."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

import models
from tests.conftest import CLASSES, resolved
from tests.training.checkpoints import checkpoint_of
from utils.options.arguments import model_options

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def write_checkpoint(
    path: Path,
    data: Path | None = None,
    result: dict[str, Any] | None = None,
    with_ema: bool = False,
    **settings: Any,
) -> Path:
    """Write a checkpoint of three classes.

    Args:
        path: of the file.
        data: of its run; None for one that read no images.
        result: its evaluation, of its own step unless it names another.
        with_ema: whether it has a moving average, too.
        settings: of the configuration, such as `arch`.
    """
    settings = {"arch": "test_resnet", "image_size": 32, "val_resize": 36} | settings
    config = resolved(data_dir=data, output_dir=path.parent, **settings)
    networks = {}
    for seed, name in enumerate(("model", "model_ema")[: 1 + with_ema]):
        torch.manual_seed(seed)
        model = models.create_model(
            config.arch, config.num_classes, image_size=config.image_size, options=model_options(config)
        )
        networks[name] = model.state_dict()
        for value in networks[name].values():  # running statistics and biases that are not their defaults
            if value.is_floating_point() and value.ndim == 1:
                value += 0.2 * torch.rand_like(value)
    saved = checkpoint_of(config)
    files = {"files of train/": "of some", "files of val/": "of others"}
    record = dataclasses.replace(
        saved.record, classes=CLASSES, normalization=(MEAN, STD), fingerprint=saved.record.fingerprint | files
    )
    state = dataclasses.replace(
        saved.state, networks=networks, result={"epoch": 0, "step": 0} | result if result else {}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dataclasses.replace(saved, record=record, state=state).to_dict(), path)
    return path
