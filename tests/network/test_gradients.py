"""Gradients of a step over its batches and over the ranks, between processes; tests/runs/test_gpu_step.py has more."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import assert_same
from tests.forked import run_ranks
from utils.network.gradients import ForwardBackward
from utils.network.parallel import FlatAllReduce, broadcast_weights

MICROS = 3
STEPS = 2


class Network(nn.Module):
    """Odd sizes, a kernel in channels_last, a frozen parameter and one that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.conv(images).mean((2, 3)))
        return logits


def gradients_of(net: nn.Module, exchange: FlatAllReduce | None, rank: int) -> list[dict[str, torch.Tensor]]:
    """By step, every gradient; each rank and each step has images of its own."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    compute = ForwardBackward(net, nn.CrossEntropyLoss(), scaler, torch.float32, MICROS, exchange)
    generator = torch.Generator().manual_seed(rank)
    steps = []
    for _ in range(STEPS):
        for micro in range(MICROS):
            images = torch.randn(4, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)
            compute(images, torch.arange(4) % 3, micro)
        found = {name.removeprefix("module."): weight.grad for name, weight in net.named_parameters()}
        steps.append({name: grad.clone() for name, grad in found.items() if grad is not None})
    return steps


class WeightedMean(nn.Module):
    """Mean of the logits times their targets, whose gradient is that of the images times their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.dtypes.append(logits.dtype)
        return (logits[:, 0] * targets).mean()


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_gradient_of_a_step_is_the_mean_over_its_batches(amp_dtype: torch.dtype, scale: float | None) -> None:
    """Numbers that no precision rounds. fp16's scaler multiplies the gradients, not the loss that is returned."""
    net = nn.Linear(2, 1, bias=False)
    nn.init.constant_(net.weight, 2.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    exchanged: list[list[list[float]]] = []

    def exchange() -> None:
        assert net.weight.grad is not None
        exchanged.append(net.weight.grad.tolist())

    criterion = WeightedMean()
    compute = ForwardBackward(net, criterion, scaler, amp_dtype, 2, exchange)
    steps = [[((1.0, 0.0), 1), ((0.0, 4.0), 2)], [((4.0, 2.0), -1), ((0.0, 8.0), 0)]]  # image and target of each batch
    losses = [
        compute(torch.tensor([image, image]), torch.tensor([target, target]), micro).item()
        for step in steps
        for micro, (image, target) in enumerate(step)
    ]
    assert losses == [2.0, 16.0, -12.0, 0.0]
    assert exchanged == [[[0.5 * (scale or 1), 4.0 * (scale or 1)]], [[-2.0 * (scale or 1), -1.0 * (scale or 1)]]]
    assert criterion.dtypes == [amp_dtype] * 4


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # other weights on each rank, until they are broadcast
    net = Network()
    broadcast_weights(net)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    found: dict[str, Any] = {"weights": weights}
    for name, dtype in (("flat", torch.float32), ("bf16", torch.bfloat16)):
        found[name] = gradients_of(net, FlatAllReduce(net.parameters(), dtype), rank)
    strides = {
        name: weight.grad.stride() == weight.stride()
        for name, weight in net.named_parameters()
        if weight.grad is not None
    }
    by_torch = DistributedDataParallel(net, find_unused_parameters=True)
    found |= {"strides": strides, "ddp": gradients_of(by_torch, None, rank)}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.slow), 3])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    """The results of each rank, of two and of three."""
    run_ranks(run_rank, request.param, tmp_path)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


@pytest.mark.dist
def test_flat_exchange(ranks: list[dict[str, Any]]) -> None:
    for other in ranks[1:]:
        assert_same(other, ranks[0])
    flat, compressed, ddp = (ranks[0][name] for name in ("flat", "bf16", "ddp"))
    assert flat[0].keys() == {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    assert all(ranks[0]["strides"].values())
    for step in range(STEPS):
        for name, gradient in flat[step].items():
            if len(ranks) == 2:  # a sum of two has one rounding
                assert torch.equal(gradient, ddp[step][name]), name
            torch.testing.assert_close(gradient, ddp[step][name])
            torch.testing.assert_close(compressed[step][name], gradient, rtol=0.02, atol=1e-3)
            assert torch.equal(compressed[step][name], compressed[step][name].bfloat16().float())
            assert not torch.equal(compressed[step][name], gradient)
    assert not torch.equal(flat[0]["head.weight"], flat[1]["head.weight"])
