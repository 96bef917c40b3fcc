"""Image tensors for the Triton kernels: memory layout, results, device, and the bounds of an image."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


def channels_last(tensor: Tensor) -> Tensor:
    """`tensor` itself if its memory is channels_last, else a copy that is."""
    return tensor.contiguous(memory_format=torch.channels_last)


def empty_images(images: int, channels: int, height: int, width: int, like: Tensor) -> Tensor:
    """An (N, C, H, W) result in channels_last, of the dtype and on the device of `like`."""
    return torch.empty(
        (images, channels, height, width), dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def images_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`empty_images` of a shape (N, C, H, W)."""
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=torch.channels_last)


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch kernels on the tensor's device; the tensors of Triton's interpreter are on the CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@triton.jit
def is_inside(h, H, w, W):  # type: ignore[no-untyped-def]
    """Is pixel (h, w) in an H x W image? h is a number, w a block; an image has no pixels in a row outside it."""
    return (w >= 0) & (w < tl.where((h >= 0) & (h < H), W, 0))
