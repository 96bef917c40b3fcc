"""Batches from decoded images in memory, on the CPU: the images of the files, torchvision's crops, exact resumes."""

import dataclasses
import itertools
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from pipelines import create_train_loader, create_val_loader
from tests.conftest import assert_same, resolved
from utils.data.augmentation.crop_draws import draw_crops
from utils.data.formats.folder import scan, scan_splits
from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.loaders import memory_loader
from utils.data.loaders.dali_loader import DaliValLoader
from utils.data.loaders.memory_loader import (
    DECODED_AT_ONCE,
    DecodedImages,
    MemoryTrainLoader,
    MemoryValLoader,
)
from utils.data.loaders.sampler import RandomSampler
from utils.data.loaders.settings import feeds_from_memory
from utils.distributed.group import DistEnv
from utils.errors import BadFile
from utils.options.resolved import ResolvedConfig

BASE = resolved(batch_size=8, image_size=32, val_resize=36, workers=2, decode="full", cache="gpu", prefetch=4)


def config_for(**values: Any) -> ResolvedConfig:
    return dataclasses.replace(BASE, **values)


def pixels_of(images: DecodedImages, index: int) -> torch.Tensor:
    """Image `index`: uint8 (height, width, 3)."""
    height, width = int(images.heights[index]), int(images.widths[index])
    start = int(images.starts[index])
    return images.pixels[start : start + height * width].view(height, width, 3)


def opened(manifest: Manifest, index: int) -> Image.Image:
    with Image.open(str(manifest.record(index).location)) as image:
        return image.convert("RGB")


def test_images_are_those_of_the_files(data: Path, cpu: DistEnv) -> None:
    train, _ = scan_splits(data)
    images = DecodedImages(BASE, train, cpu)
    for index in range(len(train)):
        assert np.array_equal(pixels_of(images, index).numpy(), np.asarray(opened(train, index)))


def test_memory_grows_where_the_sample_was_of_smaller_images(tmp_path: Path, cpu: DistEnv) -> None:
    """Of 400 images the 256 whose sizes are read are small, the others large; they come in several batches."""
    assert DECODED_AT_ONCE < 256
    read = set(random.Random(0).sample(range(400), 256))
    noise = np.random.default_rng(0)
    (tmp_path / "train" / "only").mkdir(parents=True)
    for number in range(400):
        side = 4 if number in read else 40
        pixels = noise.integers(0, 256, (side, side + 1, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "train" / "only" / f"{number:03}.png")
    train = scan(tmp_path, "train")
    images = DecodedImages(BASE, train, cpu)
    for index in (0, 1, 127, 128, 255, 256, 399, *sorted(read)[:5]):
        assert np.array_equal(pixels_of(images, index).numpy(), np.asarray(opened(train, index)))


def test_batches_are_crops_of_torchvision(data: Path, cpu: DistEnv) -> None:
    """Two epochs: images and targets in the sampler's order, crops and flips as drawn, pixels within 1 of 255."""
    train, _ = scan_splits(data)
    sampler = RandomSampler(len(train), 8, seed=3)
    stream = create_train_loader(config_for(seed=3, crop_scale=0.2), train, sampler, cpu)
    assert isinstance(stream, MemoryTrainLoader)
    for batch in range(2 * sampler.batches_per_epoch):
        images, targets = next(stream)
        indices = sampler.indices(batch)
        assert images.shape == (8, 3, 32, 32)
        assert images.dtype == torch.uint8
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert targets.dtype == torch.int64
        assert targets.tolist() == train.labels[indices].tolist()
        files = [opened(train, index) for index in indices]
        widths, heights = (np.array(sides) for sides in zip(*(file.size for file in files), strict=True))
        drawn = draw_crops(3, sampler.draws(batch), indices, heights, widths, 0.2, 0.5)
        for image, file, top, left, height, width, flip in zip(images, files, *drawn, strict=True):
            crop = functional.resized_crop(file, top, left, height, width, [32, 32])
            expected = functional.pil_to_tensor(functional.hflip(crop) if flip else crop)
            assert (image.int() - expected).abs().max() <= 1
    stream.close()


@pytest.mark.parametrize("schedule", ["", "0:24,1:32"])
def test_a_resume_needs_no_state(data: Path, cpu: DistEnv, schedule: str) -> None:
    """Before the first batch, within an epoch, at its end, in the next; also where the size changes."""
    train, _ = scan_splits(data)
    config, sampler = config_for(resize_schedule=schedule), RandomSampler(len(train), 8)
    stream = create_train_loader(config, train, sampler, cpu)
    batches = []
    for _ in range(9):
        assert stream.state() == {}
        batches.append(next(stream))
    for cut in (0, 3, 5, 7):
        resumed = create_train_loader(config, train, sampler, cpu, cut, {})
        for expected in batches[cut:]:
            assert torch.equal(next(resumed).images, expected.images), cut


def test_another_number_of_processes_has_the_same_images(data: Path, cpu: DistEnv) -> None:
    """To the last bit, in the order of the global batch: 1 process, then 2, then 4 that accumulate nothing."""
    train, _ = scan_splits(data)
    found = []
    for world_size in (1, 2, 4):
        ranks = []
        for rank in range(world_size):
            sampler = RandomSampler(len(train), 8 // world_size, rank=rank, world_size=world_size)
            env = dataclasses.replace(cpu, rank=rank, world_size=world_size)
            stream = create_train_loader(config_for(batch_size=8 // world_size), train, sampler, env, first_batch=2)
            ranks.append([next(stream).images for _ in range(6)])
        found.append([torch.cat(step) for step in zip(*ranks, strict=True)])
    for step in range(6):
        assert torch.equal(found[0][step], found[1][step])
        assert torch.equal(found[0][step], found[2][step])


def test_sizes_of_a_schedule_share_the_images(data: Path, tmp_path: Path, cpu: DistEnv) -> None:
    """They are decoded once: the files are gone when the second size begins."""
    shutil.copytree(data / "train", tmp_path / "train")
    train = scan(tmp_path, "train")
    sampler = RandomSampler(len(train), 8)
    stream = create_train_loader(config_for(resize_schedule="0:16,1:32"), train, sampler, cpu)
    plain = create_train_loader(config_for(), train, sampler, cpu)
    shutil.rmtree(tmp_path / "train")
    for number in range(2 * sampler.batches_per_epoch):
        images, expected = next(stream).images, next(plain).images
        if number < sampler.batches_per_epoch:
            assert images.shape[-1] == 16
        else:
            assert torch.equal(images, expected)


def test_epochs_and_seeds_have_other_crops(data: Path, cpu: DistEnv) -> None:
    one = scan_splits(data)[0].select(np.zeros(8, dtype=np.int64))
    seen = set()
    for seed in range(2):
        stream = create_train_loader(config_for(seed=seed), one, RandomSampler(8, 8, seed=seed), cpu)
        seen |= {image.numpy().tobytes() for _ in range(2) for image in next(stream).images}
    assert len(seen) == 32, "one picture, 32 different crops"


def test_a_bad_file_is_named(data: Path, tmp_path: Path, cpu: DistEnv) -> None:
    (tmp_path / "train" / "only").mkdir(parents=True)
    good = sorted((data / "train" / "red").glob("*.jpg"))
    for number in range(6):
        content = good[number].read_bytes()
        (tmp_path / "train" / "only" / f"{number}.jpg").write_bytes(content[: 300 if number == 4 else None])
    train = scan(tmp_path, "train")
    with pytest.raises(BadFile, match=r"only/4\.jpg: .*--bad-files skip"):
        create_train_loader(config_for(batch_size=2), train, RandomSampler(6, 2), cpu)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"cache": "host"}, False),
        ({"cache": "none"}, False),
        ({"augment": "randaugment"}, False),
        ({"transform": "file.py:name"}, False),
        ({"color_jitter": 0.4}, False),
        ({"repeated_augmentation": 3}, False),
        ({"interpolation": "bicubic"}, False),
        ({"loader": "torch"}, False),
    ],
)
def test_policies_and_transforms_stay_with_dali(values: dict[str, Any], expected: bool) -> None:
    assert feeds_from_memory(config_for(**values)) is expected


def targets_and_images(batches: Iterable[Batch]) -> list[tuple[Tensor, Tensor]]:
    return [(targets.clone(), images.clone()) for images, targets in batches]


@pytest.mark.parametrize(("world_size", "cache"), [(1, "gpu"), (2, "gpu"), (50, "gpu"), (2, "none")])
def test_validation_batches_stay(data: Path, tmp_path: Path, cpu: DistEnv, world_size: int, cache: str) -> None:
    """DALI's, to the last bit, also of ranks without images; once all have been read, the files are not needed."""
    shutil.copytree(data / "val", tmp_path / "val")
    for rank in {0, world_size - 1}:
        env = dataclasses.replace(cpu, rank=rank, world_size=world_size)
        config, keep = config_for(cache=cache), cache == "none"
        expected = targets_and_images(create_val_loader(config_for(cache="host"), scan(data, "val"), env))
        loader = create_val_loader(config, scan(tmp_path, "val"), env, keep)
        assert isinstance(loader, MemoryValLoader)
        for batch in loader:
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            break  # a pass that is not finished does not count
        loader = create_val_loader(config, scan(tmp_path, "val"), env, keep)
        first = itertools.islice(loader, len(expected))  # as a run does, which counts them
        assert_same(targets_and_images(first), expected)
        (tmp_path / "val").rename(tmp_path / "elsewhere")
        for _ in range(2):
            assert_same(targets_and_images(loader), expected)
        (tmp_path / "elsewhere").rename(tmp_path / "val")


def test_validation_batches_that_do_not_fit_are_read_again(
    data: Path, tmp_path: Path, cpu: DistEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_loader, "VAL_SHARE", 0)
    loader = create_val_loader(BASE, scan(data, "val"), cpu)
    first = targets_and_images(loader)
    assert_same(targets_and_images(loader), first)
    assert isinstance(loader, MemoryValLoader)
    assert loader._batches == []


def test_a_single_pass_keeps_nothing(data: Path, cpu: DistEnv) -> None:
    config = config_for(evaluate=True)
    assert isinstance(create_val_loader(config, scan(data, "val"), cpu, keep=True), DaliValLoader)
