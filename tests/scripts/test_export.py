"""scripts/export.py: what it writes, replaces and refuses."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from scripts import export, make_digits
from tests.conftest import Refused, call_main
from tests.harness import ROOT, launch, launch_and_end, read_checkpoint
from tests.inference.exported import write_checkpoint
from utils.inference.export.formats import FORMATS

SCRIPT = ROOT / "scripts" / "export.py"


@pytest.fixture
def best(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "run" / "best.pt", result={"val/top1": 50.0})


def run(*flags: object) -> int:
    return export.main([*map(str, flags)])


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_formats_of_one_network_share_a_folder(
    best: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(best.parent, "--format", "timm", "--output-dir", out) == 0
    assert run(best, "--format", "pt2", "--output-dir", out, "--no-check") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{best}: test_resnet, 3 classes, weights, top-1 50.00 %"
    assert lines[1] == (
        "100 generated images, as those of the run are not here: logits differ from torch's by at most 0 "
        f"(the largest is {lines[1].partition('the largest is ')[2].partition(')')[0]}), same class for 100 of 100"
    )
    assert lines[2].startswith(f"{out}: model.safetensors, config.json, labels.txt; 1.5 MB")
    assert lines[4] == "not compared with torch (--no-check)"
    assert (out / "labels.txt").read_text() == "blue\ngreen\nred\n"
    assert sorted(snapshot(out)) == ["config.json", "labels.txt", "model.pt2", "model.safetensors"]

    before = snapshot(out)
    arguments = (best, "--format", "timm", "--output-dir", out)
    other = read_checkpoint(best.parent, "best.pt") | {"classes": ["one", "two"]}
    torch.save(other, tmp_path / "other.pt")
    refused(tmp_path / "other.pt", "--format", "onnx", "--output-dir", out, main=export.main, program="export.py")(
        f"--output-dir {out}: has model.safetensors of other classes; give another folder, or remove it"
    )
    assert snapshot(out) == before
    refused(tmp_path / "other.pt", *arguments[1:], "--overwrite", main=export.main, program="export.py")(
        f"--output-dir {out}: has model.pt2 of other classes; give another folder, or remove it"
    )
    assert snapshot(out) == before
    (out / "model.pt2").unlink()
    assert run(tmp_path / "other.pt", "--format", "timm", "--output-dir", out, "--overwrite") == 0
    assert (out / "labels.txt").read_text() == "one\ntwo\n"
    assert json.loads((out / "config.json").read_text())["label_names"] == ["one", "two"]


@pytest.mark.parametrize(
    "name", ["pt2", *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS if name != "pt2")]
)
def test_a_full_disk(best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A limit of the size of files stands for it."""
    out = tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        done = call_main(export.main, [str(best), "--format", name, "--output-dir", str(out)], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.status == 2
    assert done.err.startswith(f"export.py: --output-dir {out}: cannot be written (")
    assert "File too large" in done.err
    assert done.err.endswith("; make room, or give another folder\n")
    assert not out.exists()


def test_packages_that_are_missing(best: Path, tmp_path: Path) -> None:
    program = """
import sys
sys.modules |= {"onnx": None, "onnxscript": None}
from scripts import export
sys.exit(export.main(sys.argv[1:]))
"""
    done = launch(best, "--format", "onnx", "--output-dir", tmp_path / "out", program=program)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        "export.py: --format onnx: needs onnx, onnxscript, not installed here; "
        "pip install -r requirements-export.txt -c constraints.txt\n"
    )


@pytest.mark.slow
def test_a_difference_leaves_the_folder_as_it_was(
    best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = read_checkpoint(best.parent, "best.pt")
    saved["model"]["fc.weight"] *= 1e7  # more than float16 holds
    torch.save(saved, best)
    arguments = (best, "--format", "pt2", "--output-dir", tmp_path / "out")
    assert run(*arguments, "--half") == 1
    assert not (tmp_path / "out").exists()
    err = capsys.readouterr().err
    assert err.startswith("export.py: model.pt2: its logits differ from torch's by up to ")
    assert err.endswith("nothing was written, --no-check writes it nevertheless\n")
    assert run(*arguments) == 0
    before = snapshot(tmp_path / "out")
    assert run(*arguments, "--half", "--overwrite") == 1
    assert snapshot(tmp_path / "out") == before


@pytest.mark.slow  # repeats in processes of their own what tests/inference/ shows
@pytest.mark.parametrize("name", FORMATS)
def test_a_kill_leaves_no_half_file(best: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    arguments = (best, "--format", name, "--output-dir", out)
    left = out / f".{FORMATS[name].files[-1]}.tmp"
    assert launch_and_end(*arguments, program=SCRIPT, when=left.exists) < 0
    assert [path.name for path in out.iterdir()] == [left.name]
    assert run(*arguments) == 0
    assert sorted(path.name for path in out.iterdir()) == sorted([*FORMATS[name].files, "labels.txt"])


# Reads 100 images and computes their logits by a format's own runtime, without Brisk.
FRESH = """
import json, sys
import numpy as np
from PIL import Image

folder, name, output, *files = sys.argv[1:]
images = np.stack([np.asarray(Image.open(file).convert("RGB").resize((32, 32), Image.BILINEAR)) for file in files])
if name == "onnx":
    import onnxruntime
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    facts = session.get_modelmeta().custom_metadata_map
    mean, std = json.loads(facts["mean"]), json.loads(facts["std"])
else:
    import timm, torch
    settings = timm.get_pretrained_cfg("resnet10t")
    mean, std = settings.mean, settings.std
floats = ((images / 255 - mean) / std).astype(np.float32).transpose(0, 3, 1, 2)
if name == "onnx":
    uint8 = session.get_inputs()[0].type == "tensor(uint8)"
    logits = session.run(None, {"images": images if uint8 else floats})[0]
else:
    network = {
        "timm": lambda: timm.create_model(f"local-dir:{folder}", pretrained=True).eval(),
        "pt2": lambda: torch.export.load(f"{folder}/model.pt2").module(),
        "checkpoint": lambda: timm.create_model("resnet10t", num_classes=10, checkpoint_path=folder).eval(),
    }[name]()
    with torch.inference_mode():
        logits = network(torch.from_numpy(floats)).numpy()
assert not any(module.split(".")[0] in ("utils", "models", "scripts") for module in sys.modules)
np.save(output, logits)
"""


@pytest.mark.slow  # trains for half a minute
def test_digits_by_every_runtime(tmp_path: Path) -> None:
    """The accuracy of each is the run's, but for an image."""
    assert make_digits.main([str(tmp_path / "digits")]) == 0
    flags: tuple[object, ...] = (
        "--arch",
        "resnet10t",
        "--image-size",
        32,
        "--val-resize",
        32,
        "--augment",
        "none",
        "--hflip",
        0,
    )
    flags += ("--data-dir", tmp_path / "digits", "--output-dir", tmp_path / "run", "--workers", 1, "--device", "cpu")
    done = launch(*flags, "--epochs", 2, "--batch-size", 64, "--lr", 0.5, "--warmup-epochs", 0, timeout=1000)
    assert done.status == 0, done.err
    files = sorted((tmp_path / "digits" / "val").glob("*/*.jpg"))
    labels = np.array([int(file.parent.name) for file in files])
    found = {"checkpoint": fresh_logits(tmp_path / "run" / "best.pt", "checkpoint", files)}
    for name in FORMATS:
        arguments = (tmp_path / "run", "--format", name, "--output-dir", tmp_path / "out")
        done = launch(*arguments, program=SCRIPT)
        assert (done.status, done.err) == (0, ""), done
        assert f"100 images of {tmp_path / 'digits'}: logits differ" in done.out
        found[name] = fresh_logits(tmp_path / "out", name, files)
    pixels = (tmp_path / "run", "--format", "onnx", "--output-dir", tmp_path / "uint8", "--input", "uint8")
    assert launch(*pixels, program=SCRIPT).status == 0
    found["onnx, uint8"] = fresh_logits(tmp_path / "uint8", "onnx", files)
    saved = read_checkpoint(tmp_path / "run", "best.pt")
    top1, (temperature,) = saved["result"]["val/top1"], saved["temperature"].values()
    for name, logits in found.items():
        divided = 1 if name in ("checkpoint", "timm") else temperature  # by ONNX's and pt2's graphs
        assert np.abs(logits - found["checkpoint"] / divided).max() < 1e-4
        # Pillow's pixels are not DALI's in all bits, which can decide about one image.
        assert abs(float((logits.argmax(1) == labels).sum()) - top1 / 100 * len(labels)) < 1.5


def fresh_logits(folder: Path, name: str, files: list[Path]) -> NDArray[np.float32]:
    """Of a process that has not imported Brisk."""
    output = folder.parent / "logits.npy"
    # Not by `launch`, which puts Brisk on the path.
    words = [sys.executable, "-c", FRESH, *map(str, (folder, name, output, *files))]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    logits: NDArray[np.float32] = np.load(output)
    return logits


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("arch", ["resnet50", "efficientnet_b0", "convnext_tiny", "vit_small_patch16_224"])
@pytest.mark.parametrize("name", ["onnx", "pt2"])
def test_usual_networks(data: Path, tmp_path: Path, arch: str, name: str) -> None:
    best = write_checkpoint(tmp_path / "run" / "best.pt", data, arch=arch, image_size=224, val_resize=256)
    assert run(best, "--format", name, "--input", "uint8", "--output-dir", tmp_path / "out") == 0
    assert (tmp_path / "out" / FORMATS[name].files[-1]).stat().st_size > 1e7
