"""Weights as other programs leave them: found whatever wraps their names, or refused by what they are."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from timm.utils import CheckpointSaver
from torch import Tensor

from models import create_model
from tests.conftest import assert_same
from tests.network.weights import ARCH, StateDict, donor, load, prefixed, without_head
from utils.errors import UserError

SAME_HEAD = "head kept (3 classes, which the file does not name)"
ONES = torch.ones(3, 3)
DEIT = "deit_tiny_patch16_224"
NO_HEAD = "head new (no head in the file)"


def zeros(state: StateDict) -> StateDict:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def cast(dtype: torch.dtype) -> Callable[[StateDict], StateDict]:
    return lambda w: {name: value.to(dtype) if value.is_floating_point() else value for name, value in w.items()}


# What a file holds, made from a network's weights and those without the head, and what is said of it. Weights that are
# not to be taken are zeros.
FILES: dict[str, tuple[Callable[[StateDict, StateDict], Any], str]] = {
    "bare": (lambda w, b: w, f"weights of FILE, {SAME_HEAD}"),
    "half": (lambda w, b: cast(torch.float16)(w), f"weights of FILE, {SAME_HEAD}"),
    "bfloat16": (lambda w, b: cast(torch.bfloat16)(w), f"weights of FILE, {SAME_HEAD}"),
    "float64": (lambda w, b: cast(torch.float64)(w), f"weights of FILE, {SAME_HEAD}"),
    "DDP": (lambda w, b: prefixed("module.", w), f"weights of FILE (prefix module.), {SAME_HEAD}"),
    "compiled": (lambda w, b: prefixed("_orig_mod.", w), f"weights of FILE, {SAME_HEAD}"),
    "DDP around compiled": (
        lambda w, b: prefixed("module._orig_mod.", w),
        f"weights of FILE (prefix module.), {SAME_HEAD}",
    ),
    "compiled around DDP": (
        lambda w, b: prefixed("_orig_mod.module.", w),
        f"weights of FILE (prefix module.), {SAME_HEAD}",
    ),
    "a compiled layer": (
        lambda w, b: {name.replace("layer1.0.", "layer1.0._orig_mod."): value for name, value in w.items()},
        f"weights of FILE, {SAME_HEAD}",
    ),
    "FSDP": (
        lambda w, b: {
            f"_fsdp_wrapped_module.{name.replace('layer1.', 'layer1._checkpoint_wrapped_module.')}": value
            for name, value in w.items()
        },
        f"weights of FILE, {SAME_HEAD}",
    ),
    "no counters": (
        lambda w, b: {name: value for name, value in w.items() if not name.endswith("num_batches_tracked")},
        f"weights of FILE, {SAME_HEAD}",
    ),
    "PyTorch's ImageNet example": (
        lambda w, b: {"epoch": 3, "arch": ARCH, "state_dict": prefixed("module.", w), "best_acc1": torch.tensor(71.0)},
        f"weights of FILE (key state_dict, prefix module.), {SAME_HEAD}",
    ),
    "torchvision's reference": (
        lambda w, b: {"model": zeros(w), "args": argparse.Namespace(lr=0.1), "lr_scheduler": {"last_epoch": 1}}
        | {"model_ema": {"n_averaged": torch.tensor(5), **prefixed("module.", w)}},
        f"EMA weights of FILE (key model_ema, prefix module.), {SAME_HEAD}",
    ),
    "timm with an average": (
        lambda w, b: {"arch": ARCH, "state_dict": zeros(w), "state_dict_ema": w},
        f"EMA weights of FILE (key state_dict_ema), {SAME_HEAD}",
    ),
    "an average alone": (lambda w, b: {"state_dict_ema": w}, f"EMA weights of FILE (key state_dict_ema), {SAME_HEAD}"),
    "an average that is None": (
        lambda w, b: {"state_dict": w, "state_dict_ema": None},
        f"weights of FILE (key state_dict), {SAME_HEAD}",
    ),
    "ema_state_dict": (
        lambda w, b: {"state_dict": zeros(w), "ema_state_dict": w},
        f"EMA weights of FILE (key ema_state_dict), {SAME_HEAD}",
    ),
    "a tutorial's": (
        lambda w, b: {"epoch": 1, "model_state_dict": w, "optimizer_state_dict": {"state": {}}, "loss": 0.3},
        f"weights of FILE (key model_state_dict), {SAME_HEAD}",
    ),
    "net": (
        lambda w, b: {"net": prefixed("module.", w), "acc": 95.2},
        f"weights of FILE (key net, prefix module.), {SAME_HEAD}",
    ),
    "nested keys": (
        lambda w, b: {"checkpoint": {"model": w, "epoch": 1}},
        f"weights of FILE (key checkpoint.model), {SAME_HEAD}",
    ),
    "Lightning": (
        lambda w, b: {"state_dict": {**prefixed("model.", w), "criterion.weight": torch.ones(3)}, "callbacks": {}}
        | {"hyper_parameters": {"lr": 0.1, "folder": Path("x")}},
        f"weights of FILE (key state_dict, prefix model.), {SAME_HEAD}",
    ),
    "Lightning with an average": (
        lambda w, b: {
            "state_dict": {**prefixed("net.", zeros(w)), **prefixed("ema_net.module.", w)},
        },
        f"EMA weights of FILE (key state_dict, prefix ema_net.module.), {SAME_HEAD}",
    ),
    "a linear probe": (
        lambda w, b: {"state_dict": {**prefixed("backbone.", b), "classifier.weight": torch.ones(3, 9)}},
        f"weights of FILE (key state_dict, prefix backbone.), {NO_HEAD}",
    ),
    "DINO": (
        lambda w, b: {
            "student": {**prefixed("module.backbone.", zeros(b)), "module.head.mlp.0.weight": torch.ones(4, 4)},
            "teacher": {**prefixed("backbone.", b), "head.last_layer.weight_g": torch.ones(4, 1)},
            "dino_loss": {"center": torch.zeros(1, 65)},
            "args": argparse.Namespace(arch="vit_small"),
        },
        f"EMA weights of FILE (key teacher, prefix backbone.), {NO_HEAD}",
    ),
    "MoCo": (
        lambda w, b: {
            "arch": "resnet50_of_another",
            "state_dict": {
                **prefixed("module.encoder_q.", {**b, "fc.0.weight": ONES, "fc.2.weight": ONES}),
                **prefixed("module.encoder_k.", zeros(w)),
                "module.queue": ONES,
            },
        },
        f"weights of FILE (key state_dict, prefix module.encoder_q., the first of 2), {NO_HEAD}",
    ),
    "SwAV": (
        lambda w, b: prefixed("module.", {**b, "projection_head.0.weight": ONES, "prototypes.weight": ONES}),
        f"weights of FILE (prefix module., without projection_head, prototypes), {NO_HEAD}",
    ),
    "a class's name as the architecture": (
        lambda w, b: {"arch": "resnet", "state_dict": w},
        f"weights of FILE (key state_dict), {SAME_HEAD}",
    ),
    "facts of another program": (
        lambda w, b: {"model": w, "config": {"arch": "x", "lr": "1"}, "normalization": "imagenet", "classes": {"a": 1}},
        f"weights of FILE (key model), {SAME_HEAD}",
    ),
    "a head of another size": (
        lambda w, b: {**b, "fc.weight": torch.ones(1000, w["fc.weight"].shape[1]), "fc.bias": torch.ones(1000)},
        "weights of FILE, head new (3 classes instead of 1,000)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_weights_are_found(tmp_path: Path, name: str) -> None:
    make, said = FILES[name]
    weights = donor()
    torch.save(make(weights, without_head(weights)), tmp_path / "file.pt")
    model, origin = load(tmp_path / "file.pt")
    assert origin == said
    taken = weights if SAME_HEAD in said else without_head(weights)
    found = {key: value for key, value in model.state_dict().items() if key in taken}
    if name == "no counters":
        taken = {key: value * ("num_batches_tracked" not in key) for key, value in taken.items()}
    tolerance = {"half": 1e-3, "bfloat16": 1e-2}.get(name, 0)
    torch.testing.assert_close(found, taken, rtol=tolerance, atol=tolerance)
    for weight in model.parameters():
        assert weight.ndim < 4 or weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["checkpoint-0.pth.tar", "last.pth.tar", "model_best.pth.tar"])
def test_what_timm_saves(tmp_path: Path, name: str) -> None:
    """With the command line of its train.py in the file."""
    model = create_model(ARCH, 3)
    model.load_state_dict(donor())
    args = argparse.Namespace(model=ARCH, lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saver: Any = CheckpointSaver(model, optimizer, args, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=51.0)
    found, origin = load(tmp_path / name)
    assert origin == f"weights of FILE (key state_dict), {SAME_HEAD}"
    assert_same(dict(found.state_dict()), donor())


def test_the_average_is_chosen_by_flag(tmp_path: Path) -> None:
    weights = donor()
    torch.save({"state_dict": weights, "state_dict_ema": zeros(weights)}, tmp_path / "both.pt")
    for ema, factor in ((None, 0), (True, 0), (False, 1)):
        model, origin = load(tmp_path / "both.pt", pretrained_ema=ema)
        assert origin.startswith("weights" if factor else "EMA weights")
        assert_same(dict(model.state_dict()), {name: factor * value for name, value in weights.items()})
    torch.save({"state_dict": weights}, tmp_path / "plain.pt")
    with pytest.raises(
        UserError, match=r"^--pretrained-ema: .*plain.pt has no EMA weights; leave --pretrained-ema out"
    ):
        load(tmp_path / "plain.pt", pretrained_ema=True)
    torch.save({"state_dict_ema": weights}, tmp_path / "ema.pt")
    with pytest.raises(UserError, match=r"^--no-pretrained-ema: .*ema.pt has only EMA weights; leave --no-pre"):
        load(tmp_path / "ema.pt", pretrained_ema=False)


def authors_convnext(state: StateDict) -> StateDict:
    """timm's names of ConvNeXt -> its authors'."""
    found = {}
    for name, value in state.items():
        name = re.sub(r"^stem\.", "downsample_layers.0.", name)
        name = re.sub(r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1.", name)
        name = re.sub(r"^stages\.(\d)\.blocks\.", r"stages.\1.", name)
        name = name.replace("conv_dw", "dwconv").replace("mlp.fc", "pwconv").replace("head.norm", "norm")
        found[name.replace("head.fc.", "head.")] = value
    return found


def authors_swin(state: StateDict) -> StateDict:
    """timm's names of Swin -> its authors', with their buffers."""
    found: StateDict = {}
    for name, value in state.items():
        name = re.sub(r"layers\.(\d)\.downsample", lambda at: f"layers.{int(at[1]) - 1}.downsample", name)
        found[name.replace("head.fc.", "head.")] = value
        if name.endswith("relative_position_bias_table"):
            found[name.replace("bias_table", "index")] = torch.zeros(49, 49, dtype=torch.long)
    return found


def authors_deit3(state: StateDict) -> StateDict:
    return {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): value for name, value in state.items()}


CONVNEXT = ("convnext_tiny", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)})
SWIN = ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4)})
ORIGINALS: dict[str, tuple[tuple[str, dict[str, Any]], Callable[[StateDict], Any], str]] = {
    "ConvNeXt": (CONVNEXT, lambda w: {"model": authors_convnext(w)}, "(key model, converted by timm)"),
    "ConvNeXt with an average": (
        CONVNEXT,
        lambda w: {"model": authors_convnext(zeros(w)), "model_ema": authors_convnext(w)},
        "(key model_ema, converted by timm)",
    ),
    "ConvNeXt of DDP": (
        CONVNEXT,
        lambda w: prefixed("module.", authors_convnext(w)),
        "(prefix module., converted by timm)",
    ),
    "Swin": (SWIN, lambda w: {"model": authors_swin(w), "max_accuracy": 81.2}, "(key model, converted by timm)"),
    "Swin of an older timm": (
        SWIN,
        lambda w: {**w, "layers.0.blocks.0.attn.relative_position_index": torch.zeros(49, 49)},
        "(converted by timm)",
    ),
    "DeiT": (("deit_tiny_distilled_patch16_224", {"depth": 1}), lambda w: {"model": w}, "(key model)"),
    "DeiT III": (
        ("deit3_small_patch16_224", {"depth": 1}),
        lambda w: {"model": authors_deit3(w)},
        "(key model, converted by timm)",
    ),
    "MAE": (
        ("vit_tiny_patch16_224", {"depth": 1}),
        lambda w: {"model": {**w, "mask_token": torch.ones(1, 1, 8), "decoder_embed.weight": torch.ones(4, 4)}},
        "(key model, without mask_token, decoder_embed)",
    ),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_files_of_the_authors(tmp_path: Path, name: str) -> None:
    (arch, options), make, said = ORIGINALS[name]
    weights = donor(arch=arch, **options)
    torch.save(make(weights), tmp_path / "file.pth")
    text = ",".join(f"{key}={list(value) if isinstance(value, tuple) else value}" for key, value in options.items())
    model, origin = load(tmp_path / "file.pth", arch=arch, model_args=text)
    assert origin == f"{'EMA ' if '_ema' in said else ''}weights of FILE {said}, {SAME_HEAD}"
    assert_same(dict(model.state_dict()), weights)


def test_names_of_torchvision(tmp_path: Path) -> None:
    """Those of a ResNet are timm's, timm converts VGG's, and MobileNet's are refused."""
    torch.save(torchvision.models.resnet18(num_classes=3).state_dict(), tmp_path / "resnet.pth")
    assert load(tmp_path / "resnet.pth", arch="resnet18")[1] == f"weights of FILE, {SAME_HEAD}"
    torch.save(torchvision.models.mobilenet_v3_small(num_classes=3).state_dict(), tmp_path / "mobilenet.pth")
    with pytest.raises(UserError) as caught:
        load(tmp_path / "mobilenet.pth", arch="mobilenetv3_small_100")
    assert "does not fit --arch mobilenetv3_small_100 (holds features.0.0.weight, " in str(caught.value)
    assert "; the network has conv_stem.weight, bn1.weight, bn1.bias and " in str(caught.value)


def test_a_vision_transformer_of_another_size(tmp_path: Path) -> None:
    """Its position embeddings are resized, as of timm's weights."""
    torch.save(donor(arch="vit_tiny_patch16_224", depth=1), tmp_path / "vit.pth")
    model, _ = load(tmp_path / "vit.pth", arch="vit_tiny_patch16_224", image_size=96, model_args="depth=1")
    assert model.get_parameter("pos_embed").shape[1] == 1 + 6 * 6


def narrow(weights: StateDict) -> StateDict:
    return {**weights, "conv1.0.weight": weights["conv1.0.weight"][:3]}


def another(arch: str, **options: Any) -> Callable[[StateDict], Any]:
    return lambda _: donor(arch=arch, **options)


# Architecture of the run, what the file holds, and the message.
MISFITS: dict[str, tuple[str, Callable[[StateDict], Any], str]] = {
    "another architecture": (
        ARCH,
        another("test_vit"),
        r"\(holds cls_token, pos_embed, patch_embed.proj.weight and 77 more; the network has conv1.0.weight, .*\); "
        "give the architecture of these weights$",
    ),
    "fewer layers": (
        "resnet14t",
        another("resnet10t"),
        r": \d+ weights missing, first: layer1\.0\.conv3\.weight; ",
    ),
    "more layers": (
        DEIT,
        another(DEIT, depth=2),
        ": 12 weights unknown, first: blocks.1.norm1.weight; give the arch",
    ),
    "another width": (ARCH, narrow, r": 1 weight of another shape, conv1\.0\.weight; give the architecture"),
    "its name": (
        "resnet10t",
        lambda w: {"arch": ARCH, "state_dict": w},
        f"holds {ARCH}, another architecture; give --arch {ARCH}$",
    ),
    "parameters alone": (
        ARCH,
        lambda w: {name: value for name, value in w.items() if "running" not in name},
        r": 30 weights missing, first: conv1\.1\.running_mean",
    ),
    "an optimizer": (
        ARCH,
        lambda w: {"optimizer": {"state": {0: w}}},
        r"\(holds no weights by name; the network has ",
    ),
    "a token more": (
        DEIT,
        another("deit_tiny_distilled_patch16_224", depth=1),
        "without dist_token, head_dist.*: 1 weight of another shape, pos_embed",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_weights_that_do_not_fit(tmp_path: Path, name: str) -> None:
    arch, make, message = MISFITS[name]
    torch.save(make(donor()), tmp_path / "file.pt")
    with pytest.raises(UserError, match=message):
        load(tmp_path / "file.pt", arch=arch, model_args="depth=1" if arch == DEIT else None)


def test_a_head_that_is_to_be_kept(tmp_path: Path) -> None:
    torch.save(donor(5), tmp_path / "five.pt")
    torch.save(without_head(donor()), tmp_path / "none.pt")
    for name, held in (("five", "a head of 5 classes is in"), ("none", "there is no head in")):
        with pytest.raises(UserError, match=rf"^--pretrained-head keep: {held} .*\.pt, the run has 3 classes; leave"):
            load(tmp_path / f"{name}.pt", pretrained_head="keep")


@pytest.mark.parametrize("num_classes", [5, 3])
def test_a_new_head_is_random(tmp_path: Path, num_classes: int) -> None:
    torch.save(donor(5), tmp_path / "file.pt")
    state: dict[str, Tensor] = dict(load(tmp_path / "file.pt", num_classes)[0].state_dict())
    torch.manual_seed(2)
    fresh = create_model(ARCH, num_classes).state_dict()
    new = {} if num_classes == 5 else {name: fresh[name] for name in ("fc.weight", "fc.bias")}
    assert_same(state, donor(5) | new)
