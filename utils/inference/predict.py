"""Predictions of a checkpoint for images that need no data set: the same pixels and numbers as an evaluation.

Whole batches go to the ranks round robin, so a batch, and what is computed of it, is the same on any number of them.
Rank 0 writes the rows of every round as they come.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import models
from utils.data.images.manifest import Manifest, describe_counts
from utils.distributed.collective import collective
from utils.distributed.collectives import gather_to_rank0, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError, first_line, readable
from utils.files import temporary_of, write_json
from utils.inference.counts import ClassCounts
from utils.inference.embeddings import FACTS, WithEmbeddings, describe_embeddings, embedding_width
from utils.inference.evaluate import FlipAverage, compute_logits, describe_result, load_network, start_evaluation
from utils.inference.inputs import NO_TARGET, PathTable, describe_folders
from utils.inference.predictions import (
    RESULTS,
    TOP,
    Columns,
    MultilabelColumns,
    PredictOptions,
    Rows,
    check_min_prob,
)
from utils.inference.predictions_file import ArrayFile, PredictionsFile
from utils.inference.readable_batches import ReadableBatches
from utils.inference.sources import list_images, resolve_config
from utils.inference.weights import choose_network, open_best_checkpoint, temperature_of, thresholds_of
from utils.log import emit
from utils.network.augment import Normalize
from utils.network.gradients import AMP_DTYPES
from utils.options.resolved import ResolvedConfig
from utils.progress import end_status, show_status, with_bar
from utils.text import count
from utils.training.state.checkpoint import Checkpoint
from utils.training.state.output import lock_output, prepare_output
from utils.training.state.train_state import NETWORKS


@collective
def predict(options: PredictOptions, env: DistEnv, stack: contextlib.ExitStack) -> None:
    """Write, or print, the predictions of all images.

    Raises:
        UserError: on all ranks: the checkpoint, a source or the output folder cannot be used.
    """
    saved = open_best_checkpoint(options.checkpoint, env)
    check_min_prob(options, saved.config.task, saved.record.classes)
    if options.output_dir is not None:
        prepare_output(options.output_dir, env, stack, RESULTS)
        lock_output(options.output_dir, env, stack)
    show_status("listing the images")
    manifest, ignored = list_images(options, saved.record.classes, env)
    show_status("preparing the predictions")
    config = resolve_config(options, saved, manifest, env)
    name = choose_network(saved, options.ema)
    predictor = create_predictor(config, saved, name, options, manifest, env)
    end_status()
    if env.is_main:
        average = ", moving average" if name != NETWORKS[0] else ""
        average += ", with mirror images" if config.eval_flip else ""
        size = f"{config.val_image_size} px of {config.val_resize}"
        emit(f"{saved.path}: {config.arch}{average}, {size}, amp {config.amp}")
        if isinstance(manifest.images, PathTable) and (note := describe_folders(manifest)):
            emit(note)
        if ignored:
            emit(f"not predicted, as no image is named so: {describe_counts(ignored)}")
    _write(predictor, options, env, stack)


class _Batch(NamedTuple):
    """Results of a batch, on their way from the device.

    Attributes:
        indices, scores: see `Rows`, with at least `TOP` classes where there are so many; None for bad images only.
        embeddings: see `Rows`.
        wait: waits until they have arrived.
    """

    images: NDArray[np.int64]
    indices: Tensor | None
    scores: Tensor | None
    embeddings: Tensor | None
    wait: Callable[[], object]


class _Piece(NamedTuple):
    """The rows of a batch: encoded, and those of a .npy file, float32 (n, width), if there is one."""

    rows: bytes = b""
    embeddings: NDArray[np.float32] | None = None


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

    @property
    def width(self) -> int:
        """Of the embeddings; 0 without."""
        return int(self.facts.get("width", 0))

    def pieces(self) -> Iterator[_Piece]:
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
        if self.env.device.type != "cuda":
            return _Batch(images, indices, scores, embeddings, lambda: None)
        outputs = _fetch(indices), _fetch(scores), _fetch(embeddings)
        return _Batch(images, *outputs, torch.cuda.current_stream().record_event().synchronize)

    def _encode(self, batch: _Batch) -> _Piece:
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
        rows = self.columns.encode(Rows(paths, indices[:, :topk], scores[:, :topk], targets, errors, embeddings))
        return _Piece(rows, None if self.columns.width else embeddings)


def _fetch(tensor: Tensor | None) -> Tensor | None:
    """A copy on the CPU that may still be on its way."""
    return tensor if tensor is None else tensor.to("cpu", non_blocking=True)


def _columns(
    config: ResolvedConfig, saved: Checkpoint, name: str, options: PredictOptions, manifest: Manifest, width: int
) -> Columns:
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
        UserError: on all ranks: the weights do not fit, or the temperature is none.
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
    )


@collective
def _write(predictor: Predictor, options: PredictOptions, env: DistEnv, stack: contextlib.ExitStack) -> None:
    """Predict, and write or print the rows as they come; `stack` closes what an error leaves open.

    Raises:
        UserError: on all ranks: the folder cannot be written any more.
    """
    file: PredictionsFile | None = None
    array: ArrayFile | None = None
    with _writing(options, env):
        if env.is_main and options.paths:
            file = PredictionsFile(options.paths[0], predictor.columns)
            stack.callback(file.release)
        if env.is_main and len(options.paths) > 1:
            array = ArrayFile(options.paths[1], len(predictor.manifest), predictor.width)
            stack.callback(array.release)
    pieces = predictor.pieces()
    for _ in with_bar(range(predictor.rounds), "predicting", predictor.rounds, env.is_main):
        gathered = gather_to_rank0(next(pieces, _Piece()), env)
        with _writing(options, env):
            for piece in gathered or ():
                if file is not None:
                    file.write(piece.rows)
                elif piece.rows:
                    emit(piece.rows.decode().rstrip("\n"))
                if array is not None and piece.embeddings is not None:
                    array.write(piece.embeddings)
    results = gather_to_rank0((predictor.counts, len(predictor.reader.bad)), env)
    counts = ClassCounts(options.min_prob or 0.0)
    for part, _ in results or ():
        counts.add(part)
    with _writing(options, env):
        if file is not None:
            _finish([file, array] if array else [file], counts, predictor.columns, options, predictor.facts)
    if results is not None:
        classes = len(predictor.columns.classes)
        _print_summary(len(predictor.manifest), sum(bad for _, bad in results), counts, classes, options)


@collective
@contextlib.contextmanager
def _writing(options: PredictOptions, env: DistEnv) -> Iterator[None]:
    """Around writing on rank 0: an OSError ends all ranks in one line."""
    with sync_errors(env):
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                for path in options.paths:
                    temporary_of(path).unlink(missing_ok=True)  # a full disk has room again
            raise UserError(
                f"--output-dir {options.output_dir}: cannot be written ({error.strerror or first_line(error)}); the "
                "same command starts over"
            ) from None


def _finish(
    files: Sequence[PredictionsFile | ArrayFile],
    counts: ClassCounts,
    columns: Columns,
    options: PredictOptions,
    facts: dict[str, Any],
) -> None:
    """Give the files their names, the predictions last: where they are, the others are theirs."""
    folder = options.paths[0].parent
    for file in files:
        file.complete()  # what takes room comes before an earlier result is removed
    for name in RESULTS:
        (folder / name).unlink(missing_ok=True)  # of an earlier run, with other sources
        if folder / name not in options.paths:
            temporary_of(folder / name).unlink(missing_ok=True)
    if columns.has_targets:
        counts.write(folder, columns.classes)
    if facts:
        write_json(folder / FACTS, {"network": facts, "classes": columns.classes, "top1": counts.summary().get("top1")})
    for file in files:
        file.publish()


def _print_summary(images: int, bad: int, counts: ClassCounts, num_classes: int, options: PredictOptions) -> None:
    if options.output_dir is None and images == 1:
        return
    where = f"{options.paths[-1]}: " if options.paths else ""
    unread = f", {bad:,} of them cannot be read{' (column error)' if where else ''}" if bad else ""
    emit(f"{where}{count(images, 'image')}{unread}")
    if summary := counts.summary():
        emit(describe_result(summary, num_classes))
    if options.min_prob is not None and (table := str(counts.answered)):
        emit(table)
