"""Resume: which checkpoint a launch goes on from, what it takes over from it, and which files it replaces."""

import contextlib
import dataclasses
import glob
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import models
from utils.data.formats.label_rows import has_rows_of, lists_validation
from utils.data.formats.sources import LabelFileError, find_source
from utils.data.formats.split_folders import has_val_folder
from utils.data.formats.tables import is_table
from utils.data.loaders.sampler import Sampler
from utils.data.loaders.scheduled_loader import config_of_epoch, schedules_agree
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, broadcast, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.launcher import restarted_by
from utils.errors import UserError
from utils.log import EVENTS, emit
from utils.network.parallel import warm_up_ddp_buckets
from utils.options.config import TrainConfig, flags_with
from utils.options.flags import flag
from utils.options.remedies import from_weights, other_folder, start_again
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import sides_of
from utils.options.store_url import store_url
from utils.options.validation import require_data, validate
from utils.report.tracking.sender import SENT, TRACKING
from utils.seed import seed_process, set_random_state
from utils.training.resume.changes import adapt, changed_names, require_other_folder
from utils.training.settings.batch_layout import layout_of, saved_layout
from utils.training.state.checkpoint import (
    BEST,
    LAST,
    Checkpoint,
    best_is_missing,
    find_checkpoints,
    load,
    load_newest,
    not_continued,
)
from utils.training.state.output import EVALUATION
from utils.training.state.train_state import TrainState, reshard


@collective
def open_checkpoint(config: TrainConfig, env: DistEnv) -> Checkpoint | None:
    """The checkpoint that `--resume` means; None if there is none to use.

    Raises:
        UserError: on all ranks: missing, damaged, or not the same on all ranks.
    """
    saved: Checkpoint | None = None
    skipped: list[str] = []
    if saved_before_restart(config, env):
        config = dataclasses.replace(config, resume="auto")
    with sync_errors(env):
        saved, skipped = load_newest(find_checkpoints(config), config=config)
    if env.is_main:
        for line in skipped:
            emit(line)
    found = all_gather_object((saved and saved.position, skipped), env)  # an evaluation changes the epoch alone
    if len({position for position, _ in found}) > 1:
        why = "".join(f"; rank {rank} {lines[0]}" for rank, (_, lines) in enumerate(found) if lines)
        raise UserError(
            f"--output-dir {config.output_dir}: not the same checkpoint on all ranks{why}; use a shared folder",
            on_all_ranks=True,
        )
    return saved


@collective
def saved_before_restart(config: TrainConfig, env: DistEnv) -> bool:
    """Whether this launch has left a checkpoint before torchrun or Slurm started it again.

    `--resume none` and `--resume PATH` say where a launch begins, not where each of its restarts does.
    """
    launch_ids = {name for ids in all_gather_object(restarted_by(), env) for name in ids}
    if not launch_ids or config.resume == "auto" or config.evaluate:
        return False
    saved: Checkpoint | None = None
    with contextlib.suppress(UserError):  # none of them is whole
        saved, _ = load_newest(find_checkpoints(dataclasses.replace(config, resume="auto")))
    return any(all_gather_object(saved is not None and not launch_ids.isdisjoint(saved.launch_ids), env))


def settings_of_checkpoint(
    config: TrainConfig, before: TrainConfig, source: Path | str, env: DistEnv
) -> tuple[TrainConfig, list[str]]:
    """`--evaluate`: what was not given is as in the run that wrote a checkpoint.

    Args:
        config: as the user gave it.
        before: the configuration of the checkpoint's run.
        source: the checkpoint, for messages.

    Returns:
        The configuration to evaluate with, and notes on what differs from the run's.

    Raises:
        UserError: another architecture was given.
    """
    if "arch" in config.given and models.base_arch(config.arch) != models.base_arch(before.arch):
        raise UserError(f"--arch {config.arch}: {source} holds {before.arch}, another architecture; leave --arch out")
    inherited = flags_with(from_checkpoint=True)
    values: dict[str, Any] = {name: getattr(before, name) for name in inherited if name not in config.given}
    if {"val_fraction", "fold"} & config.given:
        unused = {"val_fraction", "fold"} | ({"val_split", "val_data"} if config.held_out else set())
        values = {name: value for name, value in values.items() if name not in unused}
    elif before.held_out and _names_val_images(config, before, values):
        values |= {"val_fraction": 0.0, "fold": None}
    _drop_names(config, before, values)
    if values.get("loader") == "synthetic" and "data_dir" in config.given:
        del values["loader"]
    if values.get("amp") == "fp16" and env.device.type == "cpu":
        values["amp"] = "none"
    if "image_size" in config.given and "val_image_size" not in config.given:
        values["val_image_size"] = config.image_size
    size = config.val_image_size or values["val_image_size"]
    if config.val_crop == "pad" and before.val_crop != "pad":  # the size before a crop has no meaning then
        values["val_resize"] = min(sides_of(size)) if "val_resize" in values else config.val_resize
    elif size and "val_resize" in values and before.val_resize is not None:
        values["val_resize"] = round(
            min(sides_of(size)) * before.val_resize / min(sides_of(before.val_image_size or before.image_size))
        )
    config = dataclasses.replace(config, **values)
    validate(config)
    require_data(config)
    now, then = config.to_dict(), before.to_dict()
    notes = [
        f"{flag(name)} {now[name]}, its run had {then[name]}"
        for name in inherited
        if name not in ("data_dir", "stage_dir", "batch_size", "hw_decoder_load") and now[name] != then[name]
    ]
    return config, notes


@collective
def settings_of_run(config: TrainConfig, before: TrainConfig, source: Path | str, env: DistEnv) -> TrainConfig:
    """As `settings_of_checkpoint`, for the run's own images, wherever `--data-dir` says that they lie now.

    What the run held out stays so, also where the data has a val/ that it left out.
    """
    found, _ = settings_of_checkpoint(config, before, source, env)
    return dataclasses.replace(found, fold=before.fold, val_fraction=before.val_fraction)


def _drop_names(config: TrainConfig, before: TrainConfig, values: dict[str, Any]) -> None:
    """Remove the names of a run's label files and shards that the user's flags leave without a meaning."""
    if _is_other_data(config, before):  # what the run's own data are called may name other files there, or none
        for name in ("train_data", "val_data"):
            if not _is_there(config, before, values.get(name)):
                values.pop(name, None)
    if "val_split" in config.given and config.val_split != before.val_split:
        folder = config.data_dir or before.data_dir
        if _lacks(folder, values.get("val_data"), config.val_split):
            values.pop("val_data", None)


def _is_other_data(config: TrainConfig, before: TrainConfig) -> bool:
    """Whether the user has named another data set than that of the run."""
    if "data_dir" not in config.given or config.data_dir == before.data_dir:
        return False
    return not (
        config.data_dir and before.data_dir and os.path.realpath(config.data_dir) == os.path.realpath(before.data_dir)
    )


def _is_there(config: TrainConfig, before: TrainConfig, pattern: str | None) -> bool:
    """Whether a pattern of a run's data names other files in another data set; of a URL that is not known yet."""
    if pattern is None or config.data_dir is None or before.data_dir is None:
        return False
    if store_url(config.data_dir):
        return not os.path.isabs(pattern)
    here, there = (os.path.realpath(os.path.join(folder, pattern)) for folder in (before.data_dir, config.data_dir))
    return here != there and next(glob.iglob(pattern, root_dir=config.data_dir), None) is not None


def _lacks(folder: Path | None, val_data: str | None, val_split: str) -> bool:
    """Whether a run's label file of val has none of the split that the user names."""
    if folder is None or val_data is None or not is_table(val_data) or not os.path.isfile(folder / val_data):
        return False
    return not has_rows_of(folder / val_data, val_split, may_wait=False)


def _names_val_images(config: TrainConfig, before: TrainConfig, values: dict[str, Any]) -> bool:
    """Whether the user has named images to evaluate, so that those which a run held out do not count.

    Raises:
        UserError: it is another data set at a URL, which shows only later what it holds.
    """
    if {"val_split", "val_data"} & config.given:
        return True
    if "data_dir" not in config.given or config.data_dir is None:
        return False
    if before.fold is not None and not _is_other_data(config, before):  # whose own val/ it leaves out
        return False
    if store_url(config.data_dir):
        if not _is_other_data(config, before):
            return False
        raise UserError(
            f"--data-dir {config.data_dir}: the run of the checkpoint held out a part of its images; add --val-split "
            f"val for the validation images there, or {before.held_out_by} for such a part"
        )
    patterns = {} if not _is_other_data(config, before) else {"train_data": None, "val_data": None}
    config = dataclasses.replace(config, **(values | patterns))
    try:
        source = find_source(config, ())
    except LabelFileError:  # perhaps of train, which is not needed
        source = find_source(config, ("val",))
    if source.has_class_folders:
        return has_val_folder(source.data_dir, values["val_split"])
    return "val" in source.shards or lists_validation(source.label_files)


def inherit_start(config: TrainConfig, saved: Checkpoint | None) -> TrainConfig:
    """The configuration with the pretrained weights that the run began with, which a resume does not change.

    Raises:
        UserError: on all ranks: others were given.
    """
    if saved is None:
        return config
    names = ("pretrained", "pretrained_ema", "pretrained_head")
    before = {name: getattr(saved.config, name) for name in names}
    for name in names:
        now = getattr(config, name)
        same = _same_source(now, before[name]) if name == "pretrained" else now == before[name]
        if name == "pretrained" and not same and now and os.path.dirname(os.path.realpath(now)) == _folder_of(saved):
            raise UserError(
                f"--pretrained {now}: {config.output_dir} holds the run that these weights are of; give "
                f"{from_weights(config, Path(now))} to train on from them in another run, or leave --pretrained out to "
                "go on with this one",
                on_all_ranks=True,
            )
        if name in config.given and not same:
            raise UserError(
                f"{flag(name)} {now}: not used, as {saved.path} is of a run that began with {before[name]}; leave "
                f"it out, or {start_again(config)}",
                on_all_ranks=True,
            )
    return dataclasses.replace(config, **before)


def _folder_of(saved: Checkpoint) -> str:
    return os.path.realpath(str(saved.path and saved.path.parent))


def _same_source(one: str | None, other: str | None) -> bool:
    if one is None or other is None or "timm" in (one, other):
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)


@collective
def files_to_replace(config: ResolvedConfig, saved: Checkpoint | None, env: DistEnv) -> list[Path]:
    """Files of the output folder that this launch removes with its first step.

    Raises:
        UserError: on all ranks: there are checkpoints that the run does not continue, and `--overwrite` was not given.
    """
    replaced: list[Path] = []
    with sync_errors(env):
        # With --resume PATH too, a restart goes on from its own last checkpoint.
        goes_on = saved is not None and saved.path != Path(config.resume)
        if env.is_main and not goes_on:
            found = not_continued(config.output_dir, saved)
            if found and not config.overwrite:
                newest, reason = next(iter(found.items()))
                undo = " --no-accept-changes" if config.accept_changes else ""
                raise UserError(
                    f"--resume {config.resume}: --output-dir {config.output_dir} holds {newest.name}, {reason}; give "
                    f"{other_folder(config)} for another folder, --resume auto{undo} to go on with it, or --overwrite "
                    "to remove it"
                )
            replaced = list(found)
            if replaced and saved is None:
                replaced += [config.output_dir / name for name in (EVALUATION, EVENTS, TRACKING)]
                for pattern in ("tensorboard/events.*", SENT.format("*")):
                    replaced += sorted(config.output_dir.glob(pattern))
    return replaced


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a launch does to its output folder with its first step.

    Attributes:
        metrics_until: epochs and steps up to which metrics.jsonl is this run's; None where it begins in this folder.
        replaced: files that are removed.
    """

    metrics_until: tuple[int, int] | None
    replaced: list[Path]


class Restored(NamedTuple):
    """What a launch goes on from.

    Attributes:
        loader_state: of this rank's loader; None where the images follow from the step.
    """

    loader_state: dict[str, Any] | None
    claim: Claim


@collective
def restore(
    state: TrainState,
    net: nn.Module,
    saved: Checkpoint | None,
    config: ResolvedConfig,
    fingerprint: dict[str, Any],
    sampler: Sampler,
    replaced: list[Path],
) -> Restored:
    """Load a checkpoint, if there is one, into `state`.

    `--resume PATH` may go on from a checkpoint elsewhere. The best epoch of `state` is forgotten where this folder does
    not hold it: best.pt is then what is best from now on.

    Args:
        state: before the first step.
        net: the network as it is called, compiled and distributed.
        fingerprint: `run_fingerprint` of this launch; what differs from the checkpoint's was accepted.
        replaced: `files_to_replace`.

    Raises:
        UserError: on all ranks: the checkpoint does not fit, or is of another folder and has nothing left to do.
    """
    loader_state = _load(state, net, saved, config, fingerprint, sampler) if saved else None
    folder = config.output_dir
    is_here, has_best = broadcast(
        (
            saved is not None
            and (
                _folder_of(saved) == os.path.realpath(folder)
                or (folder / LAST not in replaced and _holds_run(folder, saved.record.run))
            ),
            not best_is_missing(folder) and folder / BEST not in replaced,
        ),
        state.env,
    )
    if saved and not is_here and state.epoch >= config.epochs and state.is_evaluated:
        raise UserError(
            f"--resume {config.resume}: its run is finished, epoch {state.epoch} of {config.epochs}; give more "
            f"--epochs and --accept-changes, or --pretrained {config.resume} --resume none to begin from its weights",
            on_all_ranks=True,
        )
    if not (is_here and has_best) or (state.best and state.best.by != config.best_by):
        state.best = None
    return Restored(loader_state, Claim((state.epoch, state.step) if is_here else None, replaced))


@collective
def _load(
    state: TrainState,
    net: nn.Module,
    saved: Checkpoint,
    config: ResolvedConfig,
    fingerprint: dict[str, Any],
    sampler: Sampler,
) -> Any:
    """Load a checkpoint into `state`; returns what this rank's loader continues from.

    In another layout, and after changes, that is None: the images follow from the step, and what is random about them
    is drawn again.
    """
    epoch = sampler.epoch_of(saved.state.step * config.grad_accum_steps)
    warm_up_ddp_buckets(net, config_of_epoch(config, epoch), state.env)
    same_layout = layout_of(config, state.env.world_size) == saved_layout(saved)
    rank_state = saved.ranks[state.env.rank] if same_layout else reshard(saved.ranks, state.env.rank)
    changes = changed_names(saved, fingerprint)
    replicated = saved.state
    if changes:
        require_other_folder(config, saved, sampler.steps_per_epoch)
        replicated, rank_state = adapt(saved, rank_state, state, changes, sampler)
    state.load(replicated, rank_state)
    if not same_layout or changes:
        seed_process(config.seed, state.env.rank, state.step)
        return None
    set_random_state(rank_state.random, state.env.device)
    # A checkpoint between two parts of a schedule has no state of a loader.
    return (rank_state.loader or None) if schedules_agree(config, saved.config, epoch) else None


def _holds_run(folder: Path, run: str) -> bool:
    """Whether last.pt in the folder is of that run."""
    with contextlib.suppress(UserError):
        return os.path.isfile(folder / LAST) and load(folder / LAST).record.run == run
    return False
