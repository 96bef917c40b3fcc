"""Triton kernels of the max pool 3 x 3, stride 2, padding 1, forward and backward.

Window (i, j) covers rows 2i-1 to 2i+1 and columns 2j-1 to 2j+1; the position of its maximum is 3 * row + column within
the window. The 2 x 2 pixels from (2i, 2j) lie in four windows at most, (i, j) to (i+1, j+1): a thread of the backward
pass computes such a patch, loads the four windows once and writes the four pixels.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from utils.network.kernels.tensors import channels_last, empty_images, is_inside, on_device_of


@triton.jit  # type: ignore[untyped-decorator]
def _max_pool(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, argmax_ptr, H, W, OH, OW: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    image, i = tl.program_id(2).to(tl.int64), tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # j * C + channel
    j, channel = flat // C, flat % C
    # As torch: a window of -inf alone has its maximum in its first pixel; of several NaN the last one counts.
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    argmax = tl.where(i == 0, 3, 0) + tl.where(j == 0, 1, 0)
    x_ptr += image * H * W * C
    for row in tl.static_range(3):
        for column in tl.static_range(3):
            h, w = 2 * i - 1 + row, 2 * j - 1 + column
            inside = is_inside(h, H, w, W) & (j < OW)
            x = tl.load(x_ptr + h * W * C + w * C + channel, inside, float("-inf")).to(tl.float32)
            better = (x > best) | (x != x)
            best = tl.where(better, x, best)
            argmax = tl.where(better, 3 * row + column, argmax)
    out = (image * OH + i) * OW * C
    tl.store(y_ptr + out + flat, best, j < OW)
    tl.store(argmax_ptr + out + flat, argmax, j < OW)


@triton.jit
def _window(dy_ptr, argmax_ptr, flat, inside):  # type: ignore[no-untyped-def]
    """Gradient of a window and the position of its maximum; 9 for a window outside."""
    dy = tl.load(dy_ptr + flat, inside, 0.0).to(tl.float32)
    return dy, tl.load(argmax_ptr + flat, inside, 9)


@triton.jit  # type: ignore[untyped-decorator]
def _max_pool_backward(  # type: ignore[no-untyped-def]
    dy_ptr, argmax_ptr, dx_ptr, H, W, OH, OW: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    image, i = tl.program_id(2).to(tl.int64), tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j, channel = flat // C, flat % C
    dy_ptr += (image * OH + i) * OW * C
    argmax_ptr += (image * OH + i) * OW * C
    right, below = j + 1 < OW, is_inside(i + 1, OH, j, OW)
    a, at_a = _window(dy_ptr, argmax_ptr, flat, j < OW)
    b, at_b = _window(dy_ptr, argmax_ptr, flat + C, right)
    c, at_c = _window(dy_ptr, argmax_ptr, flat + OW * C, below)
    d, at_d = _window(dy_ptr, argmax_ptr, flat + OW * C + C, below & right)
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
    tl.store(dx_ptr + out + W * C, low_left, is_inside(2 * i + 1, H, 2 * j, W))
    tl.store(dx_ptr + out + W * C + C, low_right, is_inside(2 * i + 1, H, 2 * j + 1, W))


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max pool 3 x 3, stride 2, padding 1 of `x` (N, C, H, W), and the uint8 position of each maximum, 0 to 8."""
    x = channels_last(x)
    images, channels, height, width = x.shape
    out_height, out_width = (height + 1) // 2, (width + 1) // 2
    y = empty_images(images, channels, out_height, out_width, like=x)
    argmax = torch.empty_like(y, dtype=torch.uint8)
    block = 1024
    with on_device_of(x):
        _max_pool[(triton.cdiv(out_width * channels, block), out_height, images)](
            x, y, argmax, height, width, out_height, OW=out_width, C=channels, BLOCK=block, num_warps=4
        )
    return y, argmax


def max_pool_backward(dy: Tensor, argmax: Tensor, height: int, width: int) -> Tensor:
    """Gradient of max_pool's input, (N, C, height, width), from that of its output and the positions of the maxima."""
    dy, argmax = channels_last(dy), channels_last(argmax)
    images, channels, out_height, out_width = dy.shape
    dx = empty_images(images, channels, height, width, like=dy)
    block = 1024
    with on_device_of(dy):
        _max_pool_backward[(triton.cdiv(out_width * channels, block), out_height, images)](
            dy, argmax, dx, height, width, out_height, OW=out_width, C=channels, BLOCK=block, num_warps=4
        )
    return dx
