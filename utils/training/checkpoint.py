"""Atomic save and restore of last.pt, the two before it and best.pt, and the fingerprint that guards a resume."""

import contextlib
import dataclasses
import os
import shutil
import time
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from utils.config import ResolvedConfig, TrainConfig, flag, flags_with_role
from utils.data.manifest import Manifest
from utils.distributed.collectives import gather_to_rank0
from utils.distributed.exit import writing
from utils.distributed.group import DistEnv
from utils.distributed.launcher import launch_ids
from utils.errors import UserError, first_line
from utils.training.state import TrainState, mean_buffers

LAST, BEST = "last.pt", "best.pt"
EARLIER = ("last-1.pt", "last-2.pt")  # what last.pt was, newest first
FORMAT = 6  # rises with the meaning of a checkpoint or of a random stream
_PARTS = {
    "format", "run", "saved_at", "config", "versions", "fingerprint", "classes", "normalization", "excluded_files",
    "files", "ranks", "model", "optimizer", "scaler", "epoch", "step", "best_top1", "result", "seconds",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run's checkpoints say of it, the same in each.

    Attributes:
        run: name of the run, made at its first start and kept by every resume; no other run has it.
        fingerprint: see `fingerprint`.
        classes: class names in label order.
        normalization: mean and standard deviation per channel, of images in [0, 1].
        excluded_files: of each split, the files that the run has been without from its start.
        files: of each split, what is known of the files besides their names and sizes, in the order of the listing
            without `excluded_files`: `mtimes`, int64 (num_images,), nanoseconds since 1970, and `digests`, int64
            (num_images,), of the content, 0 where it is not known.
        versions: of the libraries that decide pixels and weights.
    """

    run: str
    fingerprint: dict[str, Any]
    classes: tuple[str, ...]
    normalization: tuple[tuple[float, ...], tuple[float, ...]]
    excluded_files: dict[str, list[str]]
    files: dict[str, dict[str, torch.Tensor]]
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The parts of a checkpoint, in types that `torch.load(weights_only=True)` reads."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mean, std = self.normalization
        return parts | {"classes": list(self.classes), "normalization": {"mean": list(mean), "std": list(std)}}


def fingerprint(config: ResolvedConfig, train: Manifest, val: Manifest, env: DistEnv, dali: str) -> dict[str, Any]:
    """What must be the same for a resume to be exact, each under the name that a refusal gives it."""
    uses_dali = config.loader in ("dali", "proxy")
    flags = {flag(name): getattr(config, name) for name in flags_with_role("fixed")}
    return flags | {
        "--decode": config.decode if uses_dali else None,
        "--cache": config.cache if config.loader == "dali" else None,
        "--ema-decay above 0": config.ema_decay > 0,
        "files of train/": train.fingerprint,
        "files of val/": val.fingerprint,
        "classes": len(train.classes),
        "device": env.device.type,
        "DALI version": dali if uses_dali else None,
    }


def check_fingerprint(path: Path, saved: dict[str, Any], now: dict[str, Any], hint: str = "") -> None:
    """Raise UserError, naming what differs and both values, unless the run is the one that was saved.

    `hint` is what the user may have forgotten where the files differ.
    """
    differing = [name for name in now if saved.get(name) != now[name]]
    if differing:
        listed = "; ".join(f"{name}: {saved.get(name)} then, {now[name]} now" for name in differing)
        hint = hint if any(name.startswith("files of") for name in differing) else ""
        raise UserError(
            f"--resume {path}: this checkpoint belongs to another run ({listed}); {hint}restore these, or start anew "
            "with another --output-dir",
            on_all_ranks=True,
        )


def changes(saved: dict[str, Any], config: ResolvedConfig, world_size: int = 1) -> list[str]:
    """Flags that decide what is computed, and that this resume changes, as `--lr 0.5 -> 0.1`."""
    names = flags_with_role("logged")
    if world_size > 1 and saved["grad_exchange"] != "auto":
        names += flags_with_role("logged_if_several")
    now = config.to_dict()
    return [f"{flag(name)} {saved.get(name)} -> {now[name]}" for name in names if saved.get(name) != now[name]]


def version_changes(saved: dict[str, str], now: dict[str, str]) -> list[str]:
    """Libraries of another version than the checkpoint's, as `timm 1.0.30 -> 1.0.31`."""
    return [f"{name} {saved.get(name)} -> {version}" for name, version in now.items() if saved.get(name) != version]


def find(config: TrainConfig) -> list[Path]:
    """The checkpoints that `--resume` means, newest first; none to start from scratch (or from `--pretrained`).

    Raises:
        UserError: a path was given that does not exist, or `--evaluate` has nothing to evaluate, or two things.
    """
    if config.resume not in ("auto", "none"):
        path = Path(config.resume)
        if not os.path.isfile(path):  # unlike Path.is_file, False for what may not be looked at
            raise UserError(f"--resume {path}: no such checkpoint; give an existing file, auto or none")
        return [path]
    if config.resume == "none":
        return []
    names = (BEST, LAST, *EARLIER) if config.evaluate else (LAST, *EARLIER, BEST)
    paths = [config.output_dir / name for name in names if os.path.isfile(config.output_dir / name)]
    if config.evaluate and config.pretrained is not None and paths:
        raise UserError(
            f"--evaluate: {paths[0]} or --pretrained {config.pretrained}? give --resume {paths[0]} or --resume none"
        )
    if config.evaluate and config.pretrained is None and not paths:
        raise UserError(f"--evaluate: no checkpoint in --output-dir {config.output_dir}; give --resume PATH")
    return paths


def load_newest(paths: Sequence[Path]) -> tuple[Path | None, dict[str, Any], list[str]]:
    """The first of `paths` that is whole, its content, and a line for each that was skipped; (None, {}, []) for none.

    Where the first is damaged, the others need not be of its run: only those of the run that has saved last count.

    Raises:
        UserError: there are some, but none is whole: nobody is to lose a run by starting from scratch unasked.
    """
    if not paths:
        return None, {}, []
    skipped: list[str] = []
    whole: list[tuple[Path, float, str]] = []
    for path in paths:
        try:
            saved = load(path)
        except UserError as error:
            if len(paths) == 1 or isinstance(error, OtherFormat):
                raise
            skipped.append(f"skipped: {error}")
            continue
        if not skipped:
            return path, saved, []
        whole.append((path, saved["saved_at"], saved["run"]))
    if not whole:
        raise UserError(
            f"{paths[0].parent}: none of its {len(paths)} checkpoints is whole; start anew with another --output-dir, "
            "or with --resume none --overwrite"
        )
    _, _, newest_run = max(whole, key=lambda found: found[1])
    skipped += [f"skipped: {path}: a checkpoint of another run" for path, _, run in whole if run != newest_run]
    path = next(path for path, _, run in whole if run == newest_run)
    return path, load(path), skipped


class OtherFormat(UserError):
    """A checkpoint of another version of Brisk: whole, and of no use here."""


def not_continued(folder: Path, saved: dict[str, Any]) -> dict[Path, str]:
    """The checkpoints in `folder` that a run going on from `saved` does not continue, newest first, and why.

    A damaged one is nobody's where a run goes on.

    Args:
        folder: the output folder.
        saved: the checkpoint that `--resume PATH` names, or {} for a new run.
    """
    found = {}
    for path in (folder / name for name in (LAST, *EARLIER, BEST)):
        if not os.path.isfile(path):
            continue
        if not saved:
            found[path] = "of an earlier run"
            continue
        try:
            other = load(path)
        except OtherFormat:
            found[path] = "of another run"
            continue
        except UserError:
            continue
        if other["run"] != saved["run"]:
            found[path] = "of another run"
        elif (other["step"], other["epoch"]) > (saved["step"], saved["epoch"]):
            found[path] = f"which is later, of step {other['step']} and epoch {other['epoch']}"
    return found


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Nothing in the file is executed.

    Raises:
        UserError: the file is damaged, or is no checkpoint of Brisk.
    """
    try:
        with warnings.catch_warnings():  # torch warns of some damage before it raises
            warnings.simplefilter("ignore")
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums that torch.save wrote
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
    except Exception as error:
        # torch's own words speak of its releases and of its arguments, which are not the user's.
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(
            f"--resume {path}: damaged, or not a readable checkpoint ({reason}); give another file"
        ) from error
    message = f"--resume {path}: not a checkpoint of this version of Brisk"
    remedy = f"--pretrained {path} with another --output-dir starts from its weights"
    if not isinstance(checkpoint, dict) or "format" not in checkpoint:
        raise UserError(f"{message}; {remedy}")
    if str(checkpoint["format"]) != str(FORMAT):
        found = str(checkpoint["format"])[:20]
        raise OtherFormat(
            f"{message}: it has format {found}, not {FORMAT}; resume it with its own version, or {remedy}"
        )
    if not checkpoint.keys() >= _PARTS:
        raise UserError(f"{message}: a part is missing; {remedy}")
    return checkpoint


def save(
    state: TrainState,
    loader: dict[str, Any],
    config: ResolvedConfig,
    record: RunRecord,
    is_best: bool = False,
) -> str | None:
    """Write last.pt, and best.pt with the same content if `is_best`. A collective; rank 0 writes.

    What last.pt was becomes last-1.pt, and that last-2.pt.

    Args:
        state: the run.
        loader: this rank's `TrainLoader.state()`.
        config: resolved.
        record: of the run.
        is_best: whether the evaluation that this checkpoint holds is the best so far.

    Returns:
        Why it could not be written (a full disk, say), or None; what was there before then stands.
    """
    ranks = gather_to_rank0(state.own(loader), state.env)
    if ranks is None:
        return None
    checkpoint = state.shared() | record.to_dict()
    checkpoint |= {
        "format": FORMAT,
        "saved_at": time.time(),
        "launch_ids": launch_ids(),
        "config": config.to_dict(),
        "ranks": ranks,
    }
    for name in state.modules():
        checkpoint[name] = checkpoint[name] | mean_buffers([own["buffers"][name] for own in ranks])
    try:
        with writing:
            _write(checkpoint, config.output_dir, is_best)
            if state.best_top1 < 0:  # not evaluated yet, so this is of another run
                (config.output_dir / BEST).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # the latter from torch's writer, which hides the former
        for name in (LAST, *EARLIER, BEST):
            with contextlib.suppress(OSError):
                _temporary(config.output_dir / name).unlink(missing_ok=True)
        cause = next(
            (cause for cause in (error, error.__cause__, error.__context__) if isinstance(cause, OSError)), error
        )
        return getattr(cause, "strerror", None) or first_line(cause)
    return None


def _write(checkpoint: dict[str, Any], folder: Path, is_best: bool) -> None:
    # Each name is, at any instant and after a crash, the old content or the new one, whole; last.pt is always there.
    # What takes room comes before the first rename: best.pt never changes for a checkpoint that then cannot be written.
    # It goes before last.pt, which says that this is the best.
    last, earlier, oldest, best = (folder / name for name in (LAST, *EARLIER, BEST))
    written = write_temporary(checkpoint, last)
    new_best = _link(written, best) if is_best else None
    new_earlier = _link(last, earlier) if last.exists() else None
    if new_best is not None:
        _rename(new_best, best)
    if earlier.exists():
        earlier.replace(oldest)
    if new_earlier is not None:
        _rename(new_earlier, earlier)
    _rename(written, last)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def lacks_best(folder: Path) -> bool:
    """Whether there is no best.pt; False where that cannot be seen, as a server is away."""
    try:
        os.stat(folder / BEST)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def has_best_of(saved: dict[str, Any], folder: Path) -> bool:
    """Whether best.pt in `folder` is the best that `saved` knows, and not of what came after it or of another run."""
    try:
        best = load(folder / BEST)
    except UserError:
        return False
    return bool((best["run"], best["best_top1"]) == (saved["run"], saved["best_top1"]))


def write_temporary(checkpoint: dict[str, Any], path: Path) -> Path:
    """Write beside `path`, down to the disk, and return where; `path` itself stays as it is."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)  # after a crash it can be another name of best.pt
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def _link(source: Path, path: Path) -> Path:
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    return temporary


def _rename(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder; the rename is then as safe as it gets
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
