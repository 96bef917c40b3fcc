"""A run of the benchmark at its smallest, for the tests of its parts."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from utils.benchmark.images import read_images
from utils.benchmark.run import open_run
from utils.data.images.manifest import Manifest
from utils.distributed.group import DistEnv
from utils.options.config import TrainConfig
from utils.training.build import build
from utils.training.run import Run

TINY = TrainConfig(
    loader="synthetic", resume="none", arch="test_resnet", image_size=32, batch_size=8, workers=1, device="cpu"
)


@pytest.fixture
def opened(data: Path, cpu: DistEnv, tmp_path: Path) -> Iterator[Callable[..., tuple[Run, Manifest]]]:
    """A run and its images, as the benchmark opens them: `opened(arch="resnet18")`."""
    with contextlib.ExitStack() as stack:
        yield lambda **values: open_run(
            dataclasses.replace(TINY, **values), read_images(data, tmp_path, cpu), cpu, tmp_path, stack, build
        )
