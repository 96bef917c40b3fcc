"""When cuDNN searches for its algorithms."""

import pytest
import torch

from utils.network.convolutions import MIN_SEARCH_IMAGES, choose_search


@pytest.mark.parametrize(
    ("before", "images", "searches"),
    [(True, MIN_SEARCH_IMAGES, True), (True, MIN_SEARCH_IMAGES - 1, False), (False, MIN_SEARCH_IMAGES, False)],
)
def test_only_long_runs_search(monkeypatch: pytest.MonkeyPatch, before: bool, images: int, searches: bool) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    choose_search(images)
    assert torch.backends.cudnn.benchmark is searches
