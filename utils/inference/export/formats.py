"""The formats of an export: how each writes a network into a folder, and how its own runtime reads it back."""

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
from safetensors import SafetensorError
from torch import Tensor

from utils.errors import UserError, first_line
from utils.files import write_json
from utils.inference.export.classifier import Classifier
from utils.inference.export.trained import Trained
from utils.options.arguments import model_arguments
from utils.options.sizes import sides_of, timm_size
from utils.training.settings.preprocessing import TIMM_CROPS

LABELS, ONNX, METADATA = "labels.txt", "model.onnx", "metadata.json"
MAX_ONNX_BYTES = 2**31 - 2**27  # a protobuf holds 2 GiB; some of it is the graph
# What timm's settings say of a network whoever trained it. The others are of the published weights: their name,
# license, origin, papers, and the sizes of their evaluation.
OF_ANY_WEIGHTS = {
    "custom_load", "input_size", "min_input_size", "fixed_input_size", "interpolation", "crop_pct", "crop_mode", "mean",
    "std", "num_classes", "pool_size", "first_conv", "classifier",
}  # fmt: skip
Network = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Format:
    """A form of file.

    Attributes:
        files: that it consists of, besides labels.txt; the last one is what is given to the runtime.
        write: network, classifier, facts about both, and a folder that is to have the files.
        read: undo of it: the folder -> a function from what the classifier takes to logits.
    """

    files: tuple[str, ...]
    write: Callable[[Trained, Classifier, dict[str, Any], Path], None]
    read: Callable[[Path], Network]


# timm


def write_timm(trained: Trained, classifier: Classifier, metadata: dict[str, Any], folder: Path) -> None:
    """model.safetensors and config.json, as `timm.create_model("local-dir:FOLDER")` reads them."""
    height, width = sides_of(trained.config.val_image_size)
    mean, std = trained.normalization
    data_config = {
        "input_size": (3, height, width),
        "interpolation": trained.config.val_interpolation,
        "crop_pct": trained.crop_pct,
        "crop_mode": next(name for name, crop in TIMM_CROPS.items() if crop == trained.config.val_crop),
        "mean": mean,
        "std": std,
    }
    settings: Any = trained.model.pretrained_cfg
    # Without the rates of dropout, which belong to training.
    model_args = model_arguments(trained.config)
    model_args |= {"img_size": timm_size(trained.config.val_image_size)} if settings["fixed_input_size"] else {}
    try:
        timm.models.save_for_hf(
            trained.model,
            str(folder),
            model_config={"label_names": list(trained.classes), "pretrained_cfg": data_config},
            model_args=model_args or None,
            safe_serialization=True,
        )
    except SafetensorError as error:  # a full disk is one
        raise OSError(first_line(error)) from error
    path = folder / "config.json"
    content = json.loads(path.read_text())
    valid = {name: value for name, value in content["pretrained_cfg"].items() if name in OF_ANY_WEIGHTS}
    of_own = {} if trained.temperature is None else {"temperature": trained.temperature}
    write_json(path, content | {"pretrained_cfg": valid} | of_own)
    shutil.copymode(path, folder / "model.safetensors")  # which is written for its owner alone


def read_timm(folder: Path) -> Network:
    """timm's own network."""
    network: Network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return network


# ONNX


def write_onnx(trained: Trained, classifier: Classifier, metadata: dict[str, Any], folder: Path) -> None:
    """model.onnx: input `images`, output `logits` or `probabilities`, batches of any size; facts in `metadata_props`.

    Raises:
        UserError: the weights are too large for one file.
    """
    size = sum(value.nbytes for value in classifier.state_dict().values())
    if size > MAX_ONNX_BYTES:
        raise UserError(
            f"--format onnx: {trained.config.arch} has {size / 1e9:.1f} GB of weights, and a file of ONNX holds 2.1; "
            "give --half, or --format pt2"
        )
    program: Any = torch.onnx.export(
        classifier,
        (example(trained, classifier),),
        dynamo=True,
        dynamic_shapes=batch_is_dynamic(),
        input_names=["images"],
        output_names=[classifier.output],
        external_data=False,
        verbose=False,
    )
    program.model.metadata_props.update(fact_texts(metadata))
    program.save(str(folder / ONNX), external_data=False)


def fact_texts(metadata: dict[str, Any]) -> dict[str, str]:
    """Facts as `metadata_props` has them: JSON where they are no text."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}


def read_onnx(folder: Path, name: str = ONNX) -> Network:
    """ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; it warns of what it optimizes
    options.intra_op_num_threads = torch.get_num_threads()  # of all cores otherwise, whatever OMP_NUM_THREADS says
    session = onnxruntime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


# torch.export


def write_pt2(trained: Trained, classifier: Classifier, metadata: dict[str, Any], folder: Path) -> None:
    """model.pt2, which `torch.export.load` reads, with the facts as its extra file metadata.json."""
    program = torch.export.export(classifier, (example(trained, classifier),), dynamic_shapes=batch_is_dynamic())
    content = io.BytesIO()  # torch aborts the process where a file cannot be written
    torch.export.save(program, content, extra_files={METADATA: json.dumps(metadata)})
    (folder / "model.pt2").write_bytes(content.getbuffer())


def read_pt2(folder: Path) -> Network:
    """The exported program."""
    network: Network = torch.export.load(str(folder / "model.pt2")).module()
    return network


def example(trained: Trained, classifier: Classifier) -> Tensor:
    """Two images: torch.export takes a size of one for a constant."""
    return classifier.prepare(torch.zeros(2, *sides_of(trained.config.val_image_size), 3, dtype=torch.uint8))


def batch_is_dynamic() -> dict[str, dict[int, Any]]:
    """Only the number of images varies."""
    return {"images": {0: torch.export.Dim("batch")}}


FORMATS = {
    "timm": Format(("model.safetensors", "config.json"), write_timm, read_timm),
    "onnx": Format((ONNX,), write_onnx, read_onnx),
    "pt2": Format(("model.pt2",), write_pt2, read_pt2),
}
