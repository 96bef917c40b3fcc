"""The fused layers compute what torch's and timm's do: single layers, whole networks, compiled ones."""

import copy
import pickle
from typing import Any, cast

import pytest
import timm
import torch
from timm.layers.norm_act import BatchNormAct2d as TimmBatchNormAct2d
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.network.tensors import FILTERS, NORMS, draw, error
from utils.network import fused_layers as layers
from utils.network import fused_ops
from utils.network.compiler import compile_network
from utils.network.fused_layers import swap_fused_layers

POOLS = [(2, 4, 8, 8), (1, 3, 7, 10), (2, 5, 1, 1)]
STEMS = [(3, 8, 12), (3, 9, 16), (5, 8, 8), (7, 8, 16), (7, 16, 10)]  # kernel, height, width; odd ones as torch does

# Of torch 2.11, on what it does itself when it compiles an autograd.Function, and on its own use of torch.jit.
TORCH_WARNING = "ignore::DeprecationWarning"


def outcome(module: nn.Module, x: Tensor, amp: bool = False, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Output, gradients of the input and of all parameters, and buffers, after a training step on x.

    `amp`: in mixed precision of `dtype`.
    """
    module.train()
    module.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast(x.device.type, dtype, enabled=amp):
        y = module(x)
    torch.manual_seed(7)
    y.backward(torch.randn(y.shape, dtype=torch.float64).to(y))
    assert x.grad is not None
    gradients = {
        f"grad of {name}": weight.grad for name, weight in module.named_parameters() if weight.grad is not None
    }
    assert len(gradients) == len(list(module.parameters()))
    return {"y": y.detach(), "grad of x": x.grad, **gradients, **dict(module.named_buffers())}


def check_same(plain: nn.Module, x: Tensor, expected: type[nn.Module], index: int = 0) -> None:
    """With fused layers, float64, float32 and bf16 agree with the plain module's float64; bf16 as well as plain."""
    plain = nn.Sequential(*plain) if isinstance(plain, nn.Sequential) else nn.Sequential(plain)
    x = x.contiguous(memory_format=torch.channels_last)
    reference = outcome(copy.deepcopy(plain).double(), x.double())
    swapped = swap_fused_layers(copy.deepcopy(plain))
    assert type(swapped[index]) is expected  # type: ignore[index]
    for module, bound in ((copy.deepcopy(swapped).double(), 1e-12), (copy.deepcopy(swapped), 1e-5)):
        out = outcome(module, x.to(next(module.parameters(), torch.zeros(0, dtype=torch.float64)).dtype))
        assert out.keys() == reference.keys()
        for name, value in out.items():
            assert error(value, reference[name]) < bound, (name, bound)
    ours, theirs = outcome(swapped, x.float(), amp=True), outcome(copy.deepcopy(plain), x.float(), amp=True)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert error(ours[name], reference[name]) < max(1e-2, 1.1 * error(theirs[name], reference[name])), name
    assert swapped.state_dict().keys() == plain.state_dict().keys()


def norm(channels: int, act: str) -> nn.Module:
    made: nn.BatchNorm2d
    if act == "plain":
        made = nn.BatchNorm2d(channels, momentum=0.3)
    else:
        layer = {"relu": nn.ReLU, "silu": nn.SiLU, "identity": nn.Identity}[act]
        made = TimmBatchNormAct2d(channels, act_layer=layer, eps=1e-3)
    made.weight.data.normal_()
    made.bias.data.normal_()
    return made


@pytest.mark.parametrize("act", ["plain", "identity", "relu", "silu"])
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_batch_norm(shape: tuple[int, ...], act: str) -> None:
    expected = layers.BatchNorm2d if act == "plain" else layers.BatchNormAct2d
    check_same(norm(shape[1], act), draw(*shape), expected)


@pytest.mark.parametrize("act", ["plain", "relu", "silu"])
def test_batch_norm_in_evaluation_is_torchs(act: str) -> None:
    plain = norm(24, act)
    plain(draw(4, 24, 5, 5))
    swapped = swap_fused_layers(copy.deepcopy(plain)).eval()
    x = draw(2, 24, 3, 3)
    assert torch.equal(swapped(x), plain.eval()(x))
    assert all(map(torch.equal, swapped.state_dict().values(), plain.state_dict().values()))


def test_variance_survives_a_large_mean() -> None:
    x = torch.randn(64, 5, 8, 8) + 1000  # the mean of squares less the square of the mean would be off by 6 %
    mean, var = fused_ops.batch_norm_stats(x)
    assert error(mean, x.double().mean(dim=(0, 2, 3))) < 1e-6
    assert error(var, x.double().var(dim=(0, 2, 3), correction=0)) < 1e-5


def test_batch_norm_refuses_a_single_value() -> None:
    with pytest.raises(ValueError, match="more than 1 value"):
        swap_fused_layers(nn.BatchNorm2d(3))(torch.zeros(1, 3, 1, 1))


@pytest.mark.parametrize("shape", POOLS, ids=str)
def test_max_pool(shape: tuple[int, ...]) -> None:
    check_same(nn.MaxPool2d(3, 2, 1), draw(*shape), layers.MaxPool2d)


def test_max_pool_gives_a_tie_to_the_first_and_passes_nan_on() -> None:
    x = draw(2, 6, 9, 8).round().relu()  # many ties
    x[0, 0, 4, 4], x[1, 2, 0, 0], x[1, 3] = float("nan"), float("nan"), float("-inf")
    results = []
    for pool in (nn.MaxPool2d(3, 2, 1), swap_fused_layers(nn.MaxPool2d(3, 2, 1))):
        leaf = x.clone().requires_grad_()
        y = pool(leaf)
        y.nan_to_num(3).mul(torch.arange(y.numel()).view(y.shape) + 1.0).sum().backward()
        assert leaf.grad is not None
        results.append((y.detach(), leaf.grad))
    (y, grad), (other_y, other_grad) = results
    assert y.isnan().sum() == 2
    torch.testing.assert_close(other_y, y, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(other_grad, grad, rtol=0, atol=0)


@pytest.mark.parametrize(("kernel", "height", "width"), STEMS)
@pytest.mark.parametrize("bias", [True, False])
def test_stem(kernel: int, height: int, width: int, bias: bool) -> None:
    conv = nn.Conv2d(3, 8, kernel, 2, kernel // 2, bias=bias)
    check_same(conv, draw(2, 3, height, width), layers.StemConv2d)


@pytest.mark.parametrize(("channels", "kernel", "stride", "height", "width"), FILTERS)
@pytest.mark.parametrize("bias", [True, False])
def test_depthwise(channels: int, kernel: int, stride: int, height: int, width: int, bias: bool) -> None:
    conv = nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=bias)
    check_same(conv, draw(3, channels, height, width), layers.DepthwiseConv2d)


def test_shapes_of_depthwise_convolutions_are_noted() -> None:
    """Those that are swapped, each once, of all passes within the block."""
    same = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), same, same, nn.Conv2d(8, 8, 5, 2, 2, groups=8), nn.Conv2d(8, 8, 7, groups=8)
    )
    with layers.depthwise_shapes(model) as shapes:
        for size in (18, 22):
            model(torch.zeros(2, 3, size, size + 2))
    model(torch.zeros(2, 3, 40, 40))
    assert shapes == {(8, side, side + 2, *kind) for side in (16, 20) for kind in ((3, 1), (5, 2))}


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.SyncBatchNorm(4),
        TimmBatchNormAct2d(4, act_layer=nn.GELU),
        TimmBatchNormAct2d(4, act_layer=nn.LeakyReLU),
        TimmBatchNormAct2d(4, drop_layer=nn.Dropout),
        nn.MaxPool2d(2, 2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.MaxPool2d(3, 2, 1, return_indices=True),
        nn.Conv2d(3, 8, 3, 1, 1),
        nn.Conv2d(3, 8, 7, 2, 2),
        nn.Conv2d(3, 8, 7, 2, 3, padding_mode="reflect"),
        nn.Conv2d(4, 8, 3, 2, 1, groups=4),
        nn.Conv2d(4, 4, 3, 1, 1, dilation=2, groups=4),
        nn.Conv2d(4, 4, 7, 1, 3, groups=4),
        nn.Conv2d(4, 8, 1),
    ],
    ids=str,
)
def test_what_does_not_match_stays(module: nn.Module) -> None:
    before = type(module)
    assert type(swap_fused_layers(module)) is before


def create(arch: str) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = timm.create_model(arch, num_classes=5)
    for name, weight in model.named_parameters():  # the last norm of a block may be zero at first
        if weight.ndim == 1:
            nn.init.normal_(weight, mean=1.0 if name.endswith("weight") else 0.0, std=0.2)
    return model.double().to(memory_format=torch.channels_last)


def assert_close(out: dict[str, Tensor], reference: dict[str, Tensor], bound: float) -> None:
    assert out.keys() == reference.keys()
    for name, value in out.items():  # what is zero but for rounding has no relative error
        scale = max(float(reference[name].double().norm()), 1e-3)
        assert float((value.double() - reference[name].double()).norm()) < bound * scale, name


@pytest.mark.parametrize(
    ("arch", "swapped"),
    [
        ("test_resnet", {"BatchNorm2d": 15, "StemConv2d": 1, "MaxPool2d": 1}),
        pytest.param("resnet18", {"BatchNorm2d": 20, "StemConv2d": 1, "MaxPool2d": 1}, marks=pytest.mark.slow),
        ("test_efficientnet", {"BatchNormAct2d": 13, "StemConv2d": 1, "DepthwiseConv2d": 2}),
        pytest.param(
            "efficientnet_b0", {"BatchNormAct2d": 49, "StemConv2d": 1, "DepthwiseConv2d": 16}, marks=pytest.mark.slow
        ),
    ],
)
def test_whole_networks(arch: str, swapped: dict[str, int]) -> None:
    plain = create(arch)
    parameters = [id(tensor) for tensor in (*plain.parameters(), *plain.buffers())]
    x = draw(4, 3, 64, 64).double().contiguous(memory_format=torch.channels_last)
    reference = outcome(copy.deepcopy(plain), x)
    fast = swap_fused_layers(plain)
    assert fast is plain
    assert [id(tensor) for tensor in (*fast.parameters(), *fast.buffers())] == parameters
    found = [type(module).__name__ for module in fast.modules() if type(module).__module__ == layers.__name__]
    assert {name: found.count(name) for name in found} == swapped
    unpickled = pickle.loads(pickle.dumps(copy.deepcopy(fast)))
    assert_close(outcome(fast, x), reference, 1e-9)
    assert_close(outcome(unpickled, x), reference, 1e-9)
    assert list(fast.state_dict()) == list(create(arch).state_dict())
    plain = create(arch)
    plain.load_state_dict(fast.state_dict())
    with torch.no_grad():
        assert error(fast.eval()(x), plain.eval()(x)) < 1e-10


def test_activations_move_into_the_norms_of_residual_blocks() -> None:
    model: Any = swap_fused_layers(timm.create_model("resnet50"))
    block = model.layer1[0]
    assert [getattr(block, f"bn{index}").activation for index in (1, 2, 3)] == ["relu", "relu", "identity"]
    assert [type(getattr(block, f"act{index}")) for index in (1, 2, 3)] == [nn.Identity, nn.Identity, nn.ReLU]
    assert model.bn1.activation == "relu"
    deep: Any = swap_fused_layers(timm.create_model("resnet26d"))
    assert [type(layer).__name__ for layer in deep.conv1[1:6]] == [
        "BatchNorm2d",
        "Identity",
        "Conv2d",
        "BatchNorm2d",
        "Identity",
    ]
    assert [deep.conv1[at].activation for at in (1, 4)] == ["relu", "relu"]
    dropping: Any = swap_fused_layers(timm.create_model("resnet18", drop_block_rate=0.1))
    unchanged = dropping.layer4[0]
    assert (unchanged.bn1.activation, type(unchanged.act1)) == ("identity", nn.ReLU)


def small_network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), TimmBatchNormAct2d(8, act_layer=nn.SiLU),
        nn.Conv2d(8, 8, 5, 2, 2, groups=8, bias=False), TimmBatchNormAct2d(8, act_layer=nn.ReLU), nn.Flatten(),
    )  # fmt: skip


@pytest.mark.filterwarnings(TORCH_WARNING)
@pytest.mark.parametrize(
    ("backend", "amp"),
    [
        ("aot_eager", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("aot_eager", True), ("inductor", False))),
    ],
)
def test_one_graph_when_compiled(backend: str, amp: bool) -> None:
    torch.compiler.reset()
    x = draw(2, 3, 24, 24).contiguous(memory_format=torch.channels_last)
    fast = swap_fused_layers(small_network())
    if not amp:
        x, fast = x.double(), fast.double()
    compiled = cast(nn.Module, torch.compile(copy.deepcopy(fast), backend=backend, fullgraph=True))
    expected = outcome(fast, x, amp)
    out = {name.replace("_orig_mod.", ""): value for name, value in outcome(compiled, x, amp).items()}
    assert_close(out, expected, 1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings(TORCH_WARNING)
def test_a_compiled_residual_network() -> None:
    torch.compiler.reset()
    x = draw(4, 3, 32, 32).double().contiguous(memory_format=torch.channels_last)
    fast = swap_fused_layers(create("test_resnet"))
    compiled = cast(nn.Module, torch.compile(fast, backend="aot_eager", fullgraph=True))
    out = {name.replace("_orig_mod.", ""): value for name, value in outcome(compiled, x).items()}
    assert_close(out, outcome(create("test_resnet"), x), 1e-9)


# Operators that the pass over the graph puts in, on a Hopper GPU.
FOLDED: dict[tuple[str, torch.dtype], dict[str, int]] = {
    ("resnet50", torch.bfloat16): {"residual_grad": 15},
    ("efficientnet_b0", torch.bfloat16): {},
    ("resnet50", torch.float16): {"convolution_sums": 53, "masked_input_grad": 47},
    ("resnet50d", torch.float16): {"convolution_sums": 55, "masked_input_grad": 49},
    ("resnet18", torch.float16): {"convolution_sums": 20, "masked_input_grad": 12, "residual_grad": 3},
    ("efficientnet_b0", torch.float16): {"convolution_sums": 33},
}


@pytest.mark.gpu
@pytest.mark.filterwarnings(TORCH_WARNING)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # from a thread that torch starts, the first to need it
@pytest.mark.parametrize(("arch", "dtype"), FOLDED, ids=str)
def test_a_compiled_step_is_as_exact_as_the_plain_one(arch: str, dtype: torch.dtype) -> None:
    made = create(arch)
    with torch.no_grad():  # branches that add little, as in training: deep ones of weight 1 amplify rounding to chaos
        for name, weight in made.named_parameters():
            if "bn3" in name or (arch == "resnet18" and "bn2" in name):
                weight.mul_(0.2)
    x = draw(32, 3, 128, 128).cuda().contiguous(memory_format=torch.channels_last)
    reference = outcome(copy.deepcopy(made).cuda(), x.double())
    norms = {
        name: float(value.norm()) for name, value in reference.items() if "grad of" in name and name != "grad of x"
    }
    names = [name for name in norms if norms[name] > 1e-9 * max(norms.values())]  # a bias before a norm has no gradient
    errors = []
    for model in (copy.deepcopy(made).float().cuda(), swap_fused_layers(made.float().cuda())):
        torch.compiler.reset()
        counters.clear()
        found = outcome(compile_network(model), x, amp=True, dtype=dtype)
        gradients = {name.replace("_orig_mod.", ""): value for name, value in found.items()}
        errors.append([error(gradients[name], reference[name]) for name in names])
    folded = {name.split(".")[1]: number for name, number in counters["brisk"].items() if name.startswith("brisk")}
    assert folded == FOLDED[arch, dtype]
    plain, fast = (sum(each) / len(each) for each in errors)
    assert plain < 0.5
    assert fast < 1.1 * plain
