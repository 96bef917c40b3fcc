"""What a checkpoint says of images, batch by batch: scores, embeddings, heat maps, and the rows of the files."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import models
from utils.data.images.manifest import Manifest
from utils.distributed.collective import collective
from utils.distributed.group import DistEnv
from utils.errors import UserError, readable
from utils.inference.counts import ClassCounts
from utils.inference.embeddings import WithEmbeddings, describe_embeddings, embedding_width
from utils.inference.evaluate import FlipAverage, compute_logits, load_network, start_evaluation
from utils.inference.heatmap_files import encode_png, heatmap_name
from utils.inference.heatmaps import HeatMaps
from utils.inference.inputs import NO_TARGET
from utils.inference.predictions import TOP, Columns, MultilabelColumns, PredictOptions, Rows
from utils.inference.readable_batches import ReadableBatches
from utils.inference.weights import temperature_of, thresholds_of
from utils.network.augment import Normalize
from utils.network.gradients import AMP_DTYPES
from utils.options.resolved import ResolvedConfig
from utils.training.state.checkpoint import Checkpoint


class _Batch(NamedTuple):
    """Results of a batch, on their way from the device.

    Attributes:
        indices, scores: see `Rows`, with at least `TOP` classes where there are so many; None for bad images only.
        embeddings: see `Rows`.
        wait: waits until they have arrived.
        mapped: uint8 (n, 3, H, W), the first images of the batch, which get heat maps.
    """

    images: NDArray[np.int64]
    indices: Tensor | None
    scores: Tensor | None
    embeddings: Tensor | None
    wait: Callable[[], object]
    mapped: Tensor | Sequence[Tensor] = ()


class Piece(NamedTuple):
    """The rows of a batch: encoded, those of a .npy file, float32 (n, width), if there is one, and PNG files."""

    rows: bytes = b""
    embeddings: NDArray[np.float32] | None = None
    heatmaps: dict[str, bytes] | None = None


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Network, images and columns.

    Attributes:
        reader: of this rank's batches.
        rounds: batches of the rank that has most.
        num_outputs: of the network.
        temperature: by which logits are divided before they become probabilities, (1,) or (num_classes,).
        counts: of this rank.
        facts: of `embeddings.json`; {} without embeddings.
        heatmaps: of the first `num_heatmaps` images; None without.
    """

    model: nn.Module
    normalize: Normalize
    amp_dtype: torch.dtype
    manifest: Manifest
    reader: ReadableBatches
    rounds: int
    num_outputs: int
    columns: Columns
    temperature: Tensor
    counts: ClassCounts
    env: DistEnv
    facts: dict[str, Any]
    heatmaps: HeatMaps | None
    num_heatmaps: int

    @property
    def width(self) -> int:
        """Of the embeddings; 0 without."""
        return int(self.facts.get("width", 0))

    def pieces(self) -> Iterator[Piece]:
        """The encoded rows of each batch of this rank. The device works on a batch while the one before is encoded."""
        pending: collections.deque[_Batch] = collections.deque()
        for images, pixels in self.reader:
            pending.append(self._compute(images, pixels))
            if len(pending) > 1:
                yield self._encode(pending.popleft())
        yield from map(self._encode, pending)

    @torch.inference_mode()
    def _compute(self, images: NDArray[np.int64], pixels: Tensor | None) -> _Batch:
        if pixels is None:
            return _Batch(images, None, None, None, lambda: None)
        computed = compute_logits(self.model, pixels, self.normalize, self.env, self.amp_dtype)
        embeddings, logits = computed[:, : self.width] if self.width else None, computed[:, self.width :]
        if isinstance(self.columns, MultilabelColumns):
            indices = None
            scores = logits if self.columns.output_type == "logit" else (logits / self.temperature).sigmoid()
        else:
            top, indices = logits.topk(min(max(self.columns.topk, TOP), logits.shape[1]), dim=1)
            if self.columns.output_type == "logit":
                scores = top
            else:
                scores = torch.take_along_dim((logits / self.temperature).softmax(1), indices, dim=1)
        mapped = pixels[: max(0, self.num_heatmaps - int(images[0]))]
        if self.env.device.type != "cuda":
            return _Batch(images, indices, scores, embeddings, lambda: None, mapped)
        outputs = _fetch(indices), _fetch(scores), _fetch(embeddings)
        return _Batch(images, *outputs, torch.cuda.current_stream().record_event().synchronize, mapped)

    def _encode(self, batch: _Batch) -> Piece:
        images, bad, topk = batch.images.tolist(), self.reader.bad, self.columns.topk
        targets = self.manifest.labels[batch.images]
        batch.wait()
        if isinstance(self.columns, MultilabelColumns):
            targets = np.full_like(targets, NO_TARGET)  # folders name one class at most
            topk = self.columns.topk
        indices = np.full((len(images), topk), NO_TARGET) if batch.indices is None else batch.indices.numpy()
        scores = np.zeros((len(images), topk), np.float32) if batch.scores is None else batch.scores.numpy()
        is_good = np.array([image not in bad for image in images])
        probabilities = scores[is_good, 0] if self.columns.output_type == "prob" else None
        self.counts.update(targets[is_good], indices[is_good], probabilities)
        paths = [self.manifest.record(image).name for image in images]
        errors = [bad.get(image) for image in images]
        embeddings = None
        if self.width:
            embeddings = np.full((len(images), self.width), np.nan, np.float32)
            if batch.embeddings is not None:
                embeddings[is_good] = batch.embeddings.numpy()[is_good]
        answers = scores[:, : len(self.columns.classes)].argmax(axis=1) if batch.indices is None else indices[:, 0]
        heatmaps = {
            heatmap_name(images[at] + 1, paths[at]): encode_png(self.heatmaps.draw(pixels, int(answers[at])))
            for at, pixels in enumerate(batch.mapped)
            if self.heatmaps is not None and is_good[at]
        }
        rows = self.columns.encode(Rows(paths, indices[:, :topk], scores[:, :topk], targets, errors, embeddings))
        return Piece(rows, None if self.columns.width else embeddings, heatmaps)


def _fetch(tensor: Tensor | None) -> Tensor | None:
    """A copy on the CPU that may still be on its way."""
    return tensor if tensor is None else tensor.to("cpu", non_blocking=True)


def _columns(
    config: ResolvedConfig, saved: Checkpoint, name: str, options: PredictOptions, manifest: Manifest, width: int
) -> Columns:
    """Those that the command line asks for.

    Args:
        name: of the network, in the checkpoint.
        width: of the embeddings; 0 without.
    """
    classes = tuple(map(readable, saved.record.classes))
    form = "text" if options.output_dir is None else "csv" if options.format == "npy" else options.format
    scores: Literal["prob", "logit"] = "logit" if options.output_type == "logit" else "prob"
    width = width if form == "parquet" else 0
    if config.task == "multiclass":
        return Columns(
            format=form,
            classes=classes,
            output_type=scores,
            topk=min(options.topk, config.num_classes),
            has_targets=bool((manifest.labels != NO_TARGET).any()),
            width=width,
            min_prob=options.min_prob or 0.0,
        )
    thresholds = thresholds_of(saved, name)
    if options.output_type == "logit":
        with np.errstate(divide="ignore"):
            thresholds = (np.log(thresholds) - np.log1p(-np.array(thresholds))).tolist()
    return MultilabelColumns(
        format=form, classes=classes, output_type=scores, topk=config.num_classes,
        has_targets=False, thresholds=thresholds, width=width,
    )  # fmt: skip


@collective
def create_predictor(
    config: ResolvedConfig, saved: Checkpoint, name: str, options: PredictOptions, manifest: Manifest, env: DistEnv
) -> Predictor:
    """Network, images and columns; the arguments are those of `predict`.

    Raises:
        UserError: on all ranks: the weights do not fit, the temperature is none, or there are no heat maps.
    """
    classes = saved.record.classes
    network = models.create_network(config, env, classes, saved.record.normalization)
    load_network(network.model, saved, name, config)
    start_evaluation(network.model)
    amp_dtype = AMP_DTYPES[config.amp]
    starts = range(0, len(manifest), config.batch_size)
    batches = [np.arange(start, min(start + config.batch_size, len(manifest))) for start in starts]
    model, facts = network.model, {}
    if options.output_type == "embedding":
        facts = describe_embeddings(saved, name, config, embedding_width(model, config))
        model = WithEmbeddings(model)
    columns = _columns(config, saved, name, options, manifest, facts.get("width", 0))
    config = config.padded_with(network.normalization[0])
    return Predictor(
        model=FlipAverage(model) if config.eval_flip else model,
        normalize=Normalize(*network.normalization, dtype=amp_dtype, device=env.device),
        amp_dtype=amp_dtype,
        manifest=manifest,
        reader=ReadableBatches(config, manifest, env, batches[env.rank :: env.world_size]),
        rounds=-(-len(batches) // env.world_size),
        num_outputs=config.num_classes,
        columns=columns,
        temperature=torch.tensor(temperature_of(saved, name), device=env.device),
        counts=ClassCounts(options.min_prob or 0.0),
        env=env,
        facts=facts,
        heatmaps=_create_heatmaps(options, network, config, env.device),
        num_heatmaps=options.heatmap,
    )


def _create_heatmaps(
    options: PredictOptions, network: models.Network, config: ResolvedConfig, device: torch.device
) -> HeatMaps | None:
    if not options.heatmap:
        return None
    try:
        return HeatMaps(network.model.state_dict(), config, network.normalization, device)
    except UserError as error:
        raise UserError(f"--heatmap {options.heatmap}: {error}; leave --heatmap out", on_all_ranks=True) from None
