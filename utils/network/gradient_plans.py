"""cuDNN's execution plans for the gradients of depthwise convolutions, made by a thread before a step needs them."""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from utils.network.kernels.shapes import DepthwiseShape

_threads: list[tuple[threading.Thread, threading.Event]] = []  # of this process, as cuDNN's plans are


def start_gradient_plans(
    shapes: Iterable[DepthwiseShape], batch_size: int, dtype: torch.dtype, device: torch.device, with_input: bool
) -> None:
    """Let a thread compute the gradients of depthwise convolutions once, of uninitialized memory.

    cuDNN compiles a kernel at the first use of each, for 0.3 s and more. torch keeps cuDNN's plans for each thread
    apart; these are made by autograd's thread of the device, which a backward pass of the network uses, too. A pass
    that comes before all are made takes turns with them, and makes itself what it needs first.

    To be followed by `stop_gradient_plans`, or the end of the process.

    Args:
        shapes: of the convolutions' inputs and filters.
        batch_size: images of a batch.
        dtype: of the inputs.
        device: that computes.
        with_input: whether cuDNN computes the input's gradient, too.
    """
    stopped = threading.Event()

    def make_plans() -> None:
        for shape in shapes:
            if stopped.is_set() or not threading.main_thread().is_alive():
                return
            try:
                make_gradient_plan(shape, batch_size, dtype, device, with_input)
            except RuntimeError:  # such as no memory: the network's own backward pass has the message for the user
                return

    thread = threading.Thread(target=make_plans, name="cuDNN plans")
    thread.start()
    _threads.append((thread, stopped))


def stop_gradient_plans() -> None:
    """Stop the thread after the gradient that it computes, if there is one, and wait for it."""
    while _threads:
        thread, stopped = _threads.pop()
        stopped.set()
        thread.join()


def make_gradient_plan(
    shape: DepthwiseShape, batch_size: int, dtype: torch.dtype, device: torch.device, with_input: bool
) -> None:
    """Compute the gradients of one convolution in autograd's thread of `device`."""
    start = torch.zeros((), device=device, requires_grad=True)
    _DepthwiseGradients.apply(start, shape, batch_size, dtype, with_input).backward()


class _DepthwiseGradients(torch.autograd.Function):
    """The identity. Its backward pass also computes the gradients of a convolution, of no use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        ctx.args = args
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (channels, height, width, kernel, stride), batch_size, dtype, with_input = ctx.args

        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=dy.device, memory_format=torch.channels_last)

        torch.ops.aten.convolution_backward(
            empty(batch_size, channels, (height - 1) // stride + 1, (width - 1) // stride + 1),
            empty(batch_size, channels, height, width),
            empty(channels, 1, kernel, kernel),
            None,
            (stride, stride),
            (kernel // 2, kernel // 2),
            (1, 1),
            False,
            (0, 0),
            channels,
            (with_input, True, False),
        )
        return dy, None, None, None, None
