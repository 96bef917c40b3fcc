"""DALI's graphs for training and validation, the loaders that run them, and the factories of all loaders.

    train = create_train_loader(config, manifest, sampler, env, first_batch, state)
    batch = next(train)                 # endless; train.state() continues after this batch, bit for bit
    for batch in create_val_loader(config, manifest, env): ...   # every image once over all ranks
    with Feed(data_dir, "train") as feed: ...                    # the same without a run: docs/python.md

Every loader but `stock` reads the images that `Sampler` names. So they have the same order, on any number of ranks, and
can start at any batch of a run. They differ in what decodes: DALI (`dali`), a DALI server behind torch's DataLoader
workers (`proxy`), Pillow and torchvision in those workers (`torch`), or nothing (`synthetic`). `stock` is DALI's own
reader and iterator: the same number of batches per epoch, in DALI's order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import nvidia.dali as dali
from nvidia.dali import fn, types
from nvidia.dali.types import BatchInfo

from utils.data.augmentation.color_jitter import apply_color_jitter
from utils.data.augmentation.policies import RATIO, apply_policy
from utils.data.augmentation.user_code import apply_transform
from utils.data.dali import (
    decoder_options,
    interpolation_of,
    on_device,
)
from utils.data.feed.batches import BaseFeed
from utils.data.images.batch import TrainLoader, ValLoader
from utils.data.images.manifest import Manifest
from utils.data.loaders.cache import CACHED, cached_images
from utils.data.loaders.dali_loader import DaliTrainLoader, DaliValLoader
from utils.data.loaders.memory_loader import DecodedImages, MemoryTrainLoader, MemoryValLoader
from utils.data.loaders.proxy_loader import ProxyTrainLoader
from utils.data.loaders.sampler import Sampler
from utils.data.loaders.scheduled_loader import ScheduledTrainLoader
from utils.data.loaders.settings import feeds_from_memory
from utils.data.loaders.stock_loader import StockTrainLoader, StockValLoader, read_files
from utils.data.loaders.synthetic import SyntheticTrainLoader, SyntheticValLoader
from utils.data.loaders.torch_loader import TorchTrainLoader, TorchValLoader
from utils.data.reading.reader import encoded_images, requested_images
from utils.distributed.group import DistEnv
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import Sides, sides_of


def create_train_loader(
    config: ResolvedConfig,
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
        first_batch: batches of the whole run that this rank has already trained on.
        state: `TrainLoader.state()` of the checkpoint to continue, for the random draws of the augmentation.
    """

    # The sizes of a schedule share the decoded images; beside a policy, whose epochs have DALI's, nothing is kept.
    decoded = functools.cache(lambda: DecodedImages(config, manifest, env))

    def open_loader(config: ResolvedConfig, first_batch: int, state: dict[str, Any] | None) -> TrainLoader:
        if config.loader == "synthetic":
            return SyntheticTrainLoader(config, manifest, env)
        if config.loader == "torch":
            return TorchTrainLoader(config, manifest, sampler, env, first_batch)
        if config.loader == "proxy":
            return ProxyTrainLoader(config, manifest, sampler, env, first_batch, proxy_pipeline)
        if config.loader == "stock":
            return StockTrainLoader(config, manifest, sampler, env, first_batch, state, stock_train_pipeline)
        # A checkpoint with the random state of DALI's pipelines is of a run that they have fed.
        if feeds_from_memory(config) and not (state and "dali" in state):
            images = DecodedImages(config, manifest, env) if config.augment_schedule else decoded()
            return MemoryTrainLoader(config, images, manifest, sampler, env, first_batch)
        return DaliTrainLoader(config, manifest, sampler, env, first_batch, state, train_pipeline)

    if config.resize_schedule or config.augment_schedule:
        return ScheduledTrainLoader(config, sampler, first_batch, state, open_loader)
    return open_loader(config, first_batch, state)


def create_val_loader(config: ResolvedConfig, manifest: Manifest, env: DistEnv, keep: bool = False) -> ValLoader:
    """The validation loader that `config.loader` names; `proxy` validates with plain DALI.

    `keep` says whether DALI's batches stay on the device after the first pass, if they fit; with `--cache gpu` they do.
    """
    if config.loader == "synthetic":
        return SyntheticValLoader(config, manifest, env)
    if config.loader == "torch":
        return TorchValLoader(config, manifest, env)
    if config.loader == "stock":
        return StockValLoader(config, manifest, env, stock_val_pipeline)
    loader = DaliValLoader(config, manifest, env, val_pipeline)
    keep = (keep or config.cache == "gpu") and not config.evaluate
    return MemoryValLoader(loader, config, manifest, env) if keep else loader


class Feed(BaseFeed):
    """The batches of a split for a training loop of your own: `with Feed(data_dir, "train", batch_size=256) as feed`.

    `for images, targets in feed` is one epoch: uint8 (N, 3, H, W) and int64 (N,) on the device, or of several labels
    float32 (N, classes). `help(Feed)` has all options; docs/python.md explains them.
    """

    create_train_loader, create_val_loader = create_train_loader, create_val_loader


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _random_crops(source: Any, config: ResolvedConfig, device: str) -> Any:
    """Random resized crops of encoded or cached images, mirrored at random: uint8 HWC, of image_size.

    Mirroring is a resize of the crop from right to left: fn.flip would launch a kernel for every image.
    """
    area, ratio = [config.crop_scale, 1.0], list(RATIO)
    decoder = decoder_options(config.hw_decoder_load, device)
    mirror = fn.cast(fn.random.coin_flip(probability=config.hflip), dtype=types.FLOAT)
    if config.decode == "fused":
        images = fn.decoders.image_random_crop(source, random_area=area, random_aspect_ratio=ratio, **decoder)
        top, bottom, left, right = (mirror * zero + one for zero, one in ((0, 0), (0, 1), (1, 0), (-1, 1)))
    else:
        images = source if config.cache in CACHED else fn.decoders.image(source, **decoder)
        anchor, shape = fn.random_crop_generator(images.shape()[:2], random_area=area, random_aspect_ratio=ratio)
        start, length = (fn.cast(corner, dtype=types.FLOAT) for corner in (anchor, shape))
        top, bottom = start[0], start[0] + length[0]
        left, right = start[1] + mirror * length[1], start[1] + (1 - mirror) * length[1]
    if config.vflip:  # else no operator: DALI's checkpoints name them by their numbers
        turn = fn.cast(fn.random.coin_flip(probability=config.vflip), dtype=types.FLOAT)
        top, bottom = top + turn * (bottom - top), bottom + turn * (top - bottom)
    return fn.resize(
        images,
        size=list(sides_of(config.image_size)),
        roi_start=fn.stack(top, left),
        roi_end=fn.stack(bottom, right),
        roi_relative=config.decode == "fused",
        interp_type=interpolation_of(config.interpolation),
        antialias=True,
    )


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _whole_images(source: Any, config: ResolvedConfig, device: str) -> Any:
    """Encoded or cached images in the geometry of `--train-crop`, mirrored at random: uint8 HWC, of image_size."""
    decoder = decoder_options(config.hw_decoder_load, device)
    images = source if config.cache in CACHED else fn.decoders.image(source, **decoder)
    flips = [fn.random.coin_flip(probability=probability) for probability in (config.vflip, config.hflip)]
    size = sides_of(config.image_size)
    return _fit(images, config.train_crop, size, size, config.interpolation, config.padding, flips)


def _train_images(source: Any, config: ResolvedConfig, device: str) -> Any:
    images = (_random_crops if config.train_crop == "random" else _whole_images)(source, config, device)
    if config.rot90:  # by an operator that works on whole batches: the pixels only move
        angle = fn.random.uniform(values=[0.0, 90.0, 180.0, 270.0])
        images = fn.rotate(images, angle=angle, size=list(sides_of(config.image_size)), interp_type=types.INTERP_NN)
    images = apply_transform(images, config, device)
    return apply_color_jitter(apply_policy(images, config), config.color_jitter)


@dali.pipeline_def(exec_dynamic=True, enable_checkpointing=True)  # type: ignore[untyped-decorator]
def train_pipeline(source: Callable[[BatchInfo], Any], config: ResolvedConfig, device: str) -> Any:
    """Random crop, flip, `--transform`, policy and color jitter of `source`: uint8 NHWC images, int64 (N, 1) targets.

    `source` gives encoded images, as `BatchReader`, or decoded ones, as `ImageCache`, by `config.cache`.
    """
    images, targets = cached_images(source, config.cache, device) if config.cache in CACHED else encoded_images(source)
    return _train_images(images, config, device), on_device(targets, device)


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def proxy_pipeline(config: ResolvedConfig, manifest: Manifest, device: str) -> Any:
    """The images of `train_pipeline`, for a DALI server that torch's DataLoader workers send requests to."""
    return _train_images(requested_images(manifest), config, device)


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _fit(
    images: Any,
    crop: str,
    resize: Sides,
    size: Sides,
    interpolation: str,
    padding: Sequence[int],
    flips: Sequence[Any] | None = None,
) -> Any:
    """Resize and crop whole images, exactly as torchvision does, or timm where that has no such way: uint8 HWC.

    Args:
        crop: center (keeps the aspect and covers `resize`), squash (becomes `resize`) or pad (fits within `resize`).
        resize, size: before and after the crop.
        padding: color beside images that are smaller than the crop.
        flips: 0 or 1 of each image, vertical and horizontal; a resize from right to left mirrors.
    """
    # torchvision's Resize truncates the longer side, its CenterCrop rounds half to even; DALI's ops do neither.
    shape = images.shape(dtype=types.INT32)
    sides = shape[0], shape[1]
    is_square = resize.height == resize.width
    if crop == "squash":
        sides = (resize.height * sides[0] // sides[0], resize.width * sides[1] // sides[1])
    elif crop == "center" and is_square:
        shorter = dali.math.min(*sides)
        sides = resize.height * sides[0] // shorter, resize.height * sides[1] // shorter
    else:
        wanted, side = (resize.height, dali.math.max(*sides)) if is_square else _binding_side(sides, resize, crop)
        sides = tuple(dali.math.max(_rounded(wanted * each, side), 1) for each in sides)
    roi = {} if flips is None else _mirrored(shape, flips)
    images = fn.resize(
        images,
        size=fn.cast(fn.stack(*sides), dtype=types.FLOAT),
        interp_type=interpolation_of(interpolation),
        antialias=True,
        **roi,
    )
    if (crop, resize) == ("squash", size):
        return images
    anchors = [
        _half_to_even(dali.math.max(side - kept, 0)) - dali.math.max(kept - side, 0) // 2
        for side, kept in zip(sides, size, strict=True)
    ]
    if flips is not None:
        mirrored = [side - kept - anchor for side, kept, anchor in zip(sides, size, anchors, strict=True)]
        anchors = [(1 - flip) * one + flip * other for flip, one, other in zip(flips, anchors, mirrored, strict=True)]
    filled = {"out_of_bounds_policy": "pad", "fill_values": list(map(float, padding))}
    border: dict[str, Any] = filled if crop == "pad" else {}
    anchor, shape = fn.stack(*anchors), list(size)
    return fn.slice(images, anchor, shape, axis_names="HW", normalized_anchor=False, normalized_shape=False, **border)


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _binding_side(sides: Sequence[Any], resize: Sides, crop: str) -> tuple[Any, Any]:
    """The side of `resize` that an image gets exactly, and this side of the image.

    It is the one that needs the larger scale to cover `resize` (center), and the smaller one to fit within it (pad).
    """
    by_height, by_width = resize.height * sides[1], resize.width * sides[0]
    is_height = fn.cast(by_height >= by_width if crop == "center" else by_height <= by_width, dtype=types.INT32)
    wanted = is_height * resize.height + (1 - is_height) * resize.width
    return wanted, is_height * sides[0] + (1 - is_height) * sides[1]


def _mirrored(shape: Any, flips: Sequence[Any]) -> dict[str, Any]:
    """Arguments of fn.resize: the whole image, from bottom to top and from right to left where a flip is 1."""
    start = [fn.cast(flip * shape[axis], dtype=types.FLOAT) for axis, flip in enumerate(flips)]
    end = [fn.cast((1 - flip) * shape[axis], dtype=types.FLOAT) for axis, flip in enumerate(flips)]
    return {"roi_start": fn.stack(*start), "roi_end": fn.stack(*end)}


def _val_images(jpegs: Any, config: ResolvedConfig, device: str) -> Any:
    """Whole images in the geometry of `--val-crop`: uint8 HWC, of val_image_size."""
    images = fn.decoders.image(
        jpegs,
        device="mixed" if device == "gpu" else "cpu",
        output_type=types.RGB,
        jpeg_fancy_upsampling=True,
    )
    before, size = config.val_sides_before_crop, sides_of(config.val_image_size)
    return _fit(images, config.val_crop, before, size, config.val_interpolation, config.padding)


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def val_pipeline(source: Callable[[BatchInfo], Any], config: ResolvedConfig, device: str) -> Any:
    """Whole images in the geometry of `--val-crop`: uint8 NHWC, int64 (N, 1)."""
    jpegs, targets = encoded_images(source)
    return _val_images(jpegs, config, device), on_device(targets, device)


@dali.pipeline_def(exec_dynamic=True, enable_checkpointing=True)  # type: ignore[untyped-decorator]
def stock_train_pipeline(reader: dict[str, Any], config: ResolvedConfig, device: str) -> Any:
    """The graph of NVIDIA's examples, from files to uint8 NHWC images and int64 (N, 1) targets.

    `crop_mirror_normalize` only mirrors: the training step normalizes, and takes uint8 from every loader.
    """
    jpegs, targets = read_files(reader, device)
    crop: dict[str, Any] = {"random_area": [config.crop_scale, 1.0], "random_aspect_ratio": list(RATIO)}
    resize: dict[str, Any] = {"size": list(sides_of(config.image_size)), "antialias": True}
    resize["interp_type"] = interpolation_of(config.interpolation)
    decoder = decoder_options(config.hw_decoder_load, device)
    if config.decode == "fused":
        images = fn.resize(fn.decoders.image_random_crop(jpegs, **crop, **decoder), **resize)
    else:
        images = fn.random_resized_crop(fn.decoders.image(jpegs, **decoder), **crop, **resize)
    images = apply_color_jitter(apply_policy(images, config), config.color_jitter)
    mirror = fn.random.coin_flip(probability=config.hflip)
    return fn.crop_mirror_normalize(images, dtype=types.UINT8, output_layout="HWC", mirror=mirror), targets


@dali.pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator]
def stock_val_pipeline(reader: dict[str, Any], config: ResolvedConfig, device: str) -> Any:
    """The images of `val_pipeline`, of the files that `reader` names."""
    jpegs, targets = read_files(reader, device)
    return _val_images(jpegs, config, device), targets


def _half_to_even(margin: Any) -> Any:
    half = margin // 2
    return half + (margin & 1 & half)


def _rounded(number: Any, divisor: Any) -> Any:
    """number / divisor, rounded, half to even."""
    doubled = 2 * number + divisor
    found = doubled // (2 * divisor)
    is_half = (doubled - found * 2 * divisor) == 0
    return found - (is_half & (found & 1))
