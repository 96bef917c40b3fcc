"""DALI Proxy: torch's DataLoader workers request the images, a DALI server reads, decodes and augments them."""

import itertools
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.utils.data
from nvidia.dali.plugin.pytorch.experimental import proxy
from torch import Tensor

from utils.data.augmentation.user_code import explain_failure
from utils.data.dali import dali_device, remove_generated_files, train_pipeline_options
from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import Sampler
from utils.data.loaders.workers import BatchSampler, label_tensor, shutdown_workers, worker_options
from utils.data.reading.decode_pool import identify_bad_file
from utils.data.reading.reader import note_images, request_of
from utils.data.reading.shard_reader import ShardFiles
from utils.distributed.group import DistEnv
from utils.distributed.process_pool import safe_fork
from utils.options.resolved import ResolvedConfig
from utils.seed import Stream, derive_seed


class _ProxyImages(torch.utils.data.Dataset[tuple[Any, Tensor]]):
    """Requests for images, handed to the DALI server by each worker, and labels: int64 ()."""

    def __init__(self, manifest: Manifest, proxy: Any, device: str) -> None:
        self.manifest, self.proxy, self.shards, self.device = manifest, proxy, ShardFiles(), device

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, Tensor]:
        index, _ = key
        return self.proxy(request_of(self.manifest.record(index), self.shards, self.device)), label_tensor(
            self.manifest, index
        )


class _Noted:
    """The batches of `order`, which are noted before they are requested."""

    def __init__(self, order: BatchSampler, manifest: Manifest) -> None:
        self._order, self._manifest = order, manifest

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self._order:
            note_images(self._manifest, np.array([index for index, _ in batch], dtype=np.int64))
            yield batch


class ProxyTrainLoader:
    """DALI as a server behind torch's DataLoader.

    A server cannot be restored, so each epoch has a new one, with a seed of its own. A resume at an epoch's boundary is
    exact with `--deterministic`, which also fixes the order in which the server takes batches. A resume within an epoch
    gives the same images with other random draws.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        manifest: Manifest,
        sampler: Sampler,
        env: DistEnv,
        first_batch: int,
        create_pipeline: Callable[..., Any],
    ) -> None:
        self._create_pipeline = create_pipeline
        self._config, self._manifest, self._sampler, self._env = config, manifest, sampler, env
        self._stopping = ThreadPoolExecutor(1)  # a server takes up to 5 s to stop; the next epoch does not wait for it
        self._batches = self._stream(first_batch)
        self._next = first_batch

    def __next__(self) -> Batch:
        upcoming = map(self._sampler.indices, itertools.count(self._next))
        explained = explain_failure(self._config, self._env.rank)
        with explained, identify_bad_file(self._config, self._manifest, self._env, upcoming):
            batch = next(self._batches)
        self._next += 1
        return batch

    def _stream(self, batch: int) -> Generator[Batch, None, None]:
        while True:
            epoch = self._sampler.epoch_of(batch)
            last = (epoch + 1) * self._sampler.batches_per_epoch
            pipeline = self._epoch_pipeline(epoch, batch - epoch * self._sampler.batches_per_epoch)
            server = proxy.DALIServer(pipeline, deterministic=self._config.deterministic)
            try:
                yield from self._epoch(server, BatchSampler(self._sampler, batch, last))
            finally:
                self._stopping.submit(server.stop_thread)
            batch = last

    def _epoch_pipeline(self, epoch: int, batch: int) -> Any:
        seed = derive_seed(Stream.PROXY, self._config.seed, self._env.rank, epoch, batch)
        options = train_pipeline_options(self._config, self._env, seed)
        pipeline = self._create_pipeline(self._config, self._manifest, dali_device(self._env), **options)
        remove_generated_files()
        return pipeline

    def _epoch(self, server: Any, order: BatchSampler) -> Iterator[Batch]:
        loader = proxy.DataLoader(
            server,
            _ProxyImages(self._manifest, server.proxy, dali_device(self._env)),
            batch_sampler=_Noted(order, self._manifest),
            **(worker_options(self._config, self._env) | {"pin_memory": False}),  # there is no image to pin
        )
        with safe_fork():
            batches = iter(loader)
        server.start_thread()  # after the fork: the workers must not inherit a running thread
        try:
            for images, targets in batches:
                yield Batch(images.permute(0, 3, 1, 2), targets.to(self._env.device, non_blocking=True))
        finally:
            shutdown_workers(batches)

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._batches.close()
        self._stopping.shutdown()
