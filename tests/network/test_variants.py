"""Gradient checkpointing and synchronized batch norm: other ways to the same weights."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn

from tests.conftest import assert_same, resolved
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.network.variants import prepare_training


def gradients(env: DistEnv, arch: str, **flags: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    size = {"img_size": 32} if arch == "test_vit" else {}
    model = timm.create_model(arch, num_classes=3, drop_path_rate=0.5, **size)
    prepare_training(model, resolved(arch=arch, image_size=32, **flags), env.world_size)
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
            prepare_training(network, config, cpu.world_size)
    prepare_training(model, dataclasses.replace(config, evaluate=True), cpu.world_size)


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[None]:
    """A process group; without one torch's SyncBatchNorm computes on the CPU, too."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize(("processes", "evaluate", "expected"), [(1, False, False), (2, False, True), (2, True, False)])
@pytest.mark.parametrize("arch", ["test_resnet", "test_efficientnet"])
def test_batch_norm_over_several_processes(arch: str, processes: int, evaluate: bool, expected: bool) -> None:
    """All of it, with the same names and tensors, after a trial on the CPU; tests/runs/test_gpus.py trains with it."""
    model = timm.create_model(arch)
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    config = resolved(sync_bn=True, arch=arch, evaluate=evaluate, image_size=32, resize_schedule="1:48")
    prepare_training(model, config, processes)
    norms = [module for module in model.modules() if hasattr(module, "running_var")]
    assert {isinstance(module, nn.SyncBatchNorm) for module in norms} == {expected}
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before


@pytest.mark.usefixtures("joined")
def test_one_image_a_process_is_enough_for_batch_norm_over_several() -> None:
    """With 32 px the last layers of this network see one pixel of each image."""
    config = resolved(sync_bn=True, arch="test_resnet", image_size=32, batch_size=1)
    prepare_training(timm.create_model("test_resnet"), config, 2)
    for processes, sync_bn in ((1, True), (2, False)):
        with pytest.raises(UserError, match="--image-size 32: test_resnet cannot compute a batch of 1 such images"):
            prepare_training(timm.create_model("test_resnet"), dataclasses.replace(config, sync_bn=sync_bn), processes)
