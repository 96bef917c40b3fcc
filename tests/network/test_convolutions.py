"""When cuDNN searches for its algorithms, and when gradients are prepared."""

from typing import Any

import pytest
import torch

from tests.conftest import resolved
from utils.network.convolutions import MIN_SEARCH_IMAGES, choose_search, prepares_gradients


@pytest.mark.parametrize(
    ("before", "images", "searches"),
    [(True, MIN_SEARCH_IMAGES, True), (True, MIN_SEARCH_IMAGES - 1, False), (False, MIN_SEARCH_IMAGES, False)],
)
def test_only_long_runs_search(monkeypatch: pytest.MonkeyPatch, before: bool, images: int, searches: bool) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    choose_search(images)
    assert torch.backends.cudnn.benchmark is searches


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize(
    ("settings", "prepares"),
    [
        ({}, True),
        ({"loader": "synthetic"}, True),
        ({"loader": "torch"}, False),
        ({"loader": "proxy"}, False),
        ({"freeze_epochs": 1}, False),
        ({"evaluate": True}, False),
    ],
    ids=str,
)
def test_gradients_are_prepared_unless(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], prepares: bool, search: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", search)
    assert prepares_gradients(resolved(**settings)) == (prepares and not search)
