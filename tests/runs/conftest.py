"""Flags of a run that takes a second, and the GPU."""

from pathlib import Path

import pytest
import torch

from tests.conftest import TINY
from utils.distributed.group import DistEnv

SHORT = (*TINY, "--batch-size", "4", "--epochs", "1")


@pytest.fixture
def good(data: Path, tmp_path: Path) -> list[str]:
    """Flags that a tiny run accepts; a case adds what spoils them, and the last one counts."""
    return [*SHORT, "--data-dir", str(data), "--output-dir", str(tmp_path / "run")]


@pytest.fixture
def gpu() -> DistEnv:
    """A single process on the first GPU."""
    return DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cuda", 0))
