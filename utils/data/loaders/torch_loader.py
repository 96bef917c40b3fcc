"""Loaders of torch's DataLoader: Pillow and torchvision in worker processes."""

import functools
import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from utils.data.augmentation.policies import RATIO, torchvision_policy
from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import Sampler, shard
from utils.data.loaders.workers import (
    BatchSampler,
    label_tensor,
    shutdown_workers,
    to_device,
    worker_options,
)
from utils.data.reading.decode_pool import identify_bad_file
from utils.data.reading.decoding import upright_rgb
from utils.data.reading.reader import read_image
from utils.data.reading.shard_reader import ShardFiles
from utils.distributed.group import DistEnv
from utils.distributed.process_pool import safe_fork
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import Sides, sides_of
from utils.seed import Stream, seed_sequence


class TorchImages(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Images through Pillow and torchvision: uint8 (3, H, W), and their labels: int64 ().

    The random draws of an image depend on (seed, draw, image) alone: not on the worker, the rank or a resume. `draw` is
    the epoch, or with `--repeated-augmentation` the epoch and the copy in it.
    """

    def __init__(self, config: ResolvedConfig, manifest: Manifest, train: bool) -> None:
        self.manifest, self.shards = manifest, ShardFiles()
        self.seed = config.seed if train else None
        self.transform = torch_train_transform(config) if train else torch_val_transform(config)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        index, draw = key
        image = upright_rgb(read_image(self.manifest.record(index), self.shards))
        if self.seed is None:
            return self.transform(image), label_tensor(self.manifest, index)
        with torch.random.fork_rng(devices=[]):
            seed = seed_sequence(Stream.IMAGE, self.seed, draw, index).generate_state(1, np.uint64)[0]
            torch.manual_seed(int(seed >> np.uint64(1)))
            return self.transform(image), label_tensor(self.manifest, index)


def torch_train_transform(config: ResolvedConfig) -> Callable[[Image.Image], Tensor]:
    """Crop, flips, turn, policy and color jitter of an RGB image: uint8 (3, height, width) of image_size."""
    jitter, size = config.color_jitter, sides_of(config.image_size)
    names = ("bilinear", "bicubic") if config.interpolation == "random" else (config.interpolation,)
    crops: list[Callable[[Image.Image], Image.Image]] = [
        v2.RandomResizedCrop(size, (config.crop_scale, 1.0), RATIO, v2.InterpolationMode(name))
        if config.train_crop == "random"
        else _fit(config.train_crop, size, size, name, config.padding)
        for name in names
    ]
    transform: Callable[[Image.Image], Tensor] = v2.Compose(
        [
            v2.RandomChoice(crops) if len(crops) > 1 else crops[0],
            v2.RandomHorizontalFlip(config.hflip),
            *([v2.RandomVerticalFlip(config.vflip)] if config.vflip else []),
            *([v2.Lambda(_turn_at_random)] if config.rot90 else []),
            *([torchvision_policy(config)] if config.augment != "none" else []),
            *([v2.ColorJitter(jitter, jitter, jitter)] if jitter else []),
            v2.PILToTensor(),
        ]
    )
    return transform


def torch_val_transform(config: ResolvedConfig) -> Callable[[Image.Image], Tensor]:
    """A whole RGB image in the geometry of `--val-crop`: uint8 (3, height, width) of val_image_size."""
    before, size = config.val_sides_before_crop, sides_of(config.val_image_size)
    fit = _fit(config.val_crop, before, size, config.val_interpolation, config.padding)
    transform: Callable[[Image.Image], Tensor] = v2.Compose([fit, v2.PILToTensor()])
    return transform


def _fit(
    crop: str, resize: Sides, size: Sides, interpolation: str, padding: tuple[int, ...]
) -> Callable[[Image.Image], Image.Image]:
    """Resize and crop, as `pipelines._fit`."""
    mode = v2.InterpolationMode(interpolation)
    if crop == "squash":
        resizing: Callable[[Image.Image], Image.Image] = v2.Resize(list(resize), mode)
    elif crop == "center" and resize.height == resize.width:
        resizing = v2.Resize(resize.height, mode)
    else:
        resizing = functools.partial(_resize_within, resize=resize, mode=mode, covers=crop == "center")
    border = [functools.partial(_pad, size=size, padding=padding)] if crop == "pad" else []
    transform: Callable[[Image.Image], Image.Image] = v2.Compose([resizing, *border, v2.CenterCrop(list(size))])
    return transform


def _resize_within(image: Image.Image, resize: Sides, mode: v2.InterpolationMode, covers: bool) -> Image.Image:
    """Keep the aspect: one side becomes that of `resize`, the other is at most that of it, or at least (`covers`)."""
    scales = [Fraction(wanted, side) for wanted, side in zip(resize, image.size[::-1], strict=True)]
    scale = max(scales) if covers else min(scales)
    resized: Image.Image = functional.resize(image, [max(round(scale * side), 1) for side in image.size[::-1]], mode)
    return resized


def _pad(image: Image.Image, size: Sides, padding: tuple[int, ...]) -> Image.Image:
    """What is less than `size` gets a border."""
    missing = max(size.width - image.width, 0), max(size.height - image.height, 0)
    borders = [missing[0] // 2, missing[1] // 2, (missing[0] + 1) // 2, (missing[1] + 1) // 2]
    padded: Image.Image = functional.pad(image, borders, fill=list(padding))
    return padded


def _turn_at_random(image: Image.Image) -> Image.Image:
    """By 0, 90, 180 or 270 degrees to the left."""
    quarters = int(torch.randint(4, ()))
    return image.rotate(90 * quarters)  # a square, of which Pillow moves the pixels


class TorchTrainLoader:
    """The baseline that users know: torchvision's transforms in DataLoader's workers; resumes bit for bit."""

    def __init__(
        self, config: ResolvedConfig, manifest: Manifest, sampler: Sampler, env: DistEnv, first_batch: int
    ) -> None:
        self._device = env.device
        self._sampler, self._next = sampler, first_batch
        self._identify_bad_file = functools.partial(identify_bad_file, config, manifest, env)
        loader = torch.utils.data.DataLoader(
            TorchImages(config, manifest, train=True),
            batch_sampler=BatchSampler(sampler, first_batch),
            **worker_options(config, env),
        )
        with safe_fork():
            self._batches = iter(loader)

    def __next__(self) -> Batch:
        with self._identify_bad_file(map(self._sampler.indices, itertools.count(self._next))):
            images, targets = next(self._batches)
        self._next += 1
        return to_device(images, targets, self._device)

    def state(self) -> dict[str, Any]:
        return {}  # the order and every draw follow from the position

    def close(self) -> None:
        shutdown_workers(self._batches)


class TorchValLoader:
    """This rank's validation images through torchvision."""

    def __init__(self, config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
        self._device = env.device
        self._indices, self._batch_size = shard(len(manifest), env.rank, env.world_size), config.batch_size
        self._identify_bad_file = functools.partial(identify_bad_file, config, manifest, env)
        self._loader = torch.utils.data.DataLoader(
            TorchImages(config, manifest, train=False),
            sampler=[(int(index), 0) for index in self._indices],
            batch_size=config.batch_size,
            **worker_options(config, env),
        )

    def __iter__(self) -> Iterator[Batch]:
        with safe_fork():
            batches = iter(self._loader)
        try:
            for start in range(0, len(self._indices), self._batch_size):
                with self._identify_bad_file([self._indices[start:]]):
                    images, targets = next(batches)
                yield to_device(images, targets, self._device)
        finally:
            shutdown_workers(batches)
