"""Names that timm knows, heads of the right size, and weights from files of all formats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from models import check_arch, choose_head, create_model, load_weights, normalization, read_weights
from tests.conftest import assert_same
from utils.errors import UserError

ARCH = "test_resnet"
Weights = dict[str, Tensor]


def test_an_old_name_builds_without_a_warning() -> None:
    assert isinstance(create_model("vit_tiny_patch16_224_in21k", 3), nn.Module)


@pytest.mark.parametrize("arch", ["resnet50", "resnet50.a1_in1k", "efficientnet_b0", "test_vit"])
def test_names_that_timm_knows(arch: str) -> None:
    check_arch(arch)


@pytest.mark.parametrize(
    ("arch", "closest"),
    [
        ("resnet5o", "resnet50"),
        ("ResNet-50", "resnet"),
        ("efficientnetb0", "efficientnet_b0"),
        ("vit_tiny_patch16", "vit_tiny_patch16_"),
    ],
)
def test_unknown_name_lists_close_ones(arch: str, closest: str) -> None:
    with pytest.raises(UserError) as caught:
        create_model(arch, 3)
    start, _, names = str(caught.value).partition("the closest are ")
    assert start.startswith(f"--arch {arch}: unknown to timm")
    assert names.startswith(closest)
    assert len(names.split(", ")) == 3


def test_options_reach_the_network() -> None:
    options = {"drop_rate": 0.3, "drop_path_rate": 0.2, "init_values": 1e-4}
    model: Any = create_model("test_vit", 3, image_size=32, options=options)
    assert model.head_drop.p == 0.3
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)
    assert model.blocks[0].ls1.gamma[0].item() == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("vgg11", {"drop_path_rate": 0.1}, "--drop-path 0.1: vgg11 does not take drop_path_rate; leave it out"),
        (ARCH, {"depth": 3}, f"--model-args depth=3: {ARCH} does not take depth; leave it out"),
        ("test_vit", {"act_layer": "nothing"}, "--model-args act_layer=nothing: timm cannot build test_vit with it ("),
        ("test_vit", {"drop_rate": 0.1, "depth": "x"}, "--model-args depth=x: timm cannot build test_vit with it ("),
    ],
)  # fmt: skip
def test_options_that_a_network_does_not_take(arch: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        create_model(arch, 3, options=options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("num_classes", [1, 3, 1000])
@pytest.mark.parametrize("arch", [ARCH, "test_vit"])
def test_head_is_sized(arch: str, num_classes: int) -> None:
    model = create_model(arch, num_classes, image_size=32).eval()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, num_classes)


def test_kernels_are_channels_last() -> None:
    kernels = [weight for weight in create_model(ARCH, 3).parameters() if weight.ndim == 4 and weight.shape[2] > 1]
    assert len(kernels) > 5
    for kernel in kernels:
        assert kernel.is_contiguous(memory_format=torch.channels_last)
        assert not kernel.is_contiguous()


@pytest.mark.parametrize("image_size", [32, 96])
def test_vision_transformer_of_another_image_size(image_size: int) -> None:
    model = create_model("vit_tiny_patch16_224", 3, image_size=image_size).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, image_size, image_size)).shape == (1, 3)


def test_image_size_that_the_network_rejects() -> None:
    with pytest.raises(UserError, match=r"^--arch levit_128s: timm cannot build it at --image-size -1 \("):
        create_model("levit_128s", 3, image_size=-1)


def test_normalization_is_the_networks_own() -> None:
    assert normalization(create_model("resnet18", 3)) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert normalization(create_model("vit_tiny_patch16_224", 3)) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def donor(num_classes: int = 5) -> Weights:
    """Weights that differ from every fresh network's, in the buffers too."""
    torch.manual_seed(1)
    state = create_model(ARCH, num_classes).state_dict()
    return {name: value + 1 if value.is_floating_point() else value + 7 for name, value in state.items()}


def save_torch(path: Path, weights: Weights) -> None:
    torch.save(weights, path)


def save_safetensors(path: Path, weights: Weights) -> None:
    safetensors.torch.save_file({name: value.contiguous() for name, value in weights.items()}, path)


def save_brisk(path: Path, weights: Weights) -> None:
    torch.save({"format": 1, "epoch": 3, "model": weights, "optimizer": {"state": {}}}, path)


def save_distributed(path: Path, weights: Weights) -> None:
    torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, path)


SAVERS: dict[str, Callable[[Path, Weights], None]] = {
    "timm.pt": save_torch,
    "timm.pth": save_torch,
    "timm.safetensors": save_safetensors,
    "last.pt": save_brisk,
    "module.pt": save_distributed,
}


def split_head(state: dict[str, Any]) -> tuple[Weights, Weights]:
    """Body and head of an `ARCH`."""
    head = {name: value for name, value in state.items() if name.startswith("fc.")}
    assert head.keys() == {"fc.weight", "fc.bias"}
    return {name: value for name, value in state.items() if name not in head}, head


def loaded(path: Path, num_classes: int) -> tuple[Weights, Weights]:
    torch.manual_seed(2)
    model = create_model(ARCH, num_classes)
    weights = read_weights(path)
    head = choose_head(weights, model, num_classes, [f"class {number}" for number in range(num_classes)], "auto")
    load_weights(model, ARCH, weights, num_classes, head.keep)
    for weight in model.parameters():
        assert weight.ndim < 4 or weight.is_contiguous(memory_format=torch.channels_last)
    return split_head(dict(model.state_dict()))


@pytest.mark.parametrize("name", SAVERS)
def test_weights_of_as_many_classes(tmp_path: Path, name: str) -> None:
    SAVERS[name](tmp_path / name, donor())
    assert_same(loaded(tmp_path / name, 5), split_head(donor()))


@pytest.mark.parametrize("name", SAVERS)
def test_weights_of_other_classes_leave_a_random_head(tmp_path: Path, name: str) -> None:
    SAVERS[name](tmp_path / name, donor())
    body, head = loaded(tmp_path / name, 3)
    assert_same(body, split_head(donor())[0])
    torch.manual_seed(2)
    assert_same(head, split_head(dict(create_model(ARCH, 3).state_dict()))[1])


def test_weights_without_a_head(tmp_path: Path) -> None:
    save_torch(tmp_path / "body.pt", split_head(donor())[0])
    assert_same(loaded(tmp_path / "body.pt", 5)[0], split_head(donor())[0])


def test_moving_average_is_preferred(tmp_path: Path) -> None:
    plain = {name: torch.zeros_like(value) for name, value in donor().items()}
    torch.save({"model": plain, "model_ema": donor()}, tmp_path / "best.pt")
    assert_same(loaded(tmp_path / "best.pt", 5), split_head(donor()))


def test_weights_of_another_architecture(tmp_path: Path) -> None:
    path = tmp_path / "vit.pt"
    save_torch(path, create_model("test_vit", 5).state_dict())
    with pytest.raises(
        UserError, match=r"does not fit --arch test_resnet \(\d+ weights missing, \d+ unknown .* first: conv1"
    ):
        load_weights(create_model(ARCH, 5), ARCH, read_weights(path), 5, keep_head=True)


def test_weights_of_another_width(tmp_path: Path) -> None:
    weights = donor()
    weights["conv1.0.weight"] = weights["conv1.0.weight"][:3]
    save_torch(tmp_path / "narrow.pt", weights)
    with pytest.raises(UserError, match=r"\(0 weights missing, 1 unknown or of another shape, first: conv1\.0\.weight"):
        load_weights(create_model(ARCH, 5), ARCH, read_weights(tmp_path / "narrow.pt"), 5, keep_head=True)
