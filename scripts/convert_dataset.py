#!/usr/bin/env python3
"""Write a data set again, as WebDataset tars or as class folders.

    scripts/convert_dataset.py SRC DST

SRC is a data set in any form that train.py reads, or parquet files of images and labels. The bytes of the images are
copied. With --max-side, larger images are made smaller. DST gets shards such as train-0000.tar, their indexes, and
classes.txt; with --to folder it gets train/CLASS/ and val/CLASS/. A run on DST has the order of images, and so the
bits, of a run on SRC, where the images stay as they are.

The same command goes on where it was killed. No shard appears under its final name before it is complete.

Exit status: 0 done, 2 wrong usage or an image that cannot be read, 143 stopped by Ctrl-C or SIGTERM.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from scripts.check_dataset import local_folder, record_signals
from utils.data.conversion import parquet
from utils.data.formats.sources import FORMATS, find_source, has_class_folders
from utils.data.formats.split_folders import find_folder
from utils.errors import Stopped, UserError
from utils.files import atomic_write_text, temporary_of
from utils.log import emit
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.options.limits import ABOVE_0, MIN_1, Limit
from utils.options.readers import choice_option, number_option
from utils.options.store_url import refuse_url, require_store, store_url
from utils.text import count

PLAN, CLASSES, STAGE = "convert.json", "classes.txt", ".arrow"  # in DST
SHARD_MB, QUALITY = 256.0, 90
LOCK_SECONDS = 5.0  # for the processes of a conversion that was killed to end
VERSION = 1
WHOLE, NUMBER = number_option(int), number_option(float)


Form = Literal["tar", "folder"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        config: where the source is, and how it is read.
        shard_size: of a tar, MB.
        max_side: that larger images get, pixels; None copies all.
        quality: of their JPEGs.
    """

    config: TrainConfig
    target: Path
    to: Form
    shard_size: float
    max_side: int | None
    quality: int
    workers: int

    @property
    def source(self) -> Path:
        """Folder of the source."""
        assert self.config.data_dir is not None, "SRC"
        return self.config.data_dir

    def described(self) -> dict[str, Any]:
        """What decides about the content of DST, besides the source's files."""
        names = self.config.class_names
        return {
            "version": VERSION,
            "source": str(self.source.resolve()),
            "--to": self.to,
            "--shard-size": self.shard_size,
            "--max-side": self.max_side,
            "--quality": self.quality,
            "--train-data": self.config.train_data,
            "--val-data": self.config.val_data,
            "--val-split": self.config.val_split,
            "--class-names": None if names is None else str(names.resolve()),
            **({"--train-split": self.config.train_split} if self.config.train_split != "train" else {}),
        }


# ---------------------------------------------------------------------------------------------------------------------
# The folder DST


def check_folders(source: Path, target: Path) -> None:
    """Raise UserError unless SRC is a folder and DST lies outside of it."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; give a data set, or a folder of parquet files")
    if target.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{target}: lies in {source}, which is read; give a folder outside of it")


@contextlib.contextmanager
def claim(target: Path, described: Mapping[str, Any]) -> Iterator[None]:
    """Make the folder, or take that of the same conversion, for this process alone.

    Raises:
        UserError: it cannot be written, has other files, is of another conversion, or another process writes there.
    """
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target).close()
        folder = os.open(target, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); give another folder") from None
    try:
        lock(folder, target)
        check_target(target, described)
        yield
    finally:
        os.close(folder)
        if is_new:
            with contextlib.suppress(OSError):
                target.rmdir()  # if nothing has been written


def lock(folder: int, target: Path) -> None:
    """Keep other conversions out of an open folder until it is closed."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(f"{target}: another conversion writes there; wait for its end") from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return


def check_target(target: Path, described: Mapping[str, Any]) -> None:
    """Raise UserError unless a folder is empty, or of a conversion with these options."""
    path = target / PLAN
    if not path.exists():
        others = sorted(set(os.listdir(target)) - {temporary_of(path).name})
        if others:
            raise UserError(f"{target}: has other files ({others[0]}, ...); give an empty or a new folder")
        return
    try:
        saved = json.loads(path.read_text())["options"]
        differing = [name for name, value in described.items() if saved[name] != value]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: cannot be read; give another folder, or delete this one") from None
    if differing:
        name = differing[0]
        raise UserError(
            f"{target}: holds a conversion with {name} {saved[name]}, not {described[name]}; give another folder, or "
            "delete this one"
        )


def write_plan(target: Path, described: Mapping[str, Any], fingerprint: str) -> None:
    """Write what a repeated conversion must have in common with this one.

    Raises:
        UserError: the images that are written are of a source with other files.
    """
    path = target / PLAN
    content = {"options": dict(described), "fingerprint": fingerprint}
    if path.exists():
        if json.loads(path.read_text()).get("fingerprint") == fingerprint:
            return
        if {name for name in os.listdir(target) if not name.startswith(".")} - {PLAN, CLASSES}:
            raise UserError(
                f"{described['source']}: has other images than when {target} was begun; give another folder, or delete "
                "that one"
            )
        shutil.rmtree(target / STAGE, ignore_errors=True)  # no image is written yet
    atomic_write_text(path, json.dumps(content, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# The source


def find_parquet(options: Options) -> dict[str, list[Path]]:
    """The parquet files of each split; {} where the source has another form, too."""
    config = options.config
    if config.train_data or config.val_data or has_class_folders(options.source, config):
        return {}
    found = parquet.find(options.source)
    return {} if found and any(each.find(options.source) for each in FORMATS) else found


def copy_parquet(shards: Mapping[str, Sequence[Path]], target: Path, stopped_by: Callable[[], str]) -> None:
    """Copy the images of parquet files into Arrow files in DST."""

    def check() -> None:
        if reason := stopped_by():
            raise Stopped(reason)

    emit(f"copying {count(sum(map(len, shards.values())), 'parquet file')} to {target / STAGE}")
    parquet.copy_as_arrow(shards, target / STAGE, check)


def splits_of(config: TrainConfig) -> tuple[str, ...]:
    """The splits that the source has: train, val or both."""
    source = find_source(config, ())
    if not source.has_class_folders:
        return source.splits
    folders = {"train": config.train_split, "val": config.val_split}
    found = {split: find_folder(source.data_dir, split, name) for split, name in folders.items()}
    return tuple(split for split, name in found.items() if name) or ("train",)


def digest(parts: Sequence[object]) -> str:
    """Digest of the source's files."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def convert(options: Options, stopped_by: Callable[[], str]) -> None:
    """Read the source and write DST.

    Raises:
        UserError: the source cannot be read, or DST not be written.
        Stopped: by `stopped_by`.
    """
    from utils.data.conversion.convert import write_error

    described, config, target = options.described(), options.config, options.target
    with claim(target, described):
        try:
            shards = find_parquet(options)
            if shards:
                stats = [(str(path), path.stat().st_size) for paths in shards.values() for path in paths]
                write_plan(target, described, digest(stats))
                copy_parquet(shards, target, stopped_by)
                config = dataclasses.replace(config, data_dir=target / STAGE)
            write_splits(options, config, not shards, stopped_by)
            shutil.rmtree(target / STAGE, ignore_errors=True)
        except OSError as error:
            raise write_error(target, error) from None


def write_splits(options: Options, config: TrainConfig, has_fingerprint: bool, stopped_by: Callable[[], str]) -> None:
    """Write the images that `config` names into DST, and read them back."""
    import torch  # what takes seconds comes after the checks of the command line

    from utils.data.conversion.convert import Shrink, check_classes, missing, plan, run_tasks, tasks
    from utils.data.images.manifest import describe
    from utils.data.splits.selection import read_data
    from utils.distributed.group import DistEnv

    alone, target, is_tar = DistEnv.single(torch.device("cpu")), options.target, options.to == "tar"
    splits = splits_of(config)
    with tempfile.TemporaryDirectory() as scratch:  # for an index, where the source's folder cannot be written
        listed = read_data(dataclasses.replace(config, output_dir=Path(scratch)), alone, splits)
    for manifest in listed.values():
        if manifest.bad:
            raise UserError(f"{manifest.root}: {describe(manifest.bad)}; replace or remove what is bad")
        if manifest.label_sets is not None:
            raise UserError(
                f"{config.data_dir}: its images have several labels, and tars and folders have a place for one; train "
                "from the label file"
            )
    classes = listed[splits[0]].classes
    check_classes(classes, is_tar)
    if has_fingerprint:
        prints = [(split, manifest.classes, manifest.fingerprint) for split, manifest in listed.items()]
        write_plan(target, options.described(), digest(prints))
    if is_tar:
        atomic_write_text(target / CLASSES, "".join(f"{name}\n" for name in classes))
    parts = {split: plan(manifest, options.shard_size * 1e6) for split, manifest in listed.items()}
    pending = {split: missing(split, target, parts[split], is_tar) for split in listed}
    todo = itertools.chain.from_iterable(tasks(listed[split], is_tar, pending[split]) for split in listed)
    total = sum(len(part) for split in listed for _, part in pending[split])
    run_tasks(todo, total, target, Shrink(options.max_side, options.quality), options.workers, stopped_by)
    written = read_data(TrainConfig(data_dir=target, output_dir=target, workers=options.workers), alone, splits)
    for split, manifest in listed.items():
        assert len(written[split]) == len(manifest), f"{split}: not all images are read back"
    if written[splits[0]].classes != classes:
        emit("the classes of folders are sorted by name, so the labels are not those of the source")
    if any(manifest.weights is not None or manifest.groups is not None for manifest in listed.values()):
        emit("weights and groups of the label file are not written: neither tars nor folders have a place for them")
    counts = ", ".join(f"{count(len(manifest), 'image')} of {split}" for split, manifest in listed.items())
    emit(f"{target}: {counts}" + (f" in {count(sum(map(len, parts.values())), 'shard')}" if is_tar else ""))


# ---------------------------------------------------------------------------------------------------------------------
# The command line


@with_train_flags(
    train_flag("train_data", help="Names of the training shards, below SRC."),
    train_flag("val_data"),
    train_flag("train_split"),
    train_flag("val_split"),
    train_flag("class_names"),
    train_flag("stage_dir", help="Where SRC s3://... or gs://... is copied to."),
)
def read_options(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A data set, or a folder of parquet files.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; new, empty, or begun before.")],
    to: Annotated[Form, typer.Option(help="Form to write.", **choice_option(Form))] = "tar",
    shard_size: Annotated[float | None, typer.Option(help="Size of a shard, MB.", show_default="256", **NUMBER)] = None,
    max_side: Annotated[
        int | None, typer.Option(help="Longest side, pixels; larger images become JPEGs.", show_default="any", **WHOLE)
    ] = None,
    quality: Annotated[
        int | None, typer.Option(help="Quality of these JPEGs, 1 to 100.", show_default="90", **WHOLE)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="all cores", **WHOLE)] = None,
    *,
    train_data: str | None,
    val_data: str | None,
    train_split: str,
    val_split: str,
    class_names: Path | None,
    stage_dir: Path | None,
) -> Options:
    """Write a data set again, as WebDataset tars or as class folders. The same command goes on after a kill.

    Exit status: 0 done, 2 wrong usage or an image that cannot be read, 143 stopped by Ctrl-C or SIGTERM.
    """
    ABOVE_0.check("--shard-size", shard_size)
    MIN_1.check("--max-side", max_side)
    MIN_1.check("--workers", workers)
    Limit(minimum=1, maximum=100).check("--quality", quality)
    if quality is not None and max_side is None:
        raise UserError(f"--quality {quality}: counts only with --max-side, as other images are copied; add that")
    if shard_size is not None and to == "folder":
        raise UserError(f"--shard-size {shard_size:g}: a folder has no shards; leave it out, or leave out --to folder")
    if store_url(source):
        require_store(source, stage_dir, flag="")
    refuse_url(target, "DST ")
    cores = workers or len(os.sched_getaffinity(0))
    config = TrainConfig(
        data_dir=source,
        stage_dir=stage_dir,
        output_dir=target,
        train_data=train_data,
        val_data=val_data,
        train_split=train_split,
        val_split=val_split,
        class_names=class_names,
        workers=cores,
        bad_files="skip",  # the listing names them
    )
    return Options(config, target, to, shard_size or SHARD_MB, max_side, quality or QUALITY, cores)


def run(options: Options) -> None:
    """Convert the data set.

    Raises:
        UserError: as `convert`.
        Stopped: a signal came; what is finished stays.
    """
    with record_signals() as stopped_by:
        config = dataclasses.replace(options.config, data_dir=local_folder(options.config, stopped_by))
        options = dataclasses.replace(options, config=config)
        check_folders(options.source, options.target)
        convert(options, stopped_by)


PROGRAM = Program("convert_dataset.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
