"""Folder of images -> iterable of Batch(images, targets). DALI is spoken only here and in utils/policies.py.

Every loader reads the images that `Sampler` names, so all of them see the same order, on any number of ranks, and
can start at any batch of a run. What differs is who decodes: DALI (`dali`), DALI behind torch's DataLoader workers
(`proxy`), Pillow and torchvision in those workers (`torch`), or nobody (`synthetic`).

    train = create_train_loader(config, manifest, sampler, env, first_batch, state)
    batch = next(train)                 # endless; train.state() continues after this batch, bit for bit
    for batch in create_val_loader(config, manifest, env): ...   # every image once over all ranks
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import nvidia.dali as dali
import PIL
import torch
import torch.utils.data
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.plugin.pytorch.experimental import proxy
from nvidia.dali.types import BatchInfo
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torchvision.transforms import v2
from tqdm import tqdm

from utils.config import TrainConfig
from utils.dataset import Manifest
from utils.distributed import DistEnv
from utils.errors import BadFile
from utils.fork import safe_fork
from utils.inspection import Decoder, Picture, Undecodable, inspect
from utils.jpeg import END, has_end
from utils.leave import heed_end_workers
from utils.policies import apply_policy, torchvision_policy
from utils.sampler import Sampler, shard
from utils.seed import Stream, derive_seed, seed_sequence
from utils.stop import StopRequest

DALI_VERSION: str = dali.__version__
RATIO = (3 / 4, 4 / 3)  # aspect of a random crop, torchvision's and Inception's (arXiv:1409.4842)
READ_THREADS = 4  # at least, of each reader; they mostly wait for the disk
KEPT = ("gpu", "host")  # values of --cache with which images are decoded once
CHUNK = 2**28  # bytes; torch rounds pinned memory up to a power of two
CPU_ONLY_DEVICE = -99999  # NVIMGCODEC_DEVICE_CPU_ONLY: CUDA is not even looked for
BLAME_SECONDS = 5.0  # for finding the file that a loader failed on
READ_AHEAD = 2  # batches of files, besides those that are being decoded
TURNS = 2  # pipelines that take turns at the training batches


class Batch(NamedTuple):
    """One batch on the training device.

    Attributes:
        images: uint8 (N, 3, H, W), RGB, in channels_last memory.
        targets: int64 (N,).
    """

    images: Tensor
    targets: Tensor


class TrainLoader(Protocol):
    """An endless stream of training batches."""

    def __next__(self) -> Batch:
        """The next batch, always `batch_size` images."""

    def state(self) -> dict[str, Any]:
        """What continues the stream after the last batch that was handed out."""

    def close(self) -> None:
        """End worker processes and threads."""


class ValLoader(Protocol):
    """This rank's share of the validation images; each `iter()` is one whole pass."""

    def __iter__(self) -> Iterator[Batch]:
        """Batches of at most `batch_size` images; none at all on a rank without images."""


def create_train_loader(
    config: TrainConfig,
    manifest: Manifest,
    sampler: Sampler,
    env: DistEnv,
    first_batch: int = 0,
    state: dict[str, Any] | None = None,
) -> TrainLoader:
    """The loader that `config.loader` names, from batch `first_batch` of the run on.

    Args:
        config: resolved, see `resolve`.
        manifest: training split.
        sampler: order of the images.
        env: this process.
        first_batch: batches of the whole run that this rank has taken already.
        state: `TrainLoader.state()` of the checkpoint to continue, for the random draws of the augmentation.
    """
    if config.loader == "synthetic":
        return SyntheticTrainLoader(config, manifest, env)
    if config.loader == "torch":
        return TorchTrainLoader(config, manifest, sampler, env, first_batch)
    if config.loader == "proxy":
        return ProxyTrainLoader(config, manifest, sampler, env, first_batch)
    return DaliTrainLoader(config, manifest, sampler, env, first_batch, state)


def create_val_loader(config: TrainConfig, manifest: Manifest, env: DistEnv) -> ValLoader:
    """Validation loader; `proxy` validates through plain DALI, which is as exact and has nothing to resume."""
    if config.loader == "synthetic":
        return SyntheticValLoader(config, manifest, env)
    if config.loader == "torch":
        return TorchValLoader(config, manifest, env)
    return DaliValLoader(config, manifest, env)


# ---------------------------------------------------------------------------------------------------------------------
# DALI graphs


def _decoder_options(config: TrainConfig, device: str) -> dict[str, Any]:
    return {
        "device": "mixed" if device == "gpu" else "cpu",
        "output_type": types.RGB,
        "hw_decoder_load": config.hw_decoder_load,
    }


def _random_crops(source: Any, config: TrainConfig, device: str) -> Any:
    """uint8 HWC (image_size, image_size, 3): random resized crop of encoded (or cached) images, mirrored at random.

    Mirroring is a resize of the crop from right to left: fn.flip would launch a kernel for every image.
    """
    area, ratio = [config.crop_scale, 1.0], list(RATIO)
    decoder = _decoder_options(config, device)
    mirror = fn.cast(fn.random.coin_flip(probability=config.hflip), dtype=types.FLOAT)
    if config.decode == "fused":
        images = fn.decoders.image_random_crop(source, random_area=area, random_aspect_ratio=ratio, **decoder)
        top, bottom, left, right = (mirror * zero + one for zero, one in ((0, 0), (0, 1), (1, 0), (-1, 1)))
    else:
        images = source if config.cache in KEPT else fn.decoders.image(source, **decoder)
        anchor, shape = fn.random_crop_generator(images.shape()[:2], random_area=area, random_aspect_ratio=ratio)
        start, length = (fn.cast(corner, dtype=types.FLOAT) for corner in (anchor, shape))
        top, bottom = start[0], start[0] + length[0]
        left, right = start[1] + mirror * length[1], start[1] + (1 - mirror) * length[1]
    return fn.resize(
        images,
        size=[config.image_size, config.image_size],
        roi_start=fn.stack(top, left),
        roi_end=fn.stack(bottom, right),
        roi_relative=config.decode == "fused",
        interp_type=types.INTERP_LINEAR,
        antialias=True,
    )


def _train_images(source: Any, config: TrainConfig, device: str) -> Any:
    return apply_policy(_random_crops(source, config, device), config.augment, config.image_size)


def _on_device(targets: Any, device: str) -> Any:
    return targets.gpu() if device == "gpu" else targets


@dali.pipeline_def(exec_dynamic=True, enable_checkpointing=True, enable_conditionals=True)  # type: ignore[untyped-decorator]
def train_pipeline(source: Callable[[BatchInfo], Any], config: TrainConfig, device: str) -> Any:
    """Random crop, flip and auto-augment of the images in `source`: uint8 NHWC images, int64 (N, 1) targets.

    `source` gives encoded files, as `_FileReader`, or decoded images, as `_DecodedImages`, by `config.cache`.
    """
    images, targets = _decoded(source, config, device) if config.cache in KEPT else _encoded(source)
    return _train_images(images, config, device), _on_device(targets, device)


@dali.pipeline_def(exec_dynamic=True, enable_conditionals=True)  # type: ignore[untyped-decorator]
def proxy_pipeline(config: TrainConfig, device: str) -> Any:
    """The images of `train_pipeline`, for a DALIServer that is fed by torch's DataLoader workers."""
    return _train_images(fn.io.file.read(fn.external_source(name="paths", no_copy=True)), config, device)


def _remove_generated_files() -> None:
    """Remove the Python files that DALI has made of conditional pipelines, in the temporary folder.

    DALI removes them only where a process comes to a regular end, and their bytecode never.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file") and module.__spec__ is not None:
            for path in (module.__spec__.origin, module.__spec__.cached):
                if path is not None:
                    with contextlib.suppress(OSError):
                        os.remove(path)


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def val_pipeline(source: Callable[[BatchInfo], Any], config: TrainConfig, device: str) -> Any:
    """Resize of the shorter side and centre crop, in torchvision's exact geometry: uint8 NHWC, int64 (N, 1)."""
    jpegs, targets = _encoded(source)
    images = fn.decoders.image(
        jpegs,
        device="mixed" if device == "gpu" else "cpu",
        output_type=types.RGB,
        jpeg_fancy_upsampling=True,
    )
    # torchvision's Resize truncates the longer side, its CenterCrop rounds half to even; DALI's own do neither.
    shape = images.shape(dtype=types.INT32)
    height, width = shape[0], shape[1]
    shorter = dali.math.min(height, width)
    height, width = config.val_resize * height // shorter, config.val_resize * width // shorter
    images = fn.resize(
        images,
        size=fn.cast(fn.stack(height, width), dtype=types.FLOAT),
        interp_type=types.INTERP_LINEAR,
        antialias=True,
    )
    anchor = fn.stack(_half_to_even(height - config.image_size), _half_to_even(width - config.image_size))
    size = [config.image_size, config.image_size]
    images = fn.slice(images, anchor, size, axis_names="HW", normalized_anchor=False, normalized_shape=False)
    return images, _on_device(targets, device)


def _half_to_even(margin: Any) -> Any:
    half = margin // 2
    return half + (margin & 1 & half)


def _encoded(source: Callable[[BatchInfo], Any]) -> tuple[Any, Any]:
    """Encoded files and targets of a batch, as `_FileReader` gives them."""
    jpegs, targets = fn.external_source(
        source=source,
        num_outputs=2,
        batch=True,
        batch_info=True,
        no_copy=True,
        dtype=[types.UINT8, types.INT64],
        ndim=[1, 1],
    )
    return jpegs, targets


def _decoded(source: Callable[[BatchInfo], Any], config: TrainConfig, device: str) -> tuple[Any, Any]:
    """Decoded images on `device` and targets on the CPU, as `_DecodedImages` gives them."""
    where = "gpu" if config.cache == "gpu" else "cpu"
    images = fn.external_source(
        source=lambda info: source(info)[0],
        batch=True,
        batch_info=True,
        no_copy=True,
        device=where,
        dtype=types.UINT8,
        ndim=3,
        layout="HWC",
    )
    targets = fn.external_source(
        source=lambda info: source(info)[1], batch=True, batch_info=True, dtype=types.INT64, ndim=1
    )
    return _on_device(images, device) if where == "cpu" else images, targets


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def decode_pipeline(source: Callable[[BatchInfo], Any], config: TrainConfig, device: str) -> Any:
    """Whole images, uint8 HWC of their own sizes, and their targets."""
    jpegs, targets = _encoded(source)
    return fn.decoders.image(jpegs, **_decoder_options(config, device)), targets


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def read_pipeline(source: Callable[[BatchInfo], Any]) -> Any:
    """The bytes of the files that `source` names, their int64 (N, 1) targets, and the last two bytes of each file."""
    table, lengths, targets = fn.external_source(
        source=source,
        num_outputs=3,
        batch=True,
        batch_info=True,
        dtype=[types.UINT8, types.INT32, types.INT64],
        ndim=[1, 1, 1],
    )
    files = fn.io.file.read(fn.slice(table, 0, lengths, axes=[0]))
    return files, targets, files[-len(END) :]


class _Files:
    """File names as one byte table: a batch of them is one indexing operation, not a Python object per image."""

    def __init__(self, manifest: Manifest) -> None:
        names = [os.fsencode(manifest.path(index)) for index in range(len(manifest))]
        self._lengths = np.array([len(name) for name in names], dtype=np.int32)
        width = int(self._lengths.max())
        self._table = np.array(names, dtype=f"S{width}").view(np.uint8).reshape(len(names), width)
        self._labels = manifest.labels

    def __getitem__(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        return self._table[indices], self._lengths[indices, None], self._labels[indices, None]


class _FileReader:
    """Source of encoded images: a pipeline of its own reads ahead; each call takes the next batch.

    The operators of one pipeline share its threads. Files read there wait behind the decoding of the batch before,
    which cost a fifth of the images per second on an H100 (docs/experiments.md).

    Args:
        manifest: the files.
        indices: position in the stream -> indices of its images.
        config: for the batch size and the number of threads.
        first: position of the first batch.
    """

    def __init__(
        self, manifest: Manifest, indices: Callable[[int], NDArray[np.int64]], config: TrainConfig, first: int = 0
    ) -> None:
        files = _Files(manifest)
        self._next = first
        self._pipeline = read_pipeline(
            lambda info: files[indices(first + info.iteration)],
            batch_size=config.batch_size,
            num_threads=max(READ_THREADS, (config.workers or 0) // 2),
            device_id=None,
            seed=0,  # draws nothing
            prefetch_queue_depth=READ_AHEAD
            + (config.prefetch or 0),  # a slow file must not hold up the training thread
        )
        self._pipeline.build()

    def take(self, position: int) -> tuple[Any, Any]:
        """Bytes and targets of the batch at `position`, which must be the next.

        Raises:
            Undecodable: a JPEG was cut off. Decoders on a GPU take it for a whole one, those on the CPU do so while no
                crop reaches the part that is missing.
        """
        assert position == self._next, f"batch {position} asked, {self._next} is next"
        self._next += 1
        files, targets, tails = self._pipeline.run()
        suspects: Iterable[int] = range(len(files))
        if tails.is_dense_tensor():  # else one is shorter than its tail would be
            suspects = np.flatnonzero((tails.as_array() != tuple(END)).any(axis=1))
        for index in suspects:
            _check_end(files.at(int(index)).tobytes())
        return files, targets


class _DecodedImages:
    """All training images, decoded once, in the memory that `config.cache` names.

    They are decoded in the order of the manifest, so that their pixels do not depend on where a run was interrupted.

    Args:
        config: resolved; `cache` is gpu or host.
        manifest: the files.
        env: this process.
    """

    def __init__(self, config: TrainConfig, manifest: Manifest, env: DistEnv) -> None:
        self._labels = manifest.labels[:, None]
        self._device = env.device
        self._chunks: list[Tensor] = []
        self._free = torch.empty(0, dtype=torch.uint8)  # what is left of the newest chunk
        self._images: list[Any] = []  # DALI's views of the chunks
        batches = [
            np.arange(at, min(at + config.local_batch_size, len(manifest)))
            for at in range(0, len(manifest), config.local_batch_size)
        ]
        reader = _FileReader(manifest, lambda position: batches[position % len(batches)], config)
        pipeline = decode_pipeline(
            lambda info: reader.take(info.iteration), config, _dali_device(env), **_pipeline_options(config, env)
        )
        pipeline.build()
        bar = tqdm(batches, "decoding", unit="batch", leave=False, disable=None if env.is_main else True)
        for number, _ in enumerate(bar):
            with _naming_bad_files(config, manifest, env, itertools.islice(batches, number, None)):
                self._append(_outputs(pipeline, env.device)[0], config)
        if env.device.type == "cuda":
            torch.cuda.synchronize(env.device)

    def _append(self, decoded: Any, config: TrainConfig) -> None:
        on_gpu = config.cache == "gpu"
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
            place, self._free = self._free[: image.numel()].view(image.shape), self._free[image.numel() :]
            place.copy_(image)
            self._images.append(wrap(place if on_gpu else place.numpy(), "HWC"))

    def __getitem__(self, indices: NDArray[np.int64]) -> tuple[list[Any], NDArray[np.int64]]:
        return [self._images[index] for index in indices], self._labels[indices]


# ---------------------------------------------------------------------------------------------------------------------
# DALI loaders


class DaliTrainLoader:
    """DALI reads, decodes and augments; resumes bit for bit.

    Two pipelines, each with half of the threads, take turns: one fills the decoders while the other waits for the last
    images of its batch (docs/decisions/0007).
    """

    def __init__(
        self,
        config: TrainConfig,
        manifest: Manifest,
        sampler: Sampler,
        env: DistEnv,
        first_batch: int,
        state: dict[str, Any] | None,
    ) -> None:
        # DALI counts batches from where its own checkpoints began, which need not be the start of the run.
        self._origin = first_batch if state is None else int(state["origin"])
        self._taken = first_batch - self._origin
        self._device = env.device
        self._naming = functools.partial(_naming_bad_files, config, manifest, env)
        self._sampler = sampler
        self._images = _DecodedImages(config, manifest, env) if config.cache in KEPT else None
        blobs = [None] * TURNS if state is None else state["dali"]
        self._pipelines = [
            self._create_pipeline(config, manifest, sampler, env, turn, blob) for turn, blob in enumerate(blobs)
        ]

    def _create_pipeline(
        self,
        config: TrainConfig,
        manifest: Manifest,
        sampler: Sampler,
        env: DistEnv,
        turn: int,
        blob: Tensor | None,
    ) -> Any:
        """The pipeline that makes batches `turn`, `turn + TURNS`, ... since the origin; `blob` is its checkpoint."""
        workers, prefetch = ((config.workers or 1) + turn) // TURNS, -(-(config.prefetch or 1) // TURNS)
        config = dataclasses.replace(config, workers=max(1, workers), prefetch=prefetch)
        first = self._origin + turn
        taken = -((turn - self._taken) // TURNS)  # by this pipeline
        # The step is not 0 in a run that goes on in another layout: the draws of its start must not come again.
        seed = derive_seed(Stream.DALI, config.seed, env.rank, turn, self._origin // sampler.batches_per_step)
        images = self._images
        if images is None:
            reader = _FileReader(manifest, lambda number: sampler.indices(first + number * TURNS), config, taken)
            source = lambda info: reader.take(info.iteration)  # noqa: E731
        else:
            source = lambda info: images[sampler.indices(first + info.iteration * TURNS)]  # noqa: E731
        pipeline = train_pipeline(
            source,
            config,
            _dali_device(env),
            checkpoint=None if blob is None else bytes(blob.numpy()),
            **_pipeline_options(config, env) | {"seed": seed},
        )
        pipeline.build()
        _remove_generated_files()
        return pipeline

    def __next__(self) -> Batch:
        pipeline = self._pipelines[self._taken % len(self._pipelines)]
        with self._naming(map(self._sampler.indices, itertools.count(self._origin + self._taken))):
            batch = _run(pipeline, self._device)
        self._taken += 1
        return batch

    def state(self) -> dict[str, Any]:
        # As tensors, because bytes are not among the types that weights_only loading admits everywhere.
        blobs = [torch.frombuffer(bytearray(pipeline.checkpoint()), dtype=torch.uint8) for pipeline in self._pipelines]
        return {"dali": blobs, "origin": self._origin}

    def close(self) -> None:
        del self._pipelines, self._images


class DaliValLoader:
    """This rank's validation images through DALI."""

    def __init__(self, config: TrainConfig, manifest: Manifest, env: DistEnv) -> None:
        indices = shard(len(manifest), env.rank, env.world_size)
        batches = [indices[at : at + config.local_batch_size] for at in range(0, len(indices), config.local_batch_size)]
        self._batches = batches
        self._device = env.device
        self._naming = functools.partial(_naming_bad_files, config, manifest, env)
        if batches:
            reader = _FileReader(manifest, lambda position: batches[position % len(batches)], config)
            self._pipeline = val_pipeline(
                lambda info: reader.take(info.iteration),  # reads ahead into the next pass
                config,
                _dali_device(env),
                **_pipeline_options(config, env),
            )
            self._pipeline.build()

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self._batches)):
            with self._naming(itertools.islice(self._batches, number, None)):
                batch = _run(self._pipeline, self._device)
            yield batch


def _dali_device(env: DistEnv) -> str:
    return "gpu" if env.device.type == "cuda" else "cpu"


def _pipeline_options(config: TrainConfig, env: DistEnv) -> dict[str, Any]:
    return {
        "batch_size": config.batch_size,
        "num_threads": config.workers,
        "device_id": env.device.index,  # the GPU of this machine, where the data is sharded by global rank
        "seed": 0,  # training pipelines have seeds of their own, the others draw nothing
        "prefetch_queue_depth": config.prefetch,
    }


def _run(pipeline: Any, device: torch.device) -> Batch:
    """One batch, without a copy."""
    images, targets = (from_dlpack(output.as_tensor()) for output in _outputs(pipeline, device))
    return Batch(images.permute(0, 3, 1, 2), targets.squeeze(-1))  # NHWC seen as NCHW is channels_last


def _outputs(pipeline: Any, device: torch.device) -> Any:
    """A run of `pipeline`; on CUDA its outputs are ordered on the current stream."""
    return pipeline.run(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else pipeline.run()


# ---------------------------------------------------------------------------------------------------------------------
# Which files the loaders take


def decoder_of(loader: str) -> Decoder:
    """What decides whether `--loader` can read a file, for `utils.inspection`."""
    if loader == "torch":
        return Decoder(f"Pillow {PIL.__version__}", pillow_decode)
    from nvidia import nvimgcodec  # see `_codec`

    return Decoder(f"DALI {DALI_VERSION}, nvImageCodec {nvimgcodec.__version__}", dali_decode)


def dali_decode(content: bytes) -> Picture:
    """Decode an image as DALI's decoders do on the CPU: by the library that they are made of.

    A pipeline of DALI's own does not say which file of a batch it refused, and is of no use after.

    Raises:
        Undecodable: DALI's pipelines fail on such a file.
    """
    from nvidia import nvimgcodec  # see `_codec`

    try:
        stream = nvimgcodec.CodeStream(content)
        codec = stream.codec_name
    except RuntimeError:
        raise Undecodable("no image that DALI reads") from None
    image = _codec(os.getpid()).decode(stream)
    if image is None:
        raise Undecodable(f"a {codec} that DALI cannot decode")
    return Picture(codec, image.width, image.height)


@functools.cache
def _codec(process: int) -> Any:
    """The codec of this process: one that was inherited through a fork would wait for threads that were not.

    nvImageCodec is imported where it is used, as its import starts CUDA, which must not know its environment before
    `utils.distributed.process_group` has set the number of hardware queues.
    """
    from nvidia import nvimgcodec

    backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
    return nvimgcodec.Decoder(device_id=CPU_ONLY_DEVICE, max_num_cpu_threads=1, backends=backends)


def _check_end(content: bytes) -> None:
    """Raise Undecodable for a JPEG that was cut off, by the verdict of `dali_decode`."""
    if not has_end(content):
        dali_decode(content)


def pillow_decode(content: bytes) -> Picture:
    """Decode an image as `--loader torch` does.

    Raises:
        Undecodable: Pillow fails on such a file, in any of the many ways that it has.
    """
    try:
        with Image.open(io.BytesIO(content)) as file:
            codec = (file.format or "").lower()
            image = _upright(file)
    except PIL.UnidentifiedImageError:
        raise Undecodable("no image that Pillow reads") from None
    except Exception as error:
        raise Undecodable(f"Pillow cannot decode it ({str(error) or type(error).__name__})") from None
    return Picture(codec, image.width, image.height)


def _upright(file: Image.Image) -> Image.Image:
    """RGB and turned as its EXIF data ask, as DALI decodes."""
    image = ImageOps.exif_transpose(file)
    # Grey of 16 bits, which convert() would clip; a mode "I" of other formats may have 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and file.format in ("PNG", "PPM")):
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    return image.convert("RGB")


@contextlib.contextmanager
def _naming_bad_files(
    config: TrainConfig, manifest: Manifest, env: DistEnv, upcoming: Iterable[NDArray[np.int64]]
) -> Iterator[None]:
    """Around the next batch: what fails for a bad file among the `upcoming` images, a batch each, names that file.

    Neither DALI nor torch's DataLoader says which it was, at least not always. Both read ahead, so that it need not be
    one of the next batch.

    Raises:
        BadFile: instead of the loader's own error.
    """
    try:
        yield
    except Exception as error:
        ahead = itertools.islice(upcoming, 2 + READ_AHEAD + TURNS * (config.prefetch or 1))
        paths = [manifest.path(int(index)) for indices in ahead for index in indices]
        deadline = time.monotonic() + BLAME_SECONDS
        with contextlib.closing(inspect(paths, decoder_of(config.loader).decode, config.workers or 1)) as stream:
            for path, found in stream:
                if found.bad is not None:
                    raise BadFile(path, found.bad, env.rank) from error
                if time.monotonic() > deadline:
                    break
        raise


# ---------------------------------------------------------------------------------------------------------------------
# torch's DataLoader: with torchvision's transforms, and as DALI's feeder


class _Order:
    """Batches of (image, epoch) pairs from batch `first` of a run up to `last` (endless if None)."""

    def __init__(self, sampler: Sampler, first: int, last: int | None = None) -> None:
        self.sampler, self.first, self.last = sampler, first, last

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        batch = self.first
        while self.last is None or batch < self.last:
            epoch = self.sampler.epoch_of(batch)
            yield [(int(index), epoch) for index in self.sampler.indices(batch)]
            batch += 1


class _TorchImages(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Images through Pillow and torchvision: uint8 (3, H, W), and their labels: int64 ().

    The random draws of an image depend on (seed, epoch, image) alone: not on the worker, the rank or a resume.
    """

    def __init__(self, config: TrainConfig, manifest: Manifest, train: bool) -> None:
        self.manifest, self.seed = manifest, config.seed if train else None
        self.transform = _torch_train_transform(config) if train else _torch_val_transform(config)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        index, epoch = key
        with Image.open(self.manifest.path(index)) as file:
            image = _upright(file)
        if self.seed is None:
            return self.transform(image), _label(self.manifest, index)
        with torch.random.fork_rng(devices=[]):
            seed = seed_sequence(Stream.IMAGE, self.seed, epoch, index).generate_state(1, np.uint64)[0]
            torch.manual_seed(int(seed >> np.uint64(1)))
            return self.transform(image), _label(self.manifest, index)


def _torch_train_transform(config: TrainConfig) -> Callable[[Image.Image], Tensor]:
    transform: Callable[[Image.Image], Tensor] = v2.Compose(
        [
            v2.RandomResizedCrop(config.image_size, scale=(config.crop_scale, 1.0), ratio=RATIO),
            v2.RandomHorizontalFlip(config.hflip),
            *([torchvision_policy(config.augment)] if config.augment != "none" else []),
            v2.PILToTensor(),
        ]
    )
    return transform


def _torch_val_transform(config: TrainConfig) -> Callable[[Image.Image], Tensor]:
    steps = [v2.Resize(config.val_resize), v2.CenterCrop(config.image_size), v2.PILToTensor()]
    transform: Callable[[Image.Image], Tensor] = v2.Compose(steps)
    return transform


def _label(manifest: Manifest, index: int) -> Tensor:
    # A number would be shared with the trainer by a thread of the worker, which can be cut off there: end_workers().
    return torch.tensor(int(manifest.labels[index]))


def _outlive_signals(worker: int) -> None:
    # torchrun signals whole sessions; the trainer needs its workers until the checkpoint is written.
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    heed_end_workers()


def _worker_options(config: TrainConfig, env: DistEnv) -> dict[str, Any]:
    return {
        "num_workers": config.workers,
        "pin_memory": env.device.type == "cuda",
        "worker_init_fn": _outlive_signals,
        "generator": torch.Generator(),  # the workers' seeds must not draw from the run's random numbers
    }


def _end_workers(batches: Any) -> None:
    """End what a DataLoader's iterator has started, now: the traceback of an error would keep it to the very end.

    There the interpreter asks workers to end by a signal, which ours are deaf to, and waits for them.
    """
    batches._shutdown_workers()


def _to_device(images: Tensor, targets: Tensor, device: torch.device) -> Batch:
    images = images.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
    return Batch(images, targets.to(device, non_blocking=True))


class TorchTrainLoader:
    """The baseline that users know: torchvision's transforms in DataLoader's workers; resumes bit for bit."""

    def __init__(
        self, config: TrainConfig, manifest: Manifest, sampler: Sampler, env: DistEnv, first_batch: int
    ) -> None:
        self._device = env.device
        self._sampler, self._next = sampler, first_batch
        self._naming = functools.partial(_naming_bad_files, config, manifest, env)
        loader = torch.utils.data.DataLoader(
            _TorchImages(config, manifest, train=True),
            batch_sampler=_Order(sampler, first_batch),
            **_worker_options(config, env),
        )
        with safe_fork():
            self._batches = iter(loader)

    def __next__(self) -> Batch:
        with self._naming(map(self._sampler.indices, itertools.count(self._next))):
            images, targets = next(self._batches)
        self._next += 1
        return _to_device(images, targets, self._device)

    def state(self) -> dict[str, Any]:
        return {}  # the order and every draw follow from the position

    def close(self) -> None:
        _end_workers(self._batches)


class TorchValLoader:
    """This rank's validation images through torchvision."""

    def __init__(self, config: TrainConfig, manifest: Manifest, env: DistEnv) -> None:
        self._device = env.device
        self._indices, self._batch_size = shard(len(manifest), env.rank, env.world_size), config.local_batch_size
        self._naming = functools.partial(_naming_bad_files, config, manifest, env)
        self._loader = torch.utils.data.DataLoader(
            _TorchImages(config, manifest, train=False),
            sampler=[(int(index), 0) for index in self._indices],
            batch_size=config.batch_size,
            **_worker_options(config, env),
        )

    def __iter__(self) -> Iterator[Batch]:
        with safe_fork():
            batches = iter(self._loader)
        try:
            for start in range(0, len(self._indices), self._batch_size):
                with self._naming([self._indices[start:]]):
                    images, targets = next(batches)
                yield _to_device(images, targets, self._device)
        finally:
            _end_workers(batches)


class _ProxyImages(torch.utils.data.Dataset[tuple[Any, Tensor]]):
    """File names, handed to the DALI server by each worker, and labels: int64 ()."""

    def __init__(self, manifest: Manifest, proxy: Any) -> None:
        self.manifest, self.proxy = manifest, proxy

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, Tensor]:
        index, _ = key
        path = self.manifest.path(index)
        with open(path, "rb") as file:
            file.seek(-len(END), os.SEEK_END)
            if file.read() != END:
                file.seek(0)
                _check_end(file.read())
        return self.proxy(np.frombuffer(os.fsencode(path), dtype=np.uint8)), _label(self.manifest, index)


class ProxyTrainLoader:
    """DALI as a server behind torch's DataLoader: workers name the files, the server decodes and augments.

    A server cannot be restored, so each epoch has a new one, with a seed of its own: a resume at an epoch's boundary is
    exact (with `--deterministic`, which also fixes the order in which the server takes batches). In
    mid-epoch the images are the ones that would have come, their random draws are others.
    """

    def __init__(
        self, config: TrainConfig, manifest: Manifest, sampler: Sampler, env: DistEnv, first_batch: int
    ) -> None:
        self._config, self._manifest, self._sampler, self._env = config, manifest, sampler, env
        self._stopping = ThreadPoolExecutor(1)  # a server takes up to 5 s to stop, which the next epoch need not wait
        self._batches = self._stream(first_batch)
        self._next = first_batch

    def __next__(self) -> Batch:
        upcoming = map(self._sampler.indices, itertools.count(self._next))
        with _naming_bad_files(self._config, self._manifest, self._env, upcoming):
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
                yield from self._epoch(server, _Order(self._sampler, batch, last))
            finally:
                self._stopping.submit(server.stop_thread)
            batch = last

    def _epoch_pipeline(self, epoch: int, batch: int) -> Any:
        seed = derive_seed(Stream.PROXY, self._config.seed, self._env.rank, epoch, batch)
        options = _pipeline_options(self._config, self._env) | {"seed": seed}
        pipeline = proxy_pipeline(self._config, _dali_device(self._env), **options)
        _remove_generated_files()
        return pipeline

    def _epoch(self, server: Any, order: _Order) -> Iterator[Batch]:
        loader = proxy.DataLoader(
            server,
            _ProxyImages(self._manifest, server.proxy),
            batch_sampler=order,
            **(_worker_options(self._config, self._env) | {"pin_memory": False}),  # there is no image to pin
        )
        with safe_fork():
            batches = iter(loader)
        server.start_thread()  # after the fork: the workers must not inherit it in the midst of something
        try:
            for images, targets in batches:
                yield Batch(images.permute(0, 3, 1, 2), targets.to(self._env.device, non_blocking=True))
        finally:
            _end_workers(batches)

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._batches.close()
        self._stopping.shutdown()


# ---------------------------------------------------------------------------------------------------------------------
# Synthetic data


class SyntheticTrainLoader:
    """One batch of random images on the device, again and again: what the training step costs without a feed."""

    def __init__(self, config: TrainConfig, manifest: Manifest, env: DistEnv) -> None:
        self._batch = _random_batch(config.local_batch_size, config.image_size, len(manifest.classes), env.device)

    def __next__(self) -> Batch:
        return self._batch

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class SyntheticValLoader:
    """Random images, as many as this rank's share."""

    def __init__(self, config: TrainConfig, manifest: Manifest, env: DistEnv) -> None:
        self._num_images = len(shard(len(manifest), env.rank, env.world_size))
        self._batch = _random_batch(config.local_batch_size, config.image_size, len(manifest.classes), env.device)

    def __iter__(self) -> Iterator[Batch]:
        size = len(self._batch.targets)
        for start in range(0, self._num_images, size):
            count = min(size, self._num_images - start)
            yield Batch(self._batch.images[:count], self._batch.targets[:count])


def _random_batch(batch_size: int, image_size: int, num_classes: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch_size, image_size, image_size, 3), dtype=torch.uint8, generator=generator)
    targets = torch.randint(0, num_classes, (batch_size,), generator=generator)
    return Batch(images.to(device).permute(0, 3, 1, 2), targets.to(device))
