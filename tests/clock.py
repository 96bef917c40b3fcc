"""A meter under a clock that stands still. A module of its own, so that processes that a test starts import little."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from utils.distributed.group import DistEnv
from utils.training.metrics import Meter


class Clock:
    """Stands in for `time` in utils.metrics, where it goes on only when it is told to."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def train(meter: Meter, clock: Clock, steps: int, images: int, seconds: float, wait: float = 0.0) -> None:
    """Steps of two batches with `images` images, `seconds` and `wait` each, all as the meter is to see them."""
    for _ in range(steps):
        for _ in range(2):
            with meter.waiting():
                clock.sleep(wait / 2)
            clock.sleep((seconds - wait) / 2)
            meter.update(torch.tensor(1.0), images // 2)
        meter.end_step()


def measure_rank(rank: int, world_size: int, folder: Path) -> None:
    """Each rank has its own images, losses, waits and bad steps."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.training.metrics.time", clock)
        meter = Meter(DistEnv(rank, rank, world_size, world_size, torch.device("cpu")))
        found: list[Any] = []
        for _ in range(2):
            train(meter, clock, steps=4, images=8, seconds=0.5, wait=(0.125, 0.25)[rank])
            meter.update(torch.tensor((2.0, math.nan)[rank]), 16)
            meter.end_step()
            found.append(meter.is_finite())
            found.append(meter.read())
        own = meter.state_dict()
    torch.save({"found": repr(found), "totals": own["totals"]}, folder / f"{rank}.pt")
    dist.destroy_process_group()
