"""Triton kernel of `crop_resize.py`: one launch crops, resizes and turns a whole batch."""

import contextlib

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from utils.options.sizes import ImageSize, sides_of

ROWS, COLUMNS, WARPS = 4, 32, 2  # pixels that one program makes, two by each of its 64 threads


@triton.jit
def _tap(position, center, inverse_support, size):  # type: ignore[no-untyped-def]
    """The pixel that is read for `position`, and its weight: beyond the crop the one at its border, without weight."""
    inside = tl.minimum(tl.maximum(position, 0), size - 1)
    weight = tl.maximum(1.0 - tl.abs(position + 0.5 - center) * inverse_support, 0.0)
    return inside, tl.where(inside == position, weight, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _resize_crops(  # type: ignore[no-untyped-def]
    pixels_ptr, crops_ptr, out_ptr, N, H: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A tile of one image."""
    image = tl.program_id(0).to(tl.int64)
    i = tl.minimum(tl.program_id(1) * ROWS + tl.arange(0, ROWS), H - 1)[:, None]  # beyond the image: its last row
    j = tl.minimum(tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), W - 1)[None, :]
    crops_ptr += image
    pixels_ptr += tl.load(crops_ptr) * 3
    stride = tl.load(crops_ptr + N) * 3
    height, width = tl.load(crops_ptr + 2 * N).to(tl.int32), tl.load(crops_ptr + 3 * N).to(tl.int32)
    turn = tl.load(crops_ptr + 4 * N)
    is_mirrored, is_upside_down, has_rows_for_columns = (turn & 1) > 0, (turn & 2) > 0, (turn & 4) > 0
    scale_y, scale_x = height.to(tl.float32) / H, width.to(tl.float32) / W
    support_y, support_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
    inverse_y, inverse_x = 1 / support_y, 1 / support_x
    center_y = (tl.where(is_upside_down, H - 1 - i, i) + 0.5) * scale_y
    center_x = (tl.where(is_mirrored, W - 1 - j, j) + 0.5) * scale_x
    first_y = tl.floor(center_y - support_y + 0.5).to(tl.int32)
    first_x = tl.floor(center_x - support_x + 0.5).to(tl.int32)
    taps_y, taps_x = tl.ceil(2 * support_y).to(tl.int32), tl.ceil(2 * support_x).to(tl.int32)
    weights_y, weights_x = tl.zeros((ROWS, 1), tl.float32), tl.zeros((1, COLUMNS), tl.float32)
    for tap in range(0, taps_x):
        _, weight_x = _tap(first_x + tap, center_x, inverse_x, width)
        weights_x += weight_x
    red = tl.zeros((ROWS, COLUMNS), tl.float32)
    green, blue = red, red
    for tap_y in range(0, taps_y):
        y, weight_y = _tap(first_y + tap_y, center_y, inverse_y, height)
        weights_y += weight_y
        row_ptr = pixels_ptr + y * stride
        row_red = tl.zeros((ROWS, COLUMNS), tl.float32)
        row_green, row_blue = row_red, row_red
        for tap_x in range(0, taps_x):
            x, weight_x = _tap(first_x + tap_x, center_x, inverse_x, width)
            pixel_ptr = row_ptr + x * 3
            row_red += weight_x * tl.load(pixel_ptr).to(tl.float32)
            row_green += weight_x * tl.load(pixel_ptr + 1).to(tl.float32)
            row_blue += weight_x * tl.load(pixel_ptr + 2).to(tl.float32)
        red += weight_y * row_red
        green += weight_y * row_green
        blue += weight_y * row_blue
    factor = (1 / weights_x) * (1 / weights_y)
    row, column = tl.where(has_rows_for_columns, j, i), tl.where(has_rows_for_columns, i, j)
    out_ptr += ((image * H + row) * W + column) * 3
    tl.store(out_ptr, (red * factor + 0.5).to(tl.uint8))
    tl.store(out_ptr + 1, (green * factor + 0.5).to(tl.uint8))
    tl.store(out_ptr + 2, (blue * factor + 0.5).to(tl.uint8))


def launch_resize(pixels: Tensor, crops: Tensor, size: ImageSize) -> Tensor:
    """As `utils.data.augmentation.crop_resize.resize_crops`."""
    count, (height, width) = crops.shape[1], sides_of(size)
    out = torch.empty((count, height, width, 3), dtype=torch.uint8, device=pixels.device)
    grid = count, triton.cdiv(height, ROWS), triton.cdiv(width, COLUMNS)
    with torch.cuda.device(pixels.device) if pixels.is_cuda else contextlib.nullcontext():
        _resize_crops[grid](
            pixels, crops, out, count, H=height, W=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out.permute(0, 3, 1, 2)
