"""Rows of label files: a file, its label and more for each image."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.data.formats.naming import VAL_NAMES
from utils.data.formats.tables import Table, read_table
from utils.data.images.manifest import SEVERAL
from utils.errors import UserError, some
from utils.figures import Task

# Names that a column may have, the first of them that there is. `datasets` writes file_name, Kaggle image_id or id.
_FILE = ("file", "file_name", "filename", "path", "filepath", "file_path", "image", "image_path", "image_id", "id")
_LABEL = ("label", "class", "target", "category", "class_name", "labels")
_WITHOUT_HEADING = ("file", "label")
TRAIN_WORDS = ("train", "training")
WHOLE = ("labels", "metadata", "data", "dataset", "images", "annotations")  # names of one file for all splits


class Labels(NamedTuple):
    """The rows of one split.

    Attributes:
        path: of the label file.
        lines: of the rows.
        files: paths as the file states them.
        labels: the classes of each image: one, or any number.
        weights: float64 (num_images,); None for val, and without the column.
        groups: of the column; None without it.
        elsewhere: files of the rows of other splits in the same file.
    """

    path: Path
    lines: list[int]
    files: list[str]
    labels: list[tuple[str, ...]]
    weights: NDArray[np.float64] | None
    groups: list[str] | None
    elsewhere: list[str]


def stem_of(name: str) -> str:
    """The name of a table without its suffix, in lower case."""
    return name.lower().rpartition(".")[0]


def check_columns(path: Path) -> None:
    """Raise UserError unless a table has columns of files and of labels."""
    _columns(path, _heading(path))


def has_splits(path: Path) -> bool:
    """Whether a label file has a column `split`."""
    return _heading(path).column("split") is not None


def has_labels(path: Path, rows: int = 0) -> bool:
    """Whether a table has columns of files and of labels, and a label in one of its first `rows`."""
    table = read_table(path, _WITHOUT_HEADING, rows=rows)
    at = table.column(*_LABEL)
    return table.column(*_FILE) is not None and at is not None and (not rows or any(row[at] for row in table.rows))


def has_rows_of(path: Path, val_split: str, may_wait: bool = True) -> bool:
    """Whether a label file has a column `split` with rows of val, which `val_split` names as `read_labels` does.

    Args:
        may_wait: whether rows of `test` count as val, where there is nothing else.
    """
    names = VAL_NAMES if may_wait else VAL_NAMES[:-1]
    return bool(_words(path) & set(names if val_split == "val" else (val_split.lower(),)))


def _words(path: Path) -> set[str]:
    """What the column `split` of a label file has, in lower case."""
    table = read_table(path, _WITHOUT_HEADING)
    at = table.column("split")
    words = set() if at is None else {row[at].lower() for row in table.rows}
    return {"train" if word in TRAIN_WORDS else word for word in words}


def has_several(label_files: Mapping[str, Path], task: Task | None) -> bool:
    """Whether an image has any number of labels: by `--task`, else where a row of any split has several."""
    if task is not None:
        return task == "multilabel"
    tables = (read_table(path, _WITHOUT_HEADING) for path in sorted(set(label_files.values())))
    columns = ((table, table.column(*_LABEL)) for table in tables)
    return any(SEVERAL in row[at] for table, at in columns if at is not None for row in table.rows)


def _heading(path: Path) -> Table:
    return read_table(path, _WITHOUT_HEADING, rows=0)


def read_labels(
    path: Path, split: str, val_split: str = "val", group: str | None = None, several: bool = False
) -> Labels:
    """The rows of one split in a label file.

    Args:
        split: train or val.
        val_split: what the column `split` calls the images of val; "val" stands for the first of `VAL_NAMES`.
        group: the column of the groups, if there is one of that name; None for `group`.
        several: whether an image has any number of labels, divided by `|`, instead of one.

    Raises:
        UserError: the file is no such table, or a row of it is wrong; names the line.
    """
    table = read_table(path, _WITHOUT_HEADING)
    at, label_at = _columns(path, table)
    rows = _rows_of(path, table, split, val_split)
    lines = [table.lines[row] for row in rows]
    for row in rows:
        _check_row(path, table.lines[row], table.rows[row][at], table.rows[row][label_at], several)
    group_at = table.column((group or "group").lower())
    return Labels(
        path,
        lines,
        [table.rows[row][at] for row in rows],
        [_labels(table.rows[row][label_at]) for row in rows],
        _weights(path, table, rows) if split == "train" else None,
        None if group_at is None else [_group(path, table, row, group_at) for row in rows],
        [table.rows[row][at] for row in sorted({*range(len(table.rows))} - {*rows})],
    )


def read_label_sets(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line, file and labels of each row of a label file, whose images have any number of labels, divided by `|`.

    Raises:
        UserError: as `read_labels`.
    """
    table = read_table(path, _WITHOUT_HEADING)
    at, label_at = _columns(path, table)
    for line, row in zip(table.lines, table.rows, strict=True):
        yield line, row[at], list(_labels(row[label_at]))


def _labels(cell: str) -> tuple[str, ...]:
    """The labels in a cell, each once."""
    return tuple(dict.fromkeys(label.strip() for label in cell.split(SEVERAL) if label.strip()))


def _columns(path: Path, table: Table) -> tuple[int, int]:
    """Indices of the columns of files and of labels."""
    at, label_at = table.column(*_FILE), table.column(*_LABEL)
    if at is None or label_at is None:
        raise UserError(
            f"{path}: has the columns {some([repr(name) for name in table.columns])}; it needs one named file and one "
            "named label"
        )
    return at, label_at


def _rows_of(path: Path, table: Table, split: str, val_split: str) -> Sequence[int]:
    """Indices of the rows of a split; all of them without a column `split`."""
    at = table.column("split")
    if at is None:
        return range(len(table.rows))
    val_split = val_split.lower()
    rows = collections.defaultdict(list)
    for row, (line, cells) in enumerate(zip(table.lines, table.rows, strict=True)):
        word = "train" if cells[at].lower() in TRAIN_WORDS else cells[at].lower()
        if word not in ("train", *VAL_NAMES, val_split):
            raise UserError(
                f"{path}: line {line} has the split {cells[at]!r}; write train, {', '.join(VAL_NAMES[:-1])} or test"
            )
        rows[word].append(row)
    names = ("train",) if split == "train" else VAL_NAMES if val_split == "val" else (val_split,)
    found = next((rows[name] for name in names if rows[name]), None)
    if found is None:
        there = " and ".join(sorted(name for name in rows if rows[name]))
        remedy = "" if split == "train" else ", or --val-fraction 0.1 holds out a tenth of train"
        raise UserError(f"{path}: its column split has {there}, but no {names[0]}; add rows of it{remedy}")
    return found


def lists_validation(label_files: Mapping[str, Path]) -> bool:
    """Whether label files have images of val; those of the split `test` may be for the end of all experiments."""
    path = label_files.get("val")
    if path is None:
        return False
    words = _words(path) if path == label_files.get("train") else {path.stem.lower()}
    return bool(words & set(VAL_NAMES[:-1]))


def _check_row(path: Path, line: int, file: str, label: str, several: bool) -> None:
    """Raise UserError for a row that names no image, or no class where it must."""
    if not file or "\0" in file:
        raise UserError(f"{path}: line {line} names no file; complete or remove the line")
    if not several and not label:
        raise UserError(
            f"{path}: line {line} has no label for {file}; add it, remove the line, or give --task multilabel if "
            "images may have none"
        )
    if not several and SEVERAL in label:
        raise UserError(
            f"{path}: line {line} has several labels ({label}) for {file}; --task multiclass takes one: keep one, or "
            "train with --task multilabel"
        )
    if "/" in label or {".", ".."} & {*_labels(label)} or not label.isprintable():
        raise UserError(f"{path}: line {line} has the label {label!r}; write it without / and control characters")


def _weights(path: Path, table: Table, rows: Sequence[int]) -> NDArray[np.float64] | None:
    at = table.column("weight")
    if at is None:
        return None
    weights = np.empty(len(rows))
    for number, row in enumerate(rows):
        weights[number] = read_weight(path, table.lines[row], table.rows[row][at])
    if not weights.any():
        raise UserError(f"{path}: all weights are 0, so that no image would come; give some a larger one")
    return weights


def read_weight(path: Path, line: int, text: str) -> float:
    """A weight, 0 or more.

    Raises:
        UserError: it is none.
    """
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < 1e6:
        raise UserError(f"{path}: line {line} has the weight {text!r}; it must be a number from 0 to 1,000,000")
    return weight


def _group(path: Path, table: Table, row: int, at: int) -> str:
    if not (name := table.rows[row][at]):
        raise UserError(f"{path}: line {table.lines[row]} has no {table.columns[at]}; add it, or remove the line")
    return name
