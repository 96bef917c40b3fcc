"""configs/: train.py accepts every recipe, which does what its header promises."""

from pathlib import Path

import pytest
import torch

from tests.conftest import resolved
from tests.harness import ROOT
from utils.cli import parse
from utils.config import TrainConfig
from utils.training.optim import check_optimizer, create_optimizer, resolve_optimizer


def read(path: Path) -> TrainConfig:
    return parse(["--config", str(path), "--data-dir", "images"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_a_recipe_is_read(path: Path) -> None:
    config = read(path)
    check_optimizer(config.optimizer)
    assert f"--config configs/{path.name}" in path.read_text()


def test_resnet50_is_trained_with_plain_momentum() -> None:
    """As in DeepLearningExamples; timm's sgd is Nesterov's."""
    recipe = read(ROOT / "configs" / "resnet50.yaml")
    config = resolved(optimizer=recipe.optimizer, **resolve_optimizer(recipe))
    optimizer = create_optimizer(config, torch.nn.Linear(2, 2), 256)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [(group["momentum"], group["nesterov"]) for group in optimizer.param_groups] == [(0.875, False)] * 2
