"""Training images that are decoded once and cached in memory, and how much memory they need."""

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import nvidia.dali as dali
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.types import BatchInfo
from PIL import Image
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from tqdm import tqdm

from utils.data.dali import dali_device, decoder_options, on_device, pipeline_options, pipeline_outputs
from utils.data.images.manifest import Manifest
from utils.data.reading.decode_pool import identify_bad_file
from utils.data.reading.reader import BatchReader, encoded_images, open_image
from utils.distributed.group import DistEnv
from utils.options.resolved import ResolvedConfig

CACHED = ("gpu", "host")  # values of --cache with which images are decoded once
CHUNK = 2**28  # bytes; torch rounds pinned memory up to a power of two


def decoded_bytes(manifest: Manifest, sample: int = 256) -> int:
    """Bytes that all images of `manifest` need as uint8 RGB, estimated from `sample` of them; 0 for synthetic data."""
    return round(len(manifest) * mean_decoded_bytes(manifest, sample))


def mean_decoded_bytes(manifest: Manifest, sample: int = 256) -> float:
    """Bytes of one image as uint8 RGB, the mean of `sample` images of `manifest`; 0 for synthetic data."""
    if manifest.images is None:
        return 0.0
    chosen = random.Random(0).sample(range(len(manifest)), min(sample, len(manifest)))
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a size is read, nothing is decoded
        for index in chosen:
            # Bad files are not counted; the loader that decodes them reports them.
            with (
                contextlib.suppress(OSError, ValueError, Image.DecompressionBombError),
                open_image(manifest.record(index)) as file,
                Image.open(file) as image,
            ):
                sizes.append(3 * image.width * image.height)
    return sum(sizes) / len(sizes) if sizes else 0.0


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def decode_pipeline(source: Callable[[BatchInfo], Any], hw_decoder_load: float, device: str) -> Any:
    """Whole images, uint8 HWC of their own sizes, and their targets."""
    jpegs, targets = encoded_images(source)
    return fn.decoders.image(jpegs, **decoder_options(hw_decoder_load, device)), targets


def decoded_batches(config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> Iterator[Any]:
    """All images once, in the order of the manifest: DALI's lists of at most `batch_size`, uint8 HWC, on `env.device`.

    Raises:
        BadFile: an image cannot be decoded.
    """
    batches = [
        np.arange(at, min(at + config.batch_size, len(manifest))) for at in range(0, len(manifest), config.batch_size)
    ]
    reader = BatchReader(
        manifest,
        lambda position: batches[position % len(batches)],
        device=dali_device(env),
        batch_size=config.batch_size,
        threads=config.workers,
        prefetch=config.prefetch,
    )
    pipeline = decode_pipeline(
        lambda info: reader.read(info.iteration),
        config.hw_decoder_load,
        dali_device(env),
        **pipeline_options(config, env),
    )
    pipeline.build()
    bar = tqdm(batches, "decoding", unit="batch", leave=False, disable=None if env.is_main else True)
    for number, _ in enumerate(bar):
        with identify_bad_file(config, manifest, env, itertools.islice(batches, number, None)):
            decoded = pipeline_outputs(pipeline, env.device)[0]
        yield decoded


class ImageCache:
    """All training images, decoded once, in the memory that `config.cache` names.

    They are decoded in the order of the manifest, so that their pixels do not depend on where a run was interrupted.
    `cache[indices]` gives a list of DALI tensors, uint8 HWC, and their targets, int64 (N, 1).

    Args:
        config: resolved; `cache` is gpu or host.
        manifest: the images.

    Raises:
        BadFile: an image cannot be decoded.
    """

    def __init__(self, config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
        self._labels = manifest.labels[:, None]
        self._device = env.device
        self._on_gpu = config.cache == "gpu"
        self._chunks: list[Tensor] = []
        self._free = torch.empty(0, dtype=torch.uint8)  # the unused part of the newest chunk
        self._images: list[Any] = []  # DALI's views of the chunks
        for decoded in decoded_batches(config, manifest, env):
            self._append(decoded)
        if env.device.type == "cuda":
            torch.cuda.synchronize(env.device)

    def _append(self, decoded: Any) -> None:
        on_gpu = self._on_gpu
        wrap = dali.tensors.TensorGPU if on_gpu else dali.tensors.TensorCPU
        for index in range(len(decoded)):
            image = from_dlpack(decoded[index])
            if image.numel() > len(self._free):
                self._free = torch.empty(
                    max(CHUNK, image.numel()),
                    dtype=torch.uint8,
                    device=self._device if on_gpu else "cpu",
                    pin_memory=not on_gpu and self._device.type == "cuda",
                )
                self._chunks.append(self._free)
            cached, self._free = self._free[: image.numel()].view(image.shape), self._free[image.numel() :]
            cached.copy_(image)
            self._images.append(wrap(cached if on_gpu else cached.numpy(), "HWC"))

    def __getitem__(self, indices: NDArray[np.int64]) -> tuple[list[Any], NDArray[np.int64]]:
        return [self._images[index] for index in indices], self._labels[indices]


def cached_images(source: Callable[[BatchInfo], Any], cache: str, device: str) -> tuple[Any, Any]:
    """Graph op: decoded images on `device` and targets on the CPU, as `ImageCache` gives them from `cache`."""
    memory = "gpu" if cache == "gpu" else "cpu"
    images = fn.external_source(
        source=lambda info: source(info)[0],
        batch=True,
        batch_info=True,
        no_copy=True,
        device=memory,
        dtype=types.UINT8,
        ndim=3,
        layout="HWC",
    )
    targets = fn.external_source(
        source=lambda info: source(info)[1], batch=True, batch_info=True, dtype=types.INT64, ndim=1
    )
    return on_device(images, device) if memory == "cpu" else images, targets
