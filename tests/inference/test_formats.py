"""Each format holds the network of the checkpoint, in plain layers, with what a program needs to use it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.data
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from tests.conftest import CLASSES
from tests.harness import ROOT
from tests.inference.exported import MEAN, STD, write_checkpoint
from tests.pages import blocks
from utils.data.loaders.torch_loader import torch_val_transform
from utils.errors import UserError
from utils.inference.export.classifier import Classifier, Input
from utils.inference.export.formats import FORMATS, METADATA
from utils.inference.export.output import write_and_compare
from utils.inference.export.trained import Trained, load_trained
from utils.network.fused_layers import swap_fused_layers

FACTS = {
    "arch": "test_resnet", "num_classes": 3, "classes": list(CLASSES), "mean": list(MEAN), "std": list(STD),
    "image_size": 32, "val_resize": 36, "interpolation": "bilinear", "crop": "center",
    "padding": [102, 128, 153], "weights": "model",
    "top1": 50.0,
}  # fmt: skip
TAKES_UINT8 = {"input": "uint8", "layout": "NHWC", "pixels": "0 to 255"}


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return load_trained(write_checkpoint(tmp_path / "best.pt", result={"val/top1": 50.0}))


def pixels(count: int, size: int = 32) -> Tensor:
    shape = (count, size, size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def write(trained: Trained, name: str, takes: Input, folder: Path, half: bool = False) -> str:
    folder.mkdir(exist_ok=True)
    return write_and_compare(trained, name, takes, half, folder, check=True, check_data=None)


def assert_reads(trained: Trained, name: str, takes: Input, folder: Path, tolerance: float = 1e-5) -> None:
    """What was written gives the logits of the network with its fused layers on 1, 3 and 20 images."""
    network = Classifier(trained, takes)
    read = FORMATS[name].read(folder)
    swap_fused_layers(trained.model)
    assert any(type(module).__module__ == "utils.network.fused_layers" for module in trained.model.modules())
    with torch.inference_mode():
        for count in (1, 3, 20):
            images = network.prepare(pixels(count))
            torch.testing.assert_close(read(images), network(images), rtol=tolerance, atol=tolerance)


def facts_of_pt2(folder: Path) -> Any:
    """The facts in model.pt2."""
    extra: dict[str, Any] = {METADATA: ""}
    torch.export.load(folder / "model.pt2", extra_files=extra)
    return json.loads(extra[METADATA])


def assert_facts(found: Mapping[str, Any], **expected: str) -> None:
    """A program finds what it needs; the version of Brisk is one of them."""
    assert {name: value for name, value in found.items() if name != "brisk"} == FACTS | expected
    assert found["brisk"]


def test_uint8_is_normalized_as_torchvision_does(trained: Trained) -> None:
    images = pixels(5).permute(0, 3, 1, 2)
    normalized = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])(images)
    with torch.inference_mode():
        expected = trained.model(normalized)
        torch.testing.assert_close(Classifier(trained, "uint8")(pixels(5)), expected)
        network = Classifier(trained, "float")
        torch.testing.assert_close(network(network.prepare(pixels(5))), expected)


def test_a_network_that_onnx_cannot_hold(trained: Trained, tmp_path: Path) -> None:
    large = dataclasses.replace(trained, model=torch.nn.Linear(30_000, 30_000, device="meta"))
    message = "^--format onnx: test_resnet has 3.6 GB of weights, and a file of ONNX holds 2.1; give --half, or"
    with pytest.raises(UserError, match=message):
        FORMATS["onnx"].write(large, Classifier(large, "float"), {}, tmp_path)


@pytest.mark.slow
def test_pt2(trained: Trained, tmp_path: Path) -> None:
    write(trained, "pt2", "float", tmp_path / "out")
    found = facts_of_pt2(tmp_path / "out")
    assert_facts(found, input="float32", layout="NCHW", pixels="normalized", precision="float32")
    assert_reads(trained, "pt2", "float", tmp_path / "out")


def test_onnx(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    write(trained, "onnx", "uint8", tmp_path / "exported")
    model = onnx.load(tmp_path / "exported" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    texts = {each.key: each.value for each in model.metadata_props}
    words = {"arch", "interpolation", "crop", "weights", "input", "layout", "pixels", "precision", "brisk"}
    assert_facts(
        {name: text if name in words else json.loads(text) for name, text in texts.items()},
        **TAKES_UINT8,
        precision="float32",
    )
    (images,), (logits,) = model.graph.input, model.graph.output
    dims = [each.dim_param or each.dim_value for each in images.type.tensor_type.shape.dim]
    assert (images.name, dims, images.type.tensor_type.elem_type) == ("images", ["batch", 32, 32, 3], 2)  # uint8
    assert (logits.name, logits.type.tensor_type.elem_type) == ("logits", 1)  # float32
    assert_reads(trained, "onnx", "uint8", tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    check_program_of_the_docs(trained)


@pytest.mark.slow
@pytest.mark.parametrize(("crop", "resize"), [("pad", 64), ("pad", 71), ("squash", 70)])
def test_the_program_of_the_docs_on_whole_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crop: Any, resize: int
) -> None:
    size: dict[str, Any] = {"image_size": 64, "val_image_size": 64, "val_resize": resize}
    trained = load_trained(write_checkpoint(tmp_path / "best.pt", val_crop=crop, **size))
    write(trained, "onnx", "uint8", tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    check_program_of_the_docs(trained)


def check_program_of_the_docs(trained: Trained) -> None:
    """It has the pixels of the evaluation, and the network's logits."""
    (block,) = (each for each in blocks(ROOT / "docs" / "using-a-model.md") if "onnxruntime" in each.text)
    for width, height in ((77, 333), (301, 200)):
        image = Image.effect_noise((width, height), 90).convert("RGB")
        image.save("photo.jpg")
        names: dict[str, Any] = {}
        exec(compile(block.text, "block", "exec"), names)
        with Image.open("photo.jpg") as file:
            expected = torch_val_transform(trained.config)(file).permute(1, 2, 0)
        assert torch.equal(torch.from_numpy(names["pixels"].copy()), expected)
        logits = Classifier(trained, "uint8")(expected[None])
        torch.testing.assert_close(torch.from_numpy(names["logits"]), logits)


def test_timm(trained: Trained, tmp_path: Path) -> None:
    write(trained, "timm", "float", tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content["architecture"], content["num_classes"], content["label_names"]) == ("test_resnet", 3, [*CLASSES])
    assert {"input_size", "mean", "std"} <= content["pretrained_cfg"].keys() <= {
        "custom_load", "input_size", "fixed_input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std",
        "num_classes", "pool_size", "first_conv", "classifier",
    }, "no license, origin or paper of timm's weights"  # fmt: skip
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o044, "others may read it"
    assert_timm_transform(trained, tmp_path / "out")
    assert_reads(trained, "timm", "float", tmp_path / "out")


def assert_timm_transform(trained: Trained, folder: Path) -> None:
    """timm's own transform of the folder gives the pixels of Brisk's evaluation."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    for use_test_size in (False, True):
        config = timm.data.resolve_data_config({}, model=model, use_test_size=use_test_size)
        transform = timm.data.create_transform(**config)
        for width, height in ((300, 200), (77, 333), (64, 64)):
            image = Image.effect_noise((width, height), 90).convert("RGB")
            expected = torch_val_transform(trained.config)(image).permute(1, 2, 0)
            torch.testing.assert_close(transform(image)[None], Classifier(trained, "float").prepare(expected[None]))


@pytest.mark.parametrize(
    ("val_crop", "interpolation"), [("squash", "bicubic"), ("center", "random"), ("pad", "bicubic")]
)
def test_timm_of_an_evaluation_at_another_size(tmp_path: Path, val_crop: str, interpolation: str) -> None:
    settings: dict[str, Any] = {"val_crop": val_crop, "interpolation": interpolation}
    trained = load_trained(write_checkpoint(tmp_path / "best.pt", val_image_size=48, val_resize=50, **settings))
    write(trained, "timm", "float", tmp_path / "out")
    assert_timm_transform(trained, tmp_path / "out")
    evaluated = "bicubic" if interpolation == "bicubic" else "bilinear"
    facts = trained.metadata
    assert (facts["image_size"], facts["crop"], facts["interpolation"]) == (48, val_crop, evaluated)


@pytest.mark.parametrize("size", [(160, 160), (96, 130)])
def test_timm_of_a_network_that_is_built_for_one_size(tmp_path: Path, size: tuple[int, int]) -> None:
    image_size, val_resize = size
    path = write_checkpoint(tmp_path / "best.pt", arch="test_vit", image_size=image_size, val_resize=val_resize)
    trained = load_trained(path)
    write(trained, "timm", "float", tmp_path / "out")
    assert_timm_transform(trained, tmp_path / "out")


def test_timm_of_a_network_with_arguments(tmp_path: Path) -> None:
    """timm builds it with those, which are in config.json; rates of dropout belong to training."""
    settings: dict[str, Any] = {"arch": "test_vit", "image_size": 96, "val_resize": 96, "drop_path": 0.5}
    arguments = "class_token=false,global_pool=avg,init_values=1e-2"
    path = write_checkpoint(tmp_path / "best.pt", model_args=arguments, **settings)
    write(load_trained(path), "timm", "float", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())["model_args"]
    assert (found["class_token"], found["global_pool"], found["init_values"]) == (False, "avg", 0.01)
    assert "drop_path_rate" not in found


@pytest.mark.slow  # seconds each
@pytest.mark.parametrize("name", ["onnx", "pt2"])
@pytest.mark.parametrize("takes", ["float", "uint8"])
@pytest.mark.parametrize("arch", ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"])
def test_half(tmp_path: Path, name: str, takes: Input, arch: str) -> None:
    path = write_checkpoint(tmp_path / "best.pt", arch=arch, image_size=64, val_resize=64)
    trained = load_trained(path)
    write(trained, name, takes, tmp_path / "whole")
    write(trained, name, takes, tmp_path / "half", half=True)
    file = FORMATS[name].files[-1]
    whole, half = ((tmp_path / folder / file).stat().st_size for folder in ("whole", "half"))
    assert half < 0.75 * whole
    assert all(value.dtype != torch.float16 for value in trained.model.state_dict().values())
