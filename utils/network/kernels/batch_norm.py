"""Triton kernels of batch norm: mean and variance of each channel, and the sums of its backward pass.

Both reductions have two stages: programs reduce blocks of rows to one row of partial results each, a second kernel
reduces those. A row of few channels would waste most of a tile, so `fold` rows are read as one row of fold * C columns;
the rows of partial results are then fold times as many, still C wide in memory.
"""

import functools
import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from utils.network.kernels.tensors import channels_last, on_device_of

ROWS, COLUMNS, WARPS = 16, 128, 8  # tile of the sums: 8 elements, one 16-byte load of bf16, a thread
SILU_ROWS = 32  # more of them to hide the exponential; found by trial on an H100, as the others
PROGRAMS_PER_SM = 4  # more would feed the second stage more than the first gains
PARTIALS = 256  # rows of partial results that the second stage takes at a time
INTERPRETER_SMS = 2  # Triton's interpreter has no multiprocessors; two make a grid small and still split


@triton.jit  # type: ignore[untyped-decorator]
def _moments(x_ptr, mean_ptr, m2_ptr, rows, width, rows_each, R: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    split = tl.program_id(1)
    rows_here = tl.minimum(rows_each, rows - split * rows_each)
    column = tl.program_id(0) * B + tl.arange(0, B)
    tile_row = tl.arange(0, R)
    x_ptr += split.to(tl.int64) * rows_each * width
    mean = tl.zeros((R, B), tl.float32)
    m2 = tl.zeros((R, B), tl.float32)
    count_so_far = 0.0
    for start in range(0, rows_here, R):  # Welford's update in each of the R x B elements
        row = start + tile_row
        valid = (row < rows_here)[:, None] & (column < width)[None, :]
        x = tl.load(x_ptr + row[:, None] * width + column[None, :], valid, 0.0).to(tl.float32)
        count_so_far += 1.0
        delta = tl.where(valid, x - mean, 0.0)
        mean += delta * (1.0 / count_so_far)
        m2 += delta * (x - mean)
    count = ((rows_here - tile_row + R - 1) // R).to(tl.float32)[:, None]
    total_mean = tl.sum(mean * count, 0) / rows_here
    deviation = mean - total_mean[None, :]
    offset = split * width + column
    tl.store(mean_ptr + offset, total_mean, column < width)
    tl.store(m2_ptr + offset, tl.sum(m2 + count * deviation * deviation, 0), column < width)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_moments(  # type: ignore[no-untyped-def]
    mean_ptr, m2_ptr, out_mean_ptr, out_var_ptr, partials, channels, fold, rows, rows_each,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * B + tl.arange(0, B)
    count = tl.zeros((R, 1), tl.float32)
    mean = tl.zeros((R, B), tl.float32)
    m2 = tl.zeros((R, B), tl.float32)
    for start in range(0, partials, R):  # Chan's formula for two groups, in each of the R x B elements
        partial = start + tl.arange(0, R)
        valid = (partial < partials)[:, None] & (channel < channels)[None, :]
        offset = partial[:, None] * channels + channel[None, :]
        rows_of_split = tl.minimum(rows_each, rows - partial // fold * rows_each)
        new = tl.where(partial < partials, rows_of_split, 0).to(tl.float32)[:, None]
        weight = new / tl.maximum(count + new, 1.0)
        delta = tl.where(valid, tl.load(mean_ptr + offset, valid, 0.0) - mean, 0.0)
        m2 += tl.load(m2_ptr + offset, valid, 0.0) + delta * delta * count * weight
        mean += delta * weight
        count += new
    total = tl.sum(count, 0)
    total_mean = tl.sum(mean * count, 0) / total
    deviation = mean - total_mean[None, :]
    variance = tl.sum(m2 + count * deviation * deviation, 0) / total
    tl.store(out_mean_ptr + channel, total_mean, channel < channels)
    tl.store(out_var_ptr + channel, variance, channel < channels)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_sums(  # type: ignore[no-untyped-def]
    dz_ptr, x_ptr, mean_ptr, scale_ptr, bias_ptr, sum_ptr, dot_ptr, rows, width, channels, rows_each,
    ACTIVATION: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    rows_here = tl.minimum(rows_each, rows - split * rows_each)
    column = tl.program_id(0) * B + tl.arange(0, B)
    channel = column % channels
    mean = tl.load(mean_ptr + channel)[None, :]
    if ACTIVATION != "identity":
        scale = tl.load(scale_ptr + channel)[None, :]
        bias = tl.load(bias_ptr + channel)[None, :]
    start_at = split.to(tl.int64) * rows_each * width
    dz_ptr += start_at
    x_ptr += start_at
    total = tl.zeros((R, B), tl.float32)
    dot = tl.zeros((R, B), tl.float32)
    for start in range(0, rows_here, R):
        row = start + tl.arange(0, R)
        valid = (row < rows_here)[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        dy = tl.load(dz_ptr + offset, valid, 0.0).to(tl.float32)
        centered = tl.load(x_ptr + offset, valid, 0.0).to(tl.float32) - mean
        if ACTIVATION == "relu":
            dy = tl.where(centered * scale + bias > 0.0, dy, 0.0)
        if ACTIVATION == "silu":
            y = centered * scale + bias
            gate = 1.0 / (1.0 + tl.exp(-y))
            dy *= gate * (1.0 + y * (1.0 - gate))
        total += dy
        dot += dy * centered
    offset = split * width + column
    tl.store(sum_ptr + offset, tl.sum(total, 0), column < width)
    tl.store(dot_ptr + offset, tl.sum(dot, 0), column < width)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_sums(a_ptr, b_ptr, out_a_ptr, out_b_ptr, partials, channels, R: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.zeros((R, B), tl.float32)
    b = tl.zeros((R, B), tl.float32)
    for start in range(0, partials, R):
        partial = start + tl.arange(0, R)
        valid = (partial < partials)[:, None] & (channel < channels)[None, :]
        offset = partial[:, None] * channels + channel[None, :]
        a += tl.load(a_ptr + offset, valid, 0.0)
        b += tl.load(b_ptr + offset, valid, 0.0)
    tl.store(out_a_ptr + channel, tl.sum(a, 0), channel < channels)
    tl.store(out_b_ptr + channel, tl.sum(b, 0), channel < channels)


class Split:
    """How the (N*H*W, C) matrix of `x` is divided among programs, and the room for their partial results."""

    def __init__(self, x: Tensor, tile_rows: int) -> None:
        self.channels = x.shape[1]
        matrix_rows = x.numel() // self.channels
        self.fold = math.gcd(matrix_rows, COLUMNS // math.gcd(self.channels, COLUMNS))
        self.rows, self.width = matrix_rows // self.fold, self.channels * self.fold
        columns, tiles = triton.cdiv(self.width, COLUMNS), triton.cdiv(self.rows, tile_rows)
        wanted = max(1, min(tiles, _multiprocessors(x.device) * PROGRAMS_PER_SM // columns))
        self.rows_each = triton.cdiv(tiles, wanted) * tile_rows
        splits = triton.cdiv(self.rows, self.rows_each)
        self.grid = (columns, splits)
        self.partials = splits * self.fold
        self.first, self.second = torch.empty((2, splits, self.width), dtype=torch.float32, device=x.device)
        # Second stage: 8 channels are one 32-byte sector of memory.
        self.merge_grid = (triton.cdiv(self.channels, 8),)
        self.merge = {"R": min(PARTIALS, triton.next_power_of_2(self.partials)), "B": 8, "num_warps": 4}


def batch_norm_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, float32 (C,), of `x` (N, C, H, W) in bf16, fp16 or float32.

    Welford's update and the pairwise formula of Chan, Golub and LeVeque (1979): no difference of large sums.
    """
    x = channels_last(x)
    split = Split(x, ROWS)
    mean, var = per_channel(split.channels, x), per_channel(split.channels, x)
    with on_device_of(x):
        _moments[split.grid](
            x, split.first, split.second, split.rows, split.width, split.rows_each, R=ROWS, B=COLUMNS, num_warps=WARPS
        )
        _merge_moments[split.merge_grid](
            split.first, split.second, mean, var,
            split.partials, split.channels, split.fold, split.rows, split.rows_each, **split.merge,
        )  # fmt: skip
    return mean, var


def batch_norm_backward_sums(
    dz: Tensor, x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Sums over N, H, W of dy and of dy * (x - mean), float32 (C,), where dy = dz * activation'(y) is never stored.

    Args:
        dz: gradient of activation(y), (N, C, H, W).
        x: what was normalized, same shape: y = (x - mean) * scale + bias.
        mean: float32 (C,), as are `scale` and `bias`.
        scale: weight / standard deviation.
        bias: the shift after it.
        activation: "identity", "relu" or "silu".
    """
    dz, x = channels_last(dz), channels_last(x)
    tile_rows = SILU_ROWS if activation == "silu" else ROWS
    split = Split(x, tile_rows)
    total, dot = per_channel(split.channels, x), per_channel(split.channels, x)
    with on_device_of(x):
        _gradient_sums[split.grid](
            dz, x, mean.contiguous(), scale.contiguous(), bias.contiguous(), split.first, split.second,
            split.rows, split.width, split.channels, split.rows_each,
            ACTIVATION=activation, R=tile_rows, B=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        merge_sums(split, split.first, split.second, total, dot)
    return total, dot


def merge_sums(split: Split, first: Tensor, second: Tensor, out_first: Tensor, out_second: Tensor) -> None:
    """Second stage of two sums: the rows of partial results of each, added."""
    _merge_sums[split.merge_grid](first, second, out_first, out_second, split.partials, split.channels, **split.merge)


def per_channel(channels: int, like: Tensor) -> Tensor:
    """A float32 number for each channel; results of one operator must not share their memory."""
    return torch.empty(channels, dtype=torch.float32, device=like.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETER_SMS
