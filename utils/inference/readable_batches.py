"""Batches of the validation loader that survive images which cannot be read, with the same pixels for all others."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import pipelines
from utils.data.dali import dali_device
from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.reading.decode_pool import decode_files
from utils.data.reading.decoding import decoder_of
from utils.data.reading.reader import READ_AHEAD
from utils.distributed.group import DistEnv
from utils.options.resolved import ResolvedConfig

Indices = NDArray[np.int64]


class ReadableBatches:
    """Batches of given images; a loader that fails is opened again without the images that it failed on.

    Another image of the batch takes the place of a bad one. So the batches keep their sizes, and what a network
    computes of an image does not depend on bad ones beside it.

    Args:
        env: this process, which reads all `batches`.
        batches: images of each batch, int64 (n,); each but the last has `config.batch_size`.

    Attributes:
        bad: image -> why it cannot be read, as far as that is known: of all batches that were returned.
    """

    def __init__(self, config: ResolvedConfig, manifest: Manifest, env: DistEnv, batches: Sequence[Indices]) -> None:
        self._config, self._manifest, self._batches = config, manifest, batches
        self._env = dataclasses.replace(env, rank=0, world_size=1)  # the loaders do not divide these images
        self._decode = decoder_of(config.loader, dali_device(env)).decode
        self.bad: dict[int, str] = {}
        if manifest.bad:  # by their listing
            for index in np.concatenate([np.empty(0, np.int64), *batches]).tolist():
                if (reason := manifest.bad.get(manifest.record(index).name)) is not None:
                    self.bad[index] = reason

    def __iter__(self) -> Iterator[tuple[Indices, Tensor | None]]:
        """Images of each batch, and their pixels, uint8 (n, 3, H, W); None for a batch of bad images only.

        The pixels of a bad image are those of another one.

        Raises:
            Exception: the loader's own, if no image explains it.
        """
        at = 0
        while at < len(self._batches):
            filled = [self._fill(batch) for batch in self._batches[at:]]
            try:
                loaded = iter(self._open([batch for batch in filled if batch is not None]))
                for batch in filled:
                    images = None if batch is None else next(loaded).images
                    at += 1
                    yield self._batches[at - 1], images
            except Exception as error:
                if not self._find_bad(at):
                    raise error

    def _open(self, batches: Sequence[Indices]) -> Iterator[Batch]:
        if batches:
            manifest = self._manifest.select(np.concatenate(batches))
            yield from pipelines.create_val_loader(self._config, manifest, self._env)

    def _fill(self, batch: Indices) -> Indices | None:
        """The batch with a good image in the place of each bad one; None if there is none."""
        is_bad = np.array([index in self.bad for index in batch.tolist()])
        return None if is_bad.all() else np.where(is_bad, batch[np.argmin(is_bad)], batch)

    def _find_bad(self, at: int) -> bool:
        """Add the bad images among those that a loader may have read when batch `at` failed; False if there is none.

        The loaders do not say which image they failed on. They read ahead, so that it need not be in this batch.
        """
        ahead = self._batches[at : at + 2 + READ_AHEAD + self._config.prefetch]
        indices = [index for index in np.concatenate(ahead).tolist() if index not in self.bad]
        records = [self._manifest.record(index) for index in indices]
        found: dict[int, str] = {}
        with contextlib.closing(decode_files(records, self._decode, self._config.workers)) as reports:
            for position, report in reports:
                if report.bad is not None:
                    found[indices[position]] = report.bad
        if not found and (filled := self._fill(self._batches[at])) is not None:
            suspects = np.unique(filled)
            found = self._find_rejected(suspects)
            if len(found) == len(suspects) > 1:  # whatever fails on every image is not their fault
                return False
        self.bad |= found
        return bool(found)

    def _find_rejected(self, indices: Indices) -> dict[int, str]:
        """The images that the decoder reads but the loader does not: ever smaller parts of a batch are loaded."""
        try:
            for _ in self._open([indices]):
                pass
            return {}
        except Exception:
            if len(indices) == 1:
                return {int(indices[0]): f"can be decoded, but --loader {self._config.loader} fails on it"}
        middle = len(indices) // 2
        return self._find_rejected(indices[:middle]) | self._find_rejected(indices[middle:])
