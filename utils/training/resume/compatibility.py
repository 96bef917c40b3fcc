"""Whether a run may go on from a checkpoint: what must be the same, what may change, and what is logged about it."""

import dataclasses
import uuid
from typing import Any

import numpy as np
import PIL
import timm
import torch
import torchvision
from torch import Tensor

from utils.data.augmentation.user_code import code_identity
from utils.data.dali import DALI_VERSION
from utils.data.images.listing import describe_difference, load_listing
from utils.data.loaders.sampler import Sampler
from utils.data.loaders.scheduled_loader import schedules_agree
from utils.data.loaders.settings import BY_DALI
from utils.data.reading.verification import compare_contents, content_digests, load_digests
from utils.data.splits.selection import Splits, initial_manifest
from utils.distributed.collective import collective
from utils.distributed.collectives import broadcast, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import flags_with
from utils.options.flags import flag
from utils.options.remedies import accept_changes, from_weights, start_again
from utils.options.resolved import ResolvedConfig
from utils.text import count
from utils.training.optimization.lr_schedule import rate_at
from utils.training.optimization.optim import peak_lr
from utils.training.resume.changes import (
    changed_names,
    describe_consequences,
    excluded_of_run,
    fingerprint_of,
    is_fixed,
    require_acceptable,
)
from utils.training.settings.batch_layout import layout_of
from utils.training.settings.class_weights import weights_identity
from utils.training.settings.teacher import TrainedTeacher
from utils.training.state.checkpoint import Checkpoint, RunRecord
from utils.training.state.train_state import TrainState

LR_FLAGS = ("schedule", "min_lr", "cooldown_epochs", "decay_epochs", "decay_rate")
LR_JUMP = 0.01  # share of the learning rate by which a resume may change it without a warning


def run_fingerprint(
    config: ResolvedConfig, splits: Splits, env: DistEnv, teacher: TrainedTeacher | None = None
) -> dict[str, Any]:
    """What must be the same for a resume to be exact, each under the name that a refusal gives it."""
    uses_dali = config.loader in BY_DALI
    flags = {flag(name): getattr(config, name) for name in flags_with(role="fixed")}
    flags |= code_identity(config) | weights_identity(config)
    flags["--teacher"] = teacher.identity if teacher else None
    return flags | {
        "--decode": config.decode if uses_dali else None,
        "--cache": config.cache if config.loader == "dali" else None,
        "--ema-decay above 0": config.ema_decay > 0,
        "files of train/": splits["train"].fingerprint,
        "files of val/": splits["val"].fingerprint,
        "classes": len(splits["train"].classes),
        "global batch": layout_of(config, env.world_size).global_batch_size,
        "device": env.device.type,
        "DALI version": DALI_VERSION if uses_dali else None,
    }


@collective
def check_fingerprint(
    config: ResolvedConfig,
    splits: Splits,
    env: DistEnv,
    saved: Checkpoint | None,
    teacher: TrainedTeacher | None = None,
) -> dict[str, Any]:
    """`run_fingerprint` of this launch, and the refusal of a checkpoint of another run.

    Raises:
        UserError: on all ranks, naming what differs and both values.
    """
    now = run_fingerprint(config, splits, env, teacher)
    with sync_errors(env):
        differing = changed_names(saved, now) if saved else []
        if saved and config.accept_changes:
            require_acceptable(config, saved, differing, splits["train"].classes)
        elif saved and differing:
            listed = describe_changes(saved, now, splits)
            forgotten = config.bad_files == "error" and any(saved.record.excluded_files.values())
            forgotten &= any(name.startswith("files of") for name in differing)
            hint = "give --bad-files skip, without whose bad files it ran, or " if forgotten else ""
            accept = f"go on with them by {accept_changes(config, saved.path)}, "
            if is_fixed(differing) or tuple(splits["train"].classes) != saved.record.classes:
                accept = ""
            raise UserError(
                f"--resume {saved.path}: its run had other settings or data ({listed}); {hint}restore these, "
                f"{accept}or {start_again(config)}"
            )
    return now


def describe_changes(saved: Checkpoint, now: dict[str, Any], splits: Splits) -> str:
    """What differs from the checkpoint, then and now; `now` is the `run_fingerprint` of this launch."""
    before = fingerprint_of(saved)
    names = changed_names(saved, now)
    return "; ".join(_describe_change(name, before.get(name), now[name], saved, splits) for name in names)


def _describe_change(name: str, before: Any, now: Any, saved: Checkpoint, splits: Splits) -> str:
    """One part of the fingerprint, then and now; of files what differs, where the run's listing is there."""
    split = name.removeprefix("files of ").removesuffix("/")
    if split in splits and saved.path is not None:
        difference = describe_difference(load_listing(saved.path.parent, split), splits[split])
        return f"{splits[split].title or f'{split}/'} has {difference or 'other files or classes'}"
    then, now = (f"{value:.6g}" if isinstance(value, float) else value for value in (before, now))
    return f"{name}: {then} then, {now} now"


@collective
def create_record(
    config: ResolvedConfig,
    identity: dict[str, Any],
    splits: Splits,
    listed: Splits,
    normalization: tuple[tuple[float, ...], tuple[float, ...]],
    env: DistEnv,
    saved: Checkpoint | None,
) -> tuple[RunRecord, list[str]]:
    """What the run's checkpoints will say of it, and a line for each kind of file that has changed.

    Args:
        identity: its `run_fingerprint`.
        splits: what is trained and evaluated on.
        listed: the same with the files that `--bad-files skip` excludes.
        normalization: mean and standard deviation per channel, of images in [0, 1].
        saved: the checkpoint that the run goes on from.

    Raises:
        UserError: on all ranks: a file has another content than when the checkpoint was written.
    """
    excluded = {split: sorted(manifest.bad) for split, manifest in splits.items()}
    if saved:
        excluded = excluded_of_run(saved, identity, excluded)
    files, changed_files = describe_files(config, listed, excluded, saved, env)
    run_record = RunRecord(
        run=saved.record.run if saved else broadcast(uuid.uuid4().hex, env),
        fingerprint=identity,
        classes=splits["train"].classes,
        normalization=normalization,
        excluded_files=excluded,
        files=files,
        versions=library_versions(),
    )
    return run_record, changed_files


def resume_warnings(
    config: ResolvedConfig,
    saved: Checkpoint | None,
    run_record: RunRecord,
    sampler: Sampler,
    state: TrainState,
    splits: Splits,
) -> list[str]:
    """Lines on other library versions, a jump of the learning rate and accepted changes; none for a new run."""
    if saved is None:
        return []
    lines = changed_versions(saved.record.versions, run_record.versions)
    changes = changed_names(saved, run_record.fingerprint)
    if changes:
        lines.append(f"accepted changes: {describe_changes(saved, run_record.fingerprint, splits)}")
        lines += describe_consequences(saved, state, changes, sampler)
    if state.step == saved.state.step:
        lines += schedule_jump(config, saved, sampler.steps_per_epoch, sampler.global_batch_size)
    epoch, step = divmod(state.step, sampler.steps_per_epoch)
    if step and not changes and not schedules_agree(config, saved.config, epoch):
        lines.append("image size or policy of the epoch under way is another: its random draws begin again")
    return lines


def changed_flags(before: ResolvedConfig, config: ResolvedConfig, world_size: int = 1) -> list[str]:
    """Flags that decide what is computed, and that this resume changes, as `--lr 0.5 -> 0.1`."""
    names = flags_with(role="logged")
    if world_size > 1 and before.grad_exchange != "auto":
        names += flags_with(role="logged_if_several")
    values = [(name, getattr(before, name), getattr(config, name)) for name in names]
    return [f"{flag(name)} {format_change(old, new)}" for name, old, new in values if old != new]


def format_change(old: Any, new: Any) -> str:
    """Both values; numbers have six digits, or all of them where six are the same."""
    short = [float(f"{value:.6g}") if isinstance(value, float) else value for value in (old, new)]
    before, after = short if short[0] != short[1] else (old, new)
    words: dict[Any, str] = {"": "off", None: "default"}
    before, after = (words.get(value, value) for value in (before, after))
    return f"{before} -> {after}"


def library_versions() -> dict[str, str]:
    """Of what decides pixels and weights."""
    return {
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "timm": timm.__version__,
        "DALI": DALI_VERSION,
        "Pillow": PIL.__version__,
    }


def changed_versions(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Libraries of another version than the checkpoint's, as `timm 1.0.30 -> 1.0.31`."""
    return [f"{name} {before.get(name)} -> {version}" for name, version in now.items() if before.get(name) != version]


@collective
def describe_files(
    config: ResolvedConfig,
    listed: Splits,
    excluded_files: dict[str, list[str]],
    saved: Checkpoint | None,
    env: DistEnv,
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """`RunRecord.files`, and lines on the files that have changed since the checkpoint.

    Names and sizes are the fingerprint's. Of a file with another time of change nobody knows the content, unless
    it was known when the checkpoint was written: then it is read again.

    Args:
        listed: all files, also those that `--bad-files skip` excludes.
        excluded_files: of each split, what the run has been without from its start.

    Raises:
        UserError: on all ranks: a file is known to have another content.
    """
    files: dict[str, dict[str, Tensor]] = {}
    lines: list[str] = []
    known = load_digests(config.output_dir) if env.is_main else {}
    with sync_errors(env):
        for split, manifest in listed.items() if env.is_main else ():
            begun = initial_manifest(manifest, excluded_files[split])
            digests = content_digests(begun, known)
            if saved and saved.record.fingerprint[f"files of {split}/"] == begun.fingerprint:
                before = {name: values.numpy() for name, values in saved.record.files[split].items()}
                changed = np.flatnonzero(before["mtimes"] != begun.mtimes)
                unsure, other = compare_contents(begun, changed, before["digests"], digests)
                if other is not None:
                    lines.append(_describe_content(begun.record(other).name, saved, config))
                digests = np.where((digests == 0) & (before["mtimes"] == begun.mtimes), before["digests"], digests)
                if len(unsure):
                    lines.append(
                        f"{count(len(unsure), f'{manifest.kind} file')} changed since the checkpoint, by time, not by "
                        f"size ({begun.name(unsure[0])}{', ...' if len(unsure) > 1 else ''})"
                    )
            files[split] = {"mtimes": torch.from_numpy(begun.mtimes), "digests": torch.from_numpy(digests)}
    return files, lines


def _describe_content(name: str, saved: Checkpoint, config: ResolvedConfig) -> str:
    """A line on a file with another content, where that is accepted.

    Raises:
        UserError: it is not.
    """
    what = f"{name} has another content than when it was saved, with the same name and size"
    if not config.accept_changes:
        raise UserError(
            f"--resume {saved.path}: {what}; restore it, go on by {accept_changes(config, saved.path)}, or "
            f"{start_again(config)}"
        )
    return f"accepted changes: {what}"


def schedule_jump(config: ResolvedConfig, saved: Checkpoint, steps_per_epoch: int, global_batch_size: int) -> list[str]:
    """A line where a resume makes the learning rate jump, as other --epochs do; none where it goes on as it was."""
    before, step = saved.config, saved.state.step
    names = ("epochs", "lr", "lr_scaling", "warmup_epochs", *LR_FLAGS)
    changed = [name for name in names if getattr(before, name) != getattr(config, name)]
    if not changed or step >= config.epochs * steps_per_epoch:
        return []
    old = dataclasses.replace(config, **{name: getattr(before, name) for name in names})
    last = rate_at(old, max(0, step - 1), steps_per_epoch, global_batch_size)
    due = rate_at(old, step, steps_per_epoch, global_batch_size) if step < old.epochs * steps_per_epoch else last
    now = rate_at(config, step, steps_per_epoch, global_batch_size)
    if abs(now - due) < LR_JUMP * max(now, due):
        return []
    peaks = [peak_lr(one, global_batch_size) for one in (old, config)]
    flags = ", ".join(f"{flag(name)} {format_change(getattr(before, name), getattr(config, name))}" for name in changed)
    return [
        f"the learning rate goes from {last:.4g} to {now:.4g} in one step, from {last / peaks[0]:.2%} to "
        f"{now / peaks[1]:.2%} of its peak ({flags}); {from_weights(config, saved.path)} trains on with a "
        "schedule of its own"
    ]
