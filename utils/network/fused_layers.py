"""Fused layers: batch norm, max pool and convolutions that compute what torch's do, in fewer passes over memory."""

import contextlib
import itertools
from collections.abc import Collection, Iterator
from typing import Literal, cast

import torch
import torch.nn.functional as F
from timm.layers.norm_act import BatchNormAct2d as TimmBatchNormAct2d
from timm.models import resnet
from torch import Tensor, nn

from utils.network.fused_ops import _activate, _batch_norm_act, _column, _depthwise, _max_pool, batch_norm_stats
from utils.network.kernels.shapes import DepthwiseShape

Activation = Literal["identity", "relu", "silu"]
Part = Literal["norm", "pool", "stem", "depthwise"]
PARTS: tuple[Part, ...] = ("norm", "pool", "stem", "depthwise")
# timm's residual networks call an activation right after the norm, with at most `drop_block` between the two.
_PAIRS: dict[type[nn.Module], tuple[tuple[str, str], ...]] = {
    resnet.ResNet: (("bn1", "act1"),),
    resnet.BasicBlock: (("bn1", "act1"),),
    resnet.Bottleneck: (("bn1", "act1"), ("bn2", "act2")),
}


class BatchNorm2d(nn.BatchNorm2d):
    """torch's, followed by `activation`; parameters, buffers and what it computes are the same."""

    activation: Activation = "identity"

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[1]
        if not self.training or count < 2:  # torch refuses to train on a single value
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


class DepthwiseConv2d(nn.Conv2d):
    """torch's, of one filter a channel, an odd square kernel that keeps the size, and stride 1 or 2."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = _depthwise(x, self.weight, self.stride[0])
        return y if self.bias is None else y + _column(self.bias).to(y.dtype)


@contextlib.contextmanager
def depthwise_shapes(model: nn.Module) -> Iterator[set[DepthwiseShape]]:
    """The shapes that meet, within the block, convolutions of `model` that `swap_fused_layers` would take."""
    found: set[DepthwiseShape] = set()

    def note(conv: nn.Conv2d, args: tuple[Tensor]) -> None:
        _, channels, height, width = args[0].shape
        found.add(DepthwiseShape(channels, height, width, conv.kernel_size[0], conv.stride[0]))

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if type(module) is nn.Conv2d and _is_depthwise(module):
                stack.callback(module.register_forward_pre_hook(note).remove)
        yield found


# Swapping them in.


def swap_fused_layers(model: nn.Module, parts: Collection[Part] = PARTS) -> nn.Module:
    """Let the layers of `model` compute as the fused layers do, in place; returns `model`.

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


def _join_activations(module: nn.Module) -> None:
    """Move the activations of a residual block into the batch norms before them."""
    if not isinstance(getattr(module, "drop_block", None), nn.Identity | None):
        return
    pairs = [(module, *names) for names in _PAIRS.get(type(module), ())]
    if type(module) is resnet.ResNet and isinstance(stem := module.conv1, nn.Sequential):  # of the -D networks
        pairs += [(stem, *names) for names in itertools.pairwise(dict(stem.named_children()))]
    for parent, norm_name, act_name in pairs:
        norm, act = getattr(parent, norm_name), getattr(parent, act_name)
        _swap_norm(norm)
        activation = _activation(act)
        if type(norm) is BatchNorm2d and norm.activation == "identity" and activation is not None:
            norm.activation = activation
            setattr(parent, act_name, nn.Identity())


def _is_stem_pool(pool: nn.MaxPool2d) -> bool:
    geometry = (_pair(pool.kernel_size), _pair(pool.stride), _pair(pool.padding), _pair(pool.dilation))
    return geometry == ((3, 3), (2, 2), (1, 1), (1, 1)) and not (pool.ceil_mode or pool.return_indices)


def _keeps_size(conv: nn.Conv2d) -> bool:
    """An odd square kernel with zeros around, so that only the stride changes the size."""
    kernel = conv.kernel_size[0]
    same_size = conv.kernel_size == (kernel, kernel) and kernel % 2 == 1 and conv.padding == (kernel // 2, kernel // 2)
    return same_size and conv.dilation == (1, 1) and conv.padding_mode == "zeros"


def _is_stem(conv: nn.Conv2d) -> bool:
    return conv.in_channels == 3 and conv.groups == 1 and conv.stride == (2, 2) and _keeps_size(conv)


def _is_depthwise(conv: nn.Conv2d) -> bool:
    one_filter_each = conv.groups == conv.in_channels == conv.out_channels > 1
    return one_filter_each and conv.stride in ((1, 1), (2, 2)) and conv.kernel_size[0] in (3, 5) and _keeps_size(conv)


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
