"""Wrong labels of a data set: predictions out of fold for all its training images, which cleanlab ranks.

scripts/find_label_errors.py is the command. Each run of `train.py --fold K/N` predicts the part that it has not seen.
"""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import models
import pipelines
from utils.data.formats.shards import ShardTable
from utils.data.images.manifest import SEVERAL, Manifest
from utils.data.splits.selection import Splits, read_data, select_images, unused_validation
from utils.data.staging.stage import stage
from utils.distributed.collective import collective
from utils.distributed.group import DistEnv
from utils.distributed.shared_memory import check_shared_memory
from utils.errors import UserError, readable, some
from utils.inference.evaluate import compute_logits, load_network, start_evaluation
from utils.inference.label_error_files import CLEANED, PAGE, RESULTS, TABLE, Findings, write_cleaned, write_results
from utils.inference.mistakes import val_indices
from utils.inference.weights import choose_network, find_best_checkpoints
from utils.log import emit
from utils.network.augment import Normalize
from utils.network.gradients import AMP_DTYPES
from utils.options.config import TrainConfig
from utils.options.folds import Fold
from utils.options.resolved import ResolvedConfig
from utils.options.store_url import store_url
from utils.progress import show_status, with_bar
from utils.text import count
from utils.training.resume.restore import settings_of_run
from utils.training.settings.autotune import choose_common_loader_settings, resolve
from utils.training.state.checkpoint import Checkpoint, load_newest
from utils.training.state.output import has_summary, lock_output, prepare_output

NO_FOLD = -1  # of an image that no run has held out


class FoldRun(NamedTuple):
    """A run, as far as the others must fit it."""

    path: Path
    fold: Fold
    data: str
    classes: tuple[str, ...]


@collective
def find_label_errors(
    paths: Sequence[Path], options: TrainConfig, relabel: bool, env: DistEnv, stack: contextlib.ExitStack
) -> None:
    """Predict all training images out of fold, rank their labels, and write `RESULTS`.

    Args:
        paths: output folders or checkpoints of runs, one of each fold.
        options: with the folder of the results in `output_dir`; what is not `given` is as in the runs.
        relabel: see `write_cleaned`.

    Raises:
        UserError: the runs do not fit each other or their data, a package is missing, or a file cannot be written.
    """
    runs = check_folds([describe_run(path) for path in paths])
    require_cleanlab()
    prepare_output(options.output_dir, env, stack, RESULTS)
    lock_output(options.output_dir, env, stack)
    images, folds, probabilities, val = _predict_all(runs, options, env)
    known = np.flatnonzero(folds != NO_FOLD)
    images, probabilities = images.select(known), probabilities[known]
    show_status("ranking the labels")
    scores, is_issue = rank_labels(images.labels, probabilities)
    findings = Findings(images, probabilities, scores, is_issue)
    try:
        write_results(findings, options.output_dir)
        no_cleaned = why_not_cleaned(images)
        kept = [] if no_cleaned else write_cleaned(findings, val, options.output_dir, relabel)
    except OSError as error:
        raise UserError(
            f"--output-dir {options.output_dir}: cannot be written ({error.strerror}); give another"
        ) from None
    found = int(is_issue.sum())
    emit(
        f"{options.output_dir}: {TABLE}, {PAGE}{'' if no_cleaned else f', {CLEANED}'}; "
        f"{found:,} of {count(len(images), 'label')} may be wrong ({100 * found / len(images):.1f} %); top-1 of the "
        f"networks out of fold {100 * (findings.proposed == images.labels).mean():.2f} %"
    )
    if left := len(folds) - len(known):
        emit(f"not ranked, as its file is bad: {count(left, 'image')}")
    if kept:
        emit(f"{CLEANED} keeps all images of {some(kept)}, though each label may be wrong: none would be left")
    if no_cleaned:
        emit(f"no {CLEANED}: {no_cleaned}")


def why_not_cleaned(images: Manifest) -> str:
    """Why there can be no `CLEANED` of these images; "" where there can."""
    if isinstance(images.images, ShardTable):
        return f"a label file names images that are files, and these lie in {images.source}"
    several = [readable(name) for name in images.classes if SEVERAL in name]
    return f"a label file takes {some(several)} for several labels; rename it" if several else ""


def describe_run(path: Path) -> FoldRun:
    """What is compared of a run.

    Raises:
        UserError: it has no checkpoint, was trained without `--fold`, or its images have any number of labels.
    """
    saved = _open(path)
    config = saved.config
    if (fold := config.held_out_fold) is None:
        raise UserError(f"RUN {path}: was trained without --fold; train with --fold 1/4, 2/4, 3/4 and 4/4")
    if config.task != "multiclass":
        raise UserError(f"RUN {path}: its images have several labels; wrong labels are found where each has one")
    if len(saved.record.classes) < 2:
        raise UserError(f"RUN {path}: has only the class {saved.record.classes[0]}; two or more are needed")
    data = store_url(config.data_dir) or os.path.realpath(config.data_dir or "")
    return FoldRun(path, fold, str(data), saved.record.classes)


def check_folds(runs: Sequence[FoldRun]) -> list[FoldRun]:
    """The runs in the order of their folds.

    Raises:
        UserError: a fold is missing or double, or a run is of other parts, data or classes.
    """
    first, found = runs[0], dict[int, FoldRun]()
    for run in runs:
        if run.fold.parts != first.fold.parts:
            raise UserError(
                f"RUN {run.path}: was trained with --fold {_text(run)}, and {first.path} with --fold {_text(first)}; "
                "give runs of one number of parts"
            )
        if other := found.get(run.fold.number):
            raise UserError(f"RUN {run.path}: was trained with --fold {_text(run)}, as {other.path}; give one of them")
        if run.data != first.data:
            raise UserError(
                f"RUN {run.path}: was trained on {run.data}, and {first.path} on {first.data}; give runs of one data "
                "set"
            )
        if run.classes != first.classes:
            raise UserError(
                f"RUN {run.path}: has other classes than {first.path} ({count(len(run.classes), 'class')}, "
                f"{count(len(first.classes), 'class')}); train the folds on the same images"
            )
        found[run.fold.number] = run
    parts = first.fold.parts
    if missing := [f"--fold {number}/{parts}" for number in range(1, parts + 1) if number not in found]:
        raise UserError(f"RUN: none of {some(missing)}; train what is missing, and give the runs of all {parts} folds")
    return [found[number] for number in sorted(found)]


def _text(run: FoldRun) -> str:
    return f"{run.fold.number}/{run.fold.parts}"


def require_cleanlab() -> None:
    """Raise UserError unless the package that ranks labels is installed."""
    if importlib.util.find_spec("cleanlab") is None:
        raise UserError("needs the package cleanlab; pip install -r requirements-labels.txt -c constraints.txt")


def rank_labels(
    labels: NDArray[np.int64], probabilities: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """cleanlab's score of each label, 0 to 1, the most doubtful first, and whether it counts as wrong: (num_images,).

    The score is the probability of the given label (`self_confidence`). How many labels are wrong is estimated by
    confident learning (https://arxiv.org/abs/1911.00068), and so many with the lowest scores count as wrong
    (`low_self_confidence`).

    Args:
        labels: (num_images,), in [0, num_classes).
        probabilities: of each class, (num_images, num_classes), by networks that have not seen the image.
    """
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    rows = probabilities.astype(np.float64)
    rows /= rows.sum(axis=1, keepdims=True)  # to 1 in float64, too
    scores: NDArray[np.float64] = get_label_quality_scores(labels, rows)
    is_issue: NDArray[np.bool_] = find_label_issues(labels, rows, filter_by="low_self_confidence", n_jobs=1)
    return scores, is_issue


# ---------------------------------------------------------------------------------------------------------------------
# Predictions out of fold


def _open(path: Path) -> Checkpoint:
    saved, skipped = load_newest(find_best_checkpoints(path, "RUN"), "RUN")
    assert saved is not None, "there is a file"
    for line in skipped:
        emit(line)
    return saved


@collective
def _predict_all(
    runs: Sequence[FoldRun], options: TrainConfig, env: DistEnv
) -> tuple[Manifest, NDArray[np.int64], NDArray[np.float32], Manifest | None]:
    """All training images, the fold of each, float32 probabilities (num_images, num_classes), and val where it is."""
    images, val = None, None
    folds, probabilities = np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32)
    for run in runs:
        show_status(f"preparing --fold {_text(run)}")
        saved = _open(run.path)
        if run.path.is_dir() and not has_summary(run.path):
            epoch = f"epoch {saved.state.epoch} of {saved.config.epochs}"
            emit(f"warning: RUN {run.path}: its run has not ended; its part is judged by the network of {epoch}")
        config, listed, held_out = _select(saved, run, options, env)
        train = listed["train"]
        if images is None:
            images, val = train, listed.get("val")
            _refuse_names(images)
            folds = np.full(len(images), NO_FOLD)
            probabilities = np.zeros((len(images), len(images.classes)), dtype=np.float32)
        if train.fingerprint != images.fingerprint or train.classes != images.classes:
            raise UserError(
                f"RUN {run.path}: has other images or labels than {runs[0].path}; train the folds on the same images"
            )
        places = {name: place for place, name in enumerate(images.names())}
        indices = np.array([places[name] for name in held_out.names()], dtype=np.int64)
        if (folds[indices] != NO_FOLD).any():
            raise UserError(f"RUN {run.path}: its part has images of another fold's; train the folds again")
        folds[indices] = run.fold.number
        probabilities[indices] = _predict(saved, config, held_out, f"fold {_text(run)}", env)
    assert images is not None, "there are two runs or more"
    if (folds == NO_FOLD).any() and config.bad_files != "skip":
        name = images.name(int(np.flatnonzero(folds == NO_FOLD)[0]))
        raise UserError(f"RUN: no fold holds out {name}; train the folds again")
    return images, folds, probabilities, val


@collective
def _select(
    saved: Checkpoint, run: FoldRun, options: TrainConfig, env: DistEnv
) -> tuple[ResolvedConfig, Splits, Manifest]:
    """How a run evaluates, all its images, and those that it held out.

    Raises:
        UserError: they are not there, or no longer what they were.
    """
    # Its output folder is that of the results, which gets an index of shards, and digests.
    config = stage(settings_of_run(options, saved.config, saved.path or "", env), env)
    listed = read_data(config, env)
    train = listed["train"]
    settings = choose_common_loader_settings(config, env, saved, train)
    resolved = resolve(config, train.classes, env, settings, saved, task=train.task)
    _, splits = select_images(resolved, listed, env, saved.initial_files)
    held_out = splits["val"]
    if held_out.fingerprint != saved.record.fingerprint["files of val/"] or train.classes != saved.record.classes:
        raise UserError(f"RUN {run.path}: its images or labels have changed since; train the folds again")
    check_shared_memory(resolved, len(held_out), env)
    return resolved, listed | _validation(config, env), held_out


@collective
def _validation(config: TrainConfig, env: DistEnv) -> Splits:
    """The data's own validation images, which the folds leave out; {} for none."""
    if not unused_validation(config):
        return {}
    return read_data(dataclasses.replace(config, fold=None, val_fraction=0.0), env, ("val",))


def _refuse_names(images: Manifest) -> None:
    """Raise UserError for a name that the tables cannot hold."""
    odd = next((name for name in images.names() if readable(name) != name), None)
    if odd is not None:
        raise UserError(f"{readable(odd)}: its name is not UTF-8, so that no table can hold it; rename it")


@collective
@torch.inference_mode()
def _predict(
    saved: Checkpoint, config: ResolvedConfig, images: Manifest, title: str, env: DistEnv
) -> NDArray[np.float32]:
    """Probabilities of each class, (num_images, num_classes), in the order of the images.

    Without the temperature of the checkpoint, which was fitted to the labels that are in question.
    """
    network = models.create_network(config, env, images.classes, saved.record.normalization)
    load_network(network.model, saved, choose_network(saved, None), config)
    start_evaluation(network.model)
    amp_dtype = AMP_DTYPES[config.amp]
    normalize = Normalize(*network.normalization, dtype=amp_dtype, device=env.device)
    loader = pipelines.create_val_loader(config.padded_with(network.normalization[0]), images, env)
    rows, seen = [], []
    for pixels, labels in with_bar(loader, title, -(-len(images) // config.batch_size), env.is_main):
        logits = compute_logits(network.model, pixels, normalize, env, amp_dtype)[:, : len(images.classes)]
        rows.append(logits.softmax(dim=1).cpu().numpy())
        seen.append(labels.cpu().numpy())
    order = val_indices(config, len(images), env)
    if not np.array_equal(np.concatenate(seen), images.labels[order]):
        raise RuntimeError("images came in another order; their predictions would be of others")
    found = np.concatenate(rows)
    if not np.isfinite(found).all():
        raise UserError(f"{saved.path}: its network answers with values that are not finite; train this fold again")
    probabilities = np.empty_like(found)
    probabilities[order] = found
    return probabilities
