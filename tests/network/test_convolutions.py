"""When cuDNN searches for its algorithms, and when gradients are prepared."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import resolved
from utils.distributed.group import DistEnv
from utils.network.convolutions import MIN_SEARCH_IMAGES, choose_search, prepare_depthwise
from utils.network.fused_layers import DepthwiseShape
from utils.network.gradient_plans import stop_gradient_plans


@pytest.mark.parametrize(
    ("before", "images", "searches"),
    [(True, MIN_SEARCH_IMAGES, True), (True, MIN_SEARCH_IMAGES - 1, False), (False, MIN_SEARCH_IMAGES, False)],
)
def test_only_long_runs_search(monkeypatch: pytest.MonkeyPatch, before: bool, images: int, searches: bool) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    choose_search(images)
    assert torch.backends.cudnn.benchmark is searches


@pytest.mark.gpu
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize(
    ("settings", "prepares"),
    [
        ({}, True),
        ({"fused_layers": True, "compile": True}, True),
        ({"loader": "torch"}, False),
        ({"freeze_epochs": 1}, False),
        ({"evaluate": Path("best.pt")}, False),
    ],
    ids=str,
)
def test_plans_of_gradients(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], prepares: bool, search: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", search)
    config = resolved(batch_size=2, workers=1, amp="bf16", **settings)
    gpu = DistEnv.single(torch.device("cuda", 0))
    shapes = [DepthwiseShape(8 * count, 16, 16, 3, 1) for count in range(1, 40)]  # none is ready at once
    prepare_depthwise(shapes, config, gpu)
    started = [thread for thread in threading.enumerate() if thread.name == "cuDNN plans"]
    stop_gradient_plans()
    assert len(started) == (prepares and not search)
