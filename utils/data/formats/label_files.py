"""Label files, train.csv and val.csv beside the images: a row for each image, with its file, its label and more."""

import collections
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.data.formats.folder import SCAN_THREADS, FileTable
from utils.data.formats.naming import VAL_NAMES, is_hidden
from utils.data.formats.tables import Table, is_table, read_table
from utils.data.images.codecs import is_image
from utils.data.images.manifest import NO_ROW, FileEntry, Manifest, bad_files_error, files_fingerprint, stat_file
from utils.errors import UserError, some
from utils.text import count, describe_alike

NAME = "label file"
WHOLE = ("labels", "metadata", "data", "dataset", "images", "annotations")  # names of one file for all splits
# Names that a column may have, the first of them that there is. `datasets` writes file_name, Kaggle image_id or id.
_FILE = ("file", "file_name", "filename", "path", "filepath", "file_path", "image", "image_path", "image_id", "id")
_LABEL = ("label", "class", "target", "category", "class_name", "labels")
_WITHOUT_HEADING = ("file", "label")
_TRAIN_WORDS = ("train", "training")
_CHUNK = 1000  # files that a thread looks at, one after the other


class Labels(NamedTuple):
    """The rows of one split.

    Attributes:
        path: of the label file.
        lines: of the rows.
        files: paths as the file states them.
        labels: names of the classes.
        weights: float64 (num_images,); None for val, and without the column.
        groups: of the column; None without it.
    """

    path: Path
    lines: list[int]
    files: list[str]
    labels: list[str]
    weights: NDArray[np.float64] | None
    groups: list[str] | None


def find_label_files(data_dir: Path, val_split: str) -> dict[str, Path]:
    """The label file of each split, train and val, by the names of the files; {} for none.

    A file of all splits counts where it has columns of files and labels; only its heading is read.

    Raises:
        UserError: there are several files of one split.
    """
    try:
        names = sorted(name for name in os.listdir(data_dir) if is_table(name) and not is_hidden(name))
    except OSError:  # which the listing explains
        return {}
    val_names = VAL_NAMES if val_split == "val" else (val_split.lower(),)
    found: dict[str, Path] = {}
    for split, words in {"train": _TRAIN_WORDS, "val": val_names, "": WHOLE}.items():
        for word in words:
            files = [name for name in names if name.lower().rpartition(".")[0] == word]
            if len(files) > 1 and word not in WHOLE:
                raise UserError(
                    f"{data_dir}: holds {files[0]} and {files[1]}; name one of them by --{split}-data, or move one away"
                )
            if files and split not in found:
                found[split] = data_dir / files[0]
    whole = found.pop("", None)
    if found or whole is None:
        return found
    heading = read_table(whole, _WITHOUT_HEADING, rows=0)
    if heading.column(*_FILE) is None or heading.column(*_LABEL) is None:
        return {}
    return {"train": whole, "val": whole} if has_splits(whole) else {"train": whole}


def has_splits(path: Path) -> bool:
    """Whether a label file has a column `split`."""
    return read_table(path, _WITHOUT_HEADING, rows=0).column("split") is not None


def read_labels(path: Path, split: str, val_split: str = "val", group: str | None = None) -> Labels:
    """The rows of one split in a label file.

    Args:
        split: train or val.
        val_split: what the column `split` calls the images of val; "val" stands for the first of `VAL_NAMES`.
        group: the column of the groups, if there is one of that name; None for `group`.

    Raises:
        UserError: the file is no such table, or a row of it is wrong; names the line.
    """
    table = read_table(path, _WITHOUT_HEADING)
    at, label_at = _columns(path, table)
    rows = _rows_of(path, table, split, val_split)
    lines = [table.lines[row] for row in rows]
    for row in rows:
        _check_row(path, table.lines[row], table.rows[row][at], table.rows[row][label_at])
    group_at = table.column((group or "group").lower())
    return Labels(
        path,
        lines,
        [table.rows[row][at] for row in rows],
        [table.rows[row][label_at] for row in rows],
        _weights(path, table, rows) if split == "train" else None,
        None if group_at is None else [_group(path, table, row, group_at) for row in rows],
    )


def read_label_sets(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line, file and labels of each row of a label file, whose images have any number of labels, divided by `|`.

    Raises:
        UserError: as `read_labels`.
    """
    table = read_table(path, _WITHOUT_HEADING)
    at, label_at = _columns(path, table)
    for line, row in zip(table.lines, table.rows, strict=True):
        yield line, row[at], [label.strip() for label in row[label_at].split("|") if label.strip()]


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
        word = "train" if cells[at].lower() in _TRAIN_WORDS else cells[at].lower()
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
    words = {path.stem.lower()}
    if path == label_files.get("train"):
        table = read_table(path, _WITHOUT_HEADING)
        at = table.column("split")
        words = set() if at is None else {row[at].lower() for row in table.rows}
    return bool(words & set(VAL_NAMES[:-1]))


def _check_row(path: Path, line: int, file: str, label: str) -> None:
    """Raise UserError for a row that names no image or no class."""
    if not file or "\0" in file:
        raise UserError(f"{path}: line {line} names no file; complete or remove the line")
    if not label:
        raise UserError(f"{path}: line {line} has no label for {file}; add it, or remove the line")
    if "|" in label:
        raise UserError(
            f"{path}: line {line} has several labels ({label}) for {file}; an image is trained with one, keep the first"
        )
    if "/" in label or label in (".", "..") or not label.isprintable():
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


# ---------------------------------------------------------------------------------------------------------------------
# Files and manifests


def create_manifests(
    data_dir: Path, splits: Mapping[str, Labels], class_names: tuple[str, ...] | None, skip_bad: bool
) -> dict[str, Manifest]:
    """The manifests of the splits, whose labels are numbered alike.

    Files are looked for beside the label file, in a folder of its name there, and in images/. A name may lack its
    suffix. Images are sorted by class, then by name.

    Args:
        data_dir: for the manifests' `root`.
        splits: from `read_labels`.
        class_names: of `--class-names`, in label order, or of the numbers that the labels are; None for none.
        skip_bad: exclude empty and missing files, instead of refusing them.

    Raises:
        UserError: files are missing, bad, or in two rows; or a label is no class.
    """
    classes, numbers = _number_labels(splits, class_names)
    found = {split: _locate(labels) for split, labels in splits.items()}
    _refuse_twice(splits, found)
    manifests = {}
    for split, labels in splits.items():
        base, paths = found[split]
        manifests[split] = _create(data_dir / split, labels, classes, numbers[split], base, paths, skip_bad)
    if "train" in manifests:
        manifests["train"].with_all_classes()
    if "train" in manifests and (extra := _count_extra(found.values())):
        manifests["train"] = dataclasses.replace(manifests["train"], ignored={NO_ROW: extra})
    return manifests


def _number_labels(
    splits: Mapping[str, Labels], class_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """Class names in label order, and the label of each row: int64. Numbers are sorted as numbers."""
    names = set(splits["train" if "train" in splits else "val"].labels)
    are_numbers = all(re.fullmatch(r"\d{1,9}", name) for name in names)
    classes = class_names or tuple(sorted(names, key=lambda name: (int(name), name) if are_numbers else (0, name)))
    known = {name: number for number, name in enumerate(classes)}
    if class_names is not None and are_numbers and names.isdisjoint(known):
        known = {str(number): number for number in range(len(classes))}
    origin = "of --class-names" if class_names is not None else "with training images"
    numbers = {}
    for split, labels in splits.items():
        for line, name in zip(labels.lines, labels.labels, strict=True):
            if name not in known:
                alike = describe_alike([name], known)
                raise UserError(
                    f"{labels.path}: line {line} has the label {name!r}, which is none of the "
                    f"{count(len(classes), 'class')} {origin}; {alike or 'correct it, or add it there'}"
                )
        numbers[split] = np.array([known[name] for name in labels.labels], dtype=np.int64)
    if "train" in splits and (empty := sorted(set(range(len(classes))) - set(numbers["train"].tolist()))):
        raise UserError(
            f"{splits['train'].path}: {count(len(empty), 'class')} of --class-names without an image in train "
            f"({some([classes[number] for number in empty])}); add images, or leave the names out"
        )
    return classes, numbers


def _locate(labels: Labels) -> tuple[Path, list[str]]:
    """A folder, and the path of each row's file in it. What is not there keeps the path that it was stated with."""
    folder = labels.path.absolute().parent
    stated = [os.path.normpath(name.replace("\\", "/") if "/" not in name else name) for name in labels.files]
    if any(map(os.path.isabs, stated)):
        return Path("/"), [os.path.join(folder, name).lstrip("/") for name in stated]
    bases = (folder, folder / labels.path.stem, folder / "images")
    for base in bases:
        if any(os.path.lexists(base / name) for name in stated[:_CHUNK]):
            return base, stated
    for base in bases:
        if base.is_dir() and (known := _without_suffix(base)) and any(name in known for name in stated[:_CHUNK]):
            return base, [known.get(name, name) for name in stated]
    return folder, stated


def _without_suffix(folder: Path) -> dict[str, str]:
    """Name without its suffix -> name, of the images in a folder."""
    return {os.path.splitext(name)[0]: name for name in os.listdir(folder) if is_image(name)}


def _refuse_twice(splits: Mapping[str, Labels], found: Mapping[str, tuple[Path, list[str]]]) -> None:
    """Raise UserError for a file that two rows name, in one split or in two."""
    seen: dict[str, tuple[str, int, str]] = {}
    for split, labels in splits.items():
        base, paths = found[split]
        for line, path, label in zip(labels.lines, paths, labels.labels, strict=True):
            whole = os.path.join(base, path)
            other, before, said = seen.setdefault(whole, (split, line, label))
            if (other, before) == (split, line):
                continue
            where = f"as line {before} does" if other == split else f"as line {before} does for {other}"
            what = "" if said == label else f", but {label} instead of {said}"
            raise UserError(f"{labels.path}: line {line} names {path}{what}, {where}; remove one of the two")


def _create(
    root: Path,
    labels: Labels,
    classes: tuple[str, ...],
    numbers: NDArray[np.int64],
    base: Path,
    paths: list[str],
    skip_bad: bool,
) -> Manifest:
    entries = _stat(base, paths)
    _refuse_bad(labels, base, [] if skip_bad else entries)
    names = np.array(
        [os.fsencode(f"{classes[number]}/{path}") for number, path in zip(numbers.tolist(), paths, strict=True)]
    )
    order = np.lexsort((names, numbers))
    sizes, mtimes = np.array([(entry.size, entry.mtime) for entry in entries], dtype=np.int64)[order].T
    weights = None if labels.weights is None else labels.weights[order]
    return Manifest(
        root=root.absolute(),
        classes=classes,
        labels=numbers[order],
        fingerprint=files_fingerprint(names[order], sizes, weights),
        images=FileTable(base, names[order], is_flat=True),
        sizes=sizes,
        mtimes=mtimes,
        weights=weights,
        groups=None if labels.groups is None else np.array(labels.groups)[order],
        source=NAME,
    ).without({os.fsdecode(names[row]): entry.bad for row, entry in enumerate(entries) if entry.bad is not None})


def _stat(base: Path, paths: list[str]) -> list[FileEntry]:
    """Each file under its path."""

    def look(start: int) -> list[FileEntry]:
        part = paths[start : start + _CHUNK]
        return [stat_file(os.path.join(base, path))._replace(name=path) for path in part]

    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        return [entry for part in pool.map(look, range(0, len(paths), _CHUNK)) for entry in part]


def _refuse_bad(labels: Labels, base: Path, entries: Sequence[FileEntry]) -> None:
    """Raise UserError for files that are missing, empty or no files."""
    bad = {row: entry for row, entry in enumerate(entries) if entry.bad is not None}
    missing = [row for row, entry in bad.items() if not os.path.exists(base / entry.name)]
    if missing:
        stated = [f"{labels.files[row]} in line {labels.lines[row]}" for row in missing]
        raise UserError(
            f"{labels.path}: names {count(len(missing), 'file')} missing in {base} ({some(stated)}); copy the images "
            "again, or remove the lines"
        )
    if bad:
        raise bad_files_error(
            {str(base / entry.name): str(entry.bad) for entry in bad.values()}, "delete or replace {}"
        )


def _count_extra(found: Iterable[tuple[Path, list[str]]]) -> int:
    """Images that lie beside those that are named, and that no row names."""
    named = {os.path.join(base, path) for base, paths in found for path in paths}
    extra = 0
    for folder in {os.path.dirname(path) for path in named}:
        if os.path.isdir(folder):
            there = (entry for entry in os.listdir(folder) if is_image(entry) and not is_hidden(entry))
            extra += sum(os.path.join(folder, name) not in named for name in there)
    return extra
