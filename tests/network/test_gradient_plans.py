"""Gradients of depthwise convolutions that a thread computes first: those of the network, in autograd's thread."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from models import create_model
from tests.harness import ROOT
from utils.network.fused_layers import depthwise_shapes, swap_fused_layers
from utils.network.gradient_plans import make_gradient_plan, start_gradient_plans, stop_gradient_plans
from utils.network.gradients import ForwardBackward, GraphedForwardBackward, capture_stream
from utils.network.input_check import check_input
from utils.network.kernels.shapes import DepthwiseShape

ARCH, SIZE, IMAGES = "mobilenetv3_small_050", 72, 2
SHAPE = DepthwiseShape(8, 16, 16, 3, 1)


class DepthwiseGradients(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what cuDNN keeps a plan for, where the device is a GPU: each call's thread, tensors and arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution_backward.default:
            dy, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args
            if groups > 1:
                tensors = tuple((tuple(each.shape), each.dtype) for each in (dy, x, weight))
                last = all(each.is_contiguous(memory_format=torch.channels_last) for each in (dy, x, weight))
                numbers = tuple(map(tuple, (stride, padding, dilation, output_padding)))
                self.calls.add((threading.get_ident(), tensors, last, numbers, transposed, groups, tuple(mask[:2])))
        return function(*args, **(kwargs or {}))


def check_same_calls(device: torch.device, fused: bool) -> None:
    model = create_model(ARCH, 10).to(memory_format=torch.channels_last)
    with depthwise_shapes(model) as shapes:
        check_input(model, ARCH, SIZE, IMAGES)
    model.to(device)
    if fused:
        swap_fused_layers(model)
    images = torch.zeros(IMAGES, 3, SIZE, SIZE, device=device).contiguous(memory_format=torch.channels_last)
    with DepthwiseGradients() as expected, torch.autocast(device.type, torch.bfloat16):
        model(images).sum().backward()
    with DepthwiseGradients() as found:
        for shape in shapes:
            make_gradient_plan(shape, IMAGES, torch.bfloat16, device, with_input=not fused)
    assert found.calls == expected.calls
    assert len(found.calls) == len(shapes) > 5


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_of_the_network(fused: bool) -> None:
    check_same_calls(torch.device("cpu"), fused)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_of_the_network_on_a_gpu(fused: bool) -> None:
    check_same_calls(torch.device("cuda", 0), fused)


def endless(taken: list[DepthwiseShape]) -> Iterator[DepthwiseShape]:
    for shape in itertools.repeat(SHAPE):
        taken.append(shape)
        yield shape


def start(taken: list[DepthwiseShape], device: torch.device) -> threading.Thread:
    """Plans without end; returns their thread when it has made some."""
    start_gradient_plans(endless(taken), IMAGES, torch.bfloat16, device, with_input=True)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "cuDNN plans")
    while len(taken) < 3:
        assert thread.is_alive()
        time.sleep(0.01)
    return thread


def test_stop_ends_the_thread() -> None:
    thread = start([], torch.device("cpu"))
    stop_gradient_plans()
    assert not thread.is_alive()
    stop_gradient_plans()  # nothing is left to stop


def test_a_gradient_that_fails_ends_the_thread_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    shapes = iter([SHAPE, SHAPE._replace(height=-5), SHAPE])
    start_gradient_plans(shapes, IMAGES, torch.float32, torch.device("cpu"), with_input=False)
    for thread in threading.enumerate():
        if thread.name == "cuDNN plans":
            thread.join(60)
    assert list(shapes) == [SHAPE]
    assert capfd.readouterr() == ("", "")
    stop_gradient_plans()


@pytest.mark.slow
def test_the_end_of_the_process_does_not_wait_for_all_plans() -> None:
    code = f"""
import itertools, torch
from utils.network.kernels.shapes import DepthwiseShape
from utils.network.gradient_plans import start_gradient_plans
shapes = itertools.repeat(DepthwiseShape{tuple(SHAPE)})
start_gradient_plans(shapes, 2, torch.bfloat16, torch.device("cpu"), True)
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=600, check=False).returncode == 7


@pytest.mark.gpu
def test_a_capture_stops_them() -> None:
    gpu = torch.device("cuda", 0)
    thread = start([], gpu)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).cuda()
    eager = ForwardBackward(net, nn.CrossEntropyLoss(), GradScaler("cuda", enabled=False), torch.bfloat16, 1)
    step = GraphedForwardBackward(eager, capture_stream(gpu))
    loss = step(torch.zeros(IMAGES, 3, 4, 4, device=gpu), torch.zeros(IMAGES, dtype=torch.int64, device=gpu), 0)
    assert not thread.is_alive()
    assert loss.isfinite()
    step.close()
