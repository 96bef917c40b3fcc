"""The comparison finds a network that computes something else, and its images are those of the evaluation."""

import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from pipelines import create_val_loader
from tests.conftest import resolved, write_data
from tests.shards import write_webdataset
from utils.data.formats.folder import scan_splits
from utils.distributed.group import DistEnv
from utils.errors import RunFailed, UserError
from utils.inference.export.check import NUM_IMAGES, TOLERANCE, Comparison, check_images, compare
from utils.options.resolved import ResolvedConfig


def config_of(data: Path | None) -> ResolvedConfig:
    return resolved(data_dir=data, image_size=32, val_resize=36, loader="torch")


def first_pixels(images: Tensor) -> Tensor:
    return images.flatten(1)[:, :5].float()


def test_equal_networks() -> None:
    images = torch.arange(70 * 6).view(70, 6)
    found = compare(first_pixels, first_pixels, images)
    assert found == Comparison(count=70, difference=0.0, largest=69 * 6 + 4, same_class=70)
    found.require(0.0, "model.onnx")


@pytest.mark.parametrize("wrong", ["one logit", "nan", "one batch size"])
def test_a_difference_is_found(wrong: str) -> None:
    images = torch.rand(70, 6, generator=torch.Generator().manual_seed(0))

    def exported(batch: Tensor) -> Tensor:
        logits = first_pixels(batch)
        if wrong == "one batch size":  # what was traced with a constant
            return logits if len(batch) == 2 else logits.roll(1, dims=1)
        logits[-1, 3] += {"one logit": 3 * TOLERANCE, "nan": math.nan}[wrong]
        return logits

    found = compare(first_pixels, exported, images)
    with pytest.raises(RunFailed, match=r"^model.onnx: its logits differ from torch's by up to .*nothing was written"):
        found.require(TOLERANCE, "model.onnx")


def test_links_in_the_folder_of_images_may_form_circles(data: Path, tmp_path: Path) -> None:
    (tmp_path / "red").symlink_to(data / "val" / "red")
    for name in ("one", "two", "three"):
        (tmp_path / name).symlink_to(tmp_path)
    images, _ = check_images(config_of(None), tmp_path)
    assert len(images) == len(list((data / "val" / "red").iterdir()))


def test_images_of_the_run_are_those_of_its_evaluation(data: Path, cpu: DistEnv) -> None:
    config = config_of(data)
    images, source = check_images(config, None)
    _, val = scan_splits(data)
    expected = torch.cat([batch.images for batch in create_val_loader(config, val, cpu)])
    assert torch.equal(images, expected.permute(0, 2, 3, 1))
    assert source == f"images of {data}"


def test_images_of_shards_and_of_any_folder(data: Path, tmp_path: Path) -> None:
    expected, _ = check_images(config_of(data), None)
    shards, _ = check_images(config_of(write_webdataset(data, tmp_path / "shards")), None)
    assert torch.equal(shards, expected)
    given, source = check_images(config_of(None), data / "val")
    assert torch.equal(given, expected)
    assert source == f"images of {data / 'val'}"


def test_of_many_images_some_of_each_class_are_taken(tmp_path: Path) -> None:
    data = write_data(tmp_path, train=(1, 1, 1), val=(70, 70, 70))
    images, _ = check_images(config_of(data), None)
    assert len(images) == NUM_IMAGES
    brightest = images.float().mean(dim=(1, 2)).argmax(1)  # blue, green, red
    assert torch.bincount(brightest, minlength=3).min() >= 33


def test_generated_images_where_those_of_the_run_are_missing(data: Path, tmp_path: Path) -> None:
    for folder in (None, tmp_path / "gone", tmp_path):
        images, source = check_images(config_of(folder), None)
        assert (images.shape, images.dtype) == ((NUM_IMAGES, 32, 32, 3), torch.uint8)
        assert images.float().std(dim=(1, 2)).min() > 10
        assert source.startswith("generated images")


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_text("no image")
    with pytest.raises(UserError, match=r"^--check-data .*: no image that can be read; give a folder of images$"):
        check_images(config_of(None), tmp_path)
    Image.new("RGB", (40, 40)).save(tmp_path / "whole.png")
    assert len(check_images(config_of(None), tmp_path)[0]) == 1
