"""Training images whose size or policy changes with the epoch: `--resize-schedule`, `--augment-schedule`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from utils.data.images.batch import Batch, TrainLoader
from utils.data.loaders.sampler import Sampler
from utils.options.resolved import ResolvedConfig
from utils.options.schedules import policy_schedule, size_schedule, value_at
from utils.options.sizes import ImageSize

OpenLoader = Callable[[ResolvedConfig, int, dict[str, Any] | None], TrainLoader]


def config_of_epoch(config: ResolvedConfig, epoch: int) -> ResolvedConfig:
    """`config` with the image size and the policy of training in an epoch, from 0."""
    return dataclasses.replace(
        config,
        image_size=value_at(size_schedule(config), epoch, config.image_size),
        augment=value_at(policy_schedule(config), epoch, config.augment),
    )


def _settings(config: ResolvedConfig, epoch: int) -> tuple[ImageSize, str]:
    found = config_of_epoch(config, epoch)
    return found.image_size, found.augment


def schedules_agree(one: ResolvedConfig, other: ResolvedConfig, epoch: int) -> bool:
    """Whether two configurations train with the same image size and policy in an epoch, from 0."""
    return _settings(one, epoch) == _settings(other, epoch)


class ScheduledTrainLoader:
    """One loader after the other, each for the epochs of one image size and one policy.

    A loader begins at the first batch of its epochs with random draws of its own, whether the run was interrupted or
    not. So a resume is as exact as with a single loader.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        sampler: Sampler,
        first_batch: int,
        state: dict[str, Any] | None,
        open_loader: OpenLoader,
    ) -> None:
        """See `pipelines.create_train_loader`; `open_loader` takes a configuration, a first batch and a state."""
        self._run_config, self._sampler, self._open_loader = config, sampler, open_loader
        self._next, self._epoch = first_batch, sampler.epoch_of(first_batch)
        self._loader = open_loader(config_of_epoch(config, self._epoch), first_batch, state or None)

    def _has_changed(self) -> bool:
        epoch = self._sampler.epoch_of(self._next)
        return epoch != self._epoch and _settings(self._run_config, epoch) != _settings(self._run_config, self._epoch)

    def __next__(self) -> Batch:
        if self._has_changed():
            self._loader.close()
            config = config_of_epoch(self._run_config, self._sampler.epoch_of(self._next))
            self._loader = self._open_loader(config, self._next, None)
        self._epoch = self._sampler.epoch_of(self._next)
        batch = next(self._loader)
        self._next += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {} if self._has_changed() else self._loader.state()

    def close(self) -> None:
        self._loader.close()
