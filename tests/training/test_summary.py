"""What is printed at the end of a run."""

import dataclasses
from pathlib import Path

import pytest

from tests.conftest import resolved
from utils.training.summary import _describe_loader, describe_wait


@pytest.mark.parametrize(
    ("data_wait", "seconds", "loader", "cache", "cpu_threads", "advised", "raised"),
    [
        (0.019, 9000, "dali", "none", 8, False, False),
        (0.05, 9000, "dali", "none", 8, True, True),
        (0.05, 9000, "dali", "none", 4, True, False),  # all are in use
        (0.05, 9000, "dali", "none", 2, True, False),
        (0.05, 9000, "dali", "gpu", 8, False, False),  # it uses none
        (0.05, 9000, "synthetic", "none", 8, False, False),
        (0.05, 70, "dali", "none", 8, False, False),  # 3.5 s
        (0.5, 70, "dali", "none", 8, True, True),
    ],
)
def test_more_workers_are_advised_where_there_are_threads(
    data_wait: float, seconds: float, loader: str, cache: str, cpu_threads: int, advised: bool, raised: bool
) -> None:
    config = resolved(data_dir=Path("images"), loader=loader, cache=cache, workers=4)
    line = describe_wait(data_wait, seconds, config, cpu_threads)
    assert line.startswith(f"data wait {data_wait:.1%}: ") == advised
    assert ("scripts/benchmark.py --data-dir images" in line) == advised
    assert (f"--workers 4 can be raised to {cpu_threads}" in line) == raised
    assert ("--workers" in line) == raised


def test_the_loader_line_says_what_makes_the_batches() -> None:
    """Of images on the GPU a kernel does, unless a policy follows, which is DALI's."""
    config = resolved(cache="gpu", decode="full")
    assert "images cached (gpu), a kernel makes each batch" in _describe_loader(config)
    with_policy = dataclasses.replace(config, augment="randaugment")
    assert "images cached (gpu), 2 batches ahead" in _describe_loader(with_policy)
