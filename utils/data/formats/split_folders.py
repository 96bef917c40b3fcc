"""Which folders of a data set are its splits: train/ and val/, names like them, or class folders beside each other."""

import contextlib
import os
from pathlib import Path

from utils.data.formats.flat import first_names
from utils.data.formats.label_rows import WHOLE, check_columns, stem_of
from utils.data.formats.naming import VAL_NAMES, is_hidden
from utils.data.formats.refused import refuse_unreadable
from utils.data.formats.tables import is_table
from utils.data.images.codecs import is_image
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.text import count

HELD_OUT = 0.1  # share of data without splits that validates, where none is given
NAMES_OF_SPLITS = {"train_split", "val_split", "train_data", "val_data"}  # fields
BESIDE = "."  # the folder of a split whose class folders lie in the data set's own
_MAY_WAIT = ("test", "testing")  # may be for the end of all experiments
_VAL_NAMES = (*(name for name in VAL_NAMES if name not in _MAY_WAIT), *_MAY_WAIT)
_NAMES = {"train": ("train", "training"), "val": _VAL_NAMES}  # of folders, in any case; the first is taken


def find_folder(data_dir: Path, split: str, name: str) -> str | None:
    """The folder of a split in `data_dir`: `name`, that in another case, or in place of train and val a name like it.

    One that is not `name` itself counts only if it holds folders. None if there is none.

    Args:
        split: train or val.
        name: that `--train-split` or `--val-split` gives.

    Raises:
        UserError: two names differ only in case.
    """
    if os.path.isdir(data_dir / name):
        return name
    folders = folders_in(data_dir)
    for word in _NAMES[split] if name == split else (name.lower(),):
        found = [folder for folder in folders if folder.lower() == word and folders_in(data_dir / folder)]
        if len(found) > 1:
            raise UserError(
                f"--data-dir {data_dir}: has {found[0]}/ and {found[1]}/; give --{split}-split {found[0]}, or the other"
            )
        if found:
            return found[0]
    return None


def folder_of(config: TrainConfig, split: str) -> str:
    """The folder of a split in `data_dir`: as `find_folder`, or `BESIDE`.

    Class folders beside each other are of train. With `--val-fraction 0` they are also of val: all images train.

    Raises:
        UserError: there is none, and as `find_folder`.
    """
    assert config.data_dir is not None, "synthetic data has no folder"
    name = config.train_split if split == "train" else config.val_split
    if found := find_folder(config.data_dir, split, name):
        return found
    if split == "train":
        may_lie_beside = config.val_fraction is not None or config.fold is not None or lie_beside(config)
    else:
        may_lie_beside = config.val_fraction == 0 and not find_folder(config.data_dir, "train", config.train_split)
    if name == split and may_lie_beside and _classes_beside(config.data_dir):
        return BESIDE
    raise _missing(config.data_dir, split, name)


def lie_beside(config: TrainConfig) -> bool:
    """Whether the data is class folders beside each other, and nothing there speaks for another form.

    Such are a folder with the name of a split, a table, and flags that name something else.
    """
    if config.data_dir is None or NAMES_OF_SPLITS & config.given:
        return False
    is_clear = not _tables(config.data_dir) and not _like_splits(config.data_dir)
    return is_clear and len(_classes_beside(config.data_dir)) > 1


def check_folders(config: TrainConfig) -> None:
    """Raise UserError unless the folders of the splits are there, as far as the command line alone names them."""
    if config.data_dir is None or config.evaluate:  # an evaluation may take the folder's name from its checkpoint
        return
    for split in ("train",) if config.held_out else ("train", "val"):
        folder_of(config, split)


def has_val_folder(data_dir: Path, name: str) -> bool:
    """Whether there is a folder of validation images, as `find_folder`; one that may wait counts only by its name."""
    found = find_folder(data_dir, "val", name)
    return found is not None and (name != "val" or found.lower() not in _MAY_WAIT)


def refuse_val_folder(data_dir: Path, train: str, held_out_by: str) -> None:
    """Raise UserError if there is a folder of validation images, which a run that holds images out would not use.

    Args:
        train: the folder of the training images.
        held_out_by: see `TrainConfig`.
    """
    if name := unused_val_folder(data_dir, train):
        raise UserError(
            f"{held_out_by}: --data-dir {data_dir} has {name}/, which would not be used; leave "
            f"{held_out_by.split()[0]} out, or move {name}/ away"
        )


def unused_val_folder(data_dir: Path, train: str) -> str:
    """Name of a folder of validation images beside the training images, "" for none.

    `test/` is none, as it may be for the end of all experiments, and no class is where `train` is `BESIDE`.
    """
    for name in _like_splits(data_dir):
        is_class = train == BESIDE and _has_images(data_dir / name)
        if name.lower() not in (*_NAMES["train"], *_MAY_WAIT) and not is_class:
            return name
    return ""


def _missing(data_dir: Path, split: str, name: str) -> UserError:
    message = f"--data-dir {data_dir}: has no {name}/ folder"
    if name != split:
        other = find_folder(data_dir, split, split)
        remedy = f", but {other}/; give --{split}-split {other}" if other else "; give the name of one that is there"
        return UserError(message + remedy)
    if split == "val":
        return UserError(
            f"{message}; it must hold train/ and {name}/, or --val-fraction 0.1 holds out a tenth of train/"
        )
    if not (folders := [folder for folder in folders_in(data_dir) if _has_images(data_dir / folder)]):
        refuse_unreadable(data_dir)
        return UserError(f"{message}; it must hold train/ and val/, or shards{_describe_nested(data_dir)}")
    message += f", but {count(len(folders), 'folder')} of images ({first_names(folders)})"
    as_classes = "give --val-fraction 0.1 to train on them but for a tenth, which validates"
    if tables := _tables(data_dir):
        for table in tables if not _classes_beside(data_dir) else ():
            if stem_of(table) in WHOLE:  # which is the label file, but for its columns
                check_columns(data_dir / table)
        as_classes = f", or {as_classes}" if _classes_beside(data_dir) else ""
        return UserError(
            f"{message} and {tables[0]}, which is no label file by its name or columns; name that of the labels by "
            f"--train-data {tables[0]}{as_classes}"
        )
    if len(folders) == 1:
        return UserError(f"{message}, and one class is nothing to learn; put each class into a folder of its name")
    for like in _like_splits(data_dir):
        if like in folders:
            return UserError(f"{message}, of which {like}/ may be no class; move it away, or {as_classes}")
        return UserError(f"{message} beside {like}/; move those of training into {data_dir / 'train'}")
    return UserError(f"{message}; {as_classes}")


def _describe_nested(data_dir: Path) -> str:
    """A clause on folders of folders, which may be splits of other names or the data set itself; "" for none."""
    folders = [name for name in folders_in(data_dir) if folders_in(data_dir / name) and name not in _NAMES["val"]]
    if len(folders) == 1:
        return f"; if {folders[0]}/ holds them, give --data-dir {data_dir / folders[0]}"
    return f"; if {first_names(folders)} are splits, name two by --train-split and --val-split" if folders else ""


def _like_splits(data_dir: Path) -> list[str]:
    """Folders with the name of a split, in any case."""
    names = {name for each in _NAMES.values() for name in each}
    return [folder for folder in folders_in(data_dir) if folder.lower() in names]


def _classes_beside(data_dir: Path) -> list[str]:
    """Folders in `data_dir` that have images; a single one beside a table has no class, but the table's images."""
    found = [name for name in folders_in(data_dir) if _has_images(data_dir / name)]
    return [] if len(found) == 1 and _tables(data_dir) else found


def _tables(data_dir: Path) -> list[str]:
    with contextlib.suppress(OSError):  # which the listing explains
        return sorted(name for name in os.listdir(data_dir) if is_table(name) and not is_hidden(name))
    return []


def _has_images(folder: Path) -> bool:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # as lost+found, which is no class
        return any(is_image(entry.name) and not is_hidden(entry.name) for entry in entries)
    return False


def folders_in(root: Path) -> tuple[str, ...]:
    """Names of the folders in a folder, sorted, without hidden ones; () for none, also where it cannot be listed."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if not is_hidden(entry.name) and is_folder(entry)))
    return ()


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one. A broken link is not."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
