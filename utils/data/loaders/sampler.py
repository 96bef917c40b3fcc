"""Which images a rank reads at each batch: a pure function of (seed, epoch, batch).

There is no state to save. A resumed run, another rank and another loader compute the same order, and the images of one
optimizer step do not depend on the number of processes.
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import ResolvedConfig
from utils.seed import Stream, seed_sequence
from utils.text import count


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Order of the training images.

    Every epoch is a new permutation of all images, cut into steps of `world_size * batches_per_step * batch_size`.
    The remainder, less than one step, is dropped; each epoch drops other images. So every rank has the same number of
    batches, and no image is seen twice in an epoch.

    With `repeats` each image of the permutation comes as many times in a row, in an epoch of the same length. So an
    epoch sees one of `repeats` images. The copies go to the ranks in turn, as timm's RepeatAugSampler deals them.

    Attributes:
        num_images: images in the split.
        batch_size: images per process and batch.
        batches_per_step: batches per optimizer step (gradient accumulation).
        rank, world_size: this process among all.
        seed: the run's seed.
        repeats: times that an image comes in an epoch; 1 or more.
    """

    num_images: int
    batch_size: int
    batches_per_step: int = 1
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    repeats: int = 1

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
        order = permutation(self.num_images, self.seed, self.epoch_of(batch))
        return order[self._positions(batch) // self.repeats]

    def copies(self, batch: int) -> NDArray[np.int64]:
        """Which copy of its image each of `indices(batch)` is, from 0: int64 (batch_size,)."""
        return self._positions(batch) % self.repeats

    def _positions(self, batch: int) -> NDArray[np.int64]:
        start = batch % self.batches_per_epoch * self.world_size * self.batch_size
        within = np.arange(self.batch_size, dtype=np.int64)
        if self.repeats == 1:
            return start + self.rank * self.batch_size + within
        return start + self.rank + self.world_size * within


@functools.lru_cache(maxsize=2)  # a loader that reads ahead needs the next epoch's before this one is done
def permutation(num_images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Permutation of `range(num_images)` for one epoch: int64 (num_images,), read-only.

    NumPy promises that RandomState's stream never changes (NEP 19), so a checkpoint outlives NumPy's releases.
    """
    random = np.random.RandomState(np.random.MT19937(seed_sequence(Stream.ORDER, seed, epoch)))
    order = random.permutation(num_images).astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def shard(num_images: int, rank: int, world_size: int) -> NDArray[np.int64]:
    """Validation images of one rank, in order: every image on exactly one rank, no rank more than one ahead."""
    return np.arange(rank, num_images, world_size, dtype=np.int64)


def create_sampler(config: ResolvedConfig, num_images: int, env: DistEnv) -> Sampler:
    """The order of the training images.

    Raises:
        UserError: fewer images than processes, or than one global batch.
    """
    sampler = Sampler(
        num_images,
        config.batch_size,
        config.grad_accum_steps,
        env.rank,
        env.world_size,
        config.seed,
        config.repeated_augmentation,
    )
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
