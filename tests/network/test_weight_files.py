"""Files of weights of all forms, folders of the hub among them; what is no weights is named by what it is."""

import argparse
import io
import json
import os
import pickle
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch

from tests.conftest import assert_same
from tests.network.weights import ARCH, StateDict, donor, load, prefixed
from utils.errors import UserError
from utils.network.weight_files import read_weights


def save_legacy(weights: Any, path: Path) -> None:
    torch.save(weights, path, _use_new_zipfile_serialization=False)


def save_safetensors(weights: StateDict, path: Path) -> None:
    safetensors.torch.save_file({name: value.contiguous() for name, value in weights.items()}, path)


NAMES = ("class 0", "class 1", "class 2")
Saver = Callable[[StateDict, Path], None]
SAVERS: dict[str, tuple[Saver, str]] = {
    "torch.pt": (torch.save, ""),
    "torch.safetensors": (torch.save, ""),  # whatever the name says
    "legacy.pth": (save_legacy, ""),
    "model.safetensors": (save_safetensors, ""),
    "safetensors.bin": (save_safetensors, ""),
    "prefixed.safetensors": (
        lambda w, path: save_safetensors(prefixed("timm_model.", w), path),
        " (prefix timm_model.)",
    ),
}


@pytest.mark.parametrize("name", SAVERS)
def test_forms_of_files(tmp_path: Path, name: str) -> None:
    save, said = SAVERS[name]
    save(donor(), tmp_path / name)
    model, origin = load(tmp_path / name)
    assert origin.startswith(f"weights of FILE{said}, head kept")
    assert_same(dict(model.state_dict()), donor())


def test_harmless_objects_beside_the_weights(tmp_path: Path) -> None:
    content = {"state_dict": donor(), "args": argparse.Namespace(output_dir=tmp_path, lr=np.float32(0.1))}
    content |= {"best": np.float64(71.2), "epoch": np.int64(3), "is_best": np.bool_(True)}
    for save in (torch.save, save_legacy):
        save(content, tmp_path / "file.pt")
        assert_same(dict(load(tmp_path / "file.pt")[0].state_dict()), donor())


def write_shards(folder: Path, stem: str, suffix: str, save: Saver) -> None:
    """As transformers writes a network that is larger than a file may be."""
    weights = list(donor().items())
    index: dict[str, str] = {}
    for number, part in enumerate((weights[:30], weights[30:])):
        name = f"{stem}-0000{number + 1}-of-00002.{suffix}"
        save(dict(part), folder / name)
        index |= dict.fromkeys((key for key, _ in part), name)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_shards(tmp_path: Path) -> None:
    for stem, suffix, save in (("model", "safetensors", save_safetensors), ("pytorch_model", "bin", torch.save)):
        folder = tmp_path / suffix
        folder.mkdir()
        write_shards(folder, stem, suffix, save)
        for path in (folder, folder / f"{stem}.{suffix}.index.json"):
            assert_same(dict(load(path)[0].state_dict()), donor())
        with pytest.raises(UserError, match=r"it is one of several files: give their folder, or index\.json$"):
            load(folder / f"{stem}-00002-of-00002.{suffix}")
        (folder / f"{stem}-00002-of-00002.{suffix}").unlink()
        with pytest.raises(UserError, match=rf"\(No such file or directory: {folder}/{stem}-00002-of-00002.{suffix}\)"):
            load(folder)


def write_folder(folder: Path, name: str, weights: StateDict, **config: Any) -> Path:
    folder.mkdir()
    (save_safetensors if name.endswith("safetensors") else torch.save)(weights, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_folders_of_the_hub(tmp_path: Path) -> None:
    """Of timm, of transformers' wrapper of it, and one whose names are transformers' own."""
    timms = {"architecture": ARCH, "label_names": list(NAMES), "pretrained_cfg": {"input_size": [3, 64, 64]}}
    folder = write_folder(tmp_path / "timm", "model.safetensors", donor(), **timms)
    assert_same(dict(load(folder)[0].state_dict()), donor())
    assert (read_weights(folder).classes, read_weights(folder).arch) == (NAMES, ARCH)
    with pytest.raises(UserError, match=f"holds {ARCH}, another architecture; give --arch {ARCH}"):
        load(folder, arch="test_vit")
    wrapped = timms | {"architectures": ["TimmWrapperForImageClassification"]}
    folder = write_folder(tmp_path / "wrapper", "pytorch_model.bin", prefixed("timm_model.", donor()), **wrapped)
    assert_same(dict(load(folder)[0].state_dict()), donor())
    foreign = {"vit.embeddings.cls_token": torch.ones(1, 1, 8)}
    folder = write_folder(tmp_path / "vit", "pytorch_model.bin", foreign, architectures=["ViTForImageClassification"])
    with pytest.raises(UserError, match=r"config\.json names transformers' ViTForImageClassification, whose names are"):
        load(folder)


def test_folders_without_weights(tmp_path: Path) -> None:
    message = f"--pretrained {tmp_path}: a folder without model.safetensors or pytorch_model.bin; give "
    with pytest.raises(UserError, match=f"^{message}a weights file$"):
        read_weights(tmp_path)
    (tmp_path / "best.pt").touch()
    with pytest.raises(UserError, match=f"^{message}{tmp_path}/best.pt$"):
        read_weights(tmp_path)


class Settings:
    """Of a trainer whose code is not here."""


class Malicious:
    """Makes a folder when it is built."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-the-pickle",)


def in_tar(*members: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in members:
            archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def torchscript() -> bytes:
    buffer, model = io.BytesIO(), timm.create_model(ARCH).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(model, torch.zeros(1, 3, 32, 32)), buffer)  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


OBJECTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a whole network": (lambda: saved(timm.create_model(ARCH)), "timm.models.resnet.ResNet"),
    "in the old form": (
        lambda: saved(timm.create_model(ARCH), _use_new_zipfile_serialization=False),
        "timm.models.resnet.ResNet",
    ),
    "a wrapped one": (
        lambda: saved(torch.nn.DataParallel(torch.nn.Linear(1, 1))),
        "torch.nn.parallel.data_parallel.DataParallel",
    ),
    "in a checkpoint": (lambda: saved({"model": timm.create_model(ARCH), "epoch": 1}), "timm.models.resnet.ResNet"),
    "settings": (lambda: saved({"state_dict": donor(), "cfg": Settings()}), f"{__name__}.Settings"),
    "code": (lambda: saved({"state_dict": donor(), "cfg": Malicious()}), "posix.mkdir"),
}
OTHERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a list": (lambda: saved([torch.zeros(1)]), "holds a list, not weights by their names; save model.state_dict()"),
    "a tar": (lambda: in_tar("weights.pth"), "a tar archive; extract it, and give the weights file in it"),
    "a tar of torch": (
        lambda: in_tar("sys_info", "pickle", "tensors", "storages"),
        "written by torch of 2016; ",
    ),
    "TorchScript": (torchscript, "a TorchScript archive; save its weights: "),
    "a pointer": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "a pointer of Git LFS, not the weights; fetch them with git lfs pull",
    ),
    "a pickle": (
        lambda: pickle.dumps({"state_dict": {"x": np.zeros(3)}}),
        "written by pickle; save the weights by torch.save, as tensors",
    ),
    "cut off": (lambda: saved(donor())[:-200], "damaged, or not a readable weights file (RuntimeError); give a"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_named_and_not_built(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, found = OBJECTS[name]
    (tmp_path / "file.pt").write_bytes(make())
    with pytest.raises(UserError) as caught:
        read_weights(tmp_path / "file.pt")
    assert str(caught.value) == (
        f"--pretrained {tmp_path}/file.pt: holds {found}, which is not built, as that can execute code; in the program "
        "that wrote it, save only the weights: torch.save(model.state_dict(), 'weights.pt')"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file.pt"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_named(tmp_path: Path, name: str) -> None:
    make, message = OTHERS[name]
    (tmp_path / "file.pt").write_bytes(make())
    with pytest.raises(UserError) as caught:
        read_weights(tmp_path / "file.pt")
    assert str(caught.value).startswith(f"--pretrained {tmp_path}/file.pt: {message}")


def test_a_file_whose_bytes_cannot_be_read() -> None:
    with pytest.raises(UserError, match=r"damaged, or not a readable weights file \(Input/output error\); give a"):
        read_weights(Path("/proc/self/mem"))
