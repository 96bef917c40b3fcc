"""Triton kernel of `crop_resize.py`: one launch crops, resizes and mirrors a whole batch."""

import contextlib

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

BLOCK = 256  # elements of a row that one program makes


@triton.jit
def _weight(position, centre, support, size):  # type: ignore[no-untyped-def]
    """Of the pixel at `position` in a result at `centre`; 0 beyond the crop and beyond the filter."""
    weight = tl.maximum(1.0 - tl.abs(position + 0.5 - centre) / support, 0.0)
    return tl.where((position >= 0) & (position < size), weight, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _resize_crops(pixels_ptr, crops_ptr, out_ptr, N, S: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of one row of one image. Column and channel make one flat index, as in the memory of both images."""
    image, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    flat = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column, channel = flat // 3, flat % 3
    crops_ptr += image
    pixels_ptr += tl.load(crops_ptr) * 3
    stride = tl.load(crops_ptr + N) * 3
    height, width = tl.load(crops_ptr + 2 * N).to(tl.int32), tl.load(crops_ptr + 3 * N).to(tl.int32)
    is_mirrored = tl.load(crops_ptr + 4 * N) > 0
    scale_y, scale_x = height.to(tl.float32) / S, width.to(tl.float32) / S
    support_y, support_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
    centre_y = (i + 0.5) * scale_y
    centre_x = (tl.where(is_mirrored, S - 1 - column, column) + 0.5) * scale_x
    first_y = tl.floor(centre_y - support_y + 0.5).to(tl.int32)
    first_x = tl.floor(centre_x - support_x + 0.5).to(tl.int32)
    taps_y, taps_x = tl.ceil(2 * support_y).to(tl.int32) + 1, tl.ceil(2 * support_x).to(tl.int32) + 1
    total = tl.zeros((BLOCK,), tl.float32)
    weights_x = tl.zeros((BLOCK,), tl.float32)
    weights_y = 0.0
    for tap in range(0, taps_x):
        weights_x += _weight(first_x + tap, centre_x, support_x, width)
    for tap_y in range(0, taps_y):
        y = first_y + tap_y
        weight_y = _weight(y, centre_y, support_y, height)
        row = tl.zeros((BLOCK,), tl.float32)
        columns = tl.where((y >= 0) & (y < height), width, 0)  # a row beyond the crop has none
        for tap_x in range(0, taps_x):
            x = first_x + tap_x
            inside = (x >= 0) & (x < columns) & (column < S)
            pixel = tl.load(pixels_ptr + y * stride + x * 3 + channel, inside, 0).to(tl.float32)
            row += _weight(x, centre_x, support_x, width) * pixel
        total += weight_y * row
        weights_y += weight_y
    out = (image * S + i) * S * 3 + flat
    tl.store(out_ptr + out, (total / (weights_x * weights_y) + 0.5).to(tl.uint8), column < S)


def launch_resize(pixels: Tensor, crops: Tensor, size: int) -> Tensor:
    """As `utils.data.crop_resize.resize_crops`."""
    count = crops.shape[1]
    out = torch.empty((count, size, size, 3), dtype=torch.uint8, device=pixels.device)
    with torch.cuda.device(pixels.device) if pixels.is_cuda else contextlib.nullcontext():
        _resize_crops[(count, size, triton.cdiv(size * 3, BLOCK))](
            pixels, crops, out, count, S=size, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True
        )
    return out.permute(0, 3, 1, 2)
