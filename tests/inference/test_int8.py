"""int8 exports: what they hold, what they are calibrated and judged on, and what they may lose."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from scripts import export
from tests.conftest import CLASSES, write_data
from tests.harness import read_checkpoint
from tests.inference.exported import write_checkpoint
from utils import __version__
from utils.data.loaders.torch_loader import torch_val_transform
from utils.data.reading.decoding import upright_rgb
from utils.errors import UserError
from utils.inference.export.check import check_images
from utils.inference.export.classifier import Classifier
from utils.inference.export.formats import Network, read_onnx
from utils.inference.export.int8 import Loss, typical_images
from utils.inference.export.run_images import find_run_images, read_images
from utils.inference.export.trained import load_trained
from utils.options.resolved import ResolvedConfig

LOUD = 1e4  # an activation that takes the whole range of 8 bits


def fit_head(path: Path, loud: bool = False) -> Path:
    """Give the random network of a checkpoint a head that knows the classes of its images, by least squares.

    Args:
        loud: whether a channel before the head is so large that 8 bits leave nothing of the others; its weight is 0.
    """
    saved = read_checkpoint(path.parent, path.name)
    trained = load_trained(path)
    images = find_run_images(trained.saved, None, path.parent)
    model: Any = trained.model
    classifier = Classifier(trained, "float")
    rows, labels = [], []
    with torch.inference_mode():
        for indices, pixels in read_images(images.config, images.train, range(len(images.train)), "fitting"):
            features = model.forward_features(classifier.prepare(pixels))
            rows.append(model.forward_head(features, pre_logits=True))
            labels.append(images.train.labels[indices])
    features, targets = torch.cat(rows), torch.nn.functional.one_hot(torch.from_numpy(np.concatenate(labels)), 3)
    weight = torch.linalg.lstsq(
        torch.cat([features, torch.ones(len(features), 1)], dim=1), 10 * targets.float(), driver="gelsd"
    ).solution
    saved["model"]["fc.weight"], saved["model"]["fc.bias"] = weight[:-1].T.contiguous(), weight[-1].contiguous()

    if loud:
        last = max(name for name in saved["model"] if name.startswith("layer") and name.endswith("bn2.bias"))
        saved["model"][last][0] += LOUD  # after the head was fitted, which does not see it
        saved["model"]["fc.weight"][:, 0] = 0
    torch.save(saved, path)
    return path


@pytest.fixture
def best(data: Path, tmp_path: Path) -> Path:
    return fit_head(write_checkpoint(tmp_path / "run" / "best.pt", data=data))


def run(*words: object) -> int:
    return export.main([*map(str, words)])


def facts_of(folder: Path) -> dict[str, Any]:
    texts = {each.key: each.value for each in onnx.load(folder / "model.onnx").metadata_props}
    words = {"arch", "interpolation", "crop", "weights", "input", "layout", "pixels", "precision", "brisk"}
    return {name: text if name in words else json.loads(text) for name, text in texts.items()}


def accuracy(network: Network, best: Path, data: Path) -> float:
    """Top-1 of a network that takes uint8, on the validation images, without what the export measures with."""
    transform = torch_val_transform(ResolvedConfig.from_dict(read_checkpoint(best.parent, best.name)["config"]))
    hits = []
    for label, name in enumerate(CLASSES):
        for path in (data / "val" / name).iterdir():
            pixels = transform(upright_rgb(path.read_bytes())).permute(1, 2, 0)
            hits.append(int(network(pixels[None]).argmax()) == label)
    return 100 * float(np.mean(hits))


@torch.inference_mode()
def test_an_int8_network(best: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes and gives what the network in float32 does, with its facts, a third of its size, and its accuracy."""
    saved = read_checkpoint(best.parent, best.name)
    torch.save(saved | {"temperature": {"model": 2.0}}, best)
    (data / "train" / "red" / "broken.jpg").write_text("no image")
    out = tmp_path / "int8"
    try:
        assert run(best, "--format", "onnx", "--input", "uint8", "--int8", "--output-dir", out) == 0
    finally:
        (data / "train" / "red" / "broken.jpg").unlink()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"41 images of {data}: logits differ from torch's by at most")
    trained = load_trained(best)
    network, exported = Classifier(trained, "uint8"), read_onnx(out)
    before, after = (accuracy(each, best, data) for each in (network, exported))
    assert before > 90
    assert lines[2] == (
        f"calibrated on 39 of 42 training images; top-1 on 41 validation images: {before:.2f} % in float32, "
        f"{after:.2f} % in int8 ({after - before:+.2f} points)"
    )
    assert facts_of(out) == json.loads(json.dumps(trained.metadata)) | {
        "input": "uint8", "layout": "NHWC", "pixels": "0 to 255", "brisk": __version__,
        "precision": "int8", "top1": after, "float32_top1": before, "calibration_images": 39,
    }  # fmt: skip
    assert sorted(path.name for path in out.iterdir()) == ["labels.txt", "model.onnx"]
    assert (out / "model.onnx").stat().st_size < 0.36 * sum(value.nbytes for value in network.state_dict().values())
    model = onnx.load(out / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [each.domain for each in model.opset_import] == [""], "other runtimes know all its operators"
    (images,), (logits,) = model.graph.input, model.graph.output
    dims = [each.dim_param or each.dim_value for each in images.type.tensor_type.shape.dim]
    assert (images.name, dims, images.type.tensor_type.elem_type) == ("images", ["batch", 32, 32, 3], 2)  # uint8
    assert (logits.name, logits.type.tensor_type.elem_type) == ("logits", 1)  # float32
    check_weights(model)
    pixels, _ = check_images(trained.config, None)
    found = torch.cat([exported(each) for each in (pixels[:1], pixels[1:3], pixels[3:])])
    expected = network(pixels)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert len(set(found.flatten().tolist())) > 0.9 * found.numel(), "not one of 256 values each"


def check_weights(model: onnx.ModelProto) -> None:
    """Convolutions have integers of 7 bits, with a scale for each output channel."""
    weights = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    kernels = [value for value in weights.values() if value.dtype == np.int8 and value.ndim == 4]
    assert len(kernels) > 10
    assert max(np.abs(kernel.astype(int)).max() for kernel in kernels) == 64
    for kernel in kernels:  # each channel uses its range
        assert (np.abs(kernel.reshape(len(kernel), -1).astype(int)).max(axis=1) > 60).all()


class Windows(nn.Module):
    """Of layers whose outputs have other shapes than the images: four windows each, and a table for all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.table = nn.Conv2d(3, 3, 1), nn.Identity(), nn.Embedding(4, 2)

    def prepare(self, pixels: Tensor) -> Tensor:
        return pixels.permute(0, 3, 1, 2) / 255

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.conv(images).reshape(len(images), 3, 2, 4, 2, 4)
        x = self.norm(x.permute(0, 2, 4, 1, 3, 5).flatten(0, 1)).square()
        return x + torch.sum(self.table(torch.arange(4)))


@pytest.mark.parametrize("size", [32, 20])
def test_images_of_huge_activations_do_not_calibrate(size: int) -> None:
    """Two of 41 are left out, of both ends of the list and of a last batch of one image."""
    pixels = torch.randint(100, 120, (41, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pixels[7, 0, 0], pixels[40, 5, 5] = 255, 250
    classifier: Any = Windows().requires_grad_(False)
    kept = typical_images(classifier, torch.split(pixels, size))
    assert torch.equal(kept, pixels[[*range(7), *range(8, 40)]])


@pytest.mark.slow  # exports twice
def test_a_network_that_loses_more_is_not_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = fit_head(write_checkpoint(tmp_path / "run" / "best.pt", data=data), loud=True)
    out = tmp_path / "out"
    flags = (best, "--format", "onnx", "--int8", "--output-dir", out)
    assert run(*flags) == 1
    assert not out.exists()
    err = capsys.readouterr().err
    assert err.startswith("export.py: --int8: top-1 on 41 validation images: 100.00 % in float32, ")
    assert err.endswith(
        " points), and --max-loss 1 is allowed; nothing was written, leave --int8 out, or give --half, or a higher "
        "--max-loss\n"
    )
    assert run(*flags, "--max-loss", 100) == 0
    assert facts_of(out)["float32_top1"] - facts_of(out)["top1"] > 20


@pytest.mark.parametrize(
    ("after", "limit", "is_allowed"),
    [(75.0, 1.0, True), (74.99, 1.0, False), (77.0, 0.0, True), (float("nan"), 100.0, False)],
)
def test_what_may_be_lost(after: float, limit: float, is_allowed: bool) -> None:
    loss = Loss("top1", 76.0, after, 50_000)
    if is_allowed:
        loss.require(limit)
    else:
        with pytest.raises(Exception, match=rf"^--int8: top-1 on 50,000 validation images: .* --max-loss {limit:g} is"):
            loss.require(limit)


def test_images_are_those_of_the_run(data: Path, tmp_path: Path) -> None:
    """Of a run with --val-fraction the training images do not have what it held out; pixels are the evaluation's."""
    whole = load_trained(write_checkpoint(tmp_path / "whole" / "best.pt", data=data)).saved
    images = find_run_images(whole, None, tmp_path)
    assert (len(images.train), len(images.val)) == (41, 41)
    (indices, pixels), *_ = read_images(images.config, images.val, range(5, 12), "")
    assert indices.tolist() == list(range(5, 12))
    transform = torch_val_transform(whole.config)
    expected = [transform(upright_rgb((data / "val" / images.val.name(i)).read_bytes())) for i in range(5, 12)]
    difference = pixels.permute(0, 3, 1, 2).float() - torch.stack(expected).float()
    assert difference.abs().mean() < 1, "DALI and Pillow decode and resize alike"
    path = write_checkpoint(tmp_path / "held" / "best.pt", data=data / "train", val_fraction=0.25)
    divided = find_run_images(load_trained(path).saved, None, tmp_path)
    train, val = set(divided.train.names()), set(divided.val.names())
    assert (len(train) + len(val), train & val) == (41, set())
    assert 5 < len(val) < 16


def test_folds_that_have_moved(data: Path, tmp_path: Path) -> None:
    """What the run held out does not calibrate, though the data has a val/ of its own, which the run left out."""
    saved = load_trained(write_checkpoint(tmp_path / "best.pt", data=data, fold="1/3")).saved
    here = find_run_images(saved, None, tmp_path)
    moved = find_run_images(saved, Path(shutil.copytree(data, tmp_path / "moved")), tmp_path)
    assert (len(here.train) + len(here.val), set(here.train.names()) & set(here.val.names())) == (41, set())
    assert [list(each.names()) for each in moved[1:]] == [list(each.names()) for each in here[1:]]


def test_data_that_has_moved(data: Path, tmp_path: Path) -> None:
    saved = load_trained(write_checkpoint(tmp_path / "best.pt", data=tmp_path / "gone", loader="stock")).saved
    with pytest.raises(UserError, match=rf"^--data-dir {tmp_path}/gone: no such folder"):
        find_run_images(saved, None, tmp_path)
    images = find_run_images(saved, data, tmp_path)
    assert len(images.train) == 41
    other = write_data(tmp_path / "other", train=(1, 1, 1), val=(1, 1, 1))
    for split in ("train", "val"):
        (other / split / "red").rename(other / split / "pink")
    with pytest.raises(UserError, match=r"its classes are not those of .*; give the data set that it was trained on$"):
        find_run_images(saved, other, tmp_path)
