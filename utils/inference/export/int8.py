"""int8: ONNX Runtime's static quantization of an exported network, and what it costs in accuracy.

Weights and activations become integers of 8 bits. Where the range of an activation ends is calibrated on training
images. https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from utils.data.splits.selection import create_targets
from utils.distributed.group import DistEnv
from utils.errors import RunFailed, UserError, first_line
from utils.figures import MAIN_FIGURE, figure
from utils.inference.export.check import spread
from utils.inference.export.classifier import Classifier, Input
from utils.inference.export.formats import ONNX, Network, fact_texts, read_onnx
from utils.inference.export.run_images import BATCH_SIZE, RunImages, read_images
from utils.inference.export.trained import Trained
from utils.inference.metrics import EvalMetric, TopK
from utils.inference.multilabel import MeanAveragePrecision
from utils.text import count

BEFORE, PREPARED = "float32.onnx", "prepared.onnx"
NUM_CALIBRATION = 512  # training images
OUTLIERS = 20  # one of so many of them is left out
MAX_LOSS = 1.0  # points
LAYERS = ("Conv", "Gemm", "MatMul")


@dataclasses.dataclass(frozen=True)
class Loss:
    """Accuracy on the validation images of the run, in ONNX Runtime.

    Attributes:
        name: `top1`, or `map` of several labels.
        before, after: of the network in float32 and in int8, percent.
        count: validation images.
    """

    name: str
    before: float
    after: float
    count: int

    def require(self, limit: float) -> None:
        """Raise RunFailed if more points are lost than `limit`, or the figures are not numbers."""
        if not self.before - self.after <= limit:
            raise RunFailed(
                f"--int8: {self}, and --max-loss {limit:g} is allowed; nothing was written, leave --int8 out, or give "
                "--half, or a higher --max-loss"
            )

    def __str__(self) -> str:
        title = figure(self.name).title
        return (
            f"{title} on {count(self.count, 'validation image')}: {self.before:.2f} % in float32, {self.after:.2f} % "
            f"in int8 ({self.after - self.before:+.2f} points)"
        )


def to_int8(trained: Trained, takes: Input, folder: Path, images: RunImages, max_loss: float | None) -> str:
    """Replace model.onnx by its int8 form, with its accuracy among the facts.

    Args:
        takes: see `Classifier`.
        max_loss: points of top-1, or of mAP, that it may lose; None for `MAX_LOSS`.

    Returns:
        What it costs, for the user.

    Raises:
        UserError: no image can be read.
        RunFailed: the network cannot be quantized, or loses more.
    """
    classifier = Classifier(trained, takes)
    before, after, num_calibration = quantize(trained, classifier, folder, images)
    loss = measure_loss(before, after, classifier, images)
    loss.require(MAX_LOSS if max_loss is None else max_loss)
    facts = {"precision": "int8", loss.name: loss.after, f"float32_{loss.name}": loss.before}
    _set_facts(folder, facts | {"calibration_images": num_calibration})
    return f"calibrated on {num_calibration:,} of {count(len(images.train), 'training image')}; {loss}"


def quantize(trained: Trained, classifier: Classifier, folder: Path, images: RunImages) -> tuple[Network, Network, int]:
    """Replace model.onnx, which becomes `BEFORE`; returns the network before and after, and how many images calibrate.

    Raises:
        UserError: no training image can be read.
        RunFailed: the network cannot be quantized.
    """
    (folder / ONNX).rename(folder / BEFORE)
    chosen = spread(len(images.train), NUM_CALIBRATION)
    batches = [pixels for _, pixels in read_images(images.config, images.train, chosen, "calibrating")]
    if not batches:
        raise UserError(f"--data-dir {images.config.data_dir}: no training image can be read; leave --int8 out")
    pixels = typical_images(classifier, batches)
    try:
        _quantize(folder, _Batches(pixels, classifier))
        after = read_onnx(folder)
    except OSError:
        raise
    except Exception as error:  # the library has no common one
        raise RunFailed(
            f"--int8: {trained.config.arch} cannot be quantized ({first_line(error, 200)}); leave --int8 out, or give "
            "--half"
        ) from error
    return read_onnx(folder, BEFORE), after, len(pixels)


@torch.inference_mode()
def typical_images(classifier: Classifier, batches: Sequence[Tensor]) -> Tensor:
    """Those whose activations are not far larger than the others'.

    The largest value of an activation ends its range. In an EfficientNet one image of a hundred can have values
    hundreds of times as large as all others, to which the range then leaves no more than one of 256 values.

    Args:
        classifier: on the CPU.
        batches: uint8 (n, height, width, 3).

    Returns:
        uint8 (N, height, width, 3), in their order: without the one of `OUTLIERS` images whose layers' largest
        absolute values are the farthest above the median image's, of any layer.
    """
    peaks: list[Tensor] = []
    size = 0

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        # Windows of an image are rows, too. An output that is the same for all images has 0, which is no peak.
        if isinstance(output, Tensor) and output.ndim > 1 and len(output) % size == 0:
            peaks.append(output.reshape(size, -1).abs().amax(dim=1).float())
        else:
            peaks.append(torch.zeros(size))

    layers = [module for module in classifier.modules() if next(module.children(), None) is None]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    rows: list[Tensor] = []
    for pixels in batches:
        size = len(pixels)
        peaks.clear()
        classifier(classifier.prepare(pixels))
        rows.append(torch.stack(peaks, dim=1))
    for hook in hooks:
        hook.remove()
    found = torch.cat(rows)  # of images and layers
    median = found.median(dim=0).values
    farthest = torch.where(median > 0, found / median, 0).amax(dim=1)
    kept = farthest.argsort()[: len(found) - len(found) // OUTLIERS].sort().values
    return torch.cat([*batches])[kept]


def _quantize(folder: Path, batches: "_Batches") -> None:
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(folder / BEFORE, folder / PREPARED, skip_symbolic_shape=True)
    graph = onnx.load(folder / PREPARED).graph
    # In a transformer some features are hundreds of times as large as others, and one scale does not hold both: sums
    # and norms stay as they are.
    is_transformer = any(node.op_type == "LayerNormalization" for node in graph.node)
    quantize_static(
        folder / PREPARED,
        folder / ONNX,
        batches,
        op_types_to_quantize=[*LAYERS] if is_transformer else None,
        nodes_to_exclude=_outside(graph),
        per_channel=True,
        # 7 bits: on x86 without VNNI two products of 8 bits saturate a sum of 16 bits.
        reduce_range=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        # Of 256 values, logits would often be equal.
        extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm"]},
    )


def _outside(graph: Any) -> list[str]:
    """Names of the nodes before the first layers and after the last: normalization, temperature, sigmoid."""
    found: list[str] = []
    reached = {each.name for each in graph.input}
    for node in graph.node:
        if node.op_type not in LAYERS and reached.intersection(node.input):
            reached.update(node.output)
            found.append(node.name)
    reached = {each.name for each in graph.output}
    for node in reversed(graph.node):
        if node.op_type not in LAYERS and reached.intersection(node.output):
            reached.update(node.input)
            found.append(node.name)
    return [name for name in found if name]  # "" would mean all nodes without a name


def _set_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Those of the float32 file, and others. ONNX Runtime's tools drop them, and list operator sets of its own."""
    import onnx

    model = onnx.load(folder / ONNX)
    texts = {each.key: each.value for each in onnx.load(folder / BEFORE).metadata_props} | fact_texts(facts)
    onnx.helper.set_model_props(model, texts)
    domains = {node.domain for node in model.graph.node}
    for each in [each for each in model.opset_import if each.domain not in domains]:
        model.opset_import.remove(each)
    onnx.save(model, folder / ONNX)


class _Batches:
    """The network's inputs one after the other, as `quantize_static` asks for them."""

    def __init__(self, pixels: Tensor, classifier: Classifier) -> None:
        self._batches, self._classifier = iter(torch.split(pixels, BATCH_SIZE)), classifier

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """The next batch, as ONNX Runtime takes it; None after the last one."""
        pixels = next(self._batches, None)
        return None if pixels is None else {"images": self._classifier.prepare(pixels).numpy()}


@torch.inference_mode()
def measure_loss(before: Network, after: Network, classifier: Classifier, images: RunImages) -> Loss:
    """Compute all validation images with both networks.

    Raises:
        UserError: none of them can be read, or of several labels none has one.
    """
    config, val = images.config, images.val
    name = MAIN_FIGURE[config.task]
    metric: type[EvalMetric] = TopK if name == "top1" else MeanAveragePrecision
    device, num_images = torch.device("cpu"), 0
    metrics = [(network, metric(config.num_classes, device)) for network in (before, after)]
    targets = create_targets(config, val, DistEnv.single(device))
    for indices, pixels in read_images(config, val, range(len(val)), "evaluating"):
        batch, labels = classifier.prepare(pixels), targets(torch.from_numpy(val.labels[indices]))
        num_images += len(indices)
        for network, figures in metrics:
            outputs = network(batch)
            figures.update(outputs, outputs.topk(min(5, config.num_classes)).indices, labels)
    found = [figures.compute(figures.state, num_images) for _, figures in metrics] if num_images else [{}, {}]
    if name not in found[0]:
        raise UserError(
            f"--data-dir {config.data_dir}: no validation image that can be read and has a class; int8 cannot be "
            "judged, leave --int8 out"
        )
    return Loss(name, found[0][name], found[1][name], num_images)
