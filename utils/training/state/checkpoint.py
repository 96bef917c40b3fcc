"""Checkpoints: their content as a type, and last.pt, those before it and best.pt, written atomically."""

import contextlib
import dataclasses
import itertools
import os
import time
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models import create_model_arguments
from utils.data.splits.selection import SPLITS, InitialFiles
from utils.distributed.collective import collective
from utils.distributed.collectives import gather_to_rank0
from utils.distributed.launcher import launch_ids
from utils.errors import UserError, first_line
from utils.files import link_temporary, rename, temporary_of, write_temporary
from utils.options.arguments import model_options
from utils.options.config import MAX_KEEP, TrainConfig
from utils.options.remedies import from_weights, start_again
from utils.options.resolved import ResolvedConfig
from utils.options.validation import require_checkpoint
from utils.training.state.train_state import NETWORKS, BestEpoch, RankState, ReplicatedState, TrainState, mean_buffers

LAST, BEST = "last.pt", "best.pt"
EARLIER = tuple(f"last-{number}.pt" for number in range(1, MAX_KEEP + 1))  # what last.pt was, newest first
IS_FOLDER = 0x10  # attribute of an entry of a ZIP archive, of which torch.load would read nothing
Temperature = float | list[float]  # of several labels one a class
FORMAT = 6  # rises with the meaning of a checkpoint or of a random stream


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run's checkpoints say of it, the same in each.

    Attributes:
        run: name of the run, made at its first start and kept by every resume; no other run has it.
        fingerprint: see `utils.training.resume.compatibility.run_fingerprint`.
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
        """In types that `torch.load(weights_only=True)` reads."""
        mean, std = self.normalization
        return _shallow_dict(self) | {
            "classes": list(self.classes),
            "normalization": {"mean": list(mean), "std": list(std)},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunRecord":
        """Undo of `to_dict`; other keys are ignored."""
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        channels = fields["normalization"]
        fields["normalization"] = (tuple(channels["mean"]), tuple(channels["std"]))
        return cls(**fields | {"classes": tuple(fields["classes"])})


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file. The file itself is one flat dict, see `to_dict`.

    Attributes:
        config: of the run that wrote it.
        record: what all checkpoints of that run say.
        state: the part that is the same on all ranks. Running statistics in it are the mean over the ranks.
        ranks: the part of each rank.
        saved_at: seconds since 1970.
        launch_ids: names of the launch that wrote it; see `utils.distributed.launcher`.
        path: the file that it was read from; None before it is written.
        temperature: of networks by name, by which logits are divided before they become probabilities; {} before the
            end of a run, and in last.pt.
    """

    config: ResolvedConfig
    record: RunRecord
    state: ReplicatedState
    ranks: list[RankState]
    saved_at: float
    launch_ids: list[str]
    path: Path | None = None
    temperature: dict[str, Temperature] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The file's content. timm finds the weights under "model" and "model_ema"."""
        state, config = _shallow_dict(self.state), self.config
        del state["networks"]
        options = model_options(config)
        return {
            "format": FORMAT,
            "saved_at": self.saved_at,
            "launch_ids": self.launch_ids,
            "config": config.to_dict(),
            "create_model": create_model_arguments(config.arch, config.num_classes, config.image_size, options),
            **self.record.to_dict(),
            **state,
            "best": None if self.state.best is None else _shallow_dict(self.state.best),
            **self.state.networks,
            "ranks": [_shallow_dict(rank) for rank in self.ranks],
            **({"temperature": self.temperature} if self.temperature else {}),
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any], path: Path | None = None) -> "Checkpoint":
        """Undo of `to_dict`.

        Raises:
            KeyError, TypeError, AttributeError: a part is missing, or of another type.
        """
        names = [field.name for field in dataclasses.fields(ReplicatedState) if field.name != "networks"]
        state = {name: content[name] for name in names}
        state["best"] = None if state["best"] is None else BestEpoch(**state["best"])
        networks = {name: content[name] for name in NETWORKS if name == NETWORKS[0] or name in content}
        return cls(
            config=ResolvedConfig.from_dict(content["config"]),
            record=RunRecord.from_dict(content),
            state=ReplicatedState(networks=networks, **state),
            ranks=[RankState(**rank) for rank in content["ranks"]],
            saved_at=content["saved_at"],
            launch_ids=content["launch_ids"],
            path=path,
            temperature=dict(content.get("temperature", {})),
        )

    @property
    def initial_files(self) -> InitialFiles:
        """The files with which the run began."""
        prints = self.record.fingerprint
        return InitialFiles(
            excluded=self.record.excluded_files,
            fingerprints={split: prints[f"files of {split}/"] for split in SPLITS},
            held_out_by=self.config.held_out_by,
            folder=self.path and self.path.parent,
        )

    @property
    def position(self) -> tuple[int, int]:
        """Steps and epochs that are done: a later checkpoint of the same run has a larger one."""
        return self.state.step, self.state.epoch


def _shallow_dict(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def find_checkpoints(config: TrainConfig) -> list[Path]:
    """The checkpoints that `--resume` means, newest first; none to start from scratch (or from `--pretrained`).

    Raises:
        UserError: a path was given that does not exist, or `--evaluate` has nothing to evaluate, or two things.
    """
    if config.resume not in ("auto", "none"):
        require_checkpoint(config)
        return [Path(config.resume)]
    if config.resume == "none":
        return []
    names = (BEST, LAST, *EARLIER) if config.evaluate else (LAST, *EARLIER, BEST)
    paths = [config.output_dir / name for name in names if os.path.isfile(config.output_dir / name)]
    if config.evaluate and config.pretrained is not None and paths:
        raise UserError(
            f"--evaluate: {paths[0]} or --pretrained {config.pretrained}? give --resume {paths[0]} or --resume none"
        )
    if config.evaluate and config.pretrained is None and not paths:
        raise UserError(
            f"--evaluate: no checkpoint in --output-dir {config.output_dir}; give --name or --output-dir of a run, or "
            "--resume PATH"
        )
    return paths


def load_newest(
    paths: Sequence[Path], flag: str = "--resume", config: TrainConfig | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The first of `paths` that is whole, and a line for each that was skipped; (None, []) for no paths.

    Where the first is damaged, the others need not be of its run: only those of the run that has saved last count.

    Args:
        paths: of checkpoints, the preferred one first.
        flag, config: see `load`.

    Raises:
        UserError: there are some, but none is whole: nobody is to lose a run by starting from scratch unasked.
    """
    if not paths:
        return None, []
    skipped: list[str] = []
    whole: list[tuple[Path, float, str]] = []
    for path in paths:
        try:
            found = load(path, flag, config)
        except UserError as error:
            if len(paths) == 1 or isinstance(error, OtherFormat):
                raise
            skipped.append(f"skipped: {error}")
            continue
        if not skipped:
            return found, []
        whole.append((path, found.saved_at, found.record.run))
    if not whole:
        remedy = "give another run" if config is None or config.evaluate else start_again(config)
        none = f"none of its {len(paths)} checkpoints is whole" if len(paths) > 1 else "its checkpoint is not whole"
        raise UserError(f"{paths[0].parent}: {none}; {remedy}")
    _, _, newest_run = max(whole, key=lambda candidate: candidate[1])
    skipped += [f"skipped: {path}: a checkpoint of another run" for path, _, run in whole if run != newest_run]
    return load(next(path for path, _, run in whole if run == newest_run)), skipped


class OtherFormat(UserError):
    """A checkpoint of another version of Brisk: whole, and of no use here."""


def not_continued(folder: Path, saved: Checkpoint | None) -> dict[Path, str]:
    """The checkpoints in `folder` that a run going on from `saved` does not continue, newest first, and why.

    A damaged one does not count where a run goes on.

    Args:
        folder: the output folder.
        saved: the checkpoint that `--resume PATH` names; None for a new run.
    """
    found = {}
    for path in (folder / name for name in (LAST, *EARLIER, BEST)):
        if not os.path.isfile(path):
            continue
        if saved is None:
            found[path] = "of an earlier run"
            continue
        try:
            other = load(path)
        except OtherFormat:
            found[path] = "of another run"
            continue
        except UserError:
            continue
        if other.record.run != saved.record.run:
            found[path] = "of another run"
        elif other.position > saved.position:
            found[path] = f"which is later, of step {other.state.step} and epoch {other.state.epoch}"
    return found


def load(path: Path, flag: str = "--resume", config: TrainConfig | None = None) -> Checkpoint:
    """Read a checkpoint onto the CPU. Nothing in the file is executed.

    Args:
        path: of the file.
        flag: that names it, for messages.
        config: of the run that it is for, if there is one, for what its messages offer.

    Raises:
        UserError: the file is damaged, or is no checkpoint of Brisk.
    """
    is_found = config is not None and config.resume == "auto" and not config.evaluate  # by us, in the output folder
    content = _read_whole(path, flag, start_again(config) if config and is_found else "give another file")
    message = f"{flag} {path}: not a checkpoint of this version of Brisk"
    remedy = "train.py --pretrained takes its weights"
    if config is not None:
        remedy = f"{from_weights(config, path)} starts from its weights"
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(f"{message}; {remedy}")
    if str(content["format"]) != str(FORMAT):
        found = str(content["format"])[:20]
        raise OtherFormat(f"{message}: it has format {found}, not {FORMAT}; use it with its own version, or {remedy}")
    try:
        return Checkpoint.from_dict(content, path)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{message}: a part is missing; {remedy}") from None


def _read_whole(path: Path, flag: str, remedy: str) -> Any:
    """What torch.save wrote to `path`.

    Raises:
        UserError: not all of it is there as it was written.
    """
    try:
        with warnings.catch_warnings():  # torch warns of some damage before it raises
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums that torch.save wrote
            damaged = archive.testzip()
            folders = [info.filename for info in archive.infolist() if info.external_attr & IS_FOLDER]
        if damaged is not None or folders:
            raise zipfile.BadZipFile(f"wrong checksum or kind of {damaged or folders[0]}")
    except Exception as error:
        # torch's own messages are about its releases and its arguments, which are not the user's.
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(f"{flag} {path}: damaged, or not a readable checkpoint ({reason}); {remedy}") from error
    return content


@collective
def create_checkpoint(
    state: TrainState, loader: dict[str, Any], config: ResolvedConfig, record: RunRecord
) -> Checkpoint | None:
    """The run as it is now, on rank 0; None on the others.

    Its tensors are those of the network and of the optimizer, which the next step changes.

    Args:
        state: the run.
        loader: this rank's `TrainLoader.state()`.
        record: of the run.
    """
    ranks = gather_to_rank0(state.rank_state(loader), state.env)
    if ranks is None:
        return None
    replicated = state.replicated_state()
    networks = {
        name: weights | mean_buffers([rank.buffers[name] for rank in ranks])
        for name, weights in replicated.networks.items()
    }
    replicated = dataclasses.replace(replicated, networks=networks)
    return Checkpoint(config, record, replicated, ranks, time.time(), launch_ids())


def save(checkpoint: Checkpoint, folder: Path, is_best: bool = False) -> str | None:
    """Write last.pt, and best.pt with the same content if `is_best`.

    What last.pt was becomes last-1.pt, and so on, as far as `--keep` says. A best.pt of another run is removed: a run
    that has no best epoch yet has none.

    Args:
        checkpoint: of the run.
        folder: its output folder.
        is_best: whether the evaluation that this checkpoint holds is the best so far.

    Returns:
        Why it could not be written (a full disk, say), or None; what was there before is then kept.
    """
    try:
        write_checkpoint(checkpoint.to_dict(), folder, is_best, checkpoint.config.keep)
        if checkpoint.state.best is None:  # not evaluated yet, so best.pt is another run's
            (folder / BEST).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # the latter from torch's writer, which hides the former
        for name in (LAST, *EARLIER, BEST):
            with contextlib.suppress(OSError):
                temporary_of(folder / name).unlink(missing_ok=True)
        cause = next(
            (cause for cause in (error, error.__cause__, error.__context__) if isinstance(cause, OSError)), error
        )
        return getattr(cause, "strerror", None) or first_line(cause)
    return None


def write_checkpoint(content: dict[str, Any], folder: Path, is_best: bool, keep: int) -> None:
    """Write last.pt, move the earlier ones on, of which `keep` stay, and link best.pt to it if `is_best`.

    Each name is, at any instant and after a crash, the old content or the new one, whole; last.pt is always there. What
    takes room comes before the first rename: best.pt never changes for a checkpoint that then cannot be written. It
    goes before last.pt, which says that this is the best.

    Raises:
        OSError, RuntimeError: it could not be written.
    """
    last, best, *earlier = (folder / name for name in (LAST, BEST, *EARLIER))
    written = write_temporary(last, lambda file: torch.save(content, file))
    new_best = link_temporary(written, best) if is_best else None
    new_earlier = link_temporary(last, earlier[0]) if keep and last.exists() else None
    if new_best is not None:
        rename(new_best, best)
    for newer, older in reversed(list(itertools.pairwise(earlier[:keep]))):
        if newer.exists():
            newer.replace(older)
    if new_earlier is not None:
        rename(new_earlier, earlier[0])
    rename(written, last)
    for path in itertools.takewhile(Path.exists, earlier[keep:]):  # since a resume with a lower --keep
        path.unlink()


def best_is_missing(folder: Path) -> bool:
    """Whether there is no best.pt; False where that cannot be seen, as a server is away."""
    try:
        os.stat(folder / BEST)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
