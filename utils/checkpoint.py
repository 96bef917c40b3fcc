"""Atomic save and restore of last.pt, the two before it and best.pt, and the fingerprint that guards a resume."""

import contextlib
import os
import shutil
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from utils.config import TrainConfig, flag
from utils.dataset import Manifest
from utils.distributed import DistEnv, gather_main
from utils.errors import UserError
from utils.launcher import launchers
from utils.leave import writing
from utils.state import TrainState, mean_buffers

LAST, BEST = "last.pt", "best.pt"
EARLIER = ("last-1.pt", "last-2.pt")  # what last.pt was, newest first
FORMAT = 4
_PARTS = {
    "format", "config", "fingerprint", "classes", "left_out", "ranks", "model", "optimizer", "scaler", "epoch", "step",
    "best_top1", "result", "seconds",
}  # fmt: skip

# What decides which images come next, how they look, and what fits the saved tensors. Other flags may change.
_FINGERPRINT_FLAGS = (
    "arch", "num_classes", "seed", "loader", "image_size", "val_resize", "augment", "crop_scale", "hflip", "mixup",
    "cutmix", "random_erase", "optimizer", "momentum", "weight_decay",
)  # fmt: skip
_FREE_FLAGS = (
    "data_dir",
    "output_dir",
    "resume",
    "evaluate",
    "workers",
    "log_steps",
    "checkpoint_steps",
    "time_limit",
    "max_bad_steps",
    "tensorboard",
)


def fingerprint(config: TrainConfig, train: Manifest, val: Manifest, env: DistEnv, dali: str) -> dict[str, Any]:
    """What must be the same for a resume to be exact, each under the name that a refusal gives it."""
    uses_dali = config.loader in ("dali", "proxy")
    flags = {flag(name): getattr(config, name) for name in _FINGERPRINT_FLAGS}
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
            "with another --output-dir or --resume none",
            common=True,
        )


def changes(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    """Flags that a resume is free to change and that this one does, as `--lr 0.5 -> 0.1`."""
    now = config.to_dict()
    names = [name for name in now if name not in _FREE_FLAGS and saved.get(name) != now[name]]
    return [f"{flag(name)} {saved.get(name)} -> {now[name]}" for name in names]


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

    Raises:
        UserError: there are some, but none is whole: nobody is to lose a run by starting from scratch unasked.
    """
    skipped: list[str] = []
    for path in paths:
        try:
            return path, load(path), skipped
        except UserError as error:
            if len(paths) == 1:
                raise
            skipped.append(f"skipped: {error}")
    if skipped:
        raise UserError(
            f"{paths[0].parent}: none of its {len(paths)} checkpoints is whole; --resume none starts from scratch"
        )
    return None, {}, []


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
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= _PARTS or str(checkpoint["format"]) != str(FORMAT):
        raise UserError(f"--resume {path}: not a checkpoint of this version of Brisk; --pretrained loads bare weights")
    return checkpoint


def save(
    state: TrainState,
    loader: dict[str, Any],
    config: TrainConfig,
    fingerprint: dict[str, Any],
    classes: Sequence[str],
    left_out: dict[str, list[str]],
    is_best: bool = False,
) -> str | None:
    """Write last.pt, and best.pt with the same content if `is_best`. A collective; rank 0 writes.

    What last.pt was becomes last-1.pt, and that last-2.pt.

    Args:
        state: the run.
        loader: this rank's `TrainLoader.state()`.
        config: resolved.
        fingerprint: see `fingerprint`.
        classes: class names in label order.
        left_out: of each split, the files that the run has been without from its start.
        is_best: whether the evaluation that this checkpoint holds is the best so far.

    Returns:
        Why it could not be written (a full disk, say), or None; what was there before then stands.
    """
    ranks = gather_main(state.own(loader), state.env)
    if ranks is None:
        return None
    checkpoint = state.shared() | {
        "format": FORMAT,
        "launchers": launchers(),
        "config": config.to_dict(),
        "fingerprint": fingerprint,
        "classes": list(classes),
        "left_out": left_out,
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
        return getattr(cause, "strerror", None) or str(cause).splitlines()[0]
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
        return bool(load(folder / BEST)["best_top1"] == saved["best_top1"])
    except UserError:
        return False


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
