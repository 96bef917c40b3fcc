"""Triton kernels of the depthwise convolution K x K (K odd, padding K // 2), forward and for the input's gradient.

Within a row of an image, pixel and channel make one flat index, so that tiles are full whatever the width and the
number of channels are; taps are (K, K, C).
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from utils.network.kernels.shapes import DepthwiseShape
from utils.network.kernels.tensors import channels_last, empty_images, is_inside, on_device_of

STRIP = 7  # output rows of one program, which share their input rows
BLOCK = 512  # elements of a row that one program makes
WARPS = 2


@triton.jit  # type: ignore[untyped-decorator]
def _add(totals, t: tl.constexpr, term):  # type: ignore[no-untyped-def]
    """The tuple `totals` with `term` added to its element t."""
    return totals[:t] + (totals[t] + term,) + totals[t + 1 :]  # noqa: RUF005 (Triton cannot unpack)


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
            x = tl.load(x_ptr + h * W * C + w * C + channel, is_inside(h, H, w, W) & (j < OW), 0.0).to(tl.float32)
            for t in tl.static_range(STRIP):
                if row >= t * S and row < t * S + K:
                    tap = tl.load(taps_ptr + ((row - t * S) * K + column) * C + channel).to(tl.float32)
                    totals = _add(totals, t, x * tap)
    y_ptr += (image * OH + i) * OW * C
    for t in tl.static_range(STRIP):
        tl.store(y_ptr + t * OW * C + flat, totals[t], is_inside(i + t, OH, j, OW))


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
                    dy = tl.load(dy_ptr + h * OW * C + w * C + channel, is_inside(h, OH, w, OW), 0.0).to(tl.float32)
                    total += dy * tl.load(taps_ptr + (row * K + column) * C + channel).to(tl.float32)
            offset = (low * W + 2 * j + right) * C + channel
            tl.store(dx_ptr + offset, total, is_inside(2 * i + low, H, 2 * j + right, W))


def depthwise(x: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Depthwise convolution of `x` (N, C, H, W) with `taps` (K, K, C), padding K // 2, stride 1 or 2."""
    x, taps = channels_last(x), taps.contiguous()
    images, channels, height, width = x.shape
    out_height, out_width = (height - 1) // stride + 1, (width - 1) // stride + 1
    y = empty_images(images, channels, out_height, out_width, like=x)
    with on_device_of(x):
        _depthwise[(triton.cdiv(out_width * channels, BLOCK), triton.cdiv(out_height, STRIP), images)](
            x, taps, y, height, width, out_height,
            OW=out_width, C=channels, K=taps.shape[0], S=stride, STRIP=STRIP, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return y


def depthwise_input_grad(dy: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    """Gradient of the input (N, C, height, width) of `depthwise` with stride 2."""
    dy, taps = channels_last(dy), taps.contiguous()
    images, channels, out_height, out_width = dy.shape
    dx = empty_images(images, channels, height, width, like=dy)
    with on_device_of(dy):
        _depthwise_input_grad[(triton.cdiv(out_width * channels, BLOCK), out_height, images)](
            dy, taps, dx, height, width, out_height,
            OW=out_width, C=channels, K=taps.shape[0], BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return dx


def compile_depthwise(
    shapes: Iterable[DepthwiseShape], dtype: torch.dtype, device: torch.device, threads: int, with_gradients: bool
) -> None:
    """Compile the kernels of convolutions of `shapes` side by side; launches would compile one after the other.

    Args:
        shapes: each kind once.
        dtype: of the input.
        device: a CUDA device.
        threads: how many compile.
        with_gradients: whether the input's gradient is wanted, too.
    """
    with torch.cuda.device(device), ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
        for channels, height, width, kernel, stride in shapes:
            out_height, out_width = (height - 1) // stride + 1, (width - 1) // stride + 1
            _depthwise.warmup(
                dtype, dtype, dtype, height, width, out_height,
                OW=out_width, C=channels, K=kernel, S=stride, STRIP=STRIP, BLOCK=BLOCK, num_warps=WARPS, grid=(1,),
            )  # fmt: skip
            if with_gradients and stride == 2:  # that of stride 1 is the same kernel
                _depthwise_input_grad.warmup(
                    dtype, dtype, dtype, height, width, out_height,
                    OW=out_width, C=channels, K=kernel, BLOCK=BLOCK, num_warps=WARPS, grid=(1,),
                )  # fmt: skip
