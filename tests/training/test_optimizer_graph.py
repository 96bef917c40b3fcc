"""Which optimizers take their step as a CUDA graph. The graph itself: tests/runs/test_gpu_step.py."""

import pytest
import timm
import torch

from tests.conftest import resolved
from utils.training.optimization.optim import create_optimizer
from utils.training.optimization.optimizer_graph import create_graphed_step, divide, is_capturable

HAS_CAPTURABLE_MUON = tuple(map(int, timm.__version__.split(".")[:3])) >= (1, 0, 28)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("muon", HAS_CAPTURABLE_MUON),
        ("nadamuon", HAS_CAPTURABLE_MUON),
        ("lookahead_muon", False),
        ("nadamw", False),
        ("adamw", False),
        ("rmsprop", False),
        ("sgd", False),
        ("lamb", False),
    ],
)
def test_optimizers_whose_step_can_be_a_graph(name: str, expected: bool) -> None:
    optimizer = create_optimizer(resolved(optimizer=name, lr=0.1), torch.nn.Linear(4, 4), 256)
    assert is_capturable(optimizer) is expected


@pytest.mark.parametrize("values", [{"cuda_graph": False}, {"amp": "fp16"}, {"optimizer": "lamb"}], ids=str)
def test_runs_without_one(values: dict[str, object]) -> None:
    config = resolved(**({"cuda_graph": True, "optimizer": "muon", "lr": 0.1} | values))
    optimizer = create_optimizer(config, torch.nn.Linear(4, 4), 256)
    assert create_graphed_step(config, optimizer, torch.device("cuda", 0)) is None


def test_weights_are_divided_evenly() -> None:
    model = timm.create_model("resnet18", num_classes=10)
    parameters = list(model.parameters())
    parts = divide(parameters, 8)
    assert sorted(map(id, parameters)) == sorted(id(parameter) for part in parts for parameter in part)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    largest = [max(parameter.numel() for parameter in part) for part in parts]
    assert min(largest) > max(parameter.numel() for parameter in parameters) / 10, "each has one of the largest"
    assert [len(part) for part in divide(parameters[:3], 8)] == [1, 1, 1]
    assert divide([], 8) == []
