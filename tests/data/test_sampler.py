"""Which rank reads which image at which step: each once, and the same images however many processes share a step."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from timm.data.distributed_sampler import RepeatAugSampler

from tests.conftest import resolved
from utils.data.images.manifest import synthetic
from utils.data.loaders.sampler import (
    RandomSampler,
    RepeatedSampler,
    Sampler,
    WeightedSampler,
    create_sampler,
    image_weights,
    permutation,
    shard,
)
from utils.distributed.group import DistEnv
from utils.errors import UserError

# images, processes, batch size, batches per step; with and without a rest, down to one step and one image
LAYOUTS = [
    (41, 1, 4, 1), (41, 2, 4, 1), (41, 2, 4, 2), (41, 4, 5, 2), (41, 3, 1, 7), (40, 4, 5, 2), (40, 2, 20, 1),
    (7, 7, 1, 1), (8, 7, 1, 1), (1, 1, 1, 1), (1000, 8, 16, 3), (97, 3, 8, 4),
]  # fmt: skip


def ranks(num_images: int, world_size: int, batch_size: int, accum: int, seed: int = 0) -> list[Sampler]:
    return [RandomSampler(num_images, batch_size, accum, rank, world_size, seed) for rank in range(world_size)]


def epoch_of_rank(sampler: Sampler, epoch: int) -> list[int]:
    first = epoch * sampler.batches_per_epoch
    batches = [sampler.indices(first + batch) for batch in range(sampler.batches_per_epoch)]
    assert {batch.shape for batch in batches} == {(sampler.batch_size,)}
    assert {batch.dtype for batch in batches} == {np.dtype(np.int64)}
    return [int(index) for index in np.concatenate(batches)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_image_twice_in_an_epoch(layout: tuple[int, int, int, int]) -> None:
    num_images, world_size, batch_size, accum = layout
    for epoch in range(3):
        seen = [epoch_of_rank(sampler, epoch) for sampler in ranks(*layout)]
        assert len({len(images) for images in seen}) == 1  # equal steps: no rank waits for another
        union = list(itertools.chain(*seen))
        assert len(union) == len(set(union))
        assert set(union) <= set(range(num_images))
        step = world_size * batch_size * accum
        assert len(union) == num_images // step * step  # all but a rest of less than one step


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_counts(layout: tuple[int, int, int, int]) -> None:
    num_images, world_size, batch_size, accum = layout
    for sampler in ranks(*layout):
        assert sampler.global_batch_size == world_size * batch_size * accum
        assert sampler.steps_per_epoch == num_images // sampler.global_batch_size
        assert sampler.batches_per_epoch == sampler.steps_per_epoch * accum
        assert sampler.epoch_of(0) == 0
        assert sampler.epoch_of(2 * sampler.batches_per_epoch - 1) == 1
        assert sampler.epoch_of(2 * sampler.batches_per_epoch) == 2


def test_one_process_with_a_batch_a_step_is_the_default() -> None:
    assert RandomSampler(41, 8) == RandomSampler(41, 8, batches_per_step=1, rank=0, world_size=1, seed=0)


def test_fewer_images_than_a_step_is_an_epoch_of_none() -> None:
    assert RandomSampler(7, batch_size=4, world_size=2).steps_per_epoch == 0


def images_of_step(num_images: int, world_size: int, batch_size: int, accum: int, step: int) -> set[int]:
    samplers = ranks(num_images, world_size, batch_size, accum, seed=3)
    batches = [s.indices(step * accum + micro) for s in samplers for micro in range(accum)]
    return set(np.concatenate(batches).tolist())


@pytest.mark.parametrize("step", [0, 1, 4, 5, 11])  # steps 5 to 9 are epoch 1
def test_images_of_a_step_do_not_depend_on_who_shares_it(step: int) -> None:
    expected = images_of_step(41, 1, 8, 1, step)
    assert len(expected) == 8
    for world_size, batch_size, accum in [(2, 4, 1), (4, 2, 1), (1, 2, 4), (2, 2, 2), (4, 1, 2), (8, 1, 1)]:
        assert images_of_step(41, world_size, batch_size, accum, step) == expected


# images, processes, batch size, batches per step, repeats
REPEATED = [
    (41, 1, 4, 1, 3),
    (41, 2, 4, 2, 3),
    (40, 4, 5, 2, 4),
    (97, 3, 8, 1, 5),
    (1000, 8, 16, 3, 3),
    (7, 1, 7, 1, 100),
]


def repeated(layout: tuple[int, int, int, int, int]) -> list[Sampler]:
    num_images, world_size, batch_size, accum, repeats = layout
    return [RepeatedSampler(num_images, batch_size, accum, rank, world_size, 3, repeats) for rank in range(world_size)]


@pytest.mark.parametrize("layout", REPEATED, ids=str)
def test_repeats_are_dealt_as_by_timm(layout: tuple[int, int, int, int, int]) -> None:
    """Of the same permutation, each rank gets what timm's RepeatAugSampler gives it, up to the last whole step."""
    num_images, world_size, *_, repeats = layout
    for sampler in repeated(layout):
        theirs = RepeatAugSampler(range(num_images), world_size, sampler.rank, False, repeats, selected_round=0)
        for epoch in range(2):
            order = permutation(num_images, 3, epoch)
            mine = epoch_of_rank(sampler, epoch)
            assert mine == order[list(theirs)][: len(mine)].tolist()
            assert (
                len(mine)
                == RandomSampler(*layout[:1], layout[2], layout[3], 0, world_size).batches_per_epoch * layout[2]
            )


@pytest.mark.parametrize("layout", REPEATED, ids=str)
def test_copies_of_an_epoch(layout: tuple[int, int, int, int, int]) -> None:
    """Each image comes `repeats` times, as copies 0, 1, ...; the last may have fewer. Neighbors are on other ranks."""
    repeats = layout[-1]
    seen: dict[int, list[tuple[int, int]]] = {}
    for sampler in repeated(layout):
        for batch in range(sampler.batches_per_epoch):
            for image, copy in zip(sampler.indices(batch).tolist(), sampler.draws(batch).tolist(), strict=True):
                seen.setdefault(image, []).append((copy, sampler.rank))
    whole = [each for each in seen.values() if len(each) == repeats]
    assert len(whole) >= len(seen) - 1
    assert len(seen) == -(-sum(map(len, seen.values())) // repeats)
    for copies in seen.values():
        assert sorted(copy for copy, _ in copies) == list(range(len(copies)))
        assert len({rank for _, rank in copies}) == min(len(copies), layout[1])


@pytest.mark.parametrize("step", [0, 1, 4, 5, 11])
def test_copies_of_a_step_do_not_depend_on_who_shares_it(step: int) -> None:
    """So a run with repeats resumes on another number of processes."""
    found = []
    for world_size, batch_size, accum in [(1, 8, 1), (2, 4, 1), (4, 2, 1), (1, 2, 4), (2, 2, 2), (8, 1, 1)]:
        batches = [
            list(zip(sampler.indices(number).tolist(), sampler.draws(number).tolist(), strict=True))
            for sampler in repeated((41, world_size, batch_size, accum, 3))
            for number in range(step * accum, (step + 1) * accum)
        ]
        found.append(sorted(itertools.chain(*batches)))
    assert len(found[0]) == len(set(found[0])) == 8
    assert all(each == found[0] for each in found)


def test_epochs_and_seeds_differ() -> None:
    orders = [permutation(1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).mean() < 0.02  # as alike as chance makes them


def test_the_remainder_that_is_dropped_changes() -> None:
    rests = [frozenset(range(41)) - set(epoch_of_rank(RandomSampler(41, 8), epoch)) for epoch in range(3)]
    assert len(set(rests)) == 3


def test_order_is_frozen() -> None:
    # A checkpoint written years ago resumes in this order. If this fails, NumPy or the sampler broke that promise.
    assert permutation(10, seed=0, epoch=0).tolist() == [8, 3, 1, 5, 6, 2, 9, 7, 4, 0]
    assert permutation(10, seed=0, epoch=1).tolist() == [3, 7, 1, 0, 6, 9, 4, 2, 8, 5]
    assert permutation(10, seed=2**31 - 1, epoch=89).tolist() == [4, 6, 9, 0, 2, 3, 5, 1, 8, 7]


def test_order_cannot_be_changed_by_a_reader() -> None:
    with pytest.raises(ValueError, match="read-only"):
        permutation(10, 0, 0)[0] = 3


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 50])
@pytest.mark.parametrize("num_images", [0, 1, 7, 41])
def test_shard_holds_every_image_on_one_rank(num_images: int, world_size: int) -> None:
    shards = [shard(num_images, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(num_images))
    lengths = [len(images) for images in shards]
    assert max(lengths) - min(lengths) <= 1
    for images in shards:
        assert images.dtype == np.int64
        assert images.tolist() == sorted(images.tolist())


UNEVEN = np.repeat(np.arange(4), [1000, 300, 100, 10])  # labels of a set of 1:100


def weighted(
    balance: float, world_size: int = 1, rank: int = 0, batch_size: int = 12, seed: int = 0
) -> WeightedSampler:
    weights = image_weights(dataclasses.replace(synthetic(len(UNEVEN), 4), labels=UNEVEN), balance)
    weights = np.ones(len(UNEVEN)) if weights is None else weights
    return WeightedSampler(len(UNEVEN), batch_size // world_size, 1, rank, world_size, seed, weights=weights)


@pytest.mark.parametrize(("balance", "exponent"), [(0.3, 0.7), (0.5, 0.5), (1, 0)])
def test_classes_come_as_often_as_balance_says(balance: float, exponent: float) -> None:
    """In proportion to n**(1 - balance); an image of weight w comes floor(w) or ceil(w) times."""
    sampler, epochs = weighted(balance), 40
    drawn = np.stack([sampler.at(epoch, np.arange(len(UNEVEN)))[0] for epoch in range(epochs)])
    counts = np.stack([np.bincount(images, minlength=len(UNEVEN)) for images in drawn])
    shares = np.bincount(UNEVEN) ** float(exponent)
    expected = shares / shares.sum() * drawn.size
    found = np.array([counts[:, label == UNEVEN].sum() for label in range(4)])
    assert chisquare(found, expected).pvalue > 0.01
    weights = expected / epochs / np.bincount(UNEVEN)
    for label, weight in enumerate(weights):
        of_class = counts[:, label == UNEVEN]
        assert set(np.unique(of_class)) <= {int(weight), int(weight) + 1}
        assert chisquare(of_class.sum(0)).pvalue > 1e-4, "all images of a class alike"


def test_a_balance_of_0_has_each_image_once() -> None:
    images, copies = weighted(0).at(3, np.arange(len(UNEVEN)))
    assert sorted(images) == list(range(len(UNEVEN)))
    assert not (copies - copies[0]).any()


def test_a_copy_has_a_draw_of_its_own_in_the_whole_run() -> None:
    pairs = {pair for epoch in range(5) for pair in zip(*weighted(1).at(epoch, np.arange(len(UNEVEN))), strict=True)}
    assert len(pairs) == 5 * len(UNEVEN)


def test_copies_are_spread_over_the_epoch() -> None:
    images, _ = weighted(1).at(0, np.arange(len(UNEVEN)))
    places = np.flatnonzero(UNEVEN[images] == 3) / len(UNEVEN)
    assert abs(len(places) - len(UNEVEN) / 4) <= 10  # each of the ten comes 35 or 36 times
    assert abs(places.mean() - 0.5) < 0.06


@pytest.mark.parametrize("balance", [0.5, 1])
def test_weighted_images_of_a_step_do_not_depend_on_the_processes(balance: float) -> None:
    for batch in (0, 5, 200):
        alone = weighted(balance)
        for world_size in (2, 3):
            ranks = [weighted(balance, world_size, rank) for rank in range(world_size)]
            for read in (Sampler.indices, Sampler.draws):
                assert np.concatenate([read(rank, batch) for rank in ranks]).tolist() == read(alone, batch).tolist()


def test_weighted_order_is_frozen() -> None:
    """Checkpoints rely on it: a change must raise `checkpoint.FORMAT`."""
    frozen = [1352, 1172, 1398, 1102, 1374, 1401, 1314, 283, 1192, 698, 1406, 1408]
    assert weighted(1).indices(0).tolist() == frozen
    assert weighted(1).draws(0).tolist() == [0, 0, 1, 0, 1, 14, 0, 0, 0, 0, 22, 29]
    assert weighted(1, seed=1).indices(0).tolist() != frozen


def test_weights_that_are_all_0_are_refused() -> None:
    manifest = dataclasses.replace(synthetic(8, 2), weights=np.zeros(8))
    with pytest.raises(UserError, match="all training images that are left have the weight 0"):
        create_sampler(resolved(batch_size=2), manifest, DistEnv.single(torch.device("cpu")))
