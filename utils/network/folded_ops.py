"""Operators that `utils.network.folding` puts in place of others: batch norm's sums, taken where the values are made.

On the CPU, and where cuDNN has no such kernel, they compute the same one after the other.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.network.fused_ops import _cast, _column, _empty_images, _operator, _upcast, _use_kernels

Vectors3 = tuple[Tensor, Tensor, Tensor, Tensor]


def _fake_convolution_sums(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    size = [(side + 2 * pad - kernel) // step + 1 for side, kernel, step, pad in sides]
    y = _empty_images(x, x.shape[0], weight.shape[0], *size)
    return y, _vector(y), _vector(y)


def _vector(like: Tensor) -> Tensor:
    """(C,) in the precision of the arithmetic."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return like.new_empty(like.shape[1], dtype=dtype)


@_operator(_fake_convolution_sums)
def convolution_sums(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A convolution y without groups and bias, and the sums of y and of its squares.

    Args:
        x: (N, C, H, W).
        weight: (K, C, R, S).

    Returns:
        y (N, K, H', W') in channels_last; two sums over N, H', W', (K,), float32 (float64 of float64).
    """
    if x.is_cuda and x.dtype == torch.float16:
        from utils.network.kernels import folded_convolutions as kernels

        if (found := kernels.convolution_sums(x, weight, stride, padding)) is not None:
            return found
    y = F.conv2d(x, weight, stride=stride, padding=padding).contiguous(memory_format=torch.channels_last)
    exact = _upcast(y)
    return y, exact.sum(dim=(0, 2, 3)), exact.square().sum(dim=(0, 2, 3))


def _fake_residual_grad(
    a: Tensor, b: Tensor, z: Tensor, x: Tensor, mean: Tensor, x2: Tensor | None, mean2: Tensor | None
) -> Vectors3:
    return _gradient_and_sums(z, x2)


def _gradient_and_sums(like: Tensor, x2: Tensor | None) -> Vectors3:
    second = _vector(like)
    return _empty_images(like, *like.shape), _vector(like), _vector(like), second[:0] if x2 is None else second


@_operator(_fake_residual_grad)
def residual_grad(
    a: Tensor, b: Tensor, z: Tensor, x: Tensor, mean: Tensor, x2: Tensor | None, mean2: Tensor | None
) -> Vectors3:
    """g = a + b where z > 0, and the sums of g, of g * (x - mean) and of g * (x2 - mean2).

    Args:
        a: gradient of z, (N, C, H, W), as `b`.
        b: the other one.
        z: result of a ReLU.
        x: what a batch norm before the ReLU normalized.
        mean: of x, (C,).
        x2: of a second batch norm, if there is one.
        mean2: of x2.

    Returns:
        g (N, C, H, W) in channels_last; sums over N, H, W, (C,), float32 (float64 of float64), the last empty without
        `x2`.
    """
    if _use_kernels(a):
        from utils.network.kernels.residual import residual_grad as kernel

        return kernel(a, b, z, x, mean, x2, mean2)
    g = torch.where(z <= 0, 0, a + b).contiguous(memory_format=torch.channels_last)
    return g, *_sums(g, x, mean, x2, mean2)


def _sums(g: Tensor, x: Tensor, mean: Tensor, x2: Tensor | None, mean2: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    exact = _upcast(g)
    dots = [
        (exact * (_upcast(each) - _column(middle))).sum(dim=(0, 2, 3))
        for each, middle in ((x, mean), (x2, mean2))
        if each is not None and middle is not None
    ]
    return exact.sum(dim=(0, 2, 3)), dots[0], dots[1] if len(dots) > 1 else dots[0].new_empty(0)


def _fake_masked_input_grad(
    dy: Tensor, weight: Tensor, stride: list[int], padding: list[int], branch: Tensor | None, shortcut: Tensor | None,
    x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor,
    x2: Tensor | None, mean2: Tensor | None, scale2: Tensor | None, bias2: Tensor | None,
) -> Vectors3:  # fmt: skip
    return _gradient_and_sums(x, x2)


@_operator(_fake_masked_input_grad)
def masked_input_grad(
    dy: Tensor, weight: Tensor, stride: list[int], padding: list[int], branch: Tensor | None, shortcut: Tensor | None,
    x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor,
    x2: Tensor | None, mean2: Tensor | None, scale2: Tensor | None, bias2: Tensor | None,
) -> Vectors3:  # fmt: skip
    """Gradient g before the ReLU in front of a convolution, and the sums of the batch norms in front of the ReLU.

    The convolution's input is relu(norm(x) + norm(x2) + shortcut), of which the last two may be absent.

    Args:
        dy: gradient of the convolution's result, (N, K, H', W').
        weight: (K, C, R, S).
        branch: another gradient of the convolution's input, (N, C, H, W), if there is one.
        shortcut: (N, C, H, W).
        x: (N, C, H, W): norm(x) = (x - mean) * scale + bias.
        mean: (C,), float32 (float64 of float64), as `scale` and `bias`.

    Returns:
        g (N, C, H, W) in channels_last; sums over N, H, W of g, of g * (x - mean) and of g * (x2 - mean2), (C,), the
        last empty without `x2`.
    """
    norms = [(x, mean, scale, bias)]
    if x2 is not None and mean2 is not None and scale2 is not None and bias2 is not None:
        norms.append((x2, mean2, scale2, bias2))
    if x.is_cuda and x.dtype == torch.float16:
        from utils.network.kernels import folded_convolutions as kernels

        found = kernels.masked_input_grad(dy, weight, norms, branch, shortcut, stride, padding)
        if found is not None:
            g, total, *dots = found
            return g, total, dots[0], dots[1] if len(dots) > 1 else total.new_empty(0)
    terms = [
        (_upcast(each) - _column(middle)) * _column(slope) + _column(shift) for each, middle, slope, shift in norms
    ]
    z: Tensor = sum(terms[1:], terms[0]) if shortcut is None else sum(terms, _upcast(shortcut))
    gradient = _input_grad(dy, x, weight, stride, padding)
    gradient = gradient if branch is None else gradient + branch
    g = _cast(torch.where(z <= 0, 0, gradient), x.dtype).contiguous(memory_format=torch.channels_last)
    return g, *_sums(g, x, mean, x2, mean2)


def _input_grad(dy: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    found = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, (True, False, False)
    )
    return found[0]  # type: ignore[no-any-return]
