"""Layers: batch norm, max pool and convolutions that compute what torch's do, in fewer passes over memory.

`accelerate` swaps them in. Each reduction or gather that the compiler or cuDNN does badly is an operator `brisk::*`,
opaque to torch.compile, with a Triton kernel on NVIDIA GPUs (utils.kernels) and plain torch elsewhere; all that works
element by element stays plain torch, for the compiler to fuse with its neighbours.
"""

from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from timm.layers.norm_act import BatchNormAct2d as TimmBatchNormAct2d
from timm.models import resnet
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

Function = TypeVar("Function", bound=Callable[..., Any])
Activation = Literal["identity", "relu", "silu"]
Part = Literal["norm", "pool", "stem", "depthwise"]
PARTS: tuple[Part, ...] = ("norm", "pool", "stem", "depthwise")
IN_GRAPH: list[str] = []  # full names of the functions that stand in the graphs that torch.compile sees
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


def _whole(function: Function) -> Function:
    """Let the compiler's front end take a function as a whole; its back end still looks inside.

    At every launch the front end would follow each autograd.Function forward and backward, seconds for the 53 batch
    norms of a ResNet-50 (docs/experiments.md). `function` uses no tensors but its arguments.
    """
    IN_GRAPH.append(f"{function.__module__}.{function.__name__}")
    return cast(Function, torch.compiler.allow_in_graph(function))  # type: ignore[no-untyped-call]


def _use_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in KERNEL_DTYPES


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `tensor.to(dtype)`, but no operation if there is nothing to do.

    torch.compile of torch 2.11 takes an autograd.Function's result and what it is a mere alias of for two results, and
    gives the gradient to the wrong one.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _wide(tensor: Tensor) -> Tensor:
    """In the precision of the arithmetic: float32, or float64 if it is that already."""
    return _cast(tensor, torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def _column(vector: Tensor) -> Tensor:
    """(C,) -> (C, 1, 1)."""
    return vector[:, None, None]


def _like(tensor: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=torch.channels_last)


# Batch norm.


def _fake_batch_norm_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


@_operator(_fake_batch_norm_stats)
def batch_norm_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of `x` (N, C, H, W): (C,) each, float32 (float64 of float64)."""
    if _use_kernels(x):
        from utils import kernels

        return kernels.batch_norm_stats(x)
    var, mean = torch.var_mean(_wide(x), dim=(0, 2, 3), correction=0)
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
        x: what was normalised, of the same shape: y = (x - mean) * scale + bias.
        mean: (C,), float32 (float64 of float64), as `scale` and `bias`.
        scale: weight / standard deviation.
        bias: the shift after it.
        activation: "identity", "relu" or "silu".
    """
    if _use_kernels(x):
        from utils import kernels

        return kernels.batch_norm_backward_sums(dz, x, mean, scale, bias, activation)
    centred = _wide(x) - _column(mean)
    dy = _input_grad(_wide(dz), centred * _column(scale) + _column(bias), activation)
    return dy.sum(dim=(0, 2, 3)), (dy * centred).sum(dim=(0, 2, 3))


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

    Only x and vectors of C numbers are kept for the backward pass (Ioffe and Szegedy, 2015), which computes y anew
    rather than read it, or a mask, from memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
        eps: float, activation: str,
    ) -> Tensor:  # fmt: skip
        std_inverse = torch.rsqrt(var + eps)
        scale, shift = _wide(weight) * std_inverse, _wide(bias)
        ctx.save_for_backward(x, mean, std_inverse, scale, shift)
        ctx.activation = activation
        y = (_wide(x) - _column(mean)) * _column(scale) + _column(shift)
        return _cast(_activate(y, activation), x.dtype)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, std_inverse, scale, shift = ctx.saved_tensors
        dy_sum, dot = batch_norm_backward_sums(dz, x, mean, scale, shift, ctx.activation)
        count = x.numel() // x.shape[1]
        centred = _wide(x) - _column(mean)
        dy = _input_grad(_wide(dz), centred * _column(scale) + _column(shift), ctx.activation)
        slope = dot * std_inverse * std_inverse / count
        dx = (dy - _column(dy_sum / count) - centred * _column(slope)) * _column(scale)
        return _cast(dx, x.dtype), dot * std_inverse, dy_sum, None, None, None, None


@_whole
def _batch_norm_act(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, activation: str
) -> Tensor:
    return cast(Tensor, _BatchNormAct.apply(x, weight, bias, mean, var, eps, activation))


class BatchNorm2d(nn.BatchNorm2d):
    """torch's, followed by `activation`; parameters, buffers and what it computes are the same."""

    activation: Activation = "identity"

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[1]
        if not self.training or count < 2:  # torch refuses to train on a single value, in its own words
            return _activate(super().forward(x), self.activation)
        mean, var = batch_norm_stats(x.detach())
        self._update(mean, var * (count / (count - 1)))
        return _batch_norm_act(x, self.weight, self.bias, mean, var, self.eps, self.activation)

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor) -> None:
        assert self.num_batches_tracked is not None, "swapped in for layers that track"
        assert self.running_mean is not None, "swapped in for layers that track"
        assert self.running_var is not None, "swapped in for layers that track"
        assert self.momentum is not None, "swapped in for layers with an exponential average"
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(var.to(self.running_var.dtype), self.momentum)


class BatchNormAct2d(TimmBatchNormAct2d, BatchNorm2d):  # type: ignore[misc]
    """timm's batch norm that holds its activation (`act`), computed as `BatchNorm2d` does."""

    def forward(self, x: Tensor) -> Tensor:
        return BatchNorm2d.forward(self, x)


# Max pool.


def _fake_max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _like(x, x.shape[0], x.shape[1], (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)
    return y, torch.empty_like(y, dtype=torch.uint8)


@_operator(_fake_max_pool)
def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max pool 3 x 3, stride 2, padding 1 of `x` (N, C, H, W), and the place of each maximum in its window, uint8.

    Place 3 * r + c is row r and column c of the window; of equal maxima the first counts.
    """
    if _use_kernels(x):
        from utils import kernels

        return kernels.max_pool(x)
    y, index = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    rows = torch.arange(y.shape[2], device=x.device)[:, None] * 2 - 1
    columns = torch.arange(y.shape[3], device=x.device) * 2 - 1
    place = 3 * (index // x.shape[3] - rows) + index % x.shape[3] - columns
    last = {"memory_format": torch.channels_last}
    return y.contiguous(**last), place.to(torch.uint8).contiguous(**last)


def _fake_max_pool_backward(dy: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    return _like(dy, dy.shape[0], dy.shape[1], height, width)


@_operator(_fake_max_pool_backward)
def max_pool_backward(dy: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    """Gradient of max_pool's input, (N, C, height, width), from that of its output and the places."""
    if _use_kernels(dy):
        from utils import kernels

        return kernels.max_pool_backward(dy, place, height, width)
    rows = torch.arange(dy.shape[2], device=dy.device)[:, None] * 2 - 1 + place // 3
    columns = torch.arange(dy.shape[3], device=dy.device) * 2 - 1 + place % 3
    dx = torch.zeros(*dy.shape[:2], height * width, dtype=dy.dtype, device=dy.device)
    dx.scatter_add_(2, (rows * width + columns).flatten(2), dy.flatten(2))
    return dx.view(*dy.shape[:2], height, width).contiguous(memory_format=torch.channels_last)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, place = max_pool(x)
        ctx.save_for_backward(place)
        ctx.size = x.shape[2:]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return max_pool_backward(dy, *ctx.saved_tensors, *ctx.size)


@_whole
def _max_pool(x: Tensor) -> Tensor:
    return cast(Tensor, _MaxPool.apply(x))


class MaxPool2d(nn.MaxPool2d):
    """torch's, of kernel 3, stride 2 and padding 1."""

    def forward(self, x: Tensor) -> Tensor:
        return _max_pool(x)


# Convolution of images.


class StemConv2d(nn.Conv2d):
    """torch's, of stride 2 from three channels, as a convolution of stride 1 from the four pixels of each 2 x 2 block.

    Twelve channels (with four of zeros, sixteen) suit the matrix units; three, as cuDNN would take them, are padded to
    eight by a pass of its own. A row of zero taps makes the kernel's size even; the sums are the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] % 2 or x.shape[3] % 2:
            return super().forward(x)
        padding, front = self.kernel_size[0] // 2, self.kernel_size[0] // 2 % 2
        before, after = padding + front, padding - front
        blocks = _blocks(F.pad(x, (before, after, before, after)))
        taps = _blocks(F.pad(self.weight, (front, 1 - front, front, 1 - front)))
        return F.conv2d(blocks, taps, self.bias)


def _blocks(x: Tensor) -> Tensor:
    """(N, C, 2h, 2w) -> (N, 4C rounded up to a multiple of 16, h, w), channels_last: one pixel a 2 x 2 block."""
    images, channels, height, width = x.shape
    pixels = x.permute(0, 2, 3, 1).reshape(images, height // 2, 2, width // 2, 2, channels)
    blocks = pixels.permute(0, 1, 3, 2, 4, 5).reshape(images, height // 2, width // 2, 4 * channels)
    return F.pad(blocks, (0, -4 * channels % 16)).permute(0, 3, 1, 2)


# Depthwise convolution.


def _fake_depthwise(x: Tensor, taps: Tensor, stride: int) -> Tensor:
    return _like(x, *x.shape[:2], (x.shape[2] - 1) // stride + 1, (x.shape[3] - 1) // stride + 1)


@_operator(_fake_depthwise)
def depthwise(x: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Depthwise convolution of `x` (N, C, H, W) with `taps` (K, K, C), K odd, padding K // 2, stride 1 or 2."""
    if _use_kernels(x):
        from utils import kernels

        return kernels.depthwise(x, taps, stride)
    y = F.conv2d(x, _weight(taps), stride=stride, padding=taps.shape[0] // 2, groups=x.shape[1])
    return y.contiguous(memory_format=torch.channels_last)


def _fake_depthwise_input_grad(dy: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    return _like(dy, dy.shape[0], dy.shape[1], height, width)


@_operator(_fake_depthwise_input_grad)
def depthwise_input_grad(dy: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    """Gradient of the input, (N, C, height, width), of `depthwise` with stride 2."""
    if _use_kernels(dy):
        from utils import kernels

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
        # The weight's gradient is cuDNN's: a Triton kernel of ours took half as long again.
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


@_whole
def _depthwise(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return cast(Tensor, _Depthwise.apply(x, weight, stride))


class DepthwiseConv2d(nn.Conv2d):
    """torch's, of one filter a channel, an odd square kernel that keeps the size, and stride 1 or 2."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = _depthwise(x, self.weight, self.stride[0])
        return y if self.bias is None else y + _column(self.bias).to(y.dtype)


# Swapping them in.


def accelerate(model: nn.Module, parts: Collection[Part] = PARTS) -> nn.Module:
    """Let the layers of `model` compute as this module's do, in place; returns `model`.

    Layers keep their names, parameters and buffers, hence the state_dict, the optimizer and what EMA copies. A layer
    that does not match exactly stays as it is.

    Args:
        model: any network; those of timm gain most.
        parts: what to swap: "norm" (batch norm with the activation after it), "pool", "stem" (the first convolution),
            "depthwise" (convolutions).
    """
    for module in list(model.modules()):
        if "norm" in parts:
            _swap_norm(module)
            _join_activations(module)
        if "pool" in parts and type(module) is nn.MaxPool2d and _is_stem_pool(module):
            module.__class__ = MaxPool2d
        if type(module) is nn.Conv2d:
            if "stem" in parts and _is_stem(module):
                module.__class__ = StemConv2d
            elif "depthwise" in parts and _is_depthwise(module):
                module.__class__ = DepthwiseConv2d
    return model


def _activation(module: nn.Module) -> Activation | None:
    """What `module` computes, if batch norm can do it too."""
    known: dict[type[nn.Module], Activation] = {nn.Identity: "identity", nn.ReLU: "relu", nn.SiLU: "silu"}
    return known.get(type(module))


def _swap_norm(module: nn.Module) -> None:
    if type(module) not in (nn.BatchNorm2d, TimmBatchNormAct2d):
        return
    norm = cast(nn.BatchNorm2d, module)
    if not (norm.affine and norm.track_running_stats) or norm.momentum is None:
        return
    if type(module) is nn.BatchNorm2d:
        module.__class__ = BatchNorm2d
        return
    activation = _activation(cast(nn.Module, module.act))
    if activation is not None and type(module.drop) is nn.Identity:
        module.__class__ = BatchNormAct2d
        cast(BatchNormAct2d, module).activation = activation


# timm's residual networks call an activation after the norm; these stand next to each other, but for `drop_block`.
_PAIRS: dict[type[nn.Module], tuple[tuple[str, str], ...]] = {
    resnet.ResNet: (("bn1", "act1"),),
    resnet.BasicBlock: (("bn1", "act1"),),
    resnet.Bottleneck: (("bn1", "act1"), ("bn2", "act2")),
}


def _join_activations(module: nn.Module) -> None:
    """Move the activations of a residual block into the batch norms before them."""
    if not isinstance(getattr(module, "drop_block", None), nn.Identity | None):
        return
    for norm_name, act_name in _PAIRS.get(type(module), ()):
        norm, act = getattr(module, norm_name), getattr(module, act_name)
        _swap_norm(norm)
        activation = _activation(act)
        if type(norm) is BatchNorm2d and norm.activation == "identity" and activation is not None:
            norm.activation = activation
            setattr(module, act_name, nn.Identity())


def _is_stem_pool(pool: nn.MaxPool2d) -> bool:
    geometry = (_pair(pool.kernel_size), _pair(pool.stride), _pair(pool.padding), _pair(pool.dilation))
    return geometry == ((3, 3), (2, 2), (1, 1), (1, 1)) and not (pool.ceil_mode or pool.return_indices)


def _keeps_size(conv: nn.Conv2d) -> bool:
    """An odd square kernel with zeros around, so that only the stride changes the size."""
    kernel = conv.kernel_size[0]
    fitting = conv.kernel_size == (kernel, kernel) and kernel % 2 == 1 and conv.padding == (kernel // 2, kernel // 2)
    return fitting and conv.dilation == (1, 1) and conv.padding_mode == "zeros"


def _is_stem(conv: nn.Conv2d) -> bool:
    return conv.in_channels == 3 and conv.groups == 1 and conv.stride == (2, 2) and _keeps_size(conv)


def _is_depthwise(conv: nn.Conv2d) -> bool:
    one_each = conv.groups == conv.in_channels == conv.out_channels > 1
    return one_each and conv.stride in ((1, 1), (2, 2)) and conv.kernel_size[0] in (3, 5) and _keeps_size(conv)


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
