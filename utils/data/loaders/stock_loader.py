"""DALI's own file reader and PyTorch iterator, as in NVIDIA's examples, with equal steps and exact counts.

DALI shuffles and shards the files here, not `Sampler`. docs/internals/decisions/0020-dali-stock-loader.md compares the
two.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

from utils.data.dali import (
    dali_device,
    on_device,
    pipeline_options,
    remove_generated_files,
    train_pipeline_options,
)
from utils.data.formats.folder import FileTable
from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import Sampler
from utils.data.reading.decode_pool import identify_bad_file
from utils.data.reading.reader import DONT_USE_MMAP, note_images
from utils.distributed.group import DistEnv
from utils.errors import UserError, escape_control_chars
from utils.options.resolved import ResolvedConfig
from utils.seed import Stream, derive_seed
from utils.text import count

NOTED = 10_000  # images that a search after a crash can look at
READER = "Reader"  # name of the reader in the graph, by which the iterator learns the length of an epoch


def read_files(reader: dict[str, Any], device: str) -> tuple[Any, Any]:
    """Graph op: encoded images of a shard, and their targets, int64 (N, 1), on `device`.

    `reader` holds the files, their order and the shard: the options of DALI's `readers.file`.
    """
    jpegs, labels = fn.readers.file(name=READER, dont_use_mmap=DONT_USE_MMAP, pad_last_batch=True, **reader)
    return jpegs, on_device(fn.cast(labels, dtype=types.INT64), device)


class StockTrainLoader:
    """DALI's reader shuffles all files after each epoch, and DALI's iterator counts it; resumes bit for bit.

    The reader pads each rank's shard by repetitions up to the same number of whole batches, so that every epoch begins
    with a batch of its own. The loader uses the first `sampler.batches_per_epoch` of them, which hold no repetition,
    and drops the others.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        manifest: Manifest,
        sampler: Sampler,
        env: DistEnv,
        first_batch: int,
        state: dict[str, Any] | None,
        create_pipeline: Callable[..., Any],
    ) -> None:
        """See `pipelines.create_train_loader`; `create_pipeline` takes the options of the reader.

        Raises:
            UserError: on all ranks: the images are no files in class folders, a name is not UTF-8, or `first_batch` is
                within an epoch and there is no `state`.
        """
        self._sampler, self._next = sampler, first_batch
        # Of the batch that DALI's own count begins at, the start of an epoch: its shuffles follow from the seeds there.
        self._origin = first_batch if state is None else int(state["origin"])
        if self._origin % sampler.batches_per_epoch:
            raise UserError(
                f"--loader stock: cannot begin within an epoch, and step {first_batch // sampler.batches_per_step} is "
                f"not a multiple of {count(sampler.steps_per_epoch, 'step')}; go on without the changes, or with "
                "--loader dali",
                on_all_ranks=True,
            )
        self._identify_bad_file = functools.partial(identify_bad_file, config, manifest, env)
        self._all_images = np.arange(len(manifest))  # in an order that only DALI knows
        note_images(manifest, self._all_images[:NOTED])
        step = self._origin // sampler.batches_per_step
        pipeline = create_pipeline(
            _files_of(config, manifest)
            | {
                "shard_id": env.rank,
                "num_shards": env.world_size,
                "shuffle_after_epoch": True,
                # The same on all ranks: each reads another part of one permutation.
                "shuffle_after_epoch_seed": derive_seed(Stream.ORDER, config.seed, sampler.epoch_of(self._origin)),
            },
            config,
            dali_device(env),
            checkpoint=None if state is None else bytes(state["dali"].numpy()),
            **train_pipeline_options(config, env, derive_seed(Stream.DALI, config.seed, env.rank, 0, step)),
        )
        self._iterator = _iterator(pipeline, LastBatchPolicy.FILL)
        remove_generated_files()

    def __next__(self) -> Batch:
        with self._identify_bad_file([self._all_images]):
            batch = _batch(next(self._iterator))
            self._next += 1
            if self._next % self._sampler.batches_per_epoch == 0:
                self._end_epoch()
        return batch

    def _end_epoch(self) -> None:
        with contextlib.suppress(StopIteration):  # which also resets the iterator
            while True:
                next(self._iterator)

    def state(self) -> dict[str, Any]:
        # As a tensor, because weights_only loading does not accept bytes everywhere.
        (blob,) = self._iterator.checkpoints()
        return {"dali": torch.frombuffer(bytearray(blob), dtype=torch.uint8), "origin": self._origin}

    def close(self) -> None:
        del self._iterator


class StockValLoader:
    """This rank's shard of the validation images, in order: every image once over all ranks."""

    def __init__(
        self, config: ResolvedConfig, manifest: Manifest, env: DistEnv, create_pipeline: Callable[..., Any]
    ) -> None:
        """`create_pipeline` takes the options of the reader.

        Raises:
            UserError: on all ranks: the images are no files in class folders, or a name is not UTF-8.
        """
        files = _files_of(config, manifest)
        num_shards = min(env.world_size, len(manifest))  # DALI refuses a shard without images
        self._indices = stock_shard(len(manifest), env.rank, env.world_size)
        self._identify_bad_file = functools.partial(identify_bad_file, config, manifest, env)
        if len(self._indices):
            note_images(manifest, self._indices[:NOTED])
            pipeline = create_pipeline(
                files | {"shard_id": env.rank, "num_shards": num_shards, "stick_to_shard": True},
                config,
                dali_device(env),
                **pipeline_options(config, env),
            )
            self._iterator = _iterator(pipeline, LastBatchPolicy.PARTIAL)

    def __iter__(self) -> Iterator[Batch]:
        if not len(self._indices):
            return
        batches = iter(self._iterator)  # resets it, where the last pass ended with its last batch
        while True:
            with self._identify_bad_file([self._indices]):
                outputs = next(batches, None)
            if outputs is None:
                return
            batch = _batch(outputs)
            if len(batch.targets):  # a shard that is smaller than others can end with a batch of padding alone
                yield batch


def stock_shard(num_images: int, rank: int, world_size: int) -> NDArray[np.int64]:
    """Validation images of one rank, in order, as DALI's reader divides them."""
    num_shards = min(world_size, num_images)
    start, end = (num_images * shard // num_shards for shard in (rank, rank + 1))
    return np.arange(start, min(end, num_images), dtype=np.int64)


def _iterator(pipeline: Any, policy: LastBatchPolicy) -> Any:
    return DALIClassificationIterator(
        pipeline,
        reader_name=READER,
        last_batch_policy=policy,
        auto_reset=True,
        prepare_first_batch=False,  # a bad file is found in `__next__`
    )


def _batch(outputs: Any) -> Batch:
    (output,) = outputs  # of one pipeline
    return Batch(output["data"].permute(0, 3, 1, 2), output["label"].squeeze(-1))


def _files_of(config: ResolvedConfig, manifest: Manifest) -> dict[str, Any]:
    """Paths and labels of the images, in the manifest's order, as DALI's reader takes them."""
    table = manifest.table()
    if not isinstance(table, FileTable):
        raise UserError(
            f"--data-dir {config.data_dir}: --loader stock reads images in class folders only; give --loader dali",
            on_all_ranks=True,
        )
    paths = table.locations(np.arange(len(manifest))).tolist()
    try:
        files = [path.decode() for path in paths]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{escape_control_chars(error.object.decode(errors='backslashreplace'))}: not UTF-8, which --loader stock "
            "needs in names of files; rename it, or give --loader dali",
            on_all_ranks=True,
        ) from None
    return {"files": files, "labels": manifest.labels.tolist()}
