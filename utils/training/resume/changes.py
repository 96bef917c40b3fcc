"""`--accept-changes`: what a run takes over from a checkpoint that it differs from, and what that means."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from utils.data.loaders.sampler import Sampler
from utils.data.splits.selection import SPLITS, SYNTHETIC_TRAIN
from utils.errors import UserError
from utils.options.config import TrainConfig, flags_with
from utils.options.flags import flag
from utils.options.remedies import from_weights, other_folder, start_again
from utils.text import count
from utils.training.settings.batch_layout import saved_layout
from utils.training.state.checkpoint import Checkpoint
from utils.training.state.train_state import NETWORKS, RankState, ReplicatedState, TrainState

FIXED = ("--arch", "--model-args", "--num-classes", "--task", "classes")  # decide which weights there are, or their use
ORDER = ("--seed", "--repeated-augmentation", "--balance", "files of train/", "global batch")
VALIDATION = (
    "files of val/", "--image-size", "--val-resize", "--val-image-size", "--val-crop", "--interpolation",
)  # fmt: skip
EMA = "--ema-decay above 0"
NETWORK, AVERAGE = NETWORKS


def changed_names(saved: Checkpoint, fingerprint: dict[str, Any]) -> list[str]:
    """What a launch with this `run_fingerprint` changes, by the names of the fingerprint."""
    before = fingerprint_of(saved)
    return [name for name in fingerprint if before.get(name) != fingerprint[name]]


def fingerprint_of(saved: Checkpoint) -> dict[str, Any]:
    """The `run_fingerprint` of a checkpoint; one that does not know a flag was trained with its default."""
    return {flag(name): getattr(saved.config, name) for name in flags_with(role="fixed")} | saved.record.fingerprint


def is_fixed(names: Sequence[str]) -> bool:
    """Whether one of the changes decides which weights there are."""
    return any(name in FIXED for name in names)


def require_acceptable(config: TrainConfig, saved: Checkpoint, names: Sequence[str], classes: Sequence[str]) -> None:
    """Raise UserError for changes after which the weights of the checkpoint do not fit."""
    fixed = [name for name in names if name in FIXED]
    if fixed or tuple(classes) != saved.record.classes:
        what = " and ".join(fixed) if fixed else "names of classes"
        remedy = f"{from_weights(config, saved.path)} starts a run from them"
        if not {"--arch", "--model-args"}.isdisjoint(fixed):  # of other layers than the head, too
            remedy = start_again(config)
        raise UserError(
            f"--accept-changes: {what} cannot change within a run, as its weights are made for the former; {remedy}"
        )


def steps_before(saved: Checkpoint) -> int:
    """Optimizer steps per epoch of the run that wrote a checkpoint."""
    num_images = len(saved.record.files["train"]["mtimes"]) or SYNTHETIC_TRAIN
    return num_images // saved_layout(saved).global_batch_size


def require_other_folder(config: TrainConfig, saved: Checkpoint, steps_per_epoch: int) -> None:
    """Raise UserError where a run would go on in its folder with epochs of another length.

    Lines of metrics.jsonl are kept or removed by their step, so that all of a folder must count alike.
    """
    before, folder = steps_before(saved), config.output_dir
    if before != steps_per_epoch and saved.path and os.path.realpath(saved.path.parent) == os.path.realpath(folder):
        raise UserError(
            f"--accept-changes: an epoch has {count(steps_per_epoch, 'step')} instead of {before}, and metrics.jsonl "
            f"in --output-dir {folder} counts the latter; give {other_folder(config)}, or {start_again(config)}",
            on_all_ranks=True,
        )


def adapt(
    saved: Checkpoint, rank_state: RankState, state: TrainState, names: Sequence[str], sampler: Sampler
) -> tuple[ReplicatedState, RankState]:
    """The states of a checkpoint as a changed run loads them.

    Args:
        rank_state: of this rank, from it.
        state: of the changed run, before the first step.
        names: as `changed_names` gives them, not empty.
    """
    replicated = dataclasses.replace(saved.state, optimizer=adapt_optimizer(saved, state, names))
    if EMA in names and AVERAGE not in replicated.networks:
        networks = replicated.networks | {AVERAGE: replicated.networks[NETWORK]}
        replicated = dataclasses.replace(replicated, networks=networks)
        rank_state = dataclasses.replace(
            rank_state, buffers=rank_state.buffers | {AVERAGE: rank_state.buffers[NETWORK]}
        )
    if any(name in VALIDATION for name in names):
        replicated = dataclasses.replace(replicated, evaluations_since_best=0, best=None, result={})
    before, epoch = steps_before(saved), saved.state.epoch
    if before != sampler.steps_per_epoch:
        # The epoch under way has no place in epochs of another length: it begins again, unless it is done. So do the
        # counts of steps.
        done = epoch + 1 if saved.state.step == (epoch + 1) * before else epoch
        replicated = dataclasses.replace(replicated, step=done * sampler.steps_per_epoch)
        rank_state = dataclasses.replace(rank_state, meter=state.meter.state_dict())
    return replicated, dataclasses.replace(rank_state, loader={}, random={})


def adapt_optimizer(saved: Checkpoint, state: TrainState, names: Sequence[str]) -> dict[str, Any]:
    """The checkpoint's, with the settings of this run; this run's own where the optimizer is another.

    A group of LAMB or Adan also has state, a count of steps: what a new group does not have before the first step.
    """
    before, now = saved.state.optimizer, state.optimizer.state_dict()
    if _begins_anew(before, now, names):
        return now
    pairs = zip(before["param_groups"], now["param_groups"], strict=True)
    groups = [
        {name: value for name, value in old.items() if name not in (*new, "lr_scale")} | new for old, new in pairs
    ]
    return before | {"param_groups": groups}


def _begins_anew(before: dict[str, Any], now: dict[str, Any], names: Sequence[str]) -> bool:
    """Other groups have the parameters in another order; other arguments may want another state."""
    groups = [[len(group["params"]) for group in each["param_groups"]] for each in (before, now)]
    return "--optimizer" in names or "--optimizer-args" in names or groups[0] != groups[1]


def _reorders(saved: Checkpoint, names: Sequence[str]) -> bool:
    """Whether the images of an epoch come in another order; `--loader stock` has one of its own."""
    return any(name in ORDER for name in names) or ("--loader" in names and saved.config.loader == "stock")


def describe_consequences(saved: Checkpoint, state: TrainState, names: Sequence[str], sampler: Sampler) -> list[str]:
    """Lines on what accepted changes mean for exactness; `names` as `changed_names` gives them."""
    before, start = steps_before(saved), saved.state.epoch * sampler.steps_per_epoch
    parts = ["random draws begin again"]
    if before != sampler.steps_per_epoch:
        again = ", and the epoch under way begins again" if saved.state.step % before else ""
        parts.append(f"an epoch has {count(sampler.steps_per_epoch, 'step')} instead of {before}{again}")
    elif _reorders(saved, names) and state.step > start:
        parts.append("the epoch under way goes on in another order, with some images twice and others not at all")
    if _begins_anew(saved.state.optimizer, state.optimizer.state_dict(), names):
        parts.append("the state of the optimizer (momentum and the like) begins again")
    if EMA in names:
        kind = "begins with the weights of the checkpoint" if state.ema is not None else "is dropped"
        parts.append(f"the moving average {kind}")
    if any(name in VALIDATION for name in names):
        parts.append("evaluations before and after do not compare, and the next one becomes best.pt")
    return [f"accepted changes: the run is another from step {state.step} on; {'; '.join(parts)}"]


def excluded_of_run(saved: Checkpoint, fingerprint: dict[str, Any], now: dict[str, list[str]]) -> dict[str, list[str]]:
    """Files that the run is without from its start, by split: the checkpoint's where its files are the same."""
    names = changed_names(saved, fingerprint)
    return {
        split: now[split] if f"files of {split}/" in names else saved.record.excluded_files[split] for split in SPLITS
    }
