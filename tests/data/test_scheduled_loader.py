"""Image size and policy that change with the epoch: real loaders, resumed at every kind of place."""

from pathlib import Path
from typing import Any

import pytest
import torch

import pipelines
from tests.conftest import resolved
from utils.data.formats.folder import scan_splits
from utils.data.loaders.sampler import RandomSampler
from utils.data.loaders.scheduled_loader import config_of_epoch, schedules_agree
from utils.distributed.group import DistEnv

SCHEDULES = {"resize_schedule": "0:32,1:48,3:40", "augment_schedule": "0:trivialaugment,2:none"}


def test_settings_of_an_epoch() -> None:
    config = resolved(image_size=64, **SCHEDULES)
    found = [config_of_epoch(config, epoch) for epoch in range(5)]
    assert [each.image_size for each in found] == [32, 48, 48, 40, 40]
    assert [each.augment for each in found] == ["trivialaugment", "trivialaugment", "none", "none", "none"]
    assert config_of_epoch(resolved(image_size=64, augment="randaugment"), 3).image_size == 64
    other = resolved(image_size=64, resize_schedule="0:32,1:40", augment_schedule="0:trivialaugment,2:none")
    assert [schedules_agree(config, other, epoch) for epoch in range(4)] == [True, False, False, True]


@pytest.mark.parametrize("loader", ["dali", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_schedule_continues_bit_for_bit(data: Path, cpu: DistEnv, loader: Any) -> None:
    """Cut within an epoch, at an epoch's end with and without a change, and right after a change."""
    train, _ = scan_splits(data)
    sampler = RandomSampler(len(train), 20)  # two batches an epoch
    config = resolved(
        loader=loader, batch_size=20, image_size=64, workers=2, prefetch=4, resize_schedule="0:32,1:48,3:40",
        augment_schedule="0:trivialaugment,2:none",
    )  # fmt: skip
    stream = pipelines.create_train_loader(config, train, sampler, cpu)
    batches, states = [], []
    for _ in range(8):
        states.append(stream.state())
        batches.append(next(stream))
    stream.close()
    assert [batch.images.shape[-1] for batch in batches] == [32, 32, 48, 48, 48, 48, 40, 40]
    for number, batch in enumerate(batches):
        assert batch.targets.tolist() == train.labels[sampler.indices(number)].tolist()
    for cut in (1, 2, 3, 6):
        resumed = pipelines.create_train_loader(config, train, sampler, cpu, cut, states[cut])
        for expected in batches[cut : cut + 3]:
            assert torch.equal(next(resumed).images, expected.images), cut
        resumed.close()


def test_the_policy_of_a_schedule_is_applied(data: Path, cpu: DistEnv) -> None:
    """With the same seed and size, the epochs with a policy differ from those without one, and only they."""
    train, _ = scan_splits(data)
    found = []
    for schedule in ("0:none,1:none", "0:none,1:trivialaugment"):
        config = resolved(loader="torch", batch_size=20, image_size=32, augment_schedule=schedule)
        stream = pipelines.create_train_loader(config, train, RandomSampler(len(train), 20), cpu)
        found.append([next(stream).images for _ in range(4)])
        stream.close()
    same = [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    assert same == [True, True, False, False]
