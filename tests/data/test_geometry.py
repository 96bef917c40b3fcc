"""Whole training images, vertical flips and quarter turns, of all loaders, against Pillow and timm."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torch import Tensor

import pipelines
from tests.conftest import resolved
from utils.data.formats.folder import scan
from utils.data.loaders.sampler import RandomSampler
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.sizes import ImageSize, timm_size

SIZE = 48
SHAPES = [(100, 75), (75, 100), (80, 80), (41, 120), (30, 20), (97, 64), (64, 97), (48, 35), (61, 48)]  # width, height
BASE = resolved(batch_size=len(SHAPES), image_size=SIZE, val_resize=SIZE, workers=1, decode="full", hflip=0.0)
CROPS = {"center": "center", "squash": "squash", "pad": "border"}  # and timm's names
# Loader, cache, crop. With the cache "gpu" a kernel makes the batches, of these crops alone.
FEEDS = [
    *itertools.product(("dali",), ("none",), ("random", *CROPS)),
    *itertools.product(("dali",), ("gpu",), ("random", "squash")),
    *itertools.product(("torch",), ("none",), ("random", *CROPS)),
]
SLOW = itertools.product((("proxy", "none"), ("dali", "host")), ("random", *CROPS))
FEEDS += [pytest.param(*feed, crop, marks=pytest.mark.slow) for feed, crop in SLOW]  # type: ignore[misc]
WHOLE = [each for each in FEEDS if "random" not in getattr(each, "values", each)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of soft spots, no two parts of which are alike."""
    root, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    (root / "train" / "a").mkdir(parents=True)
    for number, (width, height) in enumerate(SHAPES):
        spots = random.integers(0, 256, size=(height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC)
        image.save(root / "train" / "a" / f"{number}.png")
    return root


def epochs(root: Path, env: DistEnv, count: int = 2, **values: Any) -> list[Tensor]:
    """The images of some epochs in the order of the files: int (N, 3, SIZE, SIZE), a batch an epoch."""
    config = dataclasses.replace(BASE, **values)
    manifest, sampler = scan(root, "train"), RandomSampler(len(SHAPES), len(SHAPES))
    stream = pipelines.create_train_loader(config, manifest, sampler, env)
    found = []
    for epoch in range(count):
        images = next(stream).images.int().clone()
        found.append(images[np.argsort(sampler.indices(epoch))])
    stream.close()
    return found


def by_timm(root: Path, crop_mode: str, size: ImageSize = SIZE, interpolation: str = "bilinear") -> Tensor:
    transform = timm.data.create_transform(
        timm_size(size), interpolation=interpolation, crop_mode=crop_mode, crop_pct=1.0, normalize=False
    )
    files = [root / "train" / "a" / f"{number}.png" for number in range(len(SHAPES))]
    images = [transform(Image.open(file)) for file in files]
    return torch.stack([torch.as_tensor(image) for image in images]).int()


def assert_alike(found: Tensor, expected: Tensor, largest: int = 2) -> None:
    """Pillow rounds after each of two passes."""
    difference = (found - expected).abs()
    assert difference.max() <= largest, difference.amax((1, 2, 3))
    assert difference.float().mean() < 0.3


@pytest.mark.parametrize("size", [SIZE, "40x56"])
@pytest.mark.parametrize(("loader", "cache", "crop"), WHOLE)
def test_a_whole_image_is_timms_in_every_epoch(
    photos: Path, cpu: DistEnv, loader: str, cache: str, crop: Any, size: ImageSize
) -> None:
    first, second = epochs(photos, cpu, loader=loader, cache=cache, train_crop=crop, image_size=size)
    assert torch.equal(first, second)
    assert_alike(first, by_timm(photos, CROPS[crop], size), largest=0 if loader == "torch" else 2)


@pytest.mark.parametrize("split", ["train", "val"])
def test_rectangles_of_a_feed(data: Path, split: Any) -> None:
    with pipelines.Feed(data, split, batch_size=8, image_size=(24, 40), device="cpu", workers=1) as feed:
        assert next(iter(feed)).images.shape == (8, 3, 24, 40)
    with pytest.raises(UserError, match=r"^image_size 4: must be 8 or more"):
        pipelines.Feed(data, split, image_size=(24, 4))


@pytest.mark.parametrize(("loader", "cache", "crop"), WHOLE)
def test_flips_are_of_whole_images(photos: Path, cpu: DistEnv, loader: str, cache: str, crop: Any) -> None:
    options: dict[str, Any] = {"loader": loader, "cache": cache, "train_crop": crop}
    for size, hflip, vflip in ((SIZE, 1.0, 0.0), (SIZE, 0.0, 1.0), ("56x40", 1.0, 1.0)):
        expected = by_timm(photos, CROPS[crop], size)
        (found,) = epochs(photos, cpu, 1, hflip=hflip, vflip=vflip, image_size=size, **options)
        dims = [dim for dim, probability in ((3, hflip), (2, vflip)) if probability]
        assert_alike(found, expected.flip(dims))


@pytest.mark.parametrize(("loader", "cache", "crop"), FEEDS)
def test_turns_are_quarters(photos: Path, cpu: DistEnv, loader: str, cache: str, crop: Any) -> None:
    """Each image of each epoch is that without turns, turned; and all four turns come."""
    options: dict[str, Any] = {"loader": loader, "cache": cache, "train_crop": crop}
    options |= {"crop_scale": 1.0} if crop == "random" else {}  # of squares the crop is then the whole image
    numbers = [at for at, (width, height) in enumerate(SHAPES) if crop != "random" or width == height]
    plain = epochs(photos, cpu, 1, **options)[0]
    found = epochs(photos, cpu, 24 if crop == "random" else 6, rot90=True, **options)
    turns = Counter(
        tuple(quarters for quarters in range(4) if (images[at] - plain[at].rot90(quarters, (1, 2))).abs().max() <= 2)
        for images in found
        for at in numbers
    )
    assert turns.keys() == {(0,), (1,), (2,), (3,)}
    assert max(turns.values()) < 0.75 * turns.total()


@pytest.mark.parametrize(
    ("loader", "cache", "decode"),
    [("dali", "none", "fused"), ("dali", "none", "full"), ("dali", "gpu", "full"), ("torch", "none", "full")],
)
def test_random_crops_are_flipped_vertically(photos: Path, cpu: DistEnv, loader: str, cache: str, decode: Any) -> None:
    (upright,) = epochs(photos, cpu, 1, loader=loader, cache=cache, decode=decode, hflip=1.0, vflip=1e-9)
    (turned,) = epochs(photos, cpu, 1, loader=loader, cache=cache, decode=decode, hflip=1.0, vflip=1.0)
    assert_alike(turned, upright.flip(2))
    assert not torch.equal(turned, upright)


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_the_border_has_the_color_of_the_network(photos: Path, cpu: DistEnv, loader: Any) -> None:
    config = dataclasses.replace(BASE, loader=loader, train_crop="pad", val_crop="pad").padded_with((0.5, 0.25, 1.0))
    manifest = scan(photos, "train")
    train = pipelines.create_train_loader(config, manifest, RandomSampler(len(SHAPES), len(SHAPES)), cpu)
    val = next(iter(pipelines.create_val_loader(config, manifest, cpu))).images
    for images in (next(train).images, val):
        corners = Counter(tuple(image[:, 0, 0].tolist()) for image in images)
        assert corners[(128, 64, 255)] == len([shape for shape in SHAPES if shape[0] != shape[1]])
    train.close()


BORDERS = [(31, 240), (64, 64), (97, 31), (96, 65), (67, 96)]  # the last two are rounded from halves
MORE_BORDERS = set(itertools.product((31, 64, 97, 240), repeat=2)) - set(BORDERS)


@pytest.mark.parametrize(
    "size", [*BORDERS, *(pytest.param(each, marks=pytest.mark.slow) for each in sorted(MORE_BORDERS))]
)
@pytest.mark.parametrize(("resize", "crop"), [(48, 48), (60, 48)])
def test_the_geometry_of_a_border(tmp_path: Path, cpu: DistEnv, size: Sequence[int], resize: int, crop: int) -> None:
    """Rows and columns of the image within the border, by a white image."""
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("RGB", tuple(size), "white").save(tmp_path / "train" / "a" / "white.png")  # type: ignore[arg-type]
    expected = [min(max(round(resize * side / max(size)), 1), crop) for side in size]
    for loader in ("dali", "torch"):
        config = dataclasses.replace(BASE, loader=loader, val_crop="pad", val_resize=resize, val_image_size=crop)
        config = dataclasses.replace(config, batch_size=1).padded_with((0, 0, 0))
        (image,) = next(iter(pipelines.create_val_loader(config, scan(tmp_path, "train"), cpu))).images
        white = (image == 255).all(0)
        assert [int(white.any(axis).sum()) for axis in (0, 1)] == expected, loader
        assert int(white.sum()) == math.prod(expected)
