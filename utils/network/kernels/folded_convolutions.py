"""Convolutions of cuDNN with batch norm's sums in the same kernel, for fp16 on Ampere and Hopper.

What is summed is still in the multiprocessor's registers: a pass over memory less. cuDNN adds with atomics, so that the
last bits of the sums differ from run to run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from utils.network.kernels.cudnn_graph import ALIGNMENT, CudnnError, Graph, Plan, Pointwise, Value
from utils.network.kernels.tensors import channels_last, images_like

Shape = tuple[int, ...]
MAX_WORKSPACE = 2**27  # bytes; ResNet-50's kernels need 37 MiB at most, at batch 256


class Convolution(NamedTuple):
    """What the kernels of a convolution without groups are chosen by."""

    input: Shape  # (N, C, H, W)
    weight: Shape
    stride: Shape
    padding: Shape

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> "Convolution":
        """That of tensors."""
        return cls(tuple(x.shape), tuple(weight.shape), tuple(stride), tuple(padding))

    @property
    def result(self) -> Shape:
        """Shape of its result."""
        sides = zip(self.input[2:], self.weight[2:], self.stride, self.padding, strict=True)
        return (self.input[0], self.weight[0], *((n + 2 * pad - k) // step + 1 for n, k, step, pad in sides))


def _planned(build: Callable[..., Graph]) -> Callable[..., Plan | None]:
    """The plan on a device, the new first argument, of the graph that `build` makes of the others; made once.

    None if cuDNN has no such kernel, or one that needs much memory.
    """
    plans: dict[tuple[Any, ...], Plan | None] = {}

    def find(device: int, *arguments: Any) -> Plan | None:
        key = (device, *arguments)
        if key not in plans:
            try:
                plan = build(*arguments).plan(device)
            except CudnnError as error:
                if not error.is_refusal:  # such as a GPU without free memory, which may have some later
                    return None
                plans[key] = None
            else:
                plans[key] = plan if plan.workspace_bytes <= MAX_WORKSPACE else None
        return plans[key]

    return find


@_planned
def sums_plan(conv: Convolution) -> Graph:
    """Arguments: x, weight, result, sums of the result, sums of its squares."""
    graph = Graph(torch.float16)
    x, weight, y = (graph.images(shape) for shape in (conv.input, conv.weight, conv.result))
    graph.convolution(x, weight, y, conv.stride, conv.padding)
    graph.sums(y, graph.vector(y.shape[1]), graph.vector(y.shape[1]))
    return graph


@_planned
def input_grad_plan(conv: Convolution, norms: int, has_shortcut: bool, has_branch: bool) -> Graph:
    """Gradient of a convolution's input z, masked where z is 0, and the sums of the batch norms behind z.

    z = relu(norm(x) + norm(x2) + shortcut), where the last two may be absent. Arguments: gradient of the convolution's
    result, weight; of each norm x, mean, 1, scale, bias; `has_branch`: a gradient that is added; `has_shortcut`: the
    shortcut; the masked gradient; of each norm the sums of it times (x - mean), its sums, three vectors.
    """
    graph = Graph(torch.float16)
    dy, weight = graph.images(conv.result), graph.images(conv.weight)
    inputs = [(graph.images(conv.input), *(graph.vector(conv.input[1]) for _ in range(4))) for _ in range(norms)]
    gradient = graph.inner(conv.input)
    graph.convolution_input_grad(dy, weight, gradient, conv.stride, conv.padding)
    if has_branch:
        gradient = _combined(graph, Pointwise.ADD, gradient, graph.images(conv.input))
    terms = [_normalized(graph, *each) for each in inputs]
    if has_shortcut:
        terms.append(graph.images(conv.input))
    z = functools.reduce(functools.partial(_combined, graph, Pointwise.ADD), terms)
    masked = graph.images(conv.input)
    graph.pointwise(Pointwise.RELU_BACKWARD, gradient, z, masked)
    for x, mean, ones, scale, _ in inputs:
        graph.norm_grads(masked, x, mean, ones, scale, [graph.vector(conv.input[1]) for _ in range(5)])
    return graph


def _combined(graph: Graph, mode: Pointwise, a: Value, b: Value) -> Value:
    result = graph.inner(a.shape)
    graph.pointwise(mode, a, b, result)
    return result


def _normalized(graph: Graph, x: Value, mean: Value, ones: Value, scale: Value, bias: Value) -> Value:
    """(x - mean) * 1 * scale + bias, in the steps that the engine knows."""
    centered = graph.inner(x.shape)
    graph.pointwise(Pointwise.ADD, x, mean, centered, factor=-1.0)
    scaled = _combined(graph, Pointwise.MUL, _combined(graph, Pointwise.MUL, centered, ones), scale)
    return _combined(graph, Pointwise.ADD, scaled, bias)


@functools.cache
def _ones(channels: int, device: torch.device) -> Tensor:
    return torch.ones(channels, device=device)


def convolution_sums(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """A convolution in fp16, and the sums of its result and of its squares; None: cuDNN has no such kernel.

    Args:
        x: (N, C, H, W).
        weight: (K, C, R, S).

    Returns:
        The result (N, K, H', W'); sums over N, H', W', float32 (K,).
    """
    conv = Convolution.of(x, weight, stride, padding)
    plan = sums_plan(x.get_device(), conv)
    x, weight = channels_last(x), channels_last(weight)
    if plan is None or not _are_aligned(x, weight):
        return None
    y, total, squares = images_like(x, conv.result), *_vectors(2, conv.weight[0], x.device)
    plan(x, weight, y, total, squares)
    return y, total, squares


def masked_input_grad(
    dy: Tensor, weight: Tensor, norms: Sequence[Sequence[Tensor]], branch: Tensor | None, shortcut: Tensor | None,
    stride: Sequence[int], padding: Sequence[int],
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Gradient g before the ReLU that a convolution in fp16 follows, and the sums of its batch norms.

    The convolution's input is relu(norm(x) + norm(x2) + shortcut), of which the last two may be absent.

    Args:
        dy: gradient of the convolution's result, (N, K, H', W').
        weight: (K, C, R, S).
        norms: of each x (N, C, H, W), mean, scale and bias: norm(x) = (x - mean) * scale + bias, float32 (C,).
        branch: another gradient of the convolution's input, (N, C, H, W).
        shortcut: (N, C, H, W).

    Returns:
        g (N, C, H, W); sums over N, H, W of g, and for each norm of g * (x - mean), float32 (C,). None: cuDNN has no
        such kernel.
    """
    like = norms[0][0]
    conv = Convolution.of(like, weight, stride, padding)
    plan = input_grad_plan(like.get_device(), conv, len(norms), shortcut is not None, branch is not None)
    images = [channels_last(each) for each in (branch, shortcut) if each is not None]
    dy, weight, *inputs = (channels_last(each) for each in (dy, weight, *(norm[0] for norm in norms)))
    channels, ones = like.shape[1], _ones(like.shape[1], like.device)
    arguments = [dy, weight]
    for x, (_, mean, scale, bias) in zip(inputs, norms, strict=True):
        arguments += [x, mean.contiguous(), ones, scale.contiguous(), bias.contiguous()]
    if plan is None or not _are_aligned(*arguments, *images):
        return None
    masked = images_like(like, like.shape)
    results = [_vectors(5, channels, like.device) for _ in norms]
    plan(*arguments, *images, masked, *(vector for vectors in results for vector in vectors))
    return masked, results[0][1], *(dot for dot, *_ in results)


def _vectors(number: int, channels: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(channels, device=device) for _ in range(number)]


def _are_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
