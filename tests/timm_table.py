"""Compares evaluations of pretrained weights with timm's validation, on real images; prints a row for each.

    python -m tests.timm_table --images DIR --output-dir OUT
    python -m tests.timm_table --images DIR --output-dir OUT --only vit

DIR has a folder of images for each class; OUT must not exist, and is removed. The weights are random, with the seed 0:
the settings of timm's published weights are compared, not the weights. Running statistics of batch norm are those of
the images, and the head's bias is such that the mean of each class's logits is 0, so that images differ in their class.
Brisk reads the weights from a file, as on a machine without a network: `--arch NAME --pretrained FILE`.

timm: `create_loader` with `resolve_model_data_config(model, use_test_size=True)`, as its validate.py. Of the pixels,
for `--loader torch` and `--loader dali`: the mean and largest difference, of 255. Of the logits, for both and for
`--loader dali` with the settings of a run from scratch: the mean difference, in standard deviations of timm's logits,
and how many images have the same class. The last column is the loss of `train.py --evaluate`, and that of timm's
logits.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import timm.data
import torch
from torch import Tensor, nn

import models
import pipelines
from tests.harness import launch
from utils.data.splits.selection import read_data
from utils.distributed.group import DistEnv
from utils.inference.evaluate import compute_logits
from utils.network.augment import Normalize
from utils.options.cli import parse
from utils.training.settings.autotune import choose_common_loader_settings, resolve
from utils.training.settings.preprocessing import fill_preprocessing

ARCHS = (
    "resnet18.a1_in1k",
    "resnet18.tv_in1k",
    "mobilenetv3_small_100.lamb_in1k",
    "tf_mobilenetv3_small_100.in1k",
    "mobilenetv4_conv_small.e2400_r224_in1k",
    "mobilevit_xxs.cvnets_in1k",
    "repvgg_a0.rvgg_in1k",
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_tiny_patch16_384.augreg_in21k_ft_in1k",
    "convnextv2_nano.fcmae_ft_in22k_in1k_384",
)
HEADER = (
    "weights",
    "settings",
    "pixels, torch",
    "pixels, dali",
    "logits, torch",
    "logits, dali",
    "from scratch's settings",
    "loss, timm's",
)
BATCH_SIZE = 25
CPU = DistEnv.single(torch.device("cpu"))


class Timm(NamedTuple):
    """timm's evaluation.

    Attributes:
        settings: of its loader.
        images: uint8 (N, 3, H, W), before normalization, as are the logits in the order of the sorted paths.
        logits: float32 (N, classes).
        targets: int64 (N,).
    """

    settings: dict[str, Any]
    images: Tensor
    logits: Tensor
    targets: Tensor


def in_order(files: Sequence[str], *values: Tensor) -> list[Tensor]:
    """`values` of the files, in the order of their sorted paths."""
    order = torch.tensor(sorted(range(len(files)), key=lambda index: files[index]))
    return [value[order] for value in values]


@torch.inference_mode()
def evaluate_timm(arch: str, root: Path, weights: Path) -> Timm:
    """timm's logits; writes the weights."""
    torch.manual_seed(0)
    dataset = timm.data.ImageDataset(str(root / "val"))
    model = timm.create_model(arch, num_classes=len(dataset.reader.class_to_idx))
    settings = timm.data.resolve_model_data_config(model, use_test_size=True)
    # No workers: timm forks them, and beside the threads of DALI they may hang.
    loader = timm.data.create_loader(
        dataset, batch_size=BATCH_SIZE, use_prefetcher=False, num_workers=0, persistent_workers=False, **settings
    )
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = None  # the mean over all batches
    if layers:
        model.train()
        for images, _ in loader:
            model(images)
    model.eval()
    batches = [(model(images), targets) for images, targets in loader]
    logits, targets = (torch.cat(values) for values in zip(*batches, strict=True))
    head = model.get_classifier()
    head.bias -= logits.mean(0)
    torch.save(model.state_dict(), weights)
    pixels = timm.data.create_transform(**settings, normalize=False)
    images = torch.stack([image for image, _ in timm.data.ImageDataset(str(root / "val"), transform=pixels)])
    return Timm(settings, *in_order(dataset.filenames(absolute=True), images, logits - logits.mean(0), targets))


@torch.inference_mode()
def evaluate_brisk(arch: str, root: Path, weights: Path, *flags: object) -> list[Tensor]:
    """Images and logits of `train.py --evaluate`, as those of `Timm`."""
    words = ("--evaluate", "--data-dir", root, "--arch", arch, "--pretrained", weights, "--batch-size", BATCH_SIZE)
    config, _ = fill_preprocessing(parse(list(map(str, (*words, "--workers", 2, "--device", "cpu", *flags)))), None)
    manifest = read_data(config, CPU)["val"]
    resolved = resolve(config, manifest.classes, CPU, choose_common_loader_settings(config, CPU, None, manifest))
    network = models.create_network(resolved, CPU, manifest.classes)
    normalize = Normalize(*network.normalization, dtype=torch.float32, device=CPU.device)
    batches = [batch.images.clone() for batch in pipelines.create_val_loader(resolved, manifest, CPU)]
    logits = [compute_logits(network.model, images, normalize, CPU, torch.float32) for images in batches]
    files = [manifest.record(index).name for index in range(len(manifest))]
    return in_order(files, torch.cat(batches), torch.cat(logits))


def compare_pixels(found: Tensor, expected: Tensor) -> str:
    """A cell of the table."""
    difference = (found.int() - expected.int()).abs()
    return f"{difference.float().mean():.2g} ({difference.max()})"


def compare(found: Tensor, expected: Tensor) -> str:
    """A cell of the table."""
    difference = (found - expected).abs().mean() / expected.std()
    same = int((found.argmax(1) == expected.argmax(1)).sum())
    return f"{difference:.1g}, {same} of {len(expected)}"


def measure(arch: str, root: Path, output_dir: Path) -> list[str]:
    """A row of the table."""
    weights = output_dir / "weights.pt"
    timms = evaluate_timm(arch, root, weights)
    size, settings = timms.settings["input_size"][-1], timms.settings
    mean = " ".join(f"{value:.3g}" for value in settings["mean"])
    described = f"{settings['interpolation']}, {size} px, {settings['crop_mode']} {settings['crop_pct']:g}, mean {mean}"
    network = timm.get_pretrained_cfg(arch)
    assert network is not None
    plain = size if network.fixed_input_size else 224
    scratch = ("--val-image-size", plain, "--val-resize", round(plain * 8 / 7), "--val-crop", "center")
    found = [evaluate_brisk(arch, root, weights, "--loader", name) for name in ("torch", "dali")]
    plainly = evaluate_brisk(arch, root, weights, "--interpolation", "bilinear", *scratch)
    cells = [compare_pixels(images, timms.images) for images, _ in found]
    cells += [compare(logits, timms.logits) for _, logits in (*found, plainly)]
    words = ("--evaluate", "--data-dir", root, "--arch", arch, "--pretrained", weights, "--device", "cpu")
    done = launch(*words, "--batch-size", BATCH_SIZE, "--output-dir", output_dir / "run")
    assert done.status == 0, done.err
    loss = json.loads((output_dir / "run" / "evaluation.json").read_text())["loss"]
    return [f"`{arch}`", described, *cells, f"{loss:.4f}, {nn.functional.cross_entropy(*timms[-2:]):.4f}"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("tests.timm_table", description="Evaluations of pretrained weights beside timm's.")
    parser.add_argument("--images", type=Path, required=True, help="a folder of images for each class")
    parser.add_argument("--output-dir", type=Path, required=True, help="a new folder, which is removed")
    parser.add_argument("--only", default="", help="a part of the names of the weights")
    options = parser.parse_args(argv)
    options.output_dir.mkdir(parents=True)
    try:
        root = options.output_dir / "data"
        root.mkdir()
        (root / "val").symlink_to(options.images.absolute())
        print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
        for arch in ARCHS:
            if options.only in arch:
                print(f"| {' | '.join(measure(arch, root, options.output_dir))} |", flush=True)
    finally:
        shutil.rmtree(options.output_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
