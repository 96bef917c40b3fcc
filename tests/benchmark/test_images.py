"""Which images a benchmark reads, how it repeats, samples and generates them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_images
from tests.shards import write_webdataset
from utils.benchmark.images import generate_images, read_images, repeat, sample_images
from utils.distributed.group import DistEnv
from utils.errors import UserError


@pytest.mark.parametrize("plain", [False, True])
def test_either_layout(data: Path, tmp_path: Path, cpu: DistEnv, plain: bool) -> None:
    images = read_images(data / "train" if plain else data, tmp_path, cpu)
    assert len(images) == 41
    assert Path(images.record(0).name).is_file()
    repeated = repeat(images, 100)
    assert len(repeated) == len(repeated.names()) == 123
    assert [repeated.record(at) for at in (0, 41)] == [images.record(0)] * 2
    assert np.array_equal(repeated.labels[41:82], images.labels)


def test_shards(data: Path, tmp_path: Path, cpu: DistEnv) -> None:
    images = read_images(write_webdataset(data, tmp_path / "shards"), tmp_path, cpu)
    assert len(images) == 41
    assert sample_images(images) == sample_images(read_images(data, tmp_path, cpu))


def test_a_bad_file_in_the_sample_does_not_count(tmp_path: Path, cpu: DistEnv) -> None:
    write_images(tmp_path, (1, 1, 1))
    (tmp_path / "blue" / "text.jpg").write_text("no image")
    images = read_images(tmp_path, tmp_path, cpu)
    sizes = []
    for path in tmp_path.glob("*/*-000.jpg"):
        with Image.open(path) as image:
            sizes.append(image.size)
    width, height, _ = sample_images(images)
    assert (width, height) == pytest.approx(tuple(np.mean(sizes, axis=0)))
    for path in tmp_path.glob("*/*-000.jpg"):
        path.write_text("no image")
    with pytest.raises(UserError, match="none of 4 files is an image"):
        sample_images(images)


def test_generated_images_are_like_imagenets(tmp_path: Path, cpu: DistEnv) -> None:
    generate_images(tmp_path, count=30)
    images = read_images(tmp_path, tmp_path, cpu)
    width, height, size = sample_images(images)
    assert len(images) == 30
    assert len(images.classes) == 10
    assert 450 < width < 550
    assert 330 < height < 420
    assert 80_000 < size < 140_000
