"""Label files, train.csv and val.csv beside the images: a row for each image, with its file, its label and more."""

import collections
import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from utils.data.formats.folder import SCAN_THREADS, FileTable
from utils.data.formats.label_rows import TRAIN_WORDS, WHOLE, Labels, has_labels, has_rows_of, has_splits, stem_of
from utils.data.formats.naming import VAL_NAMES, is_hidden
from utils.data.formats.tables import is_table
from utils.data.images.codecs import is_image
from utils.data.images.manifest import (
    NO_ROW,
    SEVERAL,
    FileEntry,
    Manifest,
    bad_files_error,
    files_fingerprint,
    stat_file,
)
from utils.errors import UserError, some
from utils.text import count, describe_alike

NAME = "label file"
NO_LABEL = "no label"  # in the name of an image that has none
_CHUNK = 1000  # files that a thread looks at, one after the other


def find_label_files(
    data_dir: Path, val_split: str, named: Mapping[str, Path], splits: Sequence[str]
) -> dict[str, Path]:
    """The label file of each split, train and val: those that are `named`, else by the names of the files; {} for none.

    A file of all splits, and test.csv, which may be the list of a competition's images, count where they have columns
    of files and labels. More than a heading is read only where two files may have val's images.

    Args:
        splits: that are needed; () for those that there are.

    Raises:
        UserError: there are several files of a split that is needed.
    """
    needed = set(splits or ("train", "val"))
    found = dict(named)
    of_stem = _tables(data_dir)
    whole = next((data_dir / of_stem[word][0] for word in WHOLE if word in of_stem), None)
    val_names = VAL_NAMES if val_split == "val" else (val_split.lower(),)
    for split, words in {"train": TRAIN_WORDS, "val": val_names}.items():
        files = next((of_stem[word] for word in words if word in of_stem), [])
        if split in found or not files or (named and split not in needed):
            continue
        if len(files) > 1 and split in needed:
            raise UserError(_two(data_dir, files[0], files[1], split))
        if split == "train" or not _may_wait(files[0]) or _has_answers(data_dir / files[0]):
            found[split] = data_dir / files[0]
    has_val, train = "val" in named, named.get("train")
    if train and not has_val and has_splits(train) and ("val" not in found or has_rows_of(train, val_split)):
        found["val"] = train
    if "train" in found or whole is None:
        return found
    doubtful = "val" in needed and not has_val and (val_split != "val" or _may_wait(found.get("val", whole).name))
    if not (needed - found.keys() or doubtful) or not has_labels(whole):
        return found
    if not has_val and has_splits(whole):
        found["val"] = _val_of(data_dir, whole, found.get("val"), val_split)
    return found | {"train": whole}


def _val_of(data_dir: Path, whole: Path, other: Path | None, val_split: str) -> Path:
    """The validation images' file, of a file of all splits and another one by name.

    Raises:
        UserError: both have them. A test.csv waits, as rows of the split `test` do.
    """
    if other is None or not has_rows_of(whole, val_split, may_wait=_may_wait(other.name)):
        return other or whole
    if val_split == "val" and _may_wait(other.name):
        return whole
    raise UserError(_two(data_dir, f"{whole.name} with a column split", other.name, "val"))


def _may_wait(name: str) -> bool:
    """Whether a file is that of images which may be for the end of all experiments, or a competition's."""
    return stem_of(name) == VAL_NAMES[-1]


def _tables(folder: Path) -> dict[str, list[str]]:
    """Names of the tables in a folder by their stems in lower case; {} for one that cannot be listed."""
    of_stem = collections.defaultdict(list)
    with contextlib.suppress(OSError):  # which the listing of the images explains
        for name in sorted(os.listdir(folder)):
            if is_table(name) and not is_hidden(name):
                of_stem[stem_of(name)].append(name)
    return dict(of_stem)


def _has_answers(path: Path) -> bool:
    """Whether a test.csv has labels; one that cannot be read is another program's."""
    with contextlib.suppress(UserError):
        return has_labels(path, rows=_CHUNK)
    return False


def _two(data_dir: Path, one: str, other: str, split: str) -> str:
    return f"{data_dir}: holds {one} and {other}; name one of them by --{split}-data, or move one away"


def create_manifests(
    data_dir: Path,
    splits: Mapping[str, Labels],
    class_names: tuple[str, ...] | None,
    skip_bad: bool,
    several: bool = False,
) -> dict[str, Manifest]:
    """The manifests of the splits, whose labels are numbered alike.

    Files are looked for beside the label file, in a folder of its name there, and in images/. A name may lack its
    suffix. Images are sorted by class, then by name.

    Args:
        data_dir: for the manifests' `root`.
        splits: from `read_labels`.
        class_names: of `--class-names`, in label order, or of the numbers that the labels are; None for none.
        skip_bad: exclude empty and missing files, instead of refusing them.
        several: whether an image has any number of labels, instead of one.

    Raises:
        UserError: files are missing, bad, or in two rows; or a label is no class.
    """
    classes, sets = _number_labels(splits, class_names)
    # One table for all splits, so that a label means the same in each.
    known: list[tuple[int, ...]] = [(number,) for number in range(len(classes))]
    if several:
        if odd := [name for name in classes if SEVERAL in name]:
            raise UserError(f"--class-names: has {odd[0]!r}; {SEVERAL} divides the labels of an image, so rename it")
        known = sorted(set(itertools.chain.from_iterable(sets.values())))
    found = {split: _locate(labels, labels.files) for split, labels in splits.items()}
    _refuse_twice(splits, found)
    manifests = {}
    for split, labels in splits.items():
        base, paths = found[split]
        manifests[split] = _create(
            data_dir / split, labels, classes, sets[split], known, several, base, paths, skip_bad
        )
    if "train" in manifests:
        manifests["train"].with_all_classes()
    named = [*found.values(), *(_locate(labels, labels.elsewhere) for labels in splits.values())]
    if "train" in manifests and (extra := _count_extra(named)):
        manifests["train"] = dataclasses.replace(manifests["train"], ignored={NO_ROW: extra})
    return manifests


def _number_labels(
    splits: Mapping[str, Labels], class_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[str, list[tuple[int, ...]]]]:
    """Class names in label order, and the numbers of each row's labels, sorted. Numbers are sorted as numbers."""
    names = set(itertools.chain.from_iterable(splits["train" if "train" in splits else "val"].labels))
    are_numbers = all(re.fullmatch(r"\d{1,9}", name) for name in names)
    classes = class_names or tuple(sorted(names, key=lambda name: (int(name), name) if are_numbers else (0, name)))
    known = {name: number for number, name in enumerate(classes)}
    if class_names is not None and are_numbers and names.isdisjoint(known):
        known = {str(number): number for number in range(len(classes))}
    origin = "of --class-names" if class_names is not None else "with training images"
    numbers = {}
    for split, labels in splits.items():
        for line, own in zip(labels.lines, labels.labels, strict=True):
            if unknown := [name for name in own if name not in known]:
                alike = describe_alike(unknown[:1], known)
                raise UserError(
                    f"{labels.path}: line {line} has the label {unknown[0]!r}, which is none of the "
                    f"{count(len(classes), 'class')} {origin}; {alike or 'correct it, or add it there'}"
                )
        numbers[split] = [tuple(sorted(known[name] for name in own)) for own in labels.labels]
    if "train" in splits:
        found = set(itertools.chain.from_iterable(numbers["train"]))
        if not classes:
            raise UserError(f"{splits['train'].path}: no training image has a label; add some")
        if empty := sorted(set(range(len(classes))) - found):
            raise UserError(
                f"{splits['train'].path}: {count(len(empty), 'class')} of --class-names without an image in train "
                f"({some([classes[number] for number in empty])}); add images, or leave the names out"
            )
    return classes, numbers


def _locate(labels: Labels, names: Sequence[str]) -> tuple[Path, list[str]]:
    """A folder, and the path in it of each file that rows name. What is not there keeps the path as it was stated."""
    folder = labels.path.absolute().parent
    stated = [os.path.normpath(name.replace("\\", "/") if "/" not in name else name) for name in names]
    if any(map(os.path.isabs, stated)):
        return Path("/"), [os.path.join(folder, name).lstrip("/") for name in stated]
    bases = (folder, folder / labels.path.stem, folder / "images")
    for base in bases:
        if any(os.path.lexists(base / name) for name in stated[:_CHUNK]):
            return base, stated
    for base in bases:
        known = {os.path.splitext(name)[0]: name for name in _images_in(base)}
        if any(name in known for name in stated[:_CHUNK]):
            return base, [known.get(name, name) for name in stated]
    return folder, stated


def _images_in(folder: str | Path) -> list[str]:
    """Names of the images in a folder; [] for one that cannot be listed."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if is_image(name) and not is_hidden(name)]
    return []


def _refuse_twice(splits: Mapping[str, Labels], found: Mapping[str, tuple[Path, list[str]]]) -> None:
    """Raise UserError for a file that two rows name, in one split or in two."""
    seen: dict[str, tuple[str, int, tuple[str, ...]]] = {}
    for split, labels in splits.items():
        base, paths = found[split]
        for line, path, label in zip(labels.lines, paths, labels.labels, strict=True):
            whole = os.path.join(base, path)
            other, before, said = seen.setdefault(whole, (split, line, label))
            if (other, before) == (split, line):
                continue
            where = f"as line {before} does" if other == split else f"as line {before} does for {other}"
            one, two = (SEVERAL.join(each) or NO_LABEL for each in (label, said))
            what = "" if one == two else f", but {one} instead of {two}"
            raise UserError(f"{labels.path}: line {line} names {path}{what}, {where}; remove one of the two")


def _create(
    root: Path,
    labels: Labels,
    classes: tuple[str, ...],
    sets: list[tuple[int, ...]],
    known: list[tuple[int, ...]],
    several: bool,
    base: Path,
    paths: list[str],
    skip_bad: bool,
) -> Manifest:
    entries = _stat(base, paths)
    _refuse_bad(labels, base, [] if skip_bad else entries)
    texts = [SEVERAL.join(classes[number] for number in each) or NO_LABEL for each in known]
    places = {each: row for row, each in enumerate(known)}
    numbers = np.array([places[each] for each in sets], dtype=np.int64)
    names = np.array(
        [os.fsencode(f"{texts[number]}/{path}") for number, path in zip(numbers.tolist(), paths, strict=True)]
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
        label_sets=_matrix(known, len(classes)) if several else None,
        weights=weights,
        groups=None if labels.groups is None else np.array(labels.groups)[order],
        flat_in=_prefix(base, root.absolute().parent),
        source=NAME,
    ).without({os.fsdecode(names[row]): entry.bad for row, entry in enumerate(entries) if entry.bad is not None})


def _matrix(sets: Sequence[tuple[int, ...]], num_classes: int) -> NDArray[np.bool_]:
    """`Manifest.label_sets` of the classes' numbers."""
    matrix = np.zeros((len(sets), num_classes), dtype=np.bool_)
    for row, numbers in enumerate(sets):
        matrix[row, list(numbers)] = True
    return matrix


def _prefix(base: Path, data_dir: Path) -> str:
    """What stands before the names of files in `base` to make them paths relative to the data set."""
    if base == Path("/"):
        return "/"
    relative = os.path.relpath(base, data_dir)
    return "" if relative == "." else f"{relative}/"


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
        extra += sum(os.path.join(folder, name) not in named for name in _images_in(folder))
    return extra
