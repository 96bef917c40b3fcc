"""Random crops and flips of the loaders: area, aspect and position as torchvision draws them, flips as often as asked.

The pictures are ramps, so that the colors of a crop show where it was cut.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest, ks_2samp
from torchvision.transforms import RandomResizedCrop

import pipelines
from tests.conftest import resolved
from utils.data.formats.folder import scan
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import RandomSampler
from utils.distributed.group import DistEnv

WIDTH, HEIGHT, SIDE = 240, 180, 16  # pixels of the pictures, and of their crops
SCALE, HFLIP = 0.2, 0.3
MIN_CHANCE = 1e-3  # of statistics as far from what is expected; seeds are fixed


@pytest.fixture(scope="module")
def ramps(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """JPEGs whose red is the column and whose green is the row."""
    folder = tmp_path_factory.mktemp("ramps")
    column, row = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    pixels = np.stack([column, row, np.full_like(row, 128)], axis=-1).astype(np.uint8)
    (folder / "train" / "only").mkdir(parents=True)
    for number in range(64):
        Image.fromarray(pixels).save(folder / "train" / "only" / f"{number}.jpg", quality=100, subsampling=0)
    return scan(folder, "train")


def measure(images: torch.Tensor) -> NDArray[np.float64]:
    """(5, N): left, top, width and height of each crop in pixels, and 1 where it is mirrored, else 0."""
    center = np.arange(1, SIDE - 1) + 0.5  # the border is cut off by the interpolation
    red, green = (images[:, channel, 1:-1, 1:-1].double().mean(1 + channel).numpy() for channel in (0, 1))
    (across, at_left), (down, at_top) = (np.polyfit(center, values.T, 1) for values in (red, green))
    mirrored = across < 0
    width, height = np.abs(across) * SIDE, down * SIDE
    left = np.where(mirrored, at_left - width, at_left) + 0.5
    return np.stack([left, at_top + 0.5, width, height, mirrored])


def drawn_by_torchvision(count: int) -> NDArray[np.float64]:
    """(4, count): left, top, width, height."""
    torch.manual_seed(0)
    image = Image.new("RGB", (WIDTH, HEIGHT))
    found = [RandomResizedCrop.get_params(image, [SCALE, 1.0], [3 / 4, 4 / 3]) for _ in range(count)]
    top, left, height, width = np.array(found, dtype=np.float64).T
    return np.stack([left, top, width, height])


def quantities(crops: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    left, top, width, height = crops[:4]
    narrow, low = width < 0.9 * WIDTH, height < 0.9 * HEIGHT  # others have no room to move
    return {
        "area": width * height / (WIDTH * HEIGHT),
        "aspect": np.log(width / height),
        "left": left[narrow] / (WIDTH - width[narrow]),
        "top": top[low] / (HEIGHT - height[low]),
    }


@pytest.mark.parametrize(
    ("loader", "flags"),
    [
        ("dali", {"decode": "fused"}),
        pytest.param("dali", {"decode": "full"}, marks=pytest.mark.slow),
        pytest.param("dali", {"decode": "full", "cache": "host"}, marks=pytest.mark.slow),
        pytest.param("stock", {"decode": "fused"}, marks=pytest.mark.slow),
        pytest.param("torch", {}, marks=pytest.mark.slow),
    ],
)
def test_crops_and_flips(ramps: Manifest, cpu: DistEnv, loader: Any, flags: dict[str, Any]) -> None:
    config = resolved(
        loader=loader, batch_size=64, image_size=SIDE, crop_scale=SCALE, hflip=HFLIP, workers=2, seed=1, **flags
    )
    stream = pipelines.create_train_loader(config, ramps, RandomSampler(len(ramps), 64, seed=1), cpu)
    crops = np.concatenate([measure(next(stream).images) for _ in range(24)], axis=1)
    stream.close()
    expected = quantities(drawn_by_torchvision(10_000))
    for name, values in quantities(crops).items():
        assert ks_2samp(values, expected[name]).pvalue > MIN_CHANCE, name
    assert binomtest(int(crops[4].sum()), crops.shape[1], HFLIP).pvalue > MIN_CHANCE
