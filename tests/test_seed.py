"""Random state is saved and restored without unpickling code; random streams are independent of each other."""

import dataclasses
import io
import itertools
import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import pipelines
from tests.conftest import resolved
from utils.data.formats.folder import scan
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import RandomSampler
from utils.distributed.group import DistEnv
from utils.network.augment import BatchAugment, Normalize
from utils.seed import Stream, derive_seed, random_state, seed_all, seed_process, seed_weights, set_random_state
from utils.targets import Targets

CPU = torch.device("cpu")
SIDE = 64  # pixels of the images whose colors show the crop
SIGMAS = 4.5  # of the correlation of independent draws, 1 / sqrt(draws): one pair in 150,000 exceeds it


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_state_survives_a_file() -> None:
    seed_all(3)
    draw()
    file = io.BytesIO()
    torch.save(random_state(CPU), file)
    expected = draw()
    seed_all(4)
    file.seek(0)
    set_random_state(torch.load(file, weights_only=True), CPU)
    assert draw() == expected


def test_seeds_decide() -> None:
    seed_all(1)
    first = draw()
    seed_all(1)
    assert draw() == first
    seed_all(2)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_every_stream_has_a_seed_of_its_own() -> None:
    """Of all purposes with parts from 0 to 3, which sums and zeros at the end would mix up."""
    seeds = [
        derive_seed(stream, *parts)
        for stream in Stream
        for parts in itertools.product(range(4), repeat=len(stream.value[1]))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    with pytest.raises(AssertionError, match="needs"):
        derive_seed(Stream.PROCESS, 0, 0)


def test_streams_are_frozen() -> None:
    # A checkpoint written years ago resumes with these. If this fails, `checkpoint.FORMAT` must rise.
    frozen = [917752063, 1860276006, 2128149876, 732493856, 679623030, 837169922, 1014427442, 30058469]
    assert [derive_seed(stream, *range(len(stream.value[1]))) for stream in Stream] == frozen


def assert_uncorrelated(streams: dict[str, NDArray[np.float64]]) -> None:
    """Every two of the (draws,) are uncorrelated; none is constant."""
    for (one, left), (other, right) in itertools.combinations(streams.items(), 2):
        found = np.corrcoef(left, right)[0, 1]
        assert abs(found) < SIGMAS / np.sqrt(len(left)), f"{one} and {other}: {found:.3f}"


def test_draws_of_seeds_ranks_and_steps_are_independent() -> None:
    """Mixup's, of 2 seeds x 2 ranks x 2 steps of the run, and the weights'."""
    streams = {}
    images, targets = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.arange(2)
    augment = BatchAugment(resolved(mixup=1.0), Normalize((0, 0, 0), (1, 1, 1), torch.float32, CPU), Targets(2), CPU)
    for seed, rank, step in itertools.product(range(2), range(2), (0, 1)):
        seed_process(seed, rank, step)
        shares = [float(augment(images, targets)[1][0, 0]) for _ in range(500)]
        streams[f"seed {seed}, rank {rank}, step {step}"] = np.array(shares)
    for seed in range(2):
        seed_weights(seed)
        streams[f"weights of seed {seed}"] = torch.rand(500, dtype=torch.float64).numpy()
    assert_uncorrelated(streams)


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Images whose red shows the column and whose green shows the row."""
    folder = tmp_path_factory.mktemp("readable")
    column, row = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    pixels = np.stack([column * 255 // SIDE, row * 255 // SIDE, 0 * row], axis=-1).astype(np.uint8)
    (folder / "train" / "only").mkdir(parents=True)
    for number in range(64):
        Image.fromarray(pixels).save(folder / "train" / "only" / f"{number}.png")
    return scan(folder, "train")


def crops(images: torch.Tensor) -> NDArray[np.float64]:
    """(4, N): column and row of each crop's center, its width, and whether it is mirrored."""
    red, green = images[:, 0].double(), images[:, 1].double()
    slope = (red[:, :, -1] - red[:, :, 0]).mean(1)
    return np.stack([red.mean((1, 2)), green.mean((1, 2)), slope.abs(), slope.sign()])


@pytest.mark.parametrize(
    ("loader", "decode", "batches"),
    [("dali", "fused", 60), ("dali", "full", 60), pytest.param("torch", "fused", 20, marks=pytest.mark.slow)],
)
def test_crops_and_flips_of_seeds_ranks_and_pipelines_are_independent(
    readable: Manifest, cpu: DistEnv, loader: str, decode: str, batches: int
) -> None:
    """2 seeds x 2 ranks x 2 pipelines, which make odd and even batches; the torch loader has one for all."""
    found: dict[str, list[NDArray[np.float64]]] = {}
    base = resolved(batch_size=16, image_size=16, workers=1, hw_decoder_load=0.65, prefetch=4)
    for seed, rank in itertools.product(range(2), range(2)):
        config = dataclasses.replace(base, seed=seed, loader=loader, decode=decode)  # type: ignore[arg-type]
        sampler = RandomSampler(len(readable), 16, rank=rank, world_size=2, seed=seed)
        env = dataclasses.replace(cpu, rank=rank, world_size=2)
        stream = pipelines.create_train_loader(config, readable, sampler, env)
        for batch in range(batches):
            name = f"seed {seed}, rank {rank}, pipeline {batch % 2}"
            found.setdefault(name, []).append(crops(next(stream).images))
        stream.close()
    assert len(found) == 8
    draws = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
    for quantity in range(4):
        assert_uncorrelated({name: values[quantity] for name, values in draws.items()})


@pytest.mark.parametrize(("loader", "cache"), [pytest.param("torch", "none", marks=pytest.mark.slow), ("dali", "gpu")])
def test_draws_of_an_image_follow_seed_and_epoch(readable: Manifest, cpu: DistEnv, loader: str, cache: str) -> None:
    """Image by image, of two seeds and, for each, two times four epochs."""
    found: dict[str, list[NDArray[np.float64]]] = {}
    base = resolved(batch_size=64, image_size=16, workers=1, loader=loader, cache=cache)
    for seed in range(2):
        sampler = RandomSampler(len(readable), 64, seed=seed)
        stream = pipelines.create_train_loader(dataclasses.replace(base, seed=seed), readable, sampler, cpu)
        for epoch in range(8):
            by_image = crops(next(stream).images)[:, np.argsort(sampler.indices(epoch))]
            found.setdefault(f"seed {seed}, epochs {epoch // 4}", []).append(by_image)
        stream.close()
    draws = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
    for quantity in range(4):
        assert_uncorrelated({name: values[quantity] for name, values in draws.items()})
