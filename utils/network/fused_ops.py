"""Operators of the fused layers, opaque to torch.compile: reductions and gathers that it or cuDNN do badly."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

Function = TypeVar("Function", bound=Callable[..., Any])
ALLOWED_IN_GRAPH: list[str] = []  # full names of the functions that torch.compile takes into its graphs as a whole
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # on CUDA; float64 takes the plain path


def _operator(fake: Function) -> Callable[[Function], Function]:
    """Make a function an operator, opaque to the compiler; `fake` returns results of the right shape, type and strides.

    The compiler hands tensors over in the strides that they have without it, which are channels_last here.
    """

    def register(function: Function) -> Function:
        tags = (torch.Tag.needs_exact_strides,)
        operator = torch.library.custom_op(f"brisk::{function.__name__}", function, mutates_args=(), tags=tags)
        operator.register_fake(fake)
        return cast(Function, operator)

    return register


def _allow_in_graph(function: Function) -> Function:
    """Let the compiler's front end take a function as a whole; its back end still looks inside.

    At every launch the front end would follow each autograd.Function forward and backward, seconds for the 53 batch
    norms of a ResNet-50 (docs/internals/experiments.md). `function` uses no tensors but its arguments.
    """
    ALLOWED_IN_GRAPH.append(f"{function.__module__}.{function.__name__}")
    return cast(Function, torch.compiler.allow_in_graph(function))  # type: ignore[no-untyped-call]


def _use_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in KERNEL_DTYPES


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `tensor.to(dtype)`, but without an operation if the dtype is right.

    torch.compile of torch 2.11 treats the result of an autograd.Function and an alias of it as two results, and gives
    the gradient to the wrong one.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _upcast(tensor: Tensor) -> Tensor:
    """In the precision of the arithmetic: float32, or float64 if it is that already."""
    return _cast(tensor, torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def _column(vector: Tensor) -> Tensor:
    """(C,) -> (C, 1, 1)."""
    return vector[:, None, None]


def _empty_images(like: Tensor, *shape: int) -> Tensor:
    """An (N, C, H, W) result in channels_last, of the dtype and on the device of `like`."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


# Batch norm.


def _fake_batch_norm_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


@_operator(_fake_batch_norm_stats)
def batch_norm_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of `x` (N, C, H, W): (C,) each, float32 (float64 of float64)."""
    if _use_kernels(x):
        from utils.network.kernels import batch_norm as kernels

        return kernels.batch_norm_stats(x)
    var, mean = torch.var_mean(_upcast(x), dim=(0, 2, 3), correction=0)
    return mean, var


def _fake_batch_norm_backward_sums(
    dz: Tensor, x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor, activation: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(mean), torch.empty_like(mean)


@_operator(_fake_batch_norm_backward_sums)
def batch_norm_backward_sums(
    dz: Tensor, x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Sums over N, H, W of dy and of dy * (x - mean), (C,) each, where dy = dz * activation'(y).

    Args:
        dz: gradient of activation(y), (N, C, H, W).
        x: what was normalized, of the same shape: y = (x - mean) * scale + bias.
        mean: (C,), float32 (float64 of float64), as `scale` and `bias`.
        scale: weight / standard deviation.
        bias: the shift after it.
        activation: "identity", "relu" or "silu".
    """
    if _use_kernels(x):
        from utils.network.kernels import batch_norm as kernels

        return kernels.batch_norm_backward_sums(dz, x, mean, scale, bias, activation)
    centered = _upcast(x) - _column(mean)
    dy = _input_grad(_upcast(dz), centered * _column(scale) + _column(bias), activation)
    return dy.sum(dim=(0, 2, 3)), (dy * centered).sum(dim=(0, 2, 3))


def _activate(y: Tensor, activation: str) -> Tensor:
    return {"identity": lambda: y, "relu": lambda: F.relu(y), "silu": lambda: F.silu(y)}[activation]()


def _input_grad(dz: Tensor, y: Tensor, activation: str) -> Tensor:
    """Gradient of y, from that of activation(y)."""
    if activation == "relu":
        return torch.where(y > 0, dz, 0)
    if activation == "silu":
        gate = torch.sigmoid(y)
        return dz * (gate * (1 + y * (1 - gate)))
    return dz


class _BatchNormAct(torch.autograd.Function):
    """activation((x - mean) / sqrt(var + eps) * weight + bias), where mean and var are those of x.

    Only x and vectors of C numbers are kept for the backward pass (Ioffe and Szegedy, 2015), which computes y
    again instead of reading it, or a mask, from memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
        eps: float, activation: str,
    ) -> Tensor:  # fmt: skip
        std_inverse = torch.rsqrt(var + eps)
        scale, shift = _upcast(weight) * std_inverse, _upcast(bias)
        ctx.save_for_backward(x, mean, std_inverse, scale, shift)
        ctx.activation = activation
        y = (_upcast(x) - _column(mean)) * _column(scale) + _column(shift)
        return _cast(_activate(y, activation), x.dtype)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, std_inverse, scale, shift = ctx.saved_tensors
        dy_sum, dot = batch_norm_backward_sums(dz, x, mean, scale, shift, ctx.activation)
        count = x.numel() // x.shape[1]
        centered = _upcast(x) - _column(mean)
        dy = _input_grad(_upcast(dz), centered * _column(scale) + _column(shift), ctx.activation)
        slope = dot * std_inverse * std_inverse / count
        dx = (dy - _column(dy_sum / count) - centered * _column(slope)) * _column(scale)
        return _cast(dx, x.dtype), dot * std_inverse, dy_sum, None, None, None, None


@_allow_in_graph
def _batch_norm_act(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, activation: str
) -> Tensor:
    return cast(Tensor, _BatchNormAct.apply(x, weight, bias, mean, var, eps, activation))


# Max pool.


def _fake_max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _empty_images(x, x.shape[0], x.shape[1], (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)
    return y, torch.empty_like(y, dtype=torch.uint8)


@_operator(_fake_max_pool)
def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max pool 3 x 3, stride 2, padding 1 of `x` (N, C, H, W), and the position of each maximum in its window, uint8.

    Position 3 * r + c is row r and column c of the window; of equal maxima the first counts.
    """
    if _use_kernels(x):
        from utils.network.kernels import max_pool as kernels

        return kernels.max_pool(x)
    y, index = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    rows = torch.arange(y.shape[2], device=x.device)[:, None] * 2 - 1
    columns = torch.arange(y.shape[3], device=x.device) * 2 - 1
    argmax = 3 * (index // x.shape[3] - rows) + index % x.shape[3] - columns
    layout = {"memory_format": torch.channels_last}
    return y.contiguous(**layout), argmax.to(torch.uint8).contiguous(**layout)


def _fake_max_pool_backward(dy: Tensor, argmax: Tensor, height: int, width: int) -> Tensor:
    return _empty_images(dy, dy.shape[0], dy.shape[1], height, width)


@_operator(_fake_max_pool_backward)
def max_pool_backward(dy: Tensor, argmax: Tensor, height: int, width: int) -> Tensor:
    """Gradient of max_pool's input, (N, C, height, width), from that of its output and the positions of the maxima."""
    if _use_kernels(dy):
        from utils.network.kernels import max_pool as kernels

        return kernels.max_pool_backward(dy, argmax, height, width)
    rows = torch.arange(dy.shape[2], device=dy.device)[:, None] * 2 - 1 + argmax // 3
    columns = torch.arange(dy.shape[3], device=dy.device) * 2 - 1 + argmax % 3
    dx = torch.zeros(*dy.shape[:2], height * width, dtype=dy.dtype, device=dy.device)
    dx.scatter_add_(2, (rows * width + columns).flatten(2), dy.flatten(2))
    return dx.view(*dy.shape[:2], height, width).contiguous(memory_format=torch.channels_last)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, argmax = max_pool(x)
        ctx.save_for_backward(argmax)
        ctx.size = x.shape[2:]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return max_pool_backward(dy, *ctx.saved_tensors, *ctx.size)


@_allow_in_graph
def _max_pool(x: Tensor) -> Tensor:
    return cast(Tensor, _MaxPool.apply(x))


# Depthwise convolution.


def _fake_depthwise(x: Tensor, taps: Tensor, stride: int) -> Tensor:
    return _empty_images(x, *x.shape[:2], (x.shape[2] - 1) // stride + 1, (x.shape[3] - 1) // stride + 1)


@_operator(_fake_depthwise)
def depthwise(x: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Depthwise convolution of `x` (N, C, H, W) with `taps` (K, K, C), K odd, padding K // 2, stride 1 or 2."""
    if _use_kernels(x):
        from utils.network.kernels import depthwise as kernels

        return kernels.depthwise(x, taps, stride)
    y = F.conv2d(x, _weight(taps), stride=stride, padding=taps.shape[0] // 2, groups=x.shape[1])
    return y.contiguous(memory_format=torch.channels_last)


def _fake_depthwise_input_grad(dy: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    return _empty_images(dy, dy.shape[0], dy.shape[1], height, width)


@_operator(_fake_depthwise_input_grad)
def depthwise_input_grad(dy: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    """Gradient of the input, (N, C, height, width), of `depthwise` with stride 2."""
    if _use_kernels(dy):
        from utils.network.kernels import depthwise as kernels

        return kernels.depthwise_input_grad(dy, taps, height, width)
    size = (dy.shape[0], dy.shape[1], height, width)
    dx = conv2d_input(size, _weight(taps), dy, 2, taps.shape[0] // 2, 1, dy.shape[1])  # type: ignore[no-untyped-call]
    return cast(Tensor, dx.contiguous(memory_format=torch.channels_last))


def _taps(weight: Tensor) -> Tensor:
    """(C, 1, K, K) -> (K, K, C)."""
    return weight[:, 0].permute(1, 2, 0)


def _weight(taps: Tensor) -> Tensor:
    """(K, K, C) -> (C, 1, K, K)."""
    return taps.permute(2, 0, 1)[:, None]


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return depthwise(x, _cast(_taps(weight), x.dtype).contiguous(), stride)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight = ctx.saved_tensors
        stride, padding = (ctx.stride, ctx.stride), (weight.shape[2] // 2, weight.shape[3] // 2)
        taps = _cast(_taps(weight), dy.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            if ctx.stride == 1:  # the gradient is itself such a convolution, with the taps turned by half a turn
                dx = depthwise(dy, taps.flip(0, 1).contiguous(), 1)
            else:
                dx = depthwise_input_grad(dy, taps.contiguous(), x.shape[2], x.shape[3])
        # The weight's gradient is cuDNN's: our Triton kernel took 1.5 times as long.
        _, grad, _ = torch.ops.aten.convolution_backward(
            dy,
            x,
            _cast(weight, x.dtype),
            None,
            stride,
            padding,
            (1, 1),
            False,
            (0, 0),
            x.shape[1],
            (False, True, False),
        )
        return dx, _cast(grad, weight.dtype), None


@_allow_in_graph
def _depthwise(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return cast(Tensor, _Depthwise.apply(x, weight, stride))
