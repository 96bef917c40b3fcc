"""Names that timm knows, heads of the right size, and input that a network takes."""

from typing import Any

import pytest
import torch
from torch import nn

from models import check_arch, check_head, create_model, normalization
from utils.errors import UserError
from utils.network.published_weights import published_weights

ARCH = "test_resnet"


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


def test_weights_of_other_classes_are_not_evaluated() -> None:
    message = r"timm's test_resnet has a head of 1,000 classes, the data 3 classes; give .* or --resume PATH"
    with pytest.raises(UserError, match=message):
        check_head(published_weights("test_resnet"), create_model("test_resnet", 1000), 3, ("a", "b", "c"))
