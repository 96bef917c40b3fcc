"""Gradient checkpointing and synchronised batch norm: other ways to the same weights."""

import dataclasses
from typing import Any

import pytest
import timm
import torch
from torch import nn

from tests.conftest import assert_same, resolved
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.network.variants import apply_variants


def gradients(env: DistEnv, arch: str, **flags: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    size = {"img_size": 32} if arch == "test_vit" else {}
    model = timm.create_model(arch, num_classes=3, drop_path_rate=0.5, **size)
    apply_variants(model, resolved(arch=arch, **flags), env)
    model.train()
    model(torch.rand(4, 3, 32, 32)).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("arch", ["test_resnet", "test_vit", "test_efficientnet"])
def test_checkpointing_computes_the_same_gradients(cpu: DistEnv, arch: str) -> None:
    """Dropped paths are dropped again."""
    sizes: list[int] = []

    def note_size(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note_size, lambda tensor: tensor):
        plain, without = gradients(cpu, arch), sum(sizes)
        sizes.clear()
        assert_same(gradients(cpu, arch, grad_checkpointing=True), plain)
    assert sum(sizes) < without


def test_an_architecture_without_checkpointing_is_refused(cpu: DistEnv) -> None:
    config = resolved(grad_checkpointing=True, arch="dla34")
    with torch.device("meta"):
        model = timm.create_model("dla34")
    message = r"^--grad-checkpointing: timm has none for dla34; leave it out, and lower --batch-size"
    for network in (model, nn.Linear(2, 2)):
        with pytest.raises(UserError, match=message):
            apply_variants(network, config, cpu)
    apply_variants(model, dataclasses.replace(config, evaluate=True), cpu)


@pytest.mark.parametrize(("processes", "evaluate", "expected"), [(1, False, False), (2, False, True), (2, True, False)])
@pytest.mark.parametrize("arch", ["test_resnet", "test_efficientnet"])
def test_batch_norm_over_several_processes(
    cpu: DistEnv, arch: str, processes: int, evaluate: bool, expected: bool
) -> None:
    """All of it, with the same names and tensors; tests/runs/test_gpus.py trains with it."""
    model = timm.create_model(arch)
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    env = dataclasses.replace(cpu, world_size=processes)
    apply_variants(model, resolved(sync_bn=True, arch=arch, evaluate=evaluate), env)
    norms = [module for module in model.modules() if hasattr(module, "running_var")]
    assert {isinstance(module, nn.SyncBatchNorm) for module in norms} == {expected}
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
