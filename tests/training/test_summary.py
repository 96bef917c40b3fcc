"""What is printed at the end of a run."""

from pathlib import Path

import pytest

from tests.conftest import resolved
from utils.training.summary import describe_wait


@pytest.mark.parametrize(
    ("data_wait", "loader", "cpu_threads", "advised", "raised"),
    [
        (0.019, "dali", 8, False, False),
        (0.05, "dali", 8, True, True),
        (0.05, "dali", 4, True, False),  # all are in use
        (0.05, "dali", 2, True, False),
        (0.05, "synthetic", 8, False, False),
    ],
)
def test_more_workers_are_advised_where_there_are_threads(
    data_wait: float, loader: str, cpu_threads: int, advised: bool, raised: bool
) -> None:
    config = resolved(data_dir=Path("images"), loader=loader, workers=4)
    line = describe_wait(data_wait, config, cpu_threads)
    assert line.startswith(f"data wait {data_wait:.1%}: ")
    assert ("scripts/benchmark.py --data-dir images" in line) == advised
    assert (f"--workers 4 can be raised to {cpu_threads}" in line) == raised
    assert ("--workers" in line) == raised
