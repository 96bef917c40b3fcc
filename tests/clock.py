"""A clock that tests set, and a meter that reads it. Apart from conftest.py, as test processes import this."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from utils.distributed.group import DistEnv
from utils.training.state.meter import Meter


class Clock:
    """Replaces the module `time` in utils/training/state/meter.py. It advances only by `sleep`."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def train(meter: Meter, clock: Clock, steps: int, images: int, seconds: float, wait: float = 0.0) -> None:
    """Steps of two batches. Each step has `images` images and takes `seconds`, of which it waits `wait` for data."""
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
        patch.setattr("utils.training.state.meter.time", clock)
        meter = Meter(DistEnv(rank, rank, world_size, world_size, torch.device("cpu")))
        found: list[Any] = []
        for _ in range(2):
            train(meter, clock, steps=4, images=8, seconds=0.5, wait=(0.125, 0.25)[rank])
            meter.update(torch.tensor((2.0, math.nan)[rank]), 16)
            meter.end_step()
            found.append(meter.is_finite())
            found.append(meter.read())
        totals = meter.state_dict()["totals"]
    torch.save({"found": repr(found), "totals": totals}, folder / f"{rank}.pt")
    dist.destroy_process_group()
