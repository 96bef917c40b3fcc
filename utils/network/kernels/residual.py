"""Triton kernel of a residual block's end: two gradients become one, and batch norm's sums are taken on the way."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from utils.network.kernels.batch_norm import COLUMNS, ROWS, WARPS, Split, merge_sums, per_channel
from utils.network.kernels.tensors import channels_last, images_like, on_device_of


@triton.jit  # type: ignore[untyped-decorator]
def _residual_sums(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, z_ptr, g_ptr, x_ptr, mean_ptr, x2_ptr, mean2_ptr, sum_ptr, dot_ptr, dot2_ptr,
    rows, width, channels, rows_each, TWO: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    rows_here = tl.minimum(rows_each, rows - split * rows_each)
    column = tl.program_id(0) * B + tl.arange(0, B)
    channel = column % channels
    mean = tl.load(mean_ptr + channel)[None, :]
    mean2 = tl.load(mean2_ptr + channel)[None, :] if TWO else mean
    start_at = split.to(tl.int64) * rows_each * width
    total = tl.zeros((R, B), tl.float32)
    dot = tl.zeros((R, B), tl.float32)
    dot2 = tl.zeros((R, B), tl.float32)
    for start in range(0, rows_here, R):
        row = start + tl.arange(0, R)
        valid = (row < rows_here)[:, None] & (column < width)[None, :]
        offset = start_at + row[:, None] * width + column[None, :]
        gradient = tl.load(a_ptr + offset, valid, 0.0).to(tl.float32) + tl.load(b_ptr + offset, valid, 0.0)
        gradient = tl.where(tl.load(z_ptr + offset, valid, 0.0) <= 0.0, 0.0, gradient).to(g_ptr.dtype.element_ty)
        tl.store(g_ptr + offset, gradient, valid)
        gradient = gradient.to(tl.float32)
        total += gradient
        dot += gradient * (tl.load(x_ptr + offset, valid, 0.0).to(tl.float32) - mean)
        if TWO:
            dot2 += gradient * (tl.load(x2_ptr + offset, valid, 0.0).to(tl.float32) - mean2)
    offset = split * width + column
    tl.store(sum_ptr + offset, tl.sum(total, 0), column < width)
    tl.store(dot_ptr + offset, tl.sum(dot, 0), column < width)
    if TWO:
        tl.store(dot2_ptr + offset, tl.sum(dot2, 0), column < width)


def residual_grad(
    a: Tensor, b: Tensor, z: Tensor, x: Tensor, mean: Tensor, x2: Tensor | None, mean2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g = a + b where z > 0, and sums over N, H, W of g, of g * (x - mean) and of g * (x2 - mean2).

    Args:
        a: gradient of z, (N, C, H, W), as are `b`, `z`, `x` and `x2`.
        b: the other one.
        z: ReLU's result.
        x: what was normalized.
        mean: float32 (C,), as `mean2`.
        x2: what the shortcut's batch norm normalized, if it has one.
        mean2: of that.

    Returns:
        g; three vectors, float32 (C,), the last of which is empty without `x2`.
    """
    a, b, z, x = channels_last(a), channels_last(b), channels_last(z), channels_last(x)
    x2, two = (x, False) if x2 is None else (channels_last(x2), True)
    mean = mean.contiguous()
    mean2 = mean if mean2 is None else mean2.contiguous()
    split = Split(x, ROWS)
    third = torch.empty_like(split.first) if two else split.first
    g, vectors = images_like(x, x.shape), [per_channel(split.channels, x) for _ in range(3)]
    with on_device_of(x):
        _residual_sums[split.grid](
            a, b, z, g, x, mean, x2, mean2, split.first, split.second, third,
            split.rows, split.width, split.channels, split.rows_each, TWO=two, R=ROWS, B=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        merge_sums(split, split.first, split.second, vectors[0], vectors[1])
        if two:
            merge_sums(split, third, third, vectors[2], vectors[2])
    return g, vectors[0], vectors[1], vectors[2] if two else vectors[2].new_empty(0)
