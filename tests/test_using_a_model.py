"""The documented ways to load a model give the network of every run, whatever its arguments, and its pixels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from models import create_model
from scripts import export
from tests.harness import ROOT, read_checkpoint
from tests.inference.exported import write_checkpoint
from tests.pages import blocks
from utils.data.loaders.torch_loader import torch_val_transform
from utils.data.reading.decoding import upright_rgb
from utils.options.arguments import model_options
from utils.options.resolved import ResolvedConfig

CLASSIFY = "name: classify.py"
PAGE = ROOT / "docs" / "using-a-model.md"
SNIPPETS = [
    block.text
    for path in (ROOT / "README.md", PAGE)
    for block in blocks(path)
    if "timm.create_model" in block.text and block.language == "python" and block.comment != CLASSIFY
]
# Settings of runs whose weights fit the network without them, but for the last two.
RUNS: dict[str, dict[str, Any]] = {
    "global_pool": {"model_args": "global_pool=max"},
    "bn_eps": {"arch": "test_efficientnet", "model_args": "bn_eps=1e-1"},
    "act_layer": {"model_args": "act_layer=gelu"},
    "drop_path": {"drop_path": 0.3, "drop_rate": 0.2},
    "image size": {"arch": "test_vit", "image_size": 96, "val_resize": 96},
    "lists": {"arch": "convnext_atto", "model_args": "depths=[1,1,1,1],dims=[8,8,16,16],ls_init_value=1e-2"},
    "all": {
        "arch": "test_vit",
        "image_size": 64,
        "val_resize": 70,
        "model_args": "class_token=false,global_pool=avg",
        "drop_path": 0.1,
    },
}


def expected_network(path: Path) -> nn.Module:
    """As the run has it."""
    saved = read_checkpoint(path.parent, path.name)
    config = ResolvedConfig.from_dict(saved["config"])
    options = model_options(config)
    model = create_model(config.arch, config.num_classes, image_size=config.image_size, options=options)
    model.load_state_dict(saved["model"])
    return model.eval()


@torch.inference_mode()
def assert_same_logits(model: nn.Module, path: Path) -> None:
    expected = expected_network(path)
    size = read_checkpoint(path.parent, path.name)["config"]["val_image_size"]
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    logits: Tensor = expected(images)
    torch.testing.assert_close(model(images), logits)
    assert expected.training == model.training
    rates = [[each.p for each in net.modules() if isinstance(each, nn.Dropout)] for net in (model, expected)]
    assert rates[0] == rates[1]


def run_snippet(text: str, path: Path) -> nn.Module:
    names: dict[str, Any] = {}
    exec(compile(text.replace("runs/imagenet-resnet50/best.pt", str(path)), "snippet", "exec"), names)
    model: nn.Module = names["model"]
    return model


def classify_program() -> dict[str, Any]:
    """The names of the page's classify.py."""
    (block,) = (block for block in blocks(PAGE) if block.comment == CLASSIFY)
    names: dict[str, Any] = {"__name__": "classify"}
    exec(compile(block.text, "classify.py", "exec"), names)
    return names


@pytest.mark.parametrize("name", RUNS)
def test_a_model_of_any_run(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(tmp_path / "best.pt", **RUNS[name])
    assert len(SNIPPETS) == 2
    for text in SNIPPETS:
        assert_same_logits(run_snippet(text, path), path)
    assert_same_logits(classify_program()["load_model"](path)[0], path)  # also of a run without an evaluation
    arguments = read_checkpoint(tmp_path, "best.pt")["create_model"]
    json.dumps(arguments)
    assert_same_logits(timm.create_model(**arguments, checkpoint_path=path).eval(), path)


@pytest.mark.parametrize(("crop", "resize"), [("center", 36), ("squash", 36), ("pad", 32), ("pad", 41)])
def test_classify_has_the_geometry_of_the_evaluation(tmp_path: Path, crop: Any, resize: int) -> None:
    path = write_checkpoint(tmp_path / "best.pt", image_size=32, val_image_size=32, val_resize=resize, val_crop=crop)
    saved = read_checkpoint(tmp_path, "best.pt")
    config = ResolvedConfig.from_dict(saved["config"]).padded_with(saved["normalization"]["mean"])
    transform, expected = classify_program()["load_model"](path)[1], torch_val_transform(config)
    normalize = v2.Normalize(**saved["normalization"])
    for size in ((60, 47), (47, 60), (20, 93)):
        image = Image.effect_noise(size, 90).convert("RGB")
        torch.testing.assert_close(transform(image), normalize(expected(image).float() / 255))


@pytest.mark.parametrize("name", [name for name in RUNS if name != "drop_path"])  # rates belong to training
def test_timms_files_of_any_run(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(tmp_path / "best.pt", **RUNS[name])
    arguments = (path, "--format", "timm", "--output-dir", tmp_path / "out", "--no-check")
    assert export.main([str(word) for word in arguments]) == 0
    assert_same_logits(timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval(), path)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK", "I;16", "I;16B", "PGM of 16 bits"])
def test_classify_has_the_pixels_of_predict(tmp_path: Path, mode: str) -> None:
    levels = np.linspace(0, 65535, 40 * 30).reshape(30, 40)
    gray = Image.fromarray((levels / 257).astype(np.uint8))
    if mode in ("I;16", "PGM of 16 bits"):
        path = tmp_path / ("gray.png" if mode == "I;16" else "gray.pgm")
        Image.fromarray(levels.astype(np.uint16)).save(path)
    elif mode == "I;16B":
        path = tmp_path / "gray.tif"
        Image.frombytes(mode, (40, 30), levels.astype(">u2").tobytes()).save(path)
    else:
        path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
        gray.convert("RGB" if mode in ("RGBA", "CMYK") else "L").convert(mode).save(path)
    expected = np.asarray(upright_rgb(path.read_bytes()))
    assert np.array_equal(np.asarray(classify_program()["read_image"](path)), expected)
    assert expected.max() > 250
    assert expected.min() < 10
