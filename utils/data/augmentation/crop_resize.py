"""Crops of images of many sizes, resized with antialiasing and turned: a whole batch at once.

The images lie one after the other in one tensor. On CUDA one Triton kernel makes the batch (`crop_kernel.py`); where
none can be compiled, and on the CPU, plain torch does. Both give the pixels of Pillow's and torchvision's bilinear
resize with antialiasing: a triangle filter, as wide as the scale where it shrinks, that ends at the border of the crop.
"""

import functools
import importlib.util
import os
import shutil

import torch
from torch import Tensor

from utils.options.sizes import ImageSize, sides_of


def resize_crops(pixels: Tensor, crops: Tensor, size: ImageSize) -> Tensor:
    """Resize a crop of each image and turn some of them: uint8 (N, 3, height, width) of `size`, channels_last.

    The pixels of a crop depend on the crop alone, not on the others of its batch.

    Args:
        pixels: uint8 (P, 3), RGB, all images row by row.
        crops: int64 (5, N), contiguous, on the same device: the first pixel of each crop in `pixels`; pixels from one
            row of it to the next, which is the width of its image; rows, 1 or more; columns, likewise; and how the
            result is turned, as `Crops.turns` says: by quarters where it is a square.
        size: of the result.
    """
    if pixels.is_cuda and can_compile_kernels():
        from utils.data.augmentation.crop_kernel import launch_resize

        return launch_resize(pixels, crops, size)
    return _resize_plain(pixels, crops, size)


@functools.cache
def can_compile_kernels() -> bool:
    """Whether there is Triton, and the C compiler that it needs: CC names it, or it is gcc or clang on the path."""
    compilers = os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")
    return importlib.util.find_spec("triton") is not None and any(compilers)


def _resize_plain(pixels: Tensor, crops: Tensor, size: ImageSize) -> Tensor:
    """`resize_crops` in plain torch: rows first, then columns.

    Only operations on single elements and in a fixed order, no matrix product, whose order of sums depends on the sizes
    in the batch.
    """
    height, width = sides_of(size)
    starts, strides, heights, widths, turns = crops.unbind()
    column = torch.arange(int(widths.max()), device=pixels.device)
    column = torch.minimum(column, widths[:, None] - 1)  # what is beyond a narrow crop is not used below
    rows = torch.zeros(len(starts), height, column.shape[1], 3, device=pixels.device)
    for tap, weights in _taps(heights, height):
        pixel = (starts[:, None] + tap * strides[:, None])[:, :, None] + column[:, None, :]
        rows += weights[:, :, None, None] * pixels[pixel]
    image = torch.arange(len(starts), device=pixels.device)[:, None]
    resized = torch.zeros(len(starts), width, height, 3, device=pixels.device)  # columns before rows
    for tap, weights in _taps(widths, width):
        resized += weights[:, :, None, None] * rows[image, :, tap]
    mirrored, upside_down, transposed = ((turns & bit > 0)[:, None, None, None] for bit in (1, 2, 4))
    resized = torch.where(mirrored, resized.flip(1), resized)
    if upside_down.any():
        resized = torch.where(upside_down, resized.flip(2), resized)
    if transposed.any():
        resized = torch.where(transposed, resized.transpose(1, 2), resized)
    nhwc = (resized + 0.5).to(torch.uint8).transpose(1, 2).contiguous()
    return nhwc.permute(0, 3, 1, 2)


def _taps(sizes: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """What each of `size` results is a weighted sum of, along one axis: position and weight, (N, size) each.

    Args:
        sizes: int64 (N,), of the crops along that axis.
        size: pixels.
    """
    scale = (sizes / size)[:, None]
    support = scale.clamp_min(1)
    center = (torch.arange(size, device=sizes.device) + 0.5) * scale
    first = (center - support + 0.5).floor().long()
    taps = []
    total = torch.zeros_like(center)
    for number in range(int((2 * support).ceil().max()) + 1):
        position = first + number
        weight = (1 - (position + 0.5 - center).abs() / support).clamp_min(0)
        weight = torch.where((position >= 0) & (position < sizes[:, None]), weight, 0)
        taps.append((torch.minimum(position.clamp_min(0), sizes[:, None] - 1), weight))
        total += weight
    return [(position, weight / total) for position, weight in taps]
