"""Kernels: what Triton computes on an NVIDIA GPU for utils.layers, which imports this with the first CUDA tensor.

Every image tensor is in channels_last memory: (N, C, H, W) in shape, (N, H, W, C) in memory, so that a batch is a
matrix of N*H*W rows and C columns. Sums are float32, in an order that depends on the shapes alone: two runs agree to
the last bit. Block sizes follow from the shapes by rule, never by trial, because a CUDA graph may be recording.
"""

import contextlib
import functools
import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

ROWS, COLUMNS, WARPS = 16, 128, 8  # tile of the batch-norm sums: 8 elements, one 16-byte load of bf16, a thread
SILU_ROWS = 32  # more of them to hide the exponential; found by trial on an H100, as the others
PROGRAMS_PER_SM = 4  # of the batch-norm sums; more would feed the second stage more than the first gains
LINES = 256  # of partial results that the second stage takes at a time
STRIP = 7  # output rows of one program of the depthwise convolution, which share their input rows
NO_GPU_SMS = 2  # Triton's interpreter has no multiprocessors; two make a grid small and still split


def channels_last(tensor: Tensor) -> Tensor:
    """`tensor` itself if its memory is channels_last, else a copy that is."""
    return tensor.contiguous(memory_format=torch.channels_last)


# Batch norm. Both reductions have two stages: programs reduce blocks of rows to one line of partial results each,
# a second kernel reduces the lines. A row of few channels would waste most of a tile, so `fold` rows are read as one
# row of fold * C columns; the lines are then fold times as many, still C wide in memory.


@triton.jit  # type: ignore[untyped-decorator]
def _moments(x_ptr, mean_ptr, m2_ptr, rows, width, rows_each, R: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    split = tl.program_id(1)
    rows_here = tl.minimum(rows_each, rows - split * rows_each)
    column = tl.program_id(0) * B + tl.arange(0, B)
    line = tl.arange(0, R)
    x_ptr += split.to(tl.int64) * rows_each * width
    mean = tl.zeros((R, B), tl.float32)
    m2 = tl.zeros((R, B), tl.float32)
    seen = 0.0
    for start in range(0, rows_here, R):  # Welford's update in each of the R x B places
        row = start + line
        valid = (row < rows_here)[:, None] & (column < width)[None, :]
        x = tl.load(x_ptr + row[:, None] * width + column[None, :], valid, 0.0).to(tl.float32)
        seen += 1.0
        delta = tl.where(valid, x - mean, 0.0)
        mean += delta * (1.0 / seen)
        m2 += delta * (x - mean)
    count = ((rows_here - line + R - 1) // R).to(tl.float32)[:, None]
    total_mean = tl.sum(mean * count, 0) / rows_here
    away = mean - total_mean[None, :]
    place = split * width + column
    tl.store(mean_ptr + place, total_mean, column < width)
    tl.store(m2_ptr + place, tl.sum(m2 + count * away * away, 0), column < width)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_moments(  # type: ignore[no-untyped-def]
    mean_ptr, m2_ptr, out_mean_ptr, out_var_ptr, lines, channels, fold, rows, rows_each,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * B + tl.arange(0, B)
    count = tl.zeros((R, 1), tl.float32)
    mean = tl.zeros((R, B), tl.float32)
    m2 = tl.zeros((R, B), tl.float32)
    for start in range(0, lines, R):  # Chan's formula for two groups, in each of the R x B places
        line = start + tl.arange(0, R)
        valid = (line < lines)[:, None] & (channel < channels)[None, :]
        place = line[:, None] * channels + channel[None, :]
        new = tl.where(line < lines, tl.minimum(rows_each, rows - line // fold * rows_each), 0).to(tl.float32)[:, None]
        share = new / tl.maximum(count + new, 1.0)
        delta = tl.where(valid, tl.load(mean_ptr + place, valid, 0.0) - mean, 0.0)
        m2 += tl.load(m2_ptr + place, valid, 0.0) + delta * delta * count * share
        mean += delta * share
        count += new
    total = tl.sum(count, 0)
    total_mean = tl.sum(mean * count, 0) / total
    away = mean - total_mean[None, :]
    variance = tl.sum(m2 + count * away * away, 0) / total
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
        place = row[:, None] * width + column[None, :]
        dy = tl.load(dz_ptr + place, valid, 0.0).to(tl.float32)
        centred = tl.load(x_ptr + place, valid, 0.0).to(tl.float32) - mean
        if ACTIVATION == "relu":
            dy = tl.where(centred * scale + bias > 0.0, dy, 0.0)
        if ACTIVATION == "silu":
            y = centred * scale + bias
            gate = 1.0 / (1.0 + tl.exp(-y))
            dy *= gate * (1.0 + y * (1.0 - gate))
        total += dy
        dot += dy * centred
    place = split * width + column
    tl.store(sum_ptr + place, tl.sum(total, 0), column < width)
    tl.store(dot_ptr + place, tl.sum(dot, 0), column < width)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_sums(a_ptr, b_ptr, out_a_ptr, out_b_ptr, lines, channels, R: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.zeros((R, B), tl.float32)
    b = tl.zeros((R, B), tl.float32)
    for start in range(0, lines, R):
        line = start + tl.arange(0, R)
        valid = (line < lines)[:, None] & (channel < channels)[None, :]
        place = line[:, None] * channels + channel[None, :]
        a += tl.load(a_ptr + place, valid, 0.0)
        b += tl.load(b_ptr + place, valid, 0.0)
    tl.store(out_a_ptr + channel, tl.sum(a, 0), channel < channels)
    tl.store(out_b_ptr + channel, tl.sum(b, 0), channel < channels)


class _Split:
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
        self.lines = splits * self.fold
        self.first, self.second = torch.empty((2, splits, self.width), dtype=torch.float32, device=x.device)
        # Second stage: 8 channels are one 32-byte sector of memory.
        self.merge_grid = (triton.cdiv(self.channels, 8),)
        self.merge = {"R": min(LINES, triton.next_power_of_2(self.lines)), "B": 8, "num_warps": 4}


def batch_norm_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, float32 (C,), of `x` (N, C, H, W) in bf16, fp16 or float32.

    Welford's update and the pairwise formula of Chan, Golub and LeVeque (1979): no difference of large sums.
    """
    x = channels_last(x)
    split = _Split(x, ROWS)
    mean, var = _line(split.channels, x), _line(split.channels, x)
    with _on(x):
        _moments[split.grid](
            x, split.first, split.second, split.rows, split.width, split.rows_each, R=ROWS, B=COLUMNS, num_warps=WARPS
        )
        _merge_moments[split.merge_grid](
            split.first, split.second, mean, var,
            split.lines, split.channels, split.fold, split.rows, split.rows_each, **split.merge,
        )  # fmt: skip
    return mean, var


def batch_norm_backward_sums(
    dz: Tensor, x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Sums over N, H, W of dy and of dy * (x - mean), float32 (C,), where dy = dz * activation'(y) is never stored.

    Args:
        dz: gradient of activation(y), (N, C, H, W).
        x: what was normalised, same shape: y = (x - mean) * scale + bias.
        mean: float32 (C,), as are `scale` and `bias`.
        scale: weight / standard deviation.
        bias: the shift after it.
        activation: "identity", "relu" or "silu".
    """
    dz, x = channels_last(dz), channels_last(x)
    tile_rows = SILU_ROWS if activation == "silu" else ROWS
    split = _Split(x, tile_rows)
    total, dot = _line(split.channels, x), _line(split.channels, x)
    with _on(x):
        _gradient_sums[split.grid](
            dz, x, mean.contiguous(), scale.contiguous(), bias.contiguous(), split.first, split.second,
            split.rows, split.width, split.channels, split.rows_each,
            ACTIVATION=activation, R=tile_rows, B=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        _merge_sums[split.merge_grid](split.first, split.second, total, dot, split.lines, split.channels, **split.merge)
    return total, dot


# Max pool 3 x 3, stride 2, padding 1. Window (i, j) covers rows 2i-1 to 2i+1 and columns 2j-1 to 2j+1; its maximum's
# place is 3 * row + column within the window. The 2 x 2 pixels from (2i, 2j) lie in four windows at most, (i, j) to
# (i+1, j+1): a thread of the backward pass owns such a patch, loads the four windows once and writes the four pixels.


@triton.jit
def _inside(h, H, w, W):  # type: ignore[no-untyped-def]
    """Is pixel (h, w) in an H x W image? h is a number, w a block; a row outside is taken for one without pixels."""
    return (w >= 0) & (w < tl.where((h >= 0) & (h < H), W, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _max_pool(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, place_ptr, H, W, OH, OW: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    image, i = tl.program_id(2).to(tl.int64), tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # j * C + channel
    j, channel = flat // C, flat % C
    # As torch: a window of -inf alone has its maximum in its first pixel; of several NaN the last one counts.
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.where(i == 0, 3, 0) + tl.where(j == 0, 1, 0)
    x_ptr += image * H * W * C
    for row in tl.static_range(3):
        for column in tl.static_range(3):
            h, w = 2 * i - 1 + row, 2 * j - 1 + column
            inside = _inside(h, H, w, W) & (j < OW)
            x = tl.load(x_ptr + h * W * C + w * C + channel, inside, float("-inf")).to(tl.float32)
            better = (x > best) | (x != x)
            best = tl.where(better, x, best)
            place = tl.where(better, 3 * row + column, place)
    out = (image * OH + i) * OW * C
    tl.store(y_ptr + out + flat, best, j < OW)
    tl.store(place_ptr + out + flat, place, j < OW)


@triton.jit
def _window(dy_ptr, place_ptr, flat, inside):  # type: ignore[no-untyped-def]
    """A window's gradient and place; place 9 lies nowhere."""
    dy = tl.load(dy_ptr + flat, inside, 0.0).to(tl.float32)
    return dy, tl.load(place_ptr + flat, inside, 9)


@triton.jit  # type: ignore[untyped-decorator]
def _max_pool_backward(  # type: ignore[no-untyped-def]
    dy_ptr, place_ptr, dx_ptr, H, W, OH, OW: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    image, i = tl.program_id(2).to(tl.int64), tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j, channel = flat // C, flat % C
    dy_ptr += (image * OH + i) * OW * C
    place_ptr += (image * OH + i) * OW * C
    right, below = j + 1 < OW, _inside(i + 1, OH, j, OW)
    a, at_a = _window(dy_ptr, place_ptr, flat, j < OW)
    b, at_b = _window(dy_ptr, place_ptr, flat + C, right)
    c, at_c = _window(dy_ptr, place_ptr, flat + OW * C, below)
    d, at_d = _window(dy_ptr, place_ptr, flat + OW * C + C, below & right)
    top_left = tl.where(at_a == 4, a, 0.0)
    top_right = tl.where(at_a == 5, a, 0.0) + tl.where(at_b == 3, b, 0.0)
    low_left = tl.where(at_a == 7, a, 0.0) + tl.where(at_c == 1, c, 0.0)
    low_right = (tl.where(at_a == 8, a, 0.0) + tl.where(at_b == 6, b, 0.0)) + (
        tl.where(at_c == 2, c, 0.0) + tl.where(at_d == 0, d, 0.0)
    )
    dx_ptr += (image * H + 2 * i) * W * C
    out = 2 * j * C + channel
    tl.store(dx_ptr + out, top_left, 2 * j < W)
    tl.store(dx_ptr + out + C, top_right, 2 * j + 1 < W)
    tl.store(dx_ptr + out + W * C, low_left, _inside(2 * i + 1, H, 2 * j, W))
    tl.store(dx_ptr + out + W * C + C, low_right, _inside(2 * i + 1, H, 2 * j + 1, W))


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max pool 3 x 3, stride 2, padding 1 of `x` (N, C, H, W), and the uint8 place of each maximum, 0 to 8."""
    x = channels_last(x)
    images, channels, height, width = x.shape
    out_height, out_width = (height + 1) // 2, (width + 1) // 2
    y = _empty(images, channels, out_height, out_width, like=x)
    place = torch.empty_like(y, dtype=torch.uint8)
    block = 1024
    with _on(x):
        _max_pool[(triton.cdiv(out_width * channels, block), out_height, images)](
            x, y, place, height, width, out_height, OW=out_width, C=channels, BLOCK=block, num_warps=4
        )
    return y, place


def max_pool_backward(dy: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    """Gradient of max_pool's input, (N, C, height, width), from that of its output and the places."""
    dy, place = channels_last(dy), channels_last(place)
    images, channels, out_height, out_width = dy.shape
    dx = _empty(images, channels, height, width, like=dy)
    block = 1024
    with _on(dy):
        _max_pool_backward[(triton.cdiv(out_width * channels, block), out_height, images)](
            dy, place, dx, height, width, out_height, OW=out_width, C=channels, BLOCK=block, num_warps=4
        )
    return dx


# Depthwise convolution K x K (K odd, padding K // 2). Within a row of an image, pixel and channel make one flat index,
# so that tiles fill whatever the width and the number of channels are; taps are (K, K, C).


@triton.jit  # type: ignore[untyped-decorator]
def _add(totals, t: tl.constexpr, part):  # type: ignore[no-untyped-def]
    """The tuple `totals` with `part` added to its element t."""
    return totals[:t] + (totals[t] + part,) + totals[t + 1 :]  # noqa: RUF005 (Triton cannot unpack)


@triton.jit  # type: ignore[untyped-decorator]
def _depthwise(  # type: ignore[no-untyped-def]
    x_ptr, taps_ptr, y_ptr, H, W, OH, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    STRIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """STRIP output rows of one image, so that an input row is loaded once for all of them."""
    image, i = tl.program_id(2).to(tl.int64), tl.program_id(1) * STRIP
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j, channel = flat // C, flat % C
    totals = (tl.zeros((BLOCK,), tl.float32),) * STRIP
    x_ptr += image * H * W * C
    for column in tl.static_range(K):
        w = j * S + (column - K // 2)
        for row in tl.static_range((STRIP - 1) * S + K):
            h = i * S + (row - K // 2)
            x = tl.load(x_ptr + h * W * C + w * C + channel, _inside(h, H, w, W) & (j < OW), 0.0).to(tl.float32)
            for t in tl.static_range(STRIP):
                if row >= t * S and row < t * S + K:
                    tap = tl.load(taps_ptr + ((row - t * S) * K + column) * C + channel).to(tl.float32)
                    totals = _add(totals, t, x * tap)
    y_ptr += (image * OH + i) * OW * C
    for t in tl.static_range(STRIP):
        tl.store(y_ptr + t * OW * C + flat, totals[t], _inside(i + t, OH, j, OW))


@triton.jit  # type: ignore[untyped-decorator]
def _depthwise_input_grad(  # type: ignore[no-untyped-def]
    dy_ptr, taps_ptr, dx_ptr, H, W, OH, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Stride 2: the 2 x 2 pixels from (2i, 2j). Pixel 2i + p takes tap k from output row i + (p + K // 2 - k) / 2."""
    image, i = tl.program_id(2).to(tl.int64), tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j, channel = flat // C, flat % C
    dy_ptr += image * OH * OW * C
    dx_ptr += (image * H + 2 * i) * W * C
    for low in tl.static_range(2):
        for right in tl.static_range(2):
            total = tl.zeros((BLOCK,), tl.float32)
            for row in tl.static_range((low + K // 2) % 2, K, 2):
                for column in tl.static_range((right + K // 2) % 2, K, 2):
                    h, w = i + (low + K // 2 - row) // 2, j + (right + K // 2 - column) // 2
                    dy = tl.load(dy_ptr + h * OW * C + w * C + channel, _inside(h, OH, w, OW), 0.0).to(tl.float32)
                    total += dy * tl.load(taps_ptr + (row * K + column) * C + channel).to(tl.float32)
            place = (low * W + 2 * j + right) * C + channel
            tl.store(dx_ptr + place, total, _inside(2 * i + low, H, 2 * j + right, W))


def depthwise(x: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Depthwise convolution of `x` (N, C, H, W) with `taps` (K, K, C), padding K // 2, stride 1 or 2."""
    x, taps = channels_last(x), taps.contiguous()
    images, channels, height, width = x.shape
    out_height, out_width = (height - 1) // stride + 1, (width - 1) // stride + 1
    y = _empty(images, channels, out_height, out_width, like=x)
    block = 512
    with _on(x):
        _depthwise[(triton.cdiv(out_width * channels, block), triton.cdiv(out_height, STRIP), images)](
            x, taps, y, height, width, out_height,
            OW=out_width, C=channels, K=taps.shape[0], S=stride, STRIP=STRIP, BLOCK=block, num_warps=2,
        )  # fmt: skip
    return y


def depthwise_input_grad(dy: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    """Gradient of the input (N, C, height, width) of `depthwise` with stride 2."""
    dy, taps = channels_last(dy), taps.contiguous()
    images, channels, out_height, out_width = dy.shape
    dx = _empty(images, channels, height, width, like=dy)
    block = 512
    with _on(dy):
        _depthwise_input_grad[(triton.cdiv(out_width * channels, block), out_height, images)](
            dy, taps, dx, height, width, out_height, OW=out_width, C=channels, K=taps.shape[0], BLOCK=block, num_warps=2
        )
    return dx


def _line(channels: int, like: Tensor) -> Tensor:
    """A float32 number for each channel; results of one operator must not share their memory."""
    return torch.empty(channels, dtype=torch.float32, device=like.device)


def _empty(images: int, channels: int, height: int, width: int, like: Tensor) -> Tensor:
    return torch.empty(
        (images, channels, height, width), dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on the tensor's device; the interpreter's tensors are on the CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NO_GPU_SMS
