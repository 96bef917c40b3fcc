"""Heat maps: the grid of many families of timm, and Grad-CAM's definition by autograd alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from tests.inference.exported import write_checkpoint
from utils.errors import UserError
from utils.inference.export.trained import load_trained
from utils.inference.heatmap_files import FOLDER, HeatmapFolder, encode_png, heatmap_name
from utils.inference.heatmaps import HeatMaps, draw_heatmaps, find_grid, find_map, overlay

SIZE = (96, 64)  # height and width, so that the two are not exchanged
VIT = {"img_size": SIZE}
LETTERS = {"depth": 2, "embed_dim": 48, "num_heads": 2}
CLASSES = 8
# Name, arguments, layer and grid.
FAMILIES: list[tuple[str, dict[str, Any], str, tuple[int, int]]] = [
    ("test_resnet", {}, "", (3, 2)),
    ("test_efficientnet", {}, "", (3, 2)),
    ("test_convnext", {}, "", (3, 2)),
    ("test_byobnet", {}, "", (3, 2)),
    ("test_nfnet", {}, "", (3, 2)),
    ("densenet121", {"block_config": (1, 1, 1, 1)}, "", (3, 2)),
    ("test_mambaout", {}, "", (3, 2)),  # height, width, channels
    ("swin_tiny_patch4_window7_224", VIT | {"embed_dim": 12, "depths": (1, 1, 1, 1), "window_size": 2}, "", (3, 2)),
    ("mixer_s32_224", VIT, "", (3, 2)),  # all tokens are patches
    ("vit_tiny_patch16_224", VIT | LETTERS, "blocks.1.norm1", (6, 4)),
    ("vit_tiny_patch16_224", VIT | LETTERS | {"global_pool": "avg"}, "", (6, 4)),
    ("vit_small_patch14_reg4_dinov2", {"img_size": (84, 56)} | LETTERS, "blocks.1.norm1", (6, 4)),  # registers
    ("deit_tiny_distilled_patch16_224", VIT | LETTERS, "blocks.1.norm1", (6, 4)),  # two tokens
    ("eva02_tiny_patch14_224", {"img_size": (84, 56)} | LETTERS, "", (6, 4)),
    ("beit_base_patch16_224", VIT | LETTERS, "", (6, 4)),
    ("cait_xxs24_224", VIT | LETTERS, "blocks.1", (6, 4)),  # the class token comes after the blocks
    ("levit_128s", VIT, "", (2, 1)),
]


def network_of(arch: str, arguments: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(arch, num_classes=CLASSES, **arguments)
    for parameter in model.parameters():
        if not parameter.any():  # as a head may begin
            nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


def cam_by_autograd(model: nn.Module, layer: str, grid: tuple[int, int], images: Tensor, label: int) -> Tensor:
    """Grad-CAM as in the paper: (1, height, width)."""
    kept: list[Tensor] = []

    def keep(output: Tensor) -> Tensor:
        kept.append(output.detach().clone().requires_grad_())
        return kept[0].clone()  # which layers behind may change in place

    if layer:
        with torch.enable_grad():
            handle = model.get_submodule(layer).register_forward_hook(lambda module, inputs, output: keep(output))
            logits = model(images)
            handle.remove()
    else:
        logits = model.forward_head(keep(model.forward_features(images)))  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(logits[0, label], kept[0])
    features = kept[0].detach()
    if features.dim() == 3:
        patches = grid[0] * grid[1]
        features, gradient = (each[:, -patches:].reshape(1, *grid, -1) for each in (features, gradient))
    is_last = features.shape[1:3] == grid  # channels
    places = (1, 2) if is_last else (2, 3)
    return (gradient.mean(places, keepdim=True) * features).sum(3 if is_last else 1).clamp(min=0)


@pytest.mark.parametrize(("arch", "arguments", "layer", "grid"), FAMILIES, ids=lambda each: str(each)[:30])
def test_maps_are_grad_cam(arch: str, arguments: dict[str, Any], layer: str, grid: tuple[int, int]) -> None:
    from captum.attr import LayerGradCam

    model = network_of(arch, arguments)
    size = arguments.get("img_size", SIZE)
    network, found = find_map(model, size, arch)
    assert (network.layer, found) == (layer, grid)
    images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(network(images), model(images))  # going through the map changes nothing
    maps = [
        LayerGradCam(network, network.map).attribute(images, k, relu_attributions=True)[:, 0] for k in range(CLASSES)
    ]
    expected = [cam_by_autograd(model, layer, grid, images, k) for k in range(CLASSES)]
    assert any(each.any() for each in expected)
    for map_, cam in zip(maps, expected, strict=True):
        torch.testing.assert_close(map_, cam, rtol=1e-4, atol=1e-5 * float(cam.max()))


@pytest.mark.parametrize(
    ("tokens", "size", "prefix", "grid"),
    [
        (196, (224, 224), 1, (14, 14)),  # a network with a class token that comes later
        (197, (224, 224), 0, (14, 14)),  # one that does not say how many there are
        (201, (224, 224), 5, (14, 14)),
        (24, (96, 64), 0, (6, 4)),
        (24, (64, 96), 0, (4, 6)),
        (25, (96, 64), 0, (6, 4)),
    ],
)
def test_patches_among_tokens(tokens: int, size: tuple[int, int], prefix: int, grid: tuple[int, int]) -> None:
    assert find_grid(tokens, size, prefix) == grid


def test_tokens_that_are_no_grid() -> None:
    with pytest.raises(ValueError, match="1 tokens"):
        find_grid(1, (64, 640), 1)


def test_a_layer_before_the_one_of_a_single_place() -> None:
    network, grid = find_map(network_of("test_resnet", {}), (32, 32), "test_resnet")
    assert (network.layer, grid) == ("layer3", (2, 2))


class Mixed(nn.Module):
    """A network whose features are of two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward_features(self, images: Tensor) -> list[Tensor]:
        return [images, images[..., ::2, ::2]]

    def forward_head(self, features: list[Tensor], pre_logits: bool = False) -> Tensor:
        pooled = features[0].mean((2, 3)) + features[1].mean((2, 3))
        return pooled if pre_logits else self.head(pooled)


def test_a_network_without_a_map() -> None:
    with pytest.raises(UserError, match=r"mixed has no heat maps at 32 x 32 px: no layer has places on which"):
        find_map(Mixed(), (32, 32), "mixed")


def create_maps(path: Path, **settings: Any) -> HeatMaps:
    trained = load_trained(write_checkpoint(path / "best.pt", **settings))
    return HeatMaps(trained.model.state_dict(), trained.config, trained.normalization, torch.device("cpu"))


def test_a_map_lies_on_its_image(tmp_path: Path) -> None:
    maps = create_maps(tmp_path, image_size=96, val_resize=96)
    assert maps.grid == (3, 3)
    image = torch.randint(0, 256, (3, 96, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = [maps.compute(image, label) for label in range(3)]
    with torch.inference_mode():  # as while predictions are made
        again = [maps.compute(image.clone(), label) for label in range(3)]
    assert all(map(torch.equal, found, again))
    assert not torch.equal(found[0], found[1])
    for heat in found:
        assert (heat.shape, heat.dtype, float(heat.min()) >= 0) == ((96, 96), torch.float32, True)
        assert float(heat.max()) in (0.0, 1.0)
    assert any(heat.any() for heat in found)
    images = maps._normalize(image[None])
    expected = cam_by_autograd(maps._network.model, "", (3, 3), images, 0)
    expected = nn.functional.interpolate(expected[:, None], (96, 96), mode="bilinear")[0, 0]
    torch.testing.assert_close(found[0], expected / expected.max().clamp(min=1e-30), rtol=1e-4, atol=1e-5)


def test_what_speaks_for_a_class_is_yellow() -> None:
    image = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    drawn = np.asarray(overlay(image, torch.tensor([[0.0, 1.0], [0.0, 0.5]])))
    assert drawn[0, 0].tolist() == drawn[1, 0].tolist() == [100, 100, 100]
    assert drawn[0, 1].tolist() == [round(30 + 0.7 * value) for value in (253.3, 231.1, 36.7)]
    assert drawn[1, 1].tolist() not in (drawn[0, 0].tolist(), drawn[0, 1].tolist())


def test_a_report_without_maps_says_why() -> None:
    def create() -> HeatMaps:
        raise UserError("crossvit has no heat maps")

    assert draw_heatmaps([(torch.zeros(3, 8, 8), [0, 1])], create) == ([[]], "crossvit has no heat maps")


def test_names_lead_back_to_the_rows() -> None:
    assert heatmap_name(7, "photos/a photo.final.jpg") == "007-a_photo.final.png"
    assert heatmap_name(1234, "/data/val.tar:red/1.jpg") == "1234-1.png"
    assert heatmap_name(1, "x/\udce9\n.jpg") == "001-__.png"
    assert len(heatmap_name(1, "x" * 255)) < 100


def test_the_folder_replaces_earlier_maps_only(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    picture = Image.new("RGB", (2, 2))
    (tmp_path / FOLDER / "001-old.png").write_bytes(encode_png(picture))
    mine = ["001-photo.png", "2026-11-03.png", "mine.txt"]
    picture.save(tmp_path / FOLDER / mine[0])
    for name in mine[1:]:
        (tmp_path / FOLDER / name).touch()
    folder = HeatmapFolder(tmp_path)
    folder.write({"001-new.png": encode_png(picture)})
    assert not (tmp_path / FOLDER / "001-new.png").exists(), "before it is complete"
    folder.publish()
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["001-new.png", *mine]
    for name in mine:
        (tmp_path / FOLDER / name).unlink()
    HeatmapFolder(tmp_path).publish()
    assert list(tmp_path.iterdir()) == []
