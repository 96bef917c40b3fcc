"""Loaders of random images that are made once, in place of reading and decoding files."""

from collections.abc import Iterator
from typing import Any

import torch

from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import shard
from utils.distributed.group import DistEnv
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import ImageSize, sides_of


class SyntheticTrainLoader:
    """The same batch of random images on the device for every step, to time the step without loading."""

    def __init__(self, config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
        self._batch = _random_batch(config.batch_size, config.image_size, _num_labels(manifest), env.device)

    def __next__(self) -> Batch:
        return self._batch

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class SyntheticValLoader:
    """As many random images as this rank's part of the validation set."""

    def __init__(self, config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
        self._num_images = len(shard(len(manifest), env.rank, env.world_size))
        self._batch = _random_batch(config.batch_size, config.val_image_size, _num_labels(manifest), env.device)

    def __iter__(self) -> Iterator[Batch]:
        size = len(self._batch.targets)
        for start in range(0, self._num_images, size):
            count = min(size, self._num_images - start)
            yield Batch(self._batch.images[:count], self._batch.targets[:count])


def _num_labels(manifest: Manifest) -> int:
    """Labels that there are: a class each, or a set of classes."""
    return len(manifest.classes if manifest.label_sets is None else manifest.label_sets)


def _random_batch(batch_size: int, image_size: ImageSize, num_classes: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch_size, *sides_of(image_size), 3), dtype=torch.uint8, generator=generator)
    targets = torch.randint(0, num_classes, (batch_size,), generator=generator)
    return Batch(images.to(device).permute(0, 3, 1, 2), targets.to(device))
