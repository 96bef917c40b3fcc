"""Loaders on real JPEGs, through real DALI pipelines."""

import contextlib
import dataclasses
import io
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN

import pipelines
from tests.conftest import resolved, write_data
from utils.data.formats.folder import scan, scan_splits
from utils.data.loaders.dali_loader import DaliTrainLoader
from utils.data.loaders.sampler import RandomSampler, create_sampler
from utils.distributed.group import DistEnv
from utils.options import sizes
from utils.options.policies import POLICIES
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import ImageSize, sides_of, timm_size
from utils.training.settings.preprocessing import TIMM_CROPS

AUGMENTS = [pytest.param(name, marks=[] if name == "none" else pytest.mark.slow) for name in POLICIES]
BASE = resolved(batch_size=8, image_size=32, val_resize=36, workers=2, decode="fused", hw_decoder_load=0.65, prefetch=4)


def config_for(**values: Any) -> ResolvedConfig:
    size = {"val_image_size": values["image_size"]} if "image_size" in values else {}
    return dataclasses.replace(BASE, **size | values)


@pytest.mark.parametrize(
    "loader", ["dali", "stock", pytest.param("proxy", marks=pytest.mark.slow), "torch", "synthetic"]
)
def test_batches_have_the_promised_form(data: Path, cpu: DistEnv, loader: str) -> None:
    train, val = scan_splits(data)
    config = config_for(loader=loader, val_image_size=40, val_resize=45)
    stream = pipelines.create_train_loader(config, train, RandomSampler(len(train), 8), cpu)
    for size, batch in ((32, next(stream)), (40, next(iter(pipelines.create_val_loader(config, val, cpu))))):
        assert batch.images.shape == (8, 3, size, size)
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.targets.shape == (8,)
        assert batch.targets.dtype == torch.int64
    stream.close()


@pytest.mark.parametrize("loader", ["dali", pytest.param("proxy", marks=pytest.mark.slow), "torch"])
def test_targets_follow_the_sampler_across_epochs(data: Path, cpu: DistEnv, loader: str) -> None:
    """Of two ranks, two epochs: every rank gets its images, none twice in an epoch."""
    train, _ = scan_splits(data)
    for rank in (0, 1):
        sampler = RandomSampler(len(train), 8, rank=rank, world_size=2)
        env = dataclasses.replace(cpu, rank=rank, world_size=2)
        stream = pipelines.create_train_loader(config_for(loader=loader), train, sampler, env)
        for batch in range(2 * sampler.batches_per_epoch):
            assert next(stream).targets.tolist() == train.labels[sampler.indices(batch)].tolist()
        stream.close()


def test_images_match_their_targets(data: Path, cpu: DistEnv) -> None:
    train, _ = scan_splits(data)  # blue, green, red: label 0 is brightest in channel 2
    stream = pipelines.create_train_loader(config_for(), train, RandomSampler(len(train), 8), cpu)
    for _ in range(10):
        images, targets = next(stream)
        assert (2 - images.float().mean(dim=(2, 3)).argmax(dim=1)).tolist() == targets.tolist()


def test_a_new_origin_draws_anew_and_resumes(tmp_path: Path, cpu: DistEnv) -> None:
    """Of images that are all the same, only the draws can differ: another layout must not repeat the run's start."""
    random = np.random.default_rng(0)
    info = Image.fromarray(random.integers(0, 255, size=(60, 60, 3), dtype=np.uint8))
    (tmp_path / "train" / "only").mkdir(parents=True)
    for number in range(64):
        info.save(tmp_path / "train" / "only" / f"{number}.png")
    manifest, sampler = scan(tmp_path, "train"), RandomSampler(64, 8)
    whole = pipelines.create_train_loader(BASE, manifest, sampler, cpu)
    start = [next(whole).images.clone() for _ in range(6)]
    later = pipelines.create_train_loader(BASE, manifest, sampler, cpu, first_batch=3)
    images = [next(later).images.clone() for _ in range(3)]
    for one, other in itertools.product(start, images):
        assert not torch.equal(one, other)
    state = later.state()
    following = next(later).images.clone()
    resumed = pipelines.create_train_loader(BASE, manifest, sampler, cpu, first_batch=6, state=state)
    assert torch.equal(next(resumed).images, following)


@pytest.mark.parametrize(
    ("decode", "cache"),
    [("fused", "none"), *(pytest.param("full", cache, marks=pytest.mark.slow) for cache in ("none", "host"))],
)
@pytest.mark.parametrize("augment", AUGMENTS)
def test_dali_continues_bit_for_bit(data: Path, cpu: DistEnv, decode: str, cache: str, augment: str) -> None:
    train, _ = scan_splits(data)
    config, sampler = config_for(decode=decode, cache=cache, augment=augment), RandomSampler(len(train), 8)
    stream = pipelines.create_train_loader(config, train, sampler, cpu)
    batches, states = [], []
    for _ in range(12):
        states.append(stream.state())
        batches.append(next(stream))
    for cut in (0, 3, 5, 7):  # before the first, within an epoch, at its end, in the next
        resumed = pipelines.create_train_loader(config, train, sampler, cpu, cut, states[cut])
        for expected in batches[cut : cut + 5]:
            assert torch.equal(next(resumed).images, expected.images), cut


def test_another_number_of_threads_changes_nothing(data: Path, cpu: DistEnv) -> None:
    train, _ = scan_splits(data)
    sampler = RandomSampler(len(train), 8)
    streams = [
        pipelines.create_train_loader(config_for(workers=workers, prefetch=prefetch), train, sampler, cpu)
        for workers, prefetch in ((1, 1), (2, 6), (5, 3))
    ]
    for _ in range(3):
        images = [next(stream).images for stream in streams]
        assert torch.equal(images[0], images[1])
        assert torch.equal(images[0], images[2])
    resumed = pipelines.create_train_loader(config_for(workers=3), train, sampler, cpu, 3, streams[0].state())
    for _ in range(4):
        assert torch.equal(next(resumed).images, next(streams[1]).images)


@pytest.mark.parametrize(
    ("workers", "prefetch", "threads", "depths"),
    [(5, 6, [2, 3], [3, 3]), (1, 1, [1, 1], [1, 1]), (2, 3, [1, 1], [2, 2])],
)
def test_pipelines_share_threads_and_queue(
    data: Path, cpu: DistEnv, workers: int, prefetch: int, threads: list[int], depths: list[int]
) -> None:
    train, _ = scan_splits(data)
    config = config_for(workers=workers, prefetch=prefetch)
    stream = pipelines.create_train_loader(config, train, RandomSampler(len(train), 8), cpu)
    assert isinstance(stream, DaliTrainLoader)
    assert [pipeline.num_threads for pipeline in stream._pipelines] == threads
    assert [pipeline.prefetch_queue_depth for pipeline in stream._pipelines] == depths


def test_cached_images_are_those_of_the_files(data: Path, cpu: DistEnv) -> None:
    train, _ = scan_splits(data)
    files, cached = (
        pipelines.create_train_loader(config_for(decode="full", cache=cache), train, RandomSampler(len(train), 8), cpu)
        for cache in ("none", "host")
    )
    for _ in range(11):  # two epochs
        (images, targets), (cached_images, cached_targets) = next(files), next(cached)
        assert torch.equal(images, cached_images)
        assert torch.equal(targets, cached_targets)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_torch_continues_bit_for_bit(data: Path, cpu: DistEnv, augment: str) -> None:
    train, _ = scan_splits(data)
    config, sampler = config_for(loader="torch", augment=augment), RandomSampler(len(train), 8)
    stream = pipelines.create_train_loader(config, train, sampler, cpu)
    batches = [next(stream) for _ in range(8)]
    resumed = pipelines.create_train_loader(config, train, sampler, cpu, 3)
    for expected in batches[3:]:
        assert torch.equal(next(resumed).images, expected.images)


def test_epochs_and_ranks_are_augmented_differently(data: Path, cpu: DistEnv) -> None:
    one = scan_splits(data)[0]
    one = one.select(np.zeros(8, dtype=np.int64))
    for loader in ("dali", "torch"):
        images = []
        for rank in range(2):
            env = dataclasses.replace(cpu, rank=rank, world_size=1)
            config = config_for(loader=loader, seed=rank if loader == "torch" else 0)
            stream = pipelines.create_train_loader(config, one, RandomSampler(8, 8), env)
            images += [*next(stream).images, *next(stream).images]
            stream.close()
        assert len({image.numpy().tobytes() for image in images}) == 32, "one picture, 32 different crops"


RECIPES: list[dict[str, Any]] = [
    {"augment": "randaugment", "randaugment_magnitude": 21, "randaugment_ops": 1, "randaugment_std": 1.5},
    {"augment": "three-augment", "color_jitter": 0.3, "repeated_augmentation": 3},
]


@pytest.mark.parametrize(
    "loader", ["dali", *(pytest.param(each, marks=pytest.mark.slow) for each in ("stock", "torch"))]
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: str(recipe["augment"]))
def test_augmentation_of_recipes_continues_bit_for_bit(
    data: Path, cpu: DistEnv, loader: str, recipe: dict[str, Any]
) -> None:
    train, _ = scan_splits(data)
    config = config_for(loader=loader, **recipe)
    sampler = create_sampler(config, train, cpu)
    stream = pipelines.create_train_loader(config, train, sampler, cpu)
    batches, states = [], []
    for _ in range(8):
        states.append(stream.state())
        batches.append(next(stream))
    stream.close()
    for cut in (3, 6):  # within the first epoch and the second one
        resumed = pipelines.create_train_loader(config, train, sampler, cpu, cut, states[cut])
        for expected in batches[cut:]:
            assert torch.equal(next(resumed).images, expected.images), cut
        resumed.close()


@pytest.mark.parametrize("loader", ["dali", pytest.param("proxy", marks=pytest.mark.slow), "torch"])
def test_copies_of_an_image_are_augmented_differently(data: Path, cpu: DistEnv, loader: str) -> None:
    train, _ = scan_splits(data)
    train = dataclasses.replace(train, labels=np.arange(len(train)))
    config = config_for(loader=loader, batch_size=9, repeated_augmentation=3)
    sampler = create_sampler(config, train, cpu)
    stream = pipelines.create_train_loader(config, train, sampler, cpu)
    seen = []
    for batch in range(2 * sampler.batches_per_epoch):
        images, targets = next(stream)
        assert targets.tolist() == sampler.indices(batch).tolist()
        assert sorted(Counter(targets.tolist()).values()) == [3, 3, 3]
        seen += [image.numpy().tobytes() for image in images]
    stream.close()
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (333, 333), (256, 1000), (257, 301), (64, 48), (1001, 259)])
def test_validation_geometry_is_torchvisions(tmp_path: Path, cpu: DistEnv, size: tuple[int, int]) -> None:
    """Same crop to the pixel; a shift by one, DALI's own rounding, would differ by far more."""
    random = np.random.default_rng(0)
    (tmp_path / "val" / "a").mkdir(parents=True)
    pixels = random.integers(0, 256, size=(size[1] // 8 + 1, size[0] // 8 + 1, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(tmp_path / "val" / "a" / "a.png")
    val = scan(tmp_path, "val")
    ours, theirs = (
        next(
            iter(pipelines.create_val_loader(config_for(loader=loader, image_size=224, val_resize=256), val, cpu))
        ).images.int()
        for loader in ("dali", "torch")
    )
    assert (ours - theirs).abs().max() <= 1


@pytest.mark.parametrize(
    ("interpolation", "crop_mode", "share", "size"),
    [
        ("bilinear", "center", 0.875, 224),
        ("bicubic", "center", 0.95, 224),
        pytest.param("bicubic", "center", 1.0, 288, marks=pytest.mark.slow),
        ("bicubic", "squash", 0.9, 192),
        ("bilinear", "border", 1.0, 224),
        pytest.param("bicubic", "border", 0.9, 192, marks=pytest.mark.slow),
        pytest.param("bilinear", "center", 0.875, "160x224", marks=pytest.mark.slow),
        pytest.param("bicubic", "center", 1.0, "224x160", marks=pytest.mark.slow),
        ("bilinear", "squash", 0.9, "160x224"),
        ("bilinear", "border", 0.9, "224x96"),
        pytest.param("bicubic", "border", 1.0, "160x224", marks=pytest.mark.slow),
    ],
)
def test_validation_images_are_timms(
    tmp_path: Path, cpu: DistEnv, interpolation: Any, crop_mode: Any, share: float, size: ImageSize
) -> None:
    write_photos(tmp_path / "val" / "a", [(500, 375), (375, 500), (301, 257), (120, 333)])
    val, resized = scan(tmp_path, "val"), math.floor(min(sides_of(size)) / share)
    crop_pct = share if isinstance(size, int) else sizes.crop_pct(size, resized)  # as an export says it
    timms = timm.data.create_transform(
        timm_size(size), interpolation=interpolation, crop_mode=crop_mode, crop_pct=crop_pct, normalize=False
    )
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(Image.open(val.record(index).name)) for index in range(len(val))]
        expected = torch.stack([timms(file) for file in files])
    options = {"val_image_size": size, "val_crop": TIMM_CROPS[crop_mode], "interpolation": interpolation}
    for loader, largest in (("torch", 0), ("dali", 2), ("stock", 2)):
        config = config_for(loader=loader, val_resize=resized, **options).padded_with(IMAGENET_DEFAULT_MEAN)
        found = next(iter(pipelines.create_val_loader(config, val, cpu))).images
        difference = (found.int() - expected.int()).abs()
        assert difference.max() <= largest, loader
        assert difference.float().mean() < 0.3


def write_photos(folder: Path, sizes: list[tuple[int, int]]) -> None:
    """JPEGs (width, height) of soft spots."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number, (width, height) in enumerate(sizes):
        spots = random.integers(0, 256, size=(height // 8, width // 8, 3), dtype=np.uint8)
        image = Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC)
        image.save(folder / f"{number}.jpg", quality=95)


def kinds_of(images: torch.Tensor) -> list[str]:
    """How each image of stripes was made larger: only bicubic interpolation goes beyond their values."""
    beyond = (images.amin(dim=(1, 2, 3)) < 60) & (images.amax(dim=(1, 2, 3)) > 196)
    within = (images.amin(dim=(1, 2, 3)) >= 63) & (images.amax(dim=(1, 2, 3)) <= 193)
    assert bool((beyond ^ within).all())
    return ["bicubic" if each else "bilinear" for each in beyond.tolist()]


@pytest.mark.parametrize(
    ("loader", "decode"),
    [
        ("dali", "fused"),
        ("dali", "full"),
        ("stock", "fused"),
        ("stock", "full"),
        *(pytest.param(loader, "full", marks=pytest.mark.slow) for loader in ("torch", "proxy")),
    ],
)
def test_interpolation(tmp_path: Path, cpu: DistEnv, loader: str, decode: str) -> None:
    """Of crops and of validation images; "random" is of each crop, and validates bilinear."""
    stripes = np.where(np.arange(64) // 8 % 2, 192, 64).astype(np.uint8)[None, :, None].repeat(64, 0).repeat(3, 2)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for number in range(32):
            Image.fromarray(stripes).save(tmp_path / split / "a" / f"{number}.png")
    train, val = scan(tmp_path, "train"), scan(tmp_path, "val")
    for name in ("bilinear", "bicubic", "random"):
        config = config_for(
            loader=loader, decode=decode, interpolation=name, crop_scale=0.5, image_size=96, val_resize=100
        )
        sampler = RandomSampler(len(train), 8)
        stream = pipelines.create_train_loader(config, train, sampler, cpu)
        crops = [kinds_of(next(stream).images) for _ in range(2)]
        state = stream.state()
        crops.append(kinds_of(next(stream).images))
        stream.close()
        assert {kind for batch in crops for kind in batch} == ({"bilinear", "bicubic"} if name == "random" else {name})
        if loader != "proxy":
            resumed = pipelines.create_train_loader(config, train, sampler, cpu, 2, state)
            assert kinds_of(next(resumed).images) == crops[-1]
            resumed.close()
        validated = kinds_of(next(iter(pipelines.create_val_loader(config, val, cpu))).images)
        assert set(validated) == {"bicubic" if name == "bicubic" else "bilinear"}


def test_validation_covers_every_image_once(tmp_path: Path, cpu: DistEnv) -> None:
    data = write_data(tmp_path, train=(1, 1, 1), val=(3, 2, 2))
    _, val = scan_splits(data)
    for world_size in (1, 2, 3, 9):
        seen: Counter[int] = Counter()
        for rank in range(world_size):
            env = dataclasses.replace(cpu, rank=rank, world_size=world_size)
            loader = pipelines.create_val_loader(config_for(batch_size=2), val, env)
            for _ in range(2):  # two passes are the same
                seen.update(target for batch in loader for target in batch.targets.tolist())
        assert seen == {0: 6, 1: 4, 2: 4}


def test_exif_rotation_is_applied_by_both(tmp_path: Path, cpu: DistEnv) -> None:
    (tmp_path / "val" / "a").mkdir(parents=True)
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[:32] = 255  # upper half white
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 90 degrees to the right
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif.tobytes())
    (tmp_path / "val" / "a" / "a.jpg").write_bytes(file.getvalue())
    val = scan(tmp_path, "val")
    for loader in ("dali", "torch"):
        image = next(iter(pipelines.create_val_loader(config_for(loader=loader), val, cpu))).images[0].float()
        assert image[:, :, 20:].mean() > 200, loader  # right half white
        assert image[:, :, :12].mean() < 50, loader


@pytest.mark.parametrize("name", ["little.png", "little.tif", "big.tif", "big.pgm"])
def test_gray_of_16_bits_is_seen_alike_by_both(tmp_path: Path, cpu: DistEnv, name: str) -> None:
    """All 65,536 values: DALI divides by 257 and rounds, Pillow's own conversion cuts off at 255."""
    (tmp_path / "val" / "a").mkdir(parents=True)
    path = tmp_path / "val" / "a" / name
    pixels = np.arange(2**16, dtype="<u2" if name.startswith("little") else ">u2").reshape(256, 256)
    if path.suffix == ".pgm":
        path.write_bytes(b"P5 256 256 65535\n" + pixels.tobytes())
    else:
        Image.frombytes("I;16" if name.startswith("little") else "I;16B", (256, 256), pixels.tobytes()).save(path)
    val = scan(tmp_path, "val")
    seen = []
    for loader in ("dali", "torch"):
        config = config_for(loader=loader, image_size=256, val_resize=256)
        seen.append(next(iter(pipelines.create_val_loader(config, val, cpu))).images[0].int())
    assert set(seen[0].flatten().tolist()) == set(range(256))
    assert (seen[0] - seen[1]).abs().max() <= 1


def test_flip_probability(data: Path, cpu: DistEnv) -> None:
    one = scan_splits(data)[0]
    one = one.select(np.zeros(8, dtype=np.int64))
    for loader in ("dali", "torch"):
        crops = {}
        for hflip in (0.0, 1.0):
            config = config_for(loader=loader, hflip=hflip, crop_scale=1.0)
            stream = pipelines.create_train_loader(config, one, RandomSampler(8, 8), cpu)
            crops[hflip] = next(stream).images
            stream.close()
        assert torch.equal(crops[0.0], crops[1.0].flip(3)), loader
