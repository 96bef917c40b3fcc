"""Resume: which checkpoint, whether it fits, and what of it the run takes over."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import timm
import torch
import torchvision
from torch import Tensor, nn

import models
from models import Normalization
from utils.config import ResolvedConfig, TrainConfig, flag, require_data, validate
from utils.data.dali import DALI_VERSION
from utils.data.sampler import Sampler
from utils.data.splits import Splits, initial_manifest
from utils.data.verification import compare_contents, content_digests, load_digests
from utils.distributed.collectives import all_gather_object, broadcast, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.launcher import restarted_by
from utils.errors import UserError
from utils.log import emit
from utils.network.parallel import warm_up_ddp_buckets
from utils.seed import seed_process, set_random_state
from utils.training import checkpoint
from utils.training.batch_layout import layout_of, saved_layout
from utils.training.optim import rate_at, scaled_lr
from utils.training.output import EVALUATION
from utils.training.state import TrainState, reshard

LR_JUMP = 0.01  # share of the learning rate by which a resume may change it without a warning
# What decides the result of an evaluation, and how much of it fits into memory.
EVALUATION_FLAGS = (
    "data_dir", "arch", "num_classes", "loader", "image_size", "val_resize", "amp", "batch_size", "hw_decoder_load",
)  # fmt: skip


def open_checkpoint(config: TrainConfig, env: DistEnv) -> tuple[Path | None, dict[str, Any]]:
    """The file that `--resume` means and its content; (None, {}) if there is none to use. A collective.

    Raises:
        UserError: on all ranks: missing, damaged, or not the same for all ranks.
    """
    path: Path | None = None
    saved: dict[str, Any] = {}
    skipped: list[str] = []
    if saved_before_restart(config, env):
        config = dataclasses.replace(config, resume="auto")
    with sync_errors(env):
        path, saved, skipped = checkpoint.load_newest(checkpoint.find(config))
    if env.is_main:
        for line in skipped:
            emit(line)
    found = all_gather_object((saved.get("step"), saved.get("epoch"), skipped), env)
    if len({(step, epoch) for step, epoch, _ in found}) > 1:  # an evaluation changes the epoch alone
        why = "".join(f"; rank {rank} {lines[0]}" for rank, (_, _, lines) in enumerate(found) if lines)
        raise UserError(
            f"--output-dir {config.output_dir}: not the same checkpoint on all ranks{why}; use a shared folder",
            on_all_ranks=True,
        )
    return path, saved


def saved_before_restart(config: TrainConfig, env: DistEnv) -> bool:
    """Whether this launch has left a checkpoint before torchrun or Slurm started it again. A collective.

    `--resume none` and `--resume PATH` say where a launch begins, not where each of its restarts does.
    """
    names = {name for of_rank in all_gather_object(restarted_by(), env) for name in of_rank}
    if not names or config.resume == "auto" or config.evaluate:
        return False
    saved: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # none of them is whole
        _, saved, _ = checkpoint.load_newest(checkpoint.find(dataclasses.replace(config, resume="auto")))
    return any(all_gather_object(not names.isdisjoint(saved.get("launch_ids", [])), env))


def saved_normalization(saved: dict[str, Any]) -> Normalization | None:
    """Mean and standard deviation per channel with which the run of a checkpoint trains; None for no checkpoint."""
    if not saved:
        return None
    channels = saved["normalization"]
    return tuple(channels["mean"]), tuple(channels["std"])


def settings_of_checkpoint(
    config: TrainConfig, saved: dict[str, Any], path: Path | str, env: DistEnv
) -> tuple[TrainConfig, list[str]]:
    """`--evaluate`: what was not given is as in the run that wrote a checkpoint.

    Args:
        config: as the user gave it.
        saved: the configuration of the checkpoint's run.
        path: of the checkpoint, for messages.
        env: this process.

    Returns:
        The configuration to evaluate with, and notes on what differs from the run's.

    Raises:
        UserError: another architecture was given.
    """
    if "arch" in config.given and models.base_arch(config.arch) != models.base_arch(saved["arch"]):
        raise UserError(f"--arch {config.arch}: {path} holds {saved['arch']}, another architecture; leave --arch out")
    values = {name: saved[name] for name in EVALUATION_FLAGS if name not in config.given}
    if values.get("data_dir") is not None:
        values["data_dir"] = Path(values["data_dir"])
    if values.get("loader") == "synthetic" and "data_dir" in config.given:
        del values["loader"]
    if values.get("amp") == "fp16" and env.device.type == "cpu":
        values["amp"] = "none"
    if "image_size" in config.given and "val_resize" in values:
        values["val_resize"] = round(config.image_size * saved["val_resize"] / saved["image_size"])
    config = dataclasses.replace(config, **values)
    validate(config)
    require_data(config)
    now = config.to_dict()
    notes = [
        f"{flag(name)} {now[name]}, its run had {saved[name]}"
        for name in EVALUATION_FLAGS
        if name not in ("data_dir", "batch_size", "hw_decoder_load") and now[name] != saved[name]
    ]
    return config, notes


def keep_start(config: TrainConfig, path: Path | None, saved: dict[str, Any]) -> TrainConfig:
    """What a run began with stays with it: the pretrained weights.

    Raises:
        UserError: others were given.
    """
    if not saved:
        return config
    names = ("pretrained", "pretrained_ema", "pretrained_head")
    begun = {name: saved["config"][name] for name in names}
    for name in names:
        now = getattr(config, name)
        same = _same_source(now, begun[name]) if name == "pretrained" else now == begun[name]
        if name in config.given and not same:
            raise UserError(
                f"{flag(name)} {now}: not used, as {path} is of a run that began with {begun[name]}; give another "
                "--output-dir to start a new run, or leave it out",
                on_all_ranks=True,
            )
    return dataclasses.replace(config, **begun)


def _same_source(one: str | None, other: str | None) -> bool:
    if one is None or other is None or "timm" in (one, other):
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)


def check_resume(
    path: Path, saved: dict[str, Any], fingerprint: dict[str, Any], config: ResolvedConfig, env: DistEnv
) -> None:
    """Raise UserError on all ranks unless the run is, on each, the one that was saved. A collective."""
    without = config.bad_files == "error" and any(saved["excluded_files"].values())
    hint = "give --bad-files skip, without whose bad files it ran, or " if without else ""
    with sync_errors(env):
        checkpoint.check_fingerprint(path, saved["fingerprint"], fingerprint, hint)


def check_folder(config: ResolvedConfig, path: Path | None, saved: dict[str, Any], env: DistEnv) -> list[Path]:
    """The files of the output folder that this launch is to remove with its first step. A collective.

    Raises:
        UserError: on all ranks: there are checkpoints that the run does not continue, and `--overwrite` was not given.
    """
    replaced: list[Path] = []
    with sync_errors(env):
        # With --resume PATH too, a restart goes on from its own last checkpoint.
        goes_on = bool(saved) and path != Path(config.resume)
        if env.is_main and not goes_on:
            found = checkpoint.not_continued(config.output_dir, saved)
            if found and not config.overwrite:
                newest, reason = next(iter(found.items()))
                raise UserError(
                    f"--resume {config.resume}: --output-dir {config.output_dir} holds {newest.name}, {reason}; give "
                    "another --output-dir, --resume auto to go on with it, or --overwrite to remove it"
                )
            replaced = list(found)
            if replaced and not saved:
                events = sorted((config.output_dir / "tensorboard").glob("events.*"))
                replaced += [config.output_dir / EVALUATION, *events]
    return replaced


def describe_files(
    config: ResolvedConfig,
    listed: Splits,
    excluded_files: dict[str, list[str]],
    path: Path | None,
    saved: dict[str, Any],
    env: DistEnv,
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """`RunRecord.files`, and lines on the files that have changed since the checkpoint `saved`. A collective.

    Names and sizes are the fingerprint's. Of a file with another time of change nobody knows the content, unless
    it was known when the checkpoint was written: then it is read again.

    Raises:
        UserError: on all ranks: a file is known to have another content.
    """
    files: dict[str, dict[str, Tensor]] = {}
    lines: list[str] = []
    known = load_digests(config.output_dir) if env.is_main else {}
    with sync_errors(env):
        for split, manifest in listed.items() if env.is_main else ():
            begun = initial_manifest(manifest, excluded_files[split])
            digests = content_digests(begun, known, split)
            if saved and saved["fingerprint"][f"files of {split}/"] == begun.fingerprint:
                before = {name: values.numpy() for name, values in saved["files"][split].items()}
                changed = np.flatnonzero(before["mtimes"] != begun.mtimes)
                unsure = compare_contents(begun, changed, before["digests"], digests, path)
                digests = np.where((digests == 0) & (before["mtimes"] == begun.mtimes), before["digests"], digests)
                if len(unsure):
                    lines.append(
                        f"{len(unsure):,} {split} file{'s' if len(unsure) > 1 else ''} changed since the checkpoint, "
                        f"by time, not by size ({begun.name(unsure[0])}{', ...' if len(unsure) > 1 else ''})"
                    )
            files[split] = {"mtimes": torch.from_numpy(begun.mtimes), "digests": torch.from_numpy(digests)}
    return files, lines


def library_versions() -> dict[str, str]:
    """Of what decides pixels and weights."""
    return {
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "timm": timm.__version__,
        "DALI": DALI_VERSION,
        "Pillow": PIL.__version__,
    }


def describe_schedule_change(
    config: ResolvedConfig, path: Path | None, saved: dict[str, Any], sampler: Sampler
) -> list[str]:
    """A line where a resume makes the learning rate jump, as other --epochs do; none where it goes on as it was."""
    before, step, per_epoch = saved["config"], saved["step"], sampler.steps_per_epoch
    names = ("epochs", "lr", "warmup_epochs")
    changed = [name for name in names if before[name] != getattr(config, name)]
    if not changed or step >= config.epochs * per_epoch:
        return []
    old = dataclasses.replace(config, **{name: before[name] for name in names})
    last = rate_at(old, max(0, step - 1), per_epoch, sampler.global_batch_size)
    due = rate_at(old, step, per_epoch, sampler.global_batch_size) if step < old.epochs * per_epoch else last
    now = rate_at(config, step, per_epoch, sampler.global_batch_size)
    if abs(now - due) < LR_JUMP * max(now, due):
        return []
    peaks = [scaled_lr(one.lr, sampler.global_batch_size) for one in (old, config)]
    flags = ", ".join(f"{flag(name)} {before[name]:g} -> {getattr(config, name):g}" for name in changed)
    return [
        f"the learning rate goes from {last:.4g} to {now:.4g} in one step, from {last / peaks[0]:.2%} to "
        f"{now / peaks[1]:.2%} of its peak ({flags}); --pretrained {path} with another --output-dir trains on with a "
        "schedule of its own"
    ]


def history(path: Path | None, saved: dict[str, Any], config: ResolvedConfig, state: TrainState) -> tuple[int, int]:
    """Epochs and steps up to which metrics.jsonl in the output folder is of the run that `state` is. A collective.

    What `--resume PATH` goes on from may lie elsewhere, or before the best checkpoint of the folder: best.pt is then
    what is best from now on.
    """
    if path is None or config.resume == "auto":
        return state.epoch, state.step
    here = broadcast(os.path.realpath(path.parent) == os.path.realpath(config.output_dir), state.env)
    best = broadcast(state.env.is_main and checkpoint.has_best_of(saved, config.output_dir), state.env)
    if not (here and best):
        state.best_top1 = -1.0
    return (state.epoch, state.step) if here else (-1, -1)


def restore(state: TrainState, net: nn.Module, saved: dict[str, Any], config: ResolvedConfig) -> dict[str, Any] | None:
    """Load the checkpoint `saved`, if there is one, into `state`; returns what this rank's loader continues from.

    In another layout that is nothing: the images follow from the step, and what is random about them is drawn anew.
    """
    if not saved:
        return None
    warm_up_ddp_buckets(net, config, state.env)
    ranks: list[dict[str, Any]] = saved["ranks"]
    if layout_of(config, state.env.world_size) == saved_layout(saved):
        own = ranks[state.env.rank]
        state.load(saved, own)
        set_random_state(own["random"], state.env.device)
        loader: dict[str, Any] = own["loader"]
        return loader
    state.load(saved, reshard(ranks, state.env.rank))
    seed_process(config.seed, state.env.rank, state.step)
    return None
