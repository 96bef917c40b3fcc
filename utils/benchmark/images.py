"""The images of a benchmark: a folder of them or generated ones, and their mean size."""

import contextlib
import dataclasses
import math
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from utils.data.formats import folder
from utils.data.formats.sources import find_source
from utils.data.formats.split_folders import folder_of
from utils.data.images.manifest import Manifest
from utils.data.reading.reader import open_image
from utils.data.splits.selection import read_data
from utils.data.staging.stage import stage
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig

NUM_GENERATED = 320


def read_images(data_dir: Path, output_dir: Path, env: DistEnv, stage_dir: Path | None = None) -> Manifest:
    """The training images of `data_dir`, or those of its own class folders; without the bad files.

    Args:
        data_dir: a data set, or class folders; or a URL of either.
        output_dir: where an index of shards is saved if it cannot be saved beside them.
        stage_dir: where a URL is copied to.

    Raises:
        UserError: as `read_data`.
    """
    config = stage(TrainConfig(data_dir=data_dir, stage_dir=stage_dir, output_dir=output_dir, bad_files="skip"), env)
    assert config.data_dir is not None, "given"
    if not find_source(config, ()).has_class_folders:
        return read_data(config, env, ["train"])["train"]
    name = folder_of(dataclasses.replace(config, val_fraction=0.0), "train")
    return folder.scan(config.data_dir, name, skip_bad=True, train=name)


def repeat(manifest: Manifest, min_images: int) -> Manifest:
    """All files of the manifest as many times as it takes to have `min_images` or more."""
    times = math.ceil(min_images / len(manifest))
    if times == 1:
        return manifest
    return manifest.select(np.tile(np.arange(len(manifest)), times))


def sample_images(manifest: Manifest, count: int = 256) -> tuple[float, float, float]:
    """Mean width and height in pixels, and mean encoded size in bytes, of a sample of the files.

    Raises:
        UserError: Pillow can read none of them.
    """
    sample = random.Random(0).sample(range(len(manifest)), min(count, len(manifest)))
    sizes = []
    for index in sample:
        with (
            contextlib.suppress(OSError, ValueError, Image.DecompressionBombError),  # the loaders report bad files
            open_image(manifest.record(index)) as file,
            Image.open(file) as image,
        ):
            sizes.append((*image.size, manifest.sizes[index]))
    if not sizes:
        raise UserError(f"--data-dir {manifest.root}: none of {len(sample)} files is an image that Pillow can read")
    width, height, size = np.mean(sizes, axis=0)
    return float(width), float(height), float(size)


def generate_images(data_dir: Path, count: int = NUM_GENERATED, num_classes: int = 10) -> None:
    """JPEGs of ImageNet's mean size, 500 x 375 px and 110 KB: shapes on noise."""
    draw_number = np.random.default_rng(0)
    for index in range(count):
        width, height = draw_number.integers((400, 300), (601, 451))
        image = Image.new("RGB", (width, height), tuple(draw_number.integers(0, 256, 3)))
        draw = ImageDraw.Draw(image)
        for _ in range(12):
            corners = np.sort(draw_number.integers(0, (width, height), (2, 2)), axis=0)
            draw.ellipse([tuple(corner) for corner in corners.tolist()], fill=tuple(draw_number.integers(0, 256, 3)))
        noisy = np.asarray(image) + draw_number.normal(0, 20, (height, width, 3))
        path = data_dir / "train" / f"class{index % num_classes}" / f"{index:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
