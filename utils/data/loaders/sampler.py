"""Which images a rank reads at each batch: a pure function of (seed, epoch, batch)."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from utils.data.images.manifest import Manifest
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.resolved import ResolvedConfig
from utils.seed import Stream, seed_sequence
from utils.text import count

_SHARES = 2**20  # of an image of mean weight


@dataclasses.dataclass(frozen=True)
class Sampler(abc.ABC):
    """Which images a rank reads, in which order, and how often in an epoch.

    Another sampler is another class with an `at`, which `create_sampler` chooses. Every loader reads what it says but
    `stock`, where DALI shuffles. What loaders and a resume rely on:

    - `at` follows from its arguments and the attributes, without `rank` and `world_size`: there is no state to save,
      and the images of a step do not depend on the number of processes.
    - An epoch has `num_images` positions, of which an image may have none, one or several. They are cut into steps of
      `global_batch_size`; the rest of less than one step is dropped. So every rank has the same number of batches.
    - An image never comes twice in a run with the same draw: random crops and the like may follow from the two.

    Attributes:
        num_images: images in the split.
        batch_size: images per process and batch.
        batches_per_step: batches per optimizer step (gradient accumulation).
        rank, world_size: this process among all.
        seed: the run's seed.
        in_turn: whether consecutive positions go to the ranks in turn; otherwise each rank has consecutive ones.
    """

    num_images: int
    batch_size: int
    batches_per_step: int = 1
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    in_turn: ClassVar[bool] = False

    @abc.abstractmethod
    def at(self, epoch: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Images and draws at `positions`, int64 (N,) in range(num_images), of an epoch, from 0: int64 (N,) each."""

    @property
    def global_batch_size(self) -> int:
        """Images per optimizer step, over all processes and accumulated batches."""
        return self.batch_size * self.batches_per_step * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch, the same on every rank."""
        return self.num_images // self.global_batch_size

    @property
    def batches_per_epoch(self) -> int:
        """Batches per epoch and process."""
        return self.steps_per_epoch * self.batches_per_step

    def epoch_of(self, batch: int) -> int:
        """Epoch, from 0, of the run's batch number `batch`, from 0."""
        return batch // self.batches_per_epoch

    def indices(self, batch: int) -> NDArray[np.int64]:
        """Images of this rank's batch number `batch` (from 0, counted over the whole run): int64 (batch_size,)."""
        return self.at(self.epoch_of(batch), self._positions(batch))[0]

    def draws(self, batch: int) -> NDArray[np.int64]:
        """Of each of `indices(batch)`, which tells it from the same image elsewhere in the run: int64 (batch_size,)."""
        return self.at(self.epoch_of(batch), self._positions(batch))[1]

    def _positions(self, batch: int) -> NDArray[np.int64]:
        start = batch % self.batches_per_epoch * self.world_size * self.batch_size
        within = np.arange(self.batch_size, dtype=np.int64)
        return start + (self.rank + self.world_size * within if self.in_turn else self.rank * self.batch_size + within)


class RandomSampler(Sampler):
    """Every epoch is a new permutation of all images: none comes twice, and each epoch drops others."""

    def at(self, epoch: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return permutation(self.num_images, self.seed, epoch)[positions], np.full_like(positions, epoch)


@dataclasses.dataclass(frozen=True)
class RepeatedSampler(Sampler):
    """Each image of the permutation comes `repeats` times in a row: an epoch has one of `repeats` images.

    The copies go to the ranks in turn, as timm's RepeatAugSampler deals them (arXiv:1901.09335).
    """

    repeats: int = 1
    in_turn = True

    def at(self, epoch: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        images, copies = np.divmod(positions, self.repeats)
        return permutation(self.num_images, self.seed, epoch)[images], epoch * self.repeats + copies


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WeightedSampler(Sampler):
    """Images come as often as their weights say; an epoch has as many positions as there are images.

    Of weights whose mean is 1, an image of weight w comes floor(w) or ceil(w) times in an epoch, w times in the mean:
    systematic sampling of a permutation, by one number for all images that follows from (seed, epoch). Each copy has a
    draw of its own.

    Attributes:
        weights: float64 (num_images,), 0 or more, one of them above 0.
    """

    weights: NDArray[np.float64]

    @functools.cached_property
    def _shares(self) -> NDArray[np.int64]:
        # Whole numbers, so that the last bit of a power or a sum, which machines may differ in, decides nothing.
        shares: NDArray[np.int64] = np.rint(self.weights / self.weights.mean() * _SHARES).astype(np.int64)
        return shares

    @functools.cached_property
    def _most_copies(self) -> int:
        return int(self._shares.max() * self.num_images // self._shares.sum()) + 2

    @functools.cached_property
    def _epoch(self) -> Callable[[int], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return functools.lru_cache(maxsize=2)(self._draw_epoch)

    def at(self, epoch: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        images, copies = self._epoch(epoch)
        return images[positions], epoch * self._most_copies + copies[positions]

    def _draw_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Image and number of its copy, from 0, at each position of an epoch: int64 (num_images,) each."""
        order = permutation(self.num_images, self.seed, epoch)
        random = random_state(Stream.WEIGHTED_ORDER, self.seed, epoch)
        ends = np.cumsum(self._shares[order])
        ends = ends * (self.num_images / ends[-1])
        ends[-1] = self.num_images
        counts = np.diff(np.floor(ends + random.random_sample()).astype(np.int64), prepend=0)
        copies = np.arange(self.num_images) - np.repeat(np.cumsum(counts) - counts, counts)
        shuffled = random.permutation(self.num_images)
        return np.repeat(order, counts)[shuffled], copies[shuffled]


def image_weights(manifest: Manifest, balance: float) -> NDArray[np.float64] | None:
    """How often each image comes, float64 (num_images,): its own weight x n**-balance, where n is that of its class.

    Of several classes it is that of the rarest.

    n is the sum of the class's own weights, or the number of its images. Where `balance` is 1, classes come equally
    often. None if all images come alike.
    """
    if not balance and manifest.weights is None:
        return None
    own = np.ones(len(manifest)) if manifest.weights is None else manifest.weights
    strata = manifest.strata()
    of_class = np.bincount(strata, weights=own)
    shares = np.power(of_class, -balance, out=np.zeros_like(of_class), where=of_class > 0)
    weights: NDArray[np.float64] = own * shares[strata]
    return weights


@functools.lru_cache(maxsize=2)  # a loader that reads ahead needs the next epoch's before this one is done
def permutation(num_images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Permutation of `range(num_images)` for one epoch: int64 (num_images,), read-only."""
    order = random_state(Stream.ORDER, seed, epoch).permutation(num_images).astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def random_state(stream: Stream, seed: int, epoch: int) -> np.random.RandomState:
    """A generator of one epoch.

    NumPy promises that RandomState's stream never changes (NEP 19), so a checkpoint outlives NumPy's releases.
    """
    return np.random.RandomState(np.random.MT19937(seed_sequence(stream, seed, epoch)))


def shard(num_images: int, rank: int, world_size: int) -> NDArray[np.int64]:
    """Validation images of one rank, in order: every image on exactly one rank, no rank more than one ahead."""
    return np.arange(rank, num_images, world_size, dtype=np.int64)


def create_sampler(config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> Sampler:
    """The order of the training images.

    Raises:
        UserError: fewer images than processes, or than one global batch; or weights that are not used.
    """
    num_images, repeats = len(manifest), config.repeated_augmentation
    layout = (num_images, config.batch_size, config.grad_accum_steps, env.rank, env.world_size, config.seed)
    sampler: Sampler = RandomSampler(*layout)
    if manifest.weights is not None and (repeats > 1 or config.loader == "stock"):
        given = f"--repeated-augmentation {repeats}" if repeats > 1 else "--loader stock"
        raise UserError(
            f"{given} with a column weight in the label file: images come {'equally' if repeats > 1 else 'once'} then; "
            "leave one of them out",
            on_all_ranks=True,
        )
    if repeats > 1:
        sampler = RepeatedSampler(*layout, repeats)
    elif (weights := image_weights(manifest, config.balance)) is not None:
        if not weights.any():
            raise UserError(
                f"--data-dir {config.data_dir}: all training images that are left have the weight 0; give some a "
                "larger one",
                on_all_ranks=True,
            )
        sampler = WeightedSampler(*layout, weights=weights)
    if num_images < env.world_size:
        raise UserError(
            f"--data-dir {config.data_dir}: {count(num_images, 'training image')} for "
            f"{count(env.world_size, 'process')}; "
            f"start at most {num_images}",
            on_all_ranks=True,
        )
    if sampler.steps_per_epoch == 0:
        processes, images = count(env.world_size, "process"), count(config.batch_size, "image")
        accumulated = f" x {config.grad_accum_steps} batches" if config.grad_accum_steps > 1 else ""
        most = num_images // (env.world_size * config.grad_accum_steps)
        remedy = f"give at most {most}; {max(1, most // 10)} makes about ten steps per epoch" if most else "lower it"
        raise UserError(
            f"--batch-size {config.batch_size}: {processes} x {images}{accumulated} is a global "
            f"batch of {sampler.global_batch_size}, more than the {count(num_images, 'training image')}; {remedy}",
            on_all_ranks=True,
        )
    return sampler
