"""Batches from the device's memory, where images stay: `--cache gpu`.

    utils.data.augmentation.crop_draws      the crop and the flip of each training image, from (seed, epoch, image)
    utils.data.augmentation.crop_resize     a batch of them from the images, by one kernel

DALI decodes the training images once, before the first batch. It has no part in the batches. Validation batches are the
same in every pass, so that those of DALI's first pass stay.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from utils.data.augmentation.crop_draws import draw_crops
from utils.data.augmentation.crop_resize import resize_crops
from utils.data.dali import release_memory
from utils.data.images.batch import Batch, ValLoader
from utils.data.images.manifest import Manifest
from utils.data.loaders.cache import decoded_batches, decoded_bytes
from utils.data.loaders.sampler import Sampler, shard
from utils.distributed.group import DistEnv
from utils.distributed.machine import free_memory
from utils.errors import UserError
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import sides_of

# Images that are decoded at once. Not --batch-size: the batch decides which of DALI's decoders takes an image on a GPU,
# and the pixels must not depend on the number of processes.
DECODED_AT_ONCE = 128
MARGIN = 1.05  # of the memory over its estimate, which is that of a sample
VAL_SHARE = 1 / 4  # of the memory that is free at the first evaluation, which validation batches may take
NO_MEMORY = ("CUDA allocation failed", "Can't allocate")  # in errors of DALI


class DecodedImages:
    """All images of a manifest, decoded, on the device of `env`.

    Attributes:
        pixels: uint8 (P, 3), RGB, one image after the other, row by row; the end may be unused.
        starts: int64 (num_images,), the first pixel of each image.
        heights: int64 (num_images,), rows.
        widths: int64 (num_images,), columns.

    Raises:
        BadFile: an image cannot be decoded.
        UserError: they do not fit into the memory of the GPU.
    """

    def __init__(self, config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
        self._device = env.device
        few_at_once = dataclasses.replace(config, batch_size=DECODED_AT_ONCE, prefetch=2)
        try:
            self.pixels = self._allocate(round(MARGIN * decoded_bytes(manifest)) // 3)
            self.heights, self.widths = self._fill(decoded_batches(few_at_once, manifest, env))
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in NO_MEMORY):
                raise
            raise UserError(
                f"--cache {config.cache}: the GPU's memory ran out while the images were decoded into it; use --cache "
                "host, or none"
            ) from error
        self.starts = np.concatenate([[0], np.cumsum(self.heights * self.widths)[:-1]])
        release_memory()

    def _fill(self, batches: Iterator[Any]) -> NDArray[np.int64]:
        """Copy all images into `pixels`; returns their heights and widths, int64 (2, num_images)."""
        shapes: list[tuple[int, ...]] = []
        used = 0
        for decoded in batches:
            images = [from_dlpack(decoded[index]) for index in range(len(decoded))]
            shapes += [tuple(image.shape[:2]) for image in images]
            end = used + sum(image.numel() for image in images) // 3
            self._reserve(used, end)
            torch.cat([image.view(-1, 3) for image in images], out=self.pixels[used:end])
            used = end
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # before DALI gives its buffers back
        return np.array(shapes, dtype=np.int64).T

    def _allocate(self, pixels: int) -> Tensor:
        return torch.empty((pixels, 3), dtype=torch.uint8, device=self._device)

    def _reserve(self, used: int, needed: int) -> None:
        """Make room for `needed` pixels and keep the first `used`."""
        if needed > len(self.pixels):
            larger = self._allocate(round(MARGIN * needed))
            larger[:used] = self.pixels[:used]
            self.pixels = larger


class MemoryTrainLoader:
    """Batches of `DecodedImages`; a resume, and one on another number of processes, are exact without a state."""

    def __init__(
        self,
        config: ResolvedConfig,
        images: DecodedImages,
        manifest: Manifest,
        sampler: Sampler,
        env: DistEnv,
        first_batch: int,
    ) -> None:
        """See `pipelines.create_train_loader`; `images` are those of the manifest."""
        self._config, self._labels, self._sampler, self._device = config, manifest.labels, sampler, env.device
        self._next = first_batch
        self._images = images

    def __next__(self) -> Batch:
        config, images = self._config, self._images
        indices = self._sampler.indices(self._next)
        heights, strides = images.heights[indices], images.widths[indices]
        draws = self._sampler.draws(self._next)
        scale = config.crop_scale if config.train_crop == "random" else None
        turns = config.hflip, config.vflip, config.rot90
        crops = draw_crops(config.seed, draws, indices, heights, strides, scale, *turns)
        starts = images.starts[indices] + crops.tops * strides + crops.lefts
        table = torch.from_numpy(
            np.stack([starts, strides, crops.heights, crops.widths, crops.turns, self._labels[indices]])
        )
        if self._device.type == "cuda":
            table = table.pin_memory().to(self._device, non_blocking=True)  # one copy, which the host does not wait for
        self._next += 1
        return Batch(resize_crops(images.pixels, table[:5], config.image_size), table[5])

    def state(self) -> dict[str, Any]:
        return {}  # the order and every draw follow from the position

    def close(self) -> None:
        del self._images


class MemoryValLoader:
    """The batches of another loader, which stay on the device after the first whole pass, if they fit.

    Args:
        loader: of this rank's validation images.
        config, manifest, env: with which it was opened.
    """

    def __init__(self, loader: ValLoader, config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
        self._loader: ValLoader | None = loader
        self._batches: list[Batch] = []
        images = len(shard(len(manifest), env.rank, env.world_size))
        self._num_batches = -(-images // config.batch_size)
        self._size = images * 3 * math.prod(sides_of(config.val_image_size))  # bytes
        self._device = env.device

    def __iter__(self) -> Iterator[Batch]:
        if len(self._batches) == self._num_batches:
            if self._loader is not None:
                self._loader = None
                release_memory()
            yield from self._batches
            return
        assert self._loader is not None
        on_cuda = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if on_cuda else free_memory()
        stays = self._size <= VAL_SHARE * free
        batches = []
        for batch in self._loader:
            if stays:  # a copy: DALI's own memory goes back
                batches.append(Batch(batch.images.clone(), batch.targets.clone()))
            if len(batches) == self._num_batches:  # here, as nothing is asked for after the last batch
                self._batches = batches
            yield batch
