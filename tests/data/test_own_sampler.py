"""Another sampler is a class with `at`: all loaders read what it says, draw for each appearance, and resume."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from pipelines import create_train_loader
from tests.conftest import resolved
from utils.data.formats.folder import scan
from utils.data.images.manifest import Manifest
from utils.data.loaders.memory_loader import DecodedImages, MemoryTrainLoader
from utils.data.loaders.sampler import Sampler, WeightedSampler, permutation
from utils.distributed.group import DistEnv

IMAGES, BATCH = 24, 4


class Doubled(Sampler):
    """Images of odd numbers come twice in an epoch, in a row."""

    def at(self, epoch: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = permutation(self.num_images, self.seed, epoch)
        images = np.repeat(order, 1 + order % 2)[: self.num_images]
        copies = np.append(False, images[1:] == images[:-1])
        return images[positions], 2 * epoch + copies[positions]


def write_alike(root: Path) -> Manifest:
    """Images of the same pixels, a class each, so that a label names the image."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, size=(60, 60, 3), dtype=np.uint8))
    for number in range(IMAGES):
        folder = root / "train" / f"{number:02d}"
        folder.mkdir(parents=True)
        picture.save(folder / "0.png")
    return scan(root, "train")


def open_loader(
    values: dict[str, Any], manifest: Manifest, sampler: Sampler, cpu: DistEnv, first: int, state: dict[str, Any] | None
) -> Any:
    """The training loader of a rank from the batch number `first` on."""
    small = {"image_size": 32, "workers": 2, "hw_decoder_load": 0.65, "prefetch": 2, "crop_scale": 0.08}
    config = resolved(batch_size=sampler.batch_size, **small, **values)
    if config.cache == "gpu":  # one kernel, whose draws follow from image and draw
        return MemoryTrainLoader(config, DecodedImages(config, manifest, cpu), manifest, sampler, cpu, first)
    env = DistEnv(sampler.rank, sampler.rank, sampler.world_size, sampler.world_size, cpu.device)
    return create_train_loader(config, manifest, sampler, env, first, state)


@pytest.mark.parametrize(
    "values",
    [{}, {"decode": "full", "cache": "host"}, {"loader": "torch"}, {"decode": "full", "cache": "gpu"}],
    ids=str,
)
def test_an_own_sampler(tmp_path: Path, cpu: DistEnv, values: dict[str, Any]) -> None:
    """The pixels of all images are the same: only draws can make batches differ."""
    manifest = write_alike(tmp_path)

    def opened(rank: int, first: int, state: dict[str, Any] | None = None) -> Any:
        return open_loader(values, manifest, Doubled(IMAGES, BATCH, rank=rank, world_size=2), cpu, first, state)

    crops, labels = [], []
    for rank in range(2):
        stream = opened(rank, 0)
        for batch in range(6):  # two epochs
            if batch == 4:
                state = stream.state()
            images, targets = next(stream)
            crops += list(images.clone())
            labels.append(targets.tolist())
        assert labels[-6:] == [Doubled(IMAGES, BATCH, rank=rank, world_size=2).indices(at).tolist() for at in range(6)]
        resumed = opened(rank, 4, state)
        for batch in (4, 5):
            assert torch.equal(next(resumed).images, torch.stack(crops[-24 + 4 * batch :][:4])), (rank, batch)
        for each in (stream, resumed):
            each.close()
    epoch = list(itertools.chain(*labels[:3], *labels[6:9]))
    assert len(epoch) == IMAGES > len(set(epoch))
    assert not [
        pair for pair in itertools.combinations(range(len(crops)), 2) if torch.equal(*(crops[at] for at in pair))
    ]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"loader": "torch"},
        {"decode": "full", "cache": "gpu"},
        pytest.param({"loader": "proxy"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_on_other_numbers_of_processes(tmp_path: Path, cpu: DistEnv, values: dict[str, Any]) -> None:
    """Two steps on 1 process, two on 2, two on 1: the images of 1; from the GPU's memory also their crops."""
    manifest, weights = write_alike(tmp_path), np.linspace(0.1, 5, IMAGES)

    def steps(first: int, world_size: int, count: int = 2) -> list[Counter[tuple[int, bytes]]]:
        found: list[Counter[tuple[int, bytes]]] = [Counter() for _ in range(count)]
        for rank in range(world_size):
            layout = (IMAGES, 8 // world_size, 1, rank, world_size)
            loader = open_loader(values, manifest, WeightedSampler(*layout, weights=weights), cpu, first, None)
            for step in found:
                images, targets = next(loader)
                crops = [image.numpy().tobytes() if "cache" in values else b"" for image in images]
                step.update(zip(targets.tolist(), crops, strict=True))
            loader.close()
        return list(found)

    alone = steps(0, 1, count=6)
    assert steps(0, 1) + steps(2, 2) + steps(4, 1) == alone
    assert max(sum(alone[:3], Counter()).values()) > 1 or "cache" in values, "some images come several times"
