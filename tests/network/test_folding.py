"""The pass over a compiled step: what it replaces, that nothing it computes changes, and cuDNN's kernels on a GPU."""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

from tests.network.tensors import draw, error
from utils.network.folding import FoldNorms, has_one_kernel
from utils.network.fused_layers import BatchNorm2d, swap_fused_layers

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
Choice = Callable[[Any, tuple[Any, ...]], bool]
OPERATORS = ("convolution_sums", "masked_input_grad", "residual_grad", "batch_norm_stats", "batch_norm_backward_sums")


def everything(target: Any, arguments: tuple[Any, ...]) -> bool:
    return True


def residuals(target: Any, arguments: tuple[Any, ...]) -> bool:
    return "residual_grad" in str(target)


def step(net: nn.Module, x: Tensor, choice: Choice | None) -> tuple[Counter[str], dict[str, Tensor]]:
    """Operators of a training step after the pass, and all that the step computes. It runs without a compiler."""
    torch.compiler.reset()
    found: Counter[str] = Counter()

    def partition(joint: torch.fx.GraphModule, inputs: Any, **others: Any) -> Any:
        if choice is not None:
            FoldNorms(choice)(joint.graph)
            joint.graph.lint()
            joint.recompile()
        names = [str(node.target).removeprefix("brisk.").removesuffix(".default") for node in joint.graph.nodes]
        found.update(name for name in names if name in OPERATORS)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **others)

    def run(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return module.forward

    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table)
    x = x.clone().requires_grad_()
    y = cast(nn.Module, torch.compile(net, backend=backend, fullgraph=True))(x)
    (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
    assert x.grad is not None
    results = {"y": y.detach(), "x": x.grad} | dict(net.named_buffers())
    return found, results | {name: cast(Tensor, weight.grad) for name, weight in net.named_parameters()}


def network(arch: str, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = timm.create_model(arch, num_classes=5, **options).double()
    for weight in model.parameters():
        if weight.ndim == 1:  # the last norm of a block may be zero at first
            nn.init.normal_(weight, mean=1, std=0.2)
    return swap_fused_layers(model.to(memory_format=torch.channels_last))


def check(make: Callable[[], nn.Module], choice: Choice, size: int = 32) -> Counter[str]:
    """A step with and without the pass; returns the operators with it."""
    x = draw(4, 3, size, size).double().contiguous(memory_format=torch.channels_last)
    _, expected = step(make(), x, None)
    found, results = step(make(), x, choice)
    assert results.keys() == expected.keys()
    for name, value in results.items():
        difference, norm = (float(each.double().norm()) for each in (value - expected[name], expected[name]))
        assert difference < 1e-9 * norm + 1e-11, name  # a gradient that is nearly zero is rounding: before a norm
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("arch", "choice", "expected"),
    [  # of the norms' sums in the backward pass those stay that no convolution of one ReLU alone follows
        pytest.param("test_resnet", everything, (15, 8, 2, 0, 3), marks=SLOW),
        pytest.param("test_resnet", residuals, (0, 0, 3, 15, 10), marks=SLOW),
        pytest.param("resnet18", everything, (20, 12, 3, 0, 2), marks=SLOW),
        pytest.param("resnet26", everything, (29, 23, 0, 0, 2), marks=SLOW),
        pytest.param("resnet26", residuals, (0, 0, 7, 29, 18), marks=SLOW),
        pytest.param("resnet26d", everything, (31, 25, 0, 0, 2), marks=SLOW),
        pytest.param("seresnext26d_32x4d", everything, (23, 14, 0, 8, 17), marks=SLOW),
        pytest.param("regnety_002", everything, (31, 12, 0, 13, 28), marks=SLOW),
        pytest.param("efficientnet_b0", everything, (33, 0, 0, 16, 49), marks=SLOW),
    ],
)
def test_what_is_replaced(arch: str, choice: Choice, expected: tuple[int, ...]) -> None:
    found = check(lambda: network(arch), choice)
    assert tuple(found[name] for name in OPERATORS) == expected


class Block(nn.Module):
    """A batch norm with a ReLU, z, and what `after` makes of it with a convolution and another norm."""

    def __init__(self, after: "After") -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.norm, self.norm2 = BatchNorm2d(8), BatchNorm2d(8)
        self.norm.activation = "relu"
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, x, self.norm(self.stem(x))).mean((2, 3))

    def branch(self, z: Tensor) -> Tensor:
        return cast(Tensor, self.norm2(self.conv(z)))

    def end(self, summed: Tensor) -> Tensor:
        """The end of a residual block, and another one behind it, whose first convolution the pass may take along."""
        w = summed.relu()
        return cast(Tensor, self.conv(w)) + w


After = Callable[[Block, Tensor, Tensor], Tensor]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param(lambda block, x, z: block.branch(z).relu(), (2, 1, 0, 0, 1), marks=SLOW),
        (lambda block, x, z: (block.branch(z) + z).relu(), (2, 0, 0, 0, 2)),  # z is used twice
        pytest.param(lambda block, x, z: (block.branch(z) + 2 * z).relu(), (2, 0, 0, 0, 2), marks=SLOW),
        (lambda block, x, z: block.branch(z + block.stem(x)), (2, 0, 0, 0, 2)),  # the gradient goes on without a mask
        pytest.param(lambda block, x, z: block.conv((block.branch(z) + z).relu()), (2, 0, 0, 0, 2), marks=SLOW),
        (lambda block, x, z: block.end(block.branch(z) + z), (2, 1, 0, 0, 1)),
        pytest.param(  # one gradient twice
            lambda block, x, z: block.conv((w := (block.branch(z) + z).relu()) + w), (2, 0, 1, 0, 1), marks=SLOW
        ),
        pytest.param(
            lambda block, x, z: checkpoint(block.branch, z, use_reentrant=False).relu(), (0, 0, 0, 2, 2), marks=SLOW
        ),
        pytest.param(lambda block, x, z: block.end(block.branch(z) + z.sigmoid()), (2, 1, 0, 0, 1), marks=SLOW),
        (lambda block, x, z: block.end(block.branch(z) + z + 1), (2, 0, 1, 0, 1)),  # not a sum of two
        pytest.param(lambda block, x, z: block.end(block.branch(z) - z), (2, 0, 1, 0, 1), marks=SLOW),
        pytest.param(lambda block, x, z: block.end(block.branch(z) + z[:1]), (2, 0, 1, 0, 1), marks=SLOW),
        pytest.param(lambda block, x, z: block.end((y := block.branch(z)) + y), (2, 1, 0, 0, 1), marks=SLOW),
    ],
)
def test_patterns_that_look_alike(after: After, expected: tuple[int, ...]) -> None:
    """Gradients stay what they are wherever the pass takes a pattern for one of its own."""
    found = check(lambda: block(after), everything)
    assert tuple(found[name] for name in OPERATORS) == expected


def block(after: After) -> nn.Module:
    torch.manual_seed(7)
    return Block(after).double().to(memory_format=torch.channels_last)


def test_nothing_is_replaced_without_a_kernel() -> None:
    found = check(lambda: block(lambda block, x, z: block.branch(z).relu()), has_one_kernel)
    assert tuple(found[name] for name in OPERATORS) == (0, 0, 0, 2, 2)


NAMES = """
    resnet10t resnet14t resnet18 resnet18d resnet26d resnet26t resnet34 resnet34d resnet50 resnet50c resnet50s resnet51q
    resnet61q resnetaa34d resnetblur18 resnetrs50 resnext26ts resnext50_32x4d wide_resnet50_2 seresnet18 seresnet33ts
    seresnext26d_32x4d seresnext26t_32x4d seresnext26ts skresnet18 skresnext50_32x4d ecaresnet26t ecaresnext26t_32x4d
    eca_resnet33ts gcresnet33ts gcresnext26ts res2net50_14w_8s res2next50 dla34 dla46_c dla46x_c dpn48b efficientnet_b0
    efficientnet_lite0 efficientnet_es efficientnetv2_rw_t tf_efficientnetv2_b0 mobilenetv2_050 mobilenetv3_small_050
    mobilenetv3_large_100 mobilenetv4_conv_small mobilenetv4_conv_medium mnasnet_small mixnet_s fbnetc_100 spnasnet_100
    lcnet_050 tinynet_e semnasnet_075 ghostnet_050 ghostnetv2_100 hardcorenas_a rexnet_100 regnetx_002 regnety_002
    repvgg_a0 repghostnet_050 mobileone_s0 fastvit_t8 repvit_m0_9 selecsls42b ese_vovnet19b_slim cspresnet50
    cs3darknet_s darknet17 hgnet_tiny hgnetv2_b0 gernet_s vgg11_bn edgenext_xx_small hrnet_w18_small
    densenet121 tresnet_m
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", NAMES.split())
def test_networks_of_timm(arch: str) -> None:
    """Outputs, gradients and buffers of a step, with the pass and without."""
    importlib.import_module("torch._inductor.lowering")  # which a decomposition of torch looks up; takes seconds
    check(lambda: network(arch), everything, size=64)


def random_images(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Different ones, whose channels have means of 0 to 4 times their standard deviation."""
    torch.manual_seed(number)
    means = torch.linspace(0, 4, shape[1])[:, None, None]
    images = (torch.randn(shape) + means for _ in range(number))
    return [image.to("cuda", dtype).contiguous(memory_format=torch.channels_last) for image in images]


def operands(shape: tuple[int, ...], kernel: int, stride: int, filters: int, dtype: torch.dtype) -> list[Any]:
    """Input, weight, stride and padding of a convolution."""
    (x,) = random_images(1, shape, dtype)
    weight = (torch.randn(filters, shape[1], kernel, kernel) / shape[1] ** 0.5).to("cuda", dtype)
    return [x, weight.contiguous(memory_format=torch.channels_last), [stride] * 2, [kernel // 2] * 2]


def exact(arguments: list[Any]) -> list[Any]:
    """The same in float64, on the CPU."""
    return [each.double().cpu() if isinstance(each, Tensor) else each for each in arguments]


CASES = [(64, 1, 1, 256), (256, 1, 1, 64), (64, 3, 1, 64), (128, 3, 2, 128)]  # channels, kernel, stride, filters


def check_operator(name: str, arguments: list[Any], has_kernel: bool) -> None:
    """On the GPU as in float64."""
    operator = getattr(torch.ops.brisk, name).default
    assert has_one_kernel(operator, tuple(arguments)) is has_kernel
    results, expected = operator(*arguments), operator(*exact(arguments))
    for index, (result, reference) in enumerate(zip(results, expected, strict=True)):
        bound = 1e-2 if index == 0 and arguments[0].dtype != torch.float32 else 1e-3
        assert error(result.cpu(), reference) < bound, (name, index)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "kernel", "stride", "filters"), CASES)
def test_sums_of_a_convolution_on_the_gpu(
    channels: int, kernel: int, stride: int, filters: int, dtype: torch.dtype
) -> None:
    arguments = operands((8, channels, 28, 28), kernel, stride, filters, dtype)
    check_operator("convolution_sums", arguments, has_kernel=dtype == torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["relu", "residual", "two norms"])
@pytest.mark.parametrize(("channels", "kernel", "stride", "filters"), CASES)
def test_masked_input_grad_on_the_gpu(
    channels: int, kernel: int, stride: int, filters: int, form: str, dtype: torch.dtype
) -> None:
    shape = (8, channels, 28, 28)
    x, weight, *geometry = operands(shape, kernel, stride, filters, dtype)
    images, vectors = random_images(3, shape, dtype), [torch.randn(channels, device="cuda") for _ in range(6)]
    (dy,) = random_images(1, (8, filters, 28 // stride, 28 // stride), dtype)
    second: list[Tensor | None] = [images[2], *vectors[3:]]
    branch, shortcut = (None, None) if form == "relu" else (images[0], images[1] if form == "residual" else None)
    if form != "two norms":
        second = [None] * 4
    has_kernel = dtype == torch.float16 and (stride == 1 or form == "relu")
    arguments = [dy, weight, *geometry, branch, shortcut, x, *vectors[:3], *second]
    check_operator("masked_input_grad", arguments, has_kernel)
