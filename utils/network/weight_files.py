"""Files of pretrained weights, of this program and of others, read without executing anything in them."""

import argparse
import dataclasses
import json
import pathlib
import pickle
import re
import tarfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
from timm.models import PretrainedCfg
from torch import Tensor

from utils.errors import UserError
from utils.network.timm_config import read_timm_config
from utils.options.validation import find_weights

Normalization = tuple[tuple[float, ...], tuple[float, ...]]
StateDict = dict[str, Tensor]
# Besides torch's own list: what trainers put beside the weights, and whose construction only stores values. A path has
# another module in Python 3.13, a scalar in NumPy 1.
_HARMLESS = [
    argparse.Namespace,
    pathlib.PosixPath,
    *((pathlib.PosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    np.dtype,
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Pretrained weights, and what their source says of them; None where it does not.

    Attributes:
        source: a file, or timm's name for its own weights.
        option: the flag that named it, for messages.
        networks: every state_dict in the file by its key, "" for the file itself, in their order.
        tensors: those of one network, by timm's names; None for timm's own, which timm loads, and before
            `utils.network.weight_names.match_weights`.
        kind: "EMA weights" or "weights".
        taken: which of the file's weights these are, for the user; "" where there is nothing to say.
        arch: name of the architecture.
        settings: the configuration of the run that wrote a checkpoint of Brisk.
        result: the evaluation of that checkpoint, a line of metrics.jsonl; {} for none.
        classes: class names in label order.
        normalization: mean and standard deviation per channel, of images in [0, 1].
        timm_settings: of the config.json that lies beside a file of timm's.
        model_args: arguments of the architecture, as the text of `--model-args`.
        program: the class of another program that the config.json beside the file names.
    """

    source: str
    option: str = "--pretrained"
    networks: dict[str, StateDict] = dataclasses.field(default_factory=dict)
    tensors: StateDict | None = None
    kind: str = "weights"
    taken: str = ""
    arch: str | None = None
    settings: dict[str, Any] | None = None
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    normalization: Normalization | None = None
    timm_settings: PretrainedCfg | None = None
    model_args: str | None = None
    program: str | None = None


def read_weights(path: Path, option: str = "--pretrained") -> Weights:
    """Read a weights file onto the CPU; nothing in it is executed.

    Args:
        path: .safetensors, or what torch.save wrote: bare weights, or a checkpoint of Brisk, timm or another program.
            An index.json of several such files, or a folder with one of them, as on the Hugging Face hub. The facts in
            a config.json beside it are read, too.
        option: the flag that names it, for messages.

    Raises:
        UserError: no such file, a damaged one, or one that holds other objects.
    """
    file, named = find_weights(path, option), f"{option} {path}"
    content = _read(named, file)
    if not isinstance(content, dict):
        raise UserError(
            f"{named}: holds a {type(content).__name__}, not weights by their names; save model.state_dict()"
        )
    saved = content.get("config")
    settings = saved if isinstance(saved, dict) and {"arch", "val_resize"} <= saved.keys() else None
    beside = {} if settings else read_timm_config(file, option)
    facts = (content if settings else {"classes": content.get("classes")}) | beside
    arch = settings["arch"] if settings else beside.get("arch", content.get("arch"))
    classes, channels = facts.get("classes"), facts.get("normalization")
    return Weights(
        source=str(path),
        option=option,
        networks=dict(_state_dicts(content)),
        arch=arch if isinstance(arch, str) and timm.is_model(arch.partition(".")[0]) else None,
        settings=settings,
        result=content.get("result", {}) if settings else {},
        classes=tuple(classes) if isinstance(classes, list) else None,
        normalization=(tuple(channels["mean"]), tuple(channels["std"])) if channels else None,
        timm_settings=beside.get("timm_settings"),
        model_args=(settings or beside).get("model_args"),
        program=beside.get("program"),
    )


def _read(named: str, file: Path) -> Any:
    """Content of a file, or of those that an index names; `named` is what the user gave.

    Raises:
        UserError: it cannot be read, or holds other objects.
    """
    try:
        if file.suffix != ".json":
            return _read_one(file)
        names = sorted(set(json.loads(file.read_text())["weight_map"].values()))
        return {name: value for each in names for name, value in _read_one(file.parent / each).items()}
    except Exception as error:  # torch and safetensors raise many
        found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if found:
            raise UserError(
                f"{named}: holds {found[1]}, which is not built, as that can execute code; in the program "
                "that wrote it, save only the weights: torch.save(model.state_dict(), 'weights.pt')"
            ) from error
        if remedy := _remedy(file, error):
            raise UserError(f"{named}: {remedy}") from error
        reason = getattr(error, "strerror", None) or type(error).__name__
        missing = f": {error.filename}" if isinstance(error, FileNotFoundError) and error.filename else ""
        raise UserError(
            f"{named}: damaged, or not a readable weights file ({reason}{missing}); give a .safetensors or .pt file"
        ) from error


def _read_one(file: Path) -> Any:
    """By its content, as torch.load would go by its name."""
    with file.open("rb") as opened:
        if opened.read(9)[8:] == b"{":  # behind the length of the header of safetensors
            return safetensors.torch.load_file(file)
        opened.seek(0)
        with warnings.catch_warnings(), torch.serialization.safe_globals(_HARMLESS):
            warnings.simplefilter("ignore")  # torch warns of some damage before it raises
            return torch.load(opened, map_location="cpu", weights_only=True)


def _remedy(file: Path, error: Exception) -> str:
    """What a file is that is not damaged, and what to do; "" for another one."""
    if "TorchScript" in str(error):
        return "a TorchScript archive; save its weights: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')"
    if isinstance(error, OSError) or not file.is_file():  # its content cannot be looked at
        return ""
    with file.open("rb") as opened:
        start = opened.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the weights; fetch them with git lfs pull"
    if start.startswith(pickle.PROTO) and "Unsupported operand" in str(error):
        return "written by pickle; save the weights by torch.save, as tensors"
    if not tarfile.is_tarfile(file):
        return ""
    with tarfile.open(file) as archive:
        is_torch = "storages" in archive.getnames()
    return (
        "written by torch of 2016; save it again: torch.save(torch.load(FILE, weights_only=False), 'weights.pt')"
        if is_torch
        else "a tar archive; extract it, and give the weights file in it"
    )


def _state_dicts(content: Mapping[Any, Any], key: str = "") -> Iterator[tuple[str, StateDict]]:
    """Each mapping of names to tensors in `content`, with the keys that lead to it, joined by points."""
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if tensors:
        yield key, tensors
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, Mapping):
            yield from _state_dicts(value, f"{key}.{name}" if key else name)
