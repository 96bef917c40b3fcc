"""Triton's kernels compute what the plain operators do. Without a GPU, Triton's interpreter runs them.

Their indexing, though not their speed, is the same there.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models import create_model
from tests.harness import launch
from tests.network.tensors import FILTERS, NORMS, draw, error
from utils.network import folded_ops, fused_ops
from utils.network.fused_layers import depthwise_shapes, swap_fused_layers
from utils.network.input_check import check_input

INTERPRETED = """
import tests.data.test_crop_resize as crops
import tests.network.test_kernels as tests
import torch
from utils.data.augmentation import crop_kernel
from utils.network.kernels import batch_norm

crop_kernel.ROWS, crop_kernel.COLUMNS = 4, 4  # several tiles of an image, which it does not fill
crops.check_kernel("cpu", size=5, count=3, longest=11)
batch_norm.ROWS, batch_norm.PARTIALS = 4, 4  # several blocks of small tensors
tests.check_norm_kernels("cpu", [(2, 24, 4, 4), (1, 40, 3, 7)], torch.float32)
tests.check_residual_kernels("cpu", [(2, 24, 4, 4)], torch.float32)
tests.check_pool_kernels("cpu", [(2, 8, 6, 6), (1, 3, 5, 8)], torch.float32)
filters = [(16, 3, 1, 5, 6), (3, 5, 2, 4, 5)]
tests.check_depthwise_kernels("cpu", filters, torch.float32)
print("all agree")
"""


def test_kernels_in_the_interpreter() -> None:
    env = {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = launch(program=INTERPRETED, env=env)
    assert (done.status, done.out) == (0, "all agree\n"), done.err


def twice(function: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
    """The results of a function, on a GPU the same to the last bit in two runs."""
    first = function(*arguments)
    tensors = (first,) if isinstance(first, Tensor) else tuple(first)
    if not tensors[0].is_cuda:  # Triton's interpreter has one order
        return tensors
    second = function(*arguments)
    for one, other in zip(tensors, (second,) if isinstance(second, Tensor) else second, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    return tensors


def check_norm_kernels(device: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    from utils.network.kernels import batch_norm as kernels

    for shape in shapes:
        x, dz = draw(*shape).to(device, dtype) + 5, draw(*shape).to(device, dtype)
        mean, var = twice(kernels.batch_norm_stats, x)
        for out, reference in zip((mean, var), fused_ops.batch_norm_stats(x.double()), strict=True):
            assert error(out, reference) < 1e-5, shape
        scale, bias = draw(shape[1]).to(device), draw(shape[1]).to(device)
        for act in ("identity", "relu", "silu"):
            sums = twice(kernels.batch_norm_backward_sums, dz, x, mean, scale, bias, act)
            references = fused_ops.batch_norm_backward_sums(
                dz.double(), x.double(), mean.double(), scale.double(), bias.double(), act
            )
            for out, reference in zip(sums, references, strict=True):
                assert error(out, reference) < 1e-4, (shape, act)


def check_residual_kernels(device: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    from utils.network.kernels.residual import residual_grad

    for shape in shapes:
        a, b, z, x, x2 = (image.to(device, dtype) for image in draw(5, *shape))
        mean, mean2 = draw(shape[1]).to(device), draw(shape[1]).to(device).roll(1)
        for second in ((x2, mean2), (None, None)):
            results = twice(residual_grad, a, b, z.relu(), x, mean, *second)
            exact: list[Any] = [None if each is None else each.double() for each in (a, b, z.relu(), x, mean, *second)]
            for out, reference in zip(results, folded_ops.residual_grad(*exact), strict=True):
                assert error(out, reference) < (1e-4 if dtype == torch.float32 else 1e-2), (shape, second)


def check_pool_kernels(device: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    from utils.network.kernels import max_pool as kernels

    for shape in shapes:
        x = draw(*shape).round().relu()
        x[0, 0, 2, 2], x[-1, 1, 0, 0], x[0, 2] = float("nan"), float("nan"), float("-inf")
        y, argmax = twice(kernels.max_pool, x.to(device, dtype))
        expected_y, expected_argmax = fused_ops.max_pool(x.double())
        assert torch.equal(y.cpu().double().nan_to_num(7), expected_y.nan_to_num(7)), shape
        assert torch.equal(argmax.cpu(), expected_argmax), shape
        dy = draw(*y.shape).to(device, dtype)
        (dx,) = twice(kernels.max_pool_backward, dy, argmax, *shape[2:])
        expected = fused_ops.max_pool_backward(dy.cpu().double(), expected_argmax, *shape[2:])
        assert error(dx.cpu(), expected) < (1e-6 if dtype == torch.float32 else 5e-3), shape


def check_depthwise_kernels(device: str, cases: list[tuple[int, int, int, int, int]], dtype: torch.dtype) -> None:
    from utils.network.kernels import depthwise as kernels

    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for case in cases:
        channels, kernel, stride, height, width = case
        x = draw(2, channels, height, width).to(device, dtype)
        taps = draw(kernel, kernel, channels).to(device, dtype)
        exact, exact_taps = x.cpu().double(), taps.cpu().double()
        (y,) = twice(kernels.depthwise, x, taps, stride)
        assert error(y.cpu(), fused_ops.depthwise(exact, exact_taps, stride)) < bound, case
        dy = draw(*y.shape).to(device, dtype)
        exact_dy = dy.cpu().double()
        if stride == 2:
            (dx,) = twice(kernels.depthwise_input_grad, dy, taps, height, width)
            assert error(dx.cpu(), fused_ops.depthwise_input_grad(exact_dy, exact_taps, height, width)) < bound, case


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_kernels_on_the_gpu(dtype: torch.dtype) -> None:
    wide = [(32, channels, 14, 14) for channels in (16, 24, 40, 112, 320, 1152, 2048)]
    check_norm_kernels("cuda", [*NORMS, (64, 64, 56, 56), (5, 96, 31, 33), *wide], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_kernels_on_the_gpu(dtype: torch.dtype) -> None:
    check_residual_kernels("cuda", [(8, 256, 28, 28), (3, 24, 9, 5), (2, 2048, 7, 7)], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pool_kernels_on_the_gpu(dtype: torch.dtype) -> None:
    check_pool_kernels("cuda", [(4, 64, 112, 112), (3, 24, 17, 30), (2, 3, 9, 9)], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_depthwise_kernels_on_the_gpu(dtype: torch.dtype) -> None:
    check_depthwise_kernels("cuda", [*FILTERS, (96, 3, 2, 28, 28), (240, 5, 1, 14, 14), (1152, 5, 1, 7, 7)], dtype)


@pytest.mark.gpu
def test_a_step_finds_its_depthwise_kernels_compiled() -> None:
    from utils.network.kernels import depthwise as kernels

    def compiled() -> list[int]:
        return [len(kernel.device_caches[0][0]) for kernel in (kernels._depthwise, kernels._depthwise_input_grad)]

    model = create_model("efficientnet_b0", 10)
    with depthwise_shapes(model) as shapes:
        check_input(model, "efficientnet_b0", 96, 8)
    before = compiled()
    kernels.compile_depthwise(shapes, torch.bfloat16, torch.device("cuda", 0), 4, with_gradients=True)
    found = compiled()
    assert [after - count for after, count in zip(found, before, strict=True)] == [12, 4]
    images = torch.zeros(8, 3, 96, 96, device="cuda").contiguous(memory_format=torch.channels_last)
    model = swap_fused_layers(model.cuda())
    with torch.autocast("cuda", torch.bfloat16):
        model(images).sum().backward()
    assert compiled() == found
