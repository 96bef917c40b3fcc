"""The head trains alone, then all layers do."""

import itertools
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.conftest import assert_same, resolved
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.network.freezing import freeze
from utils.network.fused_layers import swap_fused_layers
from utils.network.loss import create_criterion
from utils.network.parallel import create_forward_backward
from utils.training.optimization.optim import create_ema, create_optimizer

HEADS = {"test_resnet": ("fc.",), "test_vit": ("head.",), "deit_tiny_distilled_patch16_224": ("head.", "head_dist.")}


@pytest.mark.parametrize("arch", HEADS)
def test_the_head_alone_has_gradients(arch: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(arch)
    freeze(model, True)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith(HEADS[arch])
    freeze(model, False)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_network_without_a_head_is_refused() -> None:
    with pytest.raises(UserError, match=r"^--freeze-epochs: timm names no head of this architecture; leave it out"):
        freeze(nn.Linear(2, 2), True)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("fused", [False, True])
def test_frozen_layers_keep_weights_and_statistics(cpu: DistEnv, fused: bool) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    if fused:
        swap_fused_layers(model)
    config = resolved(freeze_epochs=2, optimizer="adamw", lr=0.01, weight_decay=0.1)
    optimizer, ema = create_optimizer(config, model, 256), create_ema(model, 0.5)
    step = create_forward_backward(
        config, model, model, create_criterion(config, cpu.device), GradScaler("cpu", enabled=False), cpu, None
    )
    seen = [tensors(model)]
    for epoch in range(3):
        model.train()
        step.start_epoch(epoch)
        for seed in range(2):
            torch.manual_seed(seed)
            step(torch.rand(8, 3, 32, 32), torch.randint(0, 3, (8,)), 0)
            optimizer.step()
            ema.update(model)
        seen.append(tensors(model))
        model.eval()  # as an evaluation
    changed: list[set[str]] = []
    for before, after in itertools.pairwise(seen):
        changed.append({name for name in before if not torch.equal(before[name], after[name])})
    head = {"fc.weight", "fc.bias"}
    assert changed == [head, head, set(seen[0])]
    counts = {name: optimizer.state[parameter]["step"].item() for name, parameter in model.named_parameters()}
    assert {name for name, count in counts.items() if count == 6} == head
    assert set(counts.values()) == {2.0, 6.0}, "the others begin as on the first day"


def test_the_end_of_freezing_is_plain_training(cpu: DistEnv) -> None:
    """A run that is set up again computes what one does that was never frozen."""

    def train(freeze_epochs: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=3, drop_path_rate=0.5)
        config = resolved(freeze_epochs=freeze_epochs)
        step = create_forward_backward(
            config, model, model, create_criterion(config, cpu.device), GradScaler("cpu", enabled=False), cpu, None
        )
        if freeze_epochs:
            model.train()
            step.start_epoch(0)
        model.train()
        step.start_epoch(1)
        step(torch.rand(8, 3, 32, 32), torch.randint(0, 3, (8,)), 0)
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    assert_same(train(freeze_epochs=1), train(freeze_epochs=0))
