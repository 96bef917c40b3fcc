"""Predictions of a checkpoint for images that need no data set: the same pixels and numbers as an evaluation.

Whole batches go to the ranks round robin, so a batch, and what is computed of it, is the same on any number of them.
Rank 0 writes the rows of every round as they come.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from utils.data.images.manifest import describe_counts
from utils.distributed.collective import collective
from utils.distributed.collectives import gather_to_rank0, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError, first_line
from utils.files import temporary_of, write_json
from utils.inference.counts import ClassCounts
from utils.inference.embeddings import FACTS
from utils.inference.evaluate import describe_result
from utils.inference.heatmap_files import HeatmapFolder, check_heatmap_folder, remove_unfinished
from utils.inference.inputs import PathTable, describe_folders
from utils.inference.predictions import RESULTS, Columns, PredictOptions, check_min_prob
from utils.inference.predictions_file import ArrayFile, PredictionsFile
from utils.inference.predictor import Piece, Predictor, create_predictor
from utils.inference.sources import list_images, resolve_config
from utils.inference.weights import choose_network, open_best_checkpoint
from utils.log import emit
from utils.progress import end_status, show_status, with_bar
from utils.text import count
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
        with sync_errors(env):
            if env.is_main and options.heatmap:
                check_heatmap_folder(options.output_dir)
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


@collective
def _write(predictor: Predictor, options: PredictOptions, env: DistEnv, stack: contextlib.ExitStack) -> None:
    """Predict, and write or print the rows as they come; `stack` closes what an error leaves open.

    Raises:
        UserError: on all ranks: the folder cannot be written any more.
    """
    file: PredictionsFile | None = None
    array: ArrayFile | None = None
    heatmaps: HeatmapFolder | None = None
    with _writing(options, env):
        if env.is_main and options.output_dir is not None:
            heatmaps = HeatmapFolder(options.output_dir)
        if env.is_main and options.paths:
            file = PredictionsFile(options.paths[0], predictor.columns)
            stack.callback(file.release)
        if env.is_main and len(options.paths) > 1:
            array = ArrayFile(options.paths[1], len(predictor.manifest), predictor.width)
            stack.callback(array.release)
    pieces = predictor.pieces()
    for _ in with_bar(range(predictor.rounds), "predicting", predictor.rounds, env.is_main):
        gathered = gather_to_rank0(next(pieces, Piece()), env)
        with _writing(options, env):
            for piece in gathered or ():
                if file is not None:
                    file.write(piece.rows)
                elif piece.rows:
                    emit(piece.rows.decode().rstrip("\n"))
                if array is not None and piece.embeddings is not None:
                    array.write(piece.embeddings)
                if heatmaps is not None:
                    heatmaps.write(piece.heatmaps or {})
    results = gather_to_rank0((predictor.counts, len(predictor.reader.bad)), env)
    counts = ClassCounts(options.min_prob or 0.0)
    for part, _ in results or ():
        counts.add(part)
    with _writing(options, env):
        if file is not None:
            files: list[PredictionsFile | ArrayFile] = [file, array] if array else [file]
            _finish(files, counts, predictor.columns, options, predictor.facts, heatmaps)
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
                if options.output_dir is not None:
                    remove_unfinished(options.output_dir)
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
    heatmaps: HeatmapFolder | None = None,
) -> None:
    """Give the files their names, the predictions last: where they are, the others are theirs."""
    folder = options.paths[0].parent
    for file in files:
        file.complete()  # what takes room comes before an earlier result is removed
    if heatmaps is not None:
        heatmaps.publish()
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
