"""Which format a data set has, found out from the names of its files."""

import contextlib
import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from utils.data.formats import arrow_cache, ilsvrc, lmdb_database, recordio, tfrecord, webdataset
from utils.data.formats.flat import find_cls_loc
from utils.data.formats.label_files import find_label_files
from utils.data.formats.label_rows import WHOLE, has_rows_of, has_several, read_labels, stem_of
from utils.data.formats.naming import VAL_NAMES
from utils.data.formats.shards import ClassNames
from utils.data.formats.split_folders import (
    HELD_OUT,
    NAMES_OF_SPLITS,
    check_folders,
    find_folder,
    folders_in,
    lie_beside,
)
from utils.data.formats.tables import is_table
from utils.data.images.records import ShardFormat
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.options.store_url import store_url
from utils.options.validation import require_folder

FORMATS = cast(tuple[ShardFormat, ...], (ilsvrc, webdataset, tfrecord, recordio, lmdb_database, arrow_cache))
_READ_EARLY = 4_000_000  # bytes of a label file, which take a moment
GLOBS = {"train": "train_data", "val": "val_data"}  # the fields that name a split's shards


class LabelFileError(UserError):
    """A label file cannot be read, or there are two for the same images."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The data of a run: class folders, shards, or files with the labels of images.

    Attributes:
        format: of the shards; None for other data.
        data_dir: that holds train/, of class folders.
        shards: of each split.
        label_files: of each split.
    """

    format: ShardFormat | None
    data_dir: Path
    shards: Mapping[str, Sequence[Path]] = dataclasses.field(default_factory=dict)
    label_files: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    @property
    def has_class_folders(self) -> bool:
        """Whether the images lie in folders of their classes."""
        return self.format is None and not self.label_files

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that there are, train, val or both; () for class folders."""
        return tuple(split for split in ("train", "val") if split in self.shards or split in self.label_files)


def find_source(config: TrainConfig, splits: Sequence[str]) -> Source:
    """The data that `--data-dir`, `--train-data` and `--val-data` name. Opens no image and no shard.

    Args:
        config: with `data_dir`.
        splits: that are needed: train and val, or one of them; () for those that there are.

    Raises:
        UserError: there is no such folder, shards of a split are missing, or formats are mixed.
    """
    assert config.data_dir is not None, "synthetic data has no files"
    require_folder(config.data_dir)
    class_folders = Source(None, find_cls_loc(config.data_dir) or config.data_dir)
    given = {split: pattern for split in splits or GLOBS if (pattern := getattr(config, GLOBS[split]))}
    if not given and config.train_data and _has_val(config, class_folders.data_dir, config.train_data):
        given = {"train": config.train_data}
    if not given and has_class_folders(class_folders.data_dir, config):
        return class_folders
    found = [] if any(map(is_table, given.values())) else _find_shards(config.data_dir, given)
    if not found and (labeled := _find_label_files(config, given, splits)):
        _require_splits(labeled, config, splits)
        return labeled
    if not found:
        if given:
            split, pattern = next(iter(given.items()))
            raise UserError(_no_shard(split, pattern))
        return class_folders
    if len(found) > 1:
        one, other = (f"{source.format.NAME} ({_first(source.shards)}, ...)" for source in found[:2] if source.format)
        raise UserError(
            f"--data-dir {config.data_dir}: holds {one} and {other}; name the shards of one format by --train-data and "
            "--val-data"
        )
    for split, name in {"train": config.train_split, "val": config.val_split}.items():
        if name != split:
            raise UserError(
                f"--{split}-split {name}: names a folder of class folders; for shards leave it out, or give "
                f"--{split}-data '{name}*'"
            )
    _require_splits(found[0], config, splits)
    return found[0]


def check_source(config: TrainConfig) -> None:
    """Raise UserError unless the data is there, as far as the command line alone names it."""
    if config.data_dir is None or config.evaluate:  # an evaluation may take the names from its checkpoint
        return
    if store_url(config.data_dir):  # which is staged first
        return
    config = with_val_fraction(config)
    source = find_source(config, required_splits(config))
    if source.has_class_folders:
        check_folders(dataclasses.replace(config, data_dir=source.data_dir))
    if any(path.stat().st_size > _READ_EARLY for path in source.label_files.values()):
        return
    several = has_several(source.label_files, config.task)
    for split in required_splits(config):
        if split in source.label_files:
            read_labels(source.label_files[split], split, config.val_split, config.val_group, several)


def required_splits(config: TrainConfig) -> tuple[str, ...]:
    """The splits that a run reads; with `--val-fraction` or `--fold` train alone, which they divide."""
    if config.held_out:
        return ("train",)
    return ("val",) if config.evaluate else ("train", "val")


def with_val_fraction(config: TrainConfig) -> TrainConfig:
    """The configuration with a `--val-fraction` if nothing is held out yet and the data names no split.

    That is so where class folders lie beside each other, and where there is one label file, with a name for all images
    or that of `--train-data`.

    Raises:
        UserError: as `find_source`.
    """
    if config.data_dir is None or config.val_fraction is not None or config.fold is not None:
        return config
    names = NAMES_OF_SPLITS & config.given
    names_table = names == {"train_data"} and is_table(config.train_data or "")
    if names and not names_table:
        return config
    source = find_source(config, ())
    is_only = source.label_files.keys() == {"train"} and (
        names_table or stem_of(source.label_files["train"].name) in WHOLE
    )
    if is_only or (source.has_class_folders and lie_beside(config)):
        return dataclasses.replace(config, val_fraction=HELD_OUT)
    return config


def has_class_folders(data_dir: Path, config: TrainConfig) -> bool:
    """Whether the folder of the training or of the validation images, in `data_dir`, holds folders."""
    found = (find_folder(data_dir, "train", config.train_split), find_folder(data_dir, "val", config.val_split))
    return any(folders_in(data_dir / name) for name in found if name)


def read_given_names(file: Path) -> tuple[str, ...]:
    """The names in the file of `--class-names`, in label order.

    Raises:
        UserError: it cannot be read, or names a class twice or none.
    """
    try:
        names = tuple(line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"--class-names {file}: cannot be read ({reason}); give a file with a name a line") from None
    for number, name in enumerate(names, start=1):
        if not name or "/" in name or name in names[: number - 1]:
            what = f"names {name} twice" if name in names[: number - 1] and name else f"has {name!r} as a name"
            raise UserError(
                f"--class-names {file}: {what} (line {number}); give each class a name of its own without /"
            )
    return names


def class_names_of(source: Source, given: tuple[str, ...] | None, file: Path | None) -> ClassNames:
    """The names of the classes: those of `--class-names` if they are given, else train's, else val's.

    Args:
        source: of shards.
        given: the names in `file`, that of `--class-names`.

    Raises:
        UserError: the data's list cannot be read, or shards of one split have different ones.
    """
    assert source.format is not None, "class folders name the classes"
    found = {split: source.format.class_names(paths) for split, paths in source.shards.items()}
    lists = {split: names for split, names in found.items() if names is not None}
    if given is not None:
        return ClassNames(given, f"--class-names {file}", lists)
    return ClassNames(lists.get("train") or lists.get("val"), "the data's list of classes", lists)


def _find_label_files(config: TrainConfig, given: Mapping[str, str], splits: Sequence[str]) -> Source | None:
    """The label files that `given` patterns name, by split, or that lie in the folder; None if there are none."""
    assert config.data_dir is not None, "given"
    named = {split: pattern for split, pattern in given.items() if is_table(pattern)}
    if given and not named:
        return None
    if others := given.keys() - named.keys():
        split, pattern = next(iter(named.items()))
        raise UserError(
            f"--{split}-data {pattern}: a label file, and {given[min(others)]} is none; give both splits alike"
        )
    found = {split: config.data_dir / pattern for split, pattern in named.items()}
    for split, path in found.items():
        if not os.path.isfile(path):
            place = "" if os.path.isabs(named[split]) else f" in {config.data_dir}"
            raise UserError(
                f"--{split}-data {named[split]}: no such label file{place}; give its path from there, or a whole one"
            )
    try:
        found = find_label_files(config.data_dir, config.val_split, found, splits)
    except UserError as error:
        raise LabelFileError(str(error)) from None
    return Source(None, config.data_dir, label_files=found) if found else None


def _has_val(config: TrainConfig, folders: Path, name: str) -> bool:
    """Whether an evaluation's images are those of the label file `name` of the training images, or of one beside it.

    Class folders in `folders` come first, unless a label file has rows of val.
    """
    assert config.data_dir is not None, "given"
    path = config.data_dir / name
    if not is_table(name) or not os.path.isfile(path):
        return False
    if not has_class_folders(folders, config):
        return True
    with contextlib.suppress(UserError):  # which its reading explains, if it is read
        if has_rows_of(path, config.val_split, may_wait="val_split" not in config.given):
            return True
        return find_label_files(config.data_dir, config.val_split, {"train": path}, ("val",)).get("val", path) != path
    return False


def _find_shards(data_dir: Path, given: Mapping[str, str]) -> list[Source]:
    """The shards of each format that there is."""
    return [Source(each, data_dir, shards) for each in FORMATS if (shards := _find(each, data_dir, given))]


def _find(source: ShardFormat, data_dir: Path, given: Mapping[str, str]) -> dict[str, list[Path]]:
    """The shards of each split that are of this format."""
    found = source.find(data_dir) if len(given) < len(GLOBS) else {}
    for split, pattern in given.items():
        paths = [data_dir / path for path in sorted(glob.glob(pattern, root_dir=data_dir))]
        paths = [database if (database := path / lmdb_database.DATA).is_file() else path for path in paths]
        found[split] = [path for path in paths if source.is_shard(path.name)]
    return {split: shards for split, shards in found.items() if shards}


def _require_splits(source: Source, config: TrainConfig, splits: Sequence[str]) -> None:
    for split in splits:
        if split not in source.splits:
            if pattern := getattr(config, GLOBS[split]):
                raise UserError(_no_shard(split, pattern))
            names = " or ".join(("train",) if split == "train" else VAL_NAMES)
            remedy = "" if split == "train" else ", or --val-fraction 0.1 holds out a tenth of train"
            if source.format is None:
                what = f"the label file {next(iter(source.label_files.values())).name}"
                add = f"add {split}.csv, a column split,"
            else:
                what = f"{source.format.NAME} ({_first(source.shards)}, ...)"
                add = f"give a name with {names} to its shards,"
            raise UserError(
                f"--data-dir {config.data_dir}: holds {what}, but none of {split}; {add} or name them by "
                f"--{split}-data{remedy}"
            )


def _first(shards: Mapping[str, Sequence[Path]]) -> str:
    return next(iter(shards.values()))[0].name


def _no_shard(split: str, pattern: str) -> str:
    formats = ", ".join(each.NAME for each in FORMATS)
    return (
        f"--{split}-data {pattern}: no file of that name below --data-dir is a shard; known are {formats}, and label "
        "files .csv, .tsv, .jsonl"
    )
