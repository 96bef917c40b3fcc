"""DALI reads, decodes and augments: the loaders of `--loader dali`, for training and validation."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from utils.data.augmentation.user_code import explain_failure
from utils.data.dali import (
    NUM_PIPELINES,
    dali_device,
    pipeline_options,
    remove_generated_files,
    run_pipeline,
    train_pipeline_options,
)
from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.loaders.cache import CACHED, ImageCache
from utils.data.loaders.sampler import Sampler, shard
from utils.data.reading.decode_pool import identify_bad_file
from utils.data.reading.reader import BatchReader
from utils.distributed.group import DistEnv
from utils.options.resolved import ResolvedConfig
from utils.seed import Stream, derive_seed


class DaliTrainLoader:
    """DALI reads, decodes and augments; resumes bit for bit.

    Two pipelines with half of the threads each make every other batch: one fills the decoders while the other waits
    for the last images of its batch (docs/internals/decisions/0007).
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
        # DALI counts batches from the origin of its own checkpoints, which need not be the start of the run.
        self._origin = first_batch if state is None else int(state["origin"])
        self._position = first_batch - self._origin  # batches since the origin
        self._device = env.device
        self._identify_bad_file = functools.partial(identify_bad_file, config, manifest, env)
        self._explain_failure = functools.partial(explain_failure, config, env.rank)
        self._sampler, self._graph = sampler, create_pipeline
        self._cache = ImageCache(config, manifest, env) if config.cache in CACHED else None
        blobs = [None] * NUM_PIPELINES if state is None else state["dali"]
        self._pipelines = [
            self._create_pipeline(config, manifest, sampler, env, number, blob) for number, blob in enumerate(blobs)
        ]

    def _create_pipeline(
        self,
        config: ResolvedConfig,
        manifest: Manifest,
        sampler: Sampler,
        env: DistEnv,
        number: int,
        blob: Tensor | None,
    ) -> Any:
        """Pipeline of batches `number`, `number + NUM_PIPELINES`, ... since the origin; `blob` is its checkpoint."""
        workers, prefetch = (config.workers + number) // NUM_PIPELINES, -(-config.prefetch // NUM_PIPELINES)
        config = dataclasses.replace(config, workers=max(1, workers), prefetch=prefetch)
        first = self._origin + number
        iterations = -((number - self._position) // NUM_PIPELINES)  # that this pipeline has already run
        # The step is not 0 in a run that continues in another layout: the draws of its start must not be repeated.
        seed = derive_seed(Stream.DALI, config.seed, env.rank, number, self._origin // sampler.batches_per_step)

        def indices(iteration: int) -> NDArray[np.int64]:
            return sampler.indices(first + iteration * NUM_PIPELINES)

        source: Callable[[int], Any]
        if self._cache is None:
            reader = BatchReader(
                manifest,
                indices,
                device=dali_device(env),
                batch_size=config.batch_size,
                threads=config.workers,
                prefetch=config.prefetch,
                first=iterations,
            )
            source = reader.read
        else:
            cache = self._cache  # a pipeline that refers to this loader would live until a garbage collection
            source = lambda iteration: cache[indices(iteration)]  # noqa: E731
        pipeline = self._graph(
            lambda info: source(info.iteration),
            config,
            dali_device(env),
            checkpoint=None if blob is None else bytes(blob.numpy()),
            **train_pipeline_options(config, env, seed),
        )
        pipeline.build()
        remove_generated_files()
        return pipeline

    def __next__(self) -> Batch:
        pipeline = self._pipelines[self._position % NUM_PIPELINES]
        upcoming = map(self._sampler.indices, itertools.count(self._origin + self._position))
        with self._explain_failure(), self._identify_bad_file(upcoming):
            batch = run_pipeline(pipeline, self._device)
        self._position += 1
        return batch

    def state(self) -> dict[str, Any]:
        # As tensors, because weights_only loading does not accept bytes everywhere.
        blobs = [torch.frombuffer(bytearray(pipeline.checkpoint()), dtype=torch.uint8) for pipeline in self._pipelines]
        return {"dali": blobs, "origin": self._origin}

    def close(self) -> None:
        del self._pipelines, self._cache


class DaliValLoader:
    """This rank's validation images through DALI."""

    def __init__(
        self, config: ResolvedConfig, manifest: Manifest, env: DistEnv, create_pipeline: Callable[..., Any]
    ) -> None:
        indices = shard(len(manifest), env.rank, env.world_size)
        batches = [indices[at : at + config.batch_size] for at in range(0, len(indices), config.batch_size)]
        self._batches = batches
        self._device = env.device
        self._identify_bad_file = functools.partial(identify_bad_file, config, manifest, env)
        if batches:
            reader = BatchReader(
                manifest,
                lambda position: batches[position % len(batches)],
                device=dali_device(env),
                batch_size=config.batch_size,
                threads=config.workers,
                prefetch=config.prefetch,
            )
            self._pipeline = create_pipeline(
                lambda info: reader.read(info.iteration),  # reads ahead into the next pass
                config,
                dali_device(env),
                **pipeline_options(config, env),
            )
            self._pipeline.build()

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self._batches)):
            with self._identify_bad_file(itertools.islice(self._batches, number, None)):
                batch = run_pipeline(self._pipeline, self._device)
            yield batch
