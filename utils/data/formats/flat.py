"""Validation images in one flat folder, whose classes stand in a file: Kaggle's, the ILSVRC devkit's, or a CSV."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from utils.data.formats.naming import is_hidden
from utils.data.formats.tables import csv_rows
from utils.data.images.codecs import is_image
from utils.errors import UserError, first_line
from utils.text import count, describe_alike

CLS_LOC = ("", "CLS-LOC", "Data/CLS-LOC", "ILSVRC/Data/CLS-LOC")  # in what Kaggle's archive unpacks to
_SOLUTION = "LOC_val_solution.csv"
_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_DEVKIT = ("", "data", "ILSVRC2012_devkit_t12/data", "devkit/data")  # folders that may hold it, and meta.mat
DEVKIT_FILES = (_GROUND_TRUTH, "meta.mat")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
_SHOWN = 3  # names in a message

Labels = list[tuple[str, str]]


def find_cls_loc(data_dir: Path) -> Path | None:
    """The folder with `train/` of Kaggle's ImageNet, which is `data_dir` or in it; None if there is none.

    Kaggle's archive unpacks to ILSVRC/Data/CLS-LOC/train.
    """
    candidates = (data_dir / name for name in CLS_LOC)
    return next((folder for folder in candidates if (folder / "train").is_dir()), None)


def label_flat(split_folder: Path, classes: tuple[str, ...]) -> Labels | None:
    """File name and class of each image of a flat folder, sorted; None if it is none, or no file has its labels.

    The labels are in NAME.csv or NAME_labels.csv, where NAME is the folder's, beside the images or the folder; in
    Kaggle's LOC_val_solution.csv, beside the folder or up to four levels above; or in the devkit's ground truth.

    A CSV has two columns, a file name and a class, which is a name or, in the order of `classes`, a number from 0 or
    from 1 on. A first row without an image is a heading.

    Raises:
        UserError: an image has no label or more than one, a labeled file is missing, or a label is no class.
        OSError: the folder cannot be read.
    """
    images = _images(split_folder)
    if not images:
        return None
    folder = split_folder.absolute()
    for parent in (folder, folder.parent):
        for name in (f"{folder.name}.csv", f"{folder.name}_labels.csv"):
            if (parent / name).is_file():
                return _from_csv(parent / name, folder, images, classes)
    for parent in folder.parents[:4]:
        if (parent / _SOLUTION).is_file():
            return _from_csv(parent / _SOLUTION, folder, images, classes)
    for parent in (folder.parent / name for name in _DEVKIT):
        if (parent / _GROUND_TRUTH).is_file():
            return _from_devkit(parent, folder, images, classes)
    return None


def _images(folder: Path) -> list[str]:
    """Names of the images, sorted; none if there is a folder among them, which would be a class."""
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not is_hidden(entry.name)]
    if any(entry.is_dir() for entry in visible):
        return []
    return sorted(entry.name for entry in visible if is_image(entry.name))


def _from_csv(path: Path, folder: Path, images: list[str], classes: tuple[str, ...]) -> Labels:
    """Labels of a CSV. Kaggle's has boxes behind the class."""
    files = _file_of(images)
    try:
        rows = list(csv_rows(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 from byte {error.start} on; save it as UTF-8") from None
    if rows and not is_image(rows[0][1][0]) and rows[0][1][0] not in files:
        del rows[0]
    for line, row in rows:
        if len(row) != 2 or not all(row):
            raise UserError(f"{path}: line {line} is {','.join(row)!r}; it must be a file name and a class")
    if path.name == _SOLUTION:
        rows = [(line, [name, label.split()[0]]) for line, (name, label) in rows]
    labels = _class_names(path, [(line, row[1]) for line, row in rows], classes)
    return _match(
        path, folder, images, [(line, row[0], label) for (line, row), label in zip(rows, labels, strict=True)]
    )


def _from_devkit(devkit: Path, folder: Path, images: list[str], classes: tuple[str, ...]) -> Labels:
    labels = devkit_labels(devkit, folder, images)
    numbered = [(int(name.split("_")[2].partition(".")[0]), wnid) for name, wnid in labels]
    _check_classes(devkit / _GROUND_TRUTH, numbered, classes)
    return labels


def devkit_labels(devkit: Path, folder: Path, images: list[str]) -> Labels:
    """The class of each of ImageNet's validation images, a WordNet ID, from the devkit.

    Line i of the ground truth is the ILSVRC2012_ID of the i-th image, and meta.mat has the class of each ID.

    Args:
        devkit: folder of both files.
        folder: of the images, for messages.

    Raises:
        UserError: an image has no label, or the devkit is damaged.
    """
    path = devkit / _GROUND_TRUTH
    wnids = _read_meta(devkit / "meta.mat")
    lines = path.read_text(errors="replace").split()
    found: Labels = []
    for name in images:
        match = _VAL_IMAGE.fullmatch(name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(lines):
            raise UserError(
                f"{folder / name}: no label, {path.name} has {count(len(lines), 'line')}, for "
                "ILSVRC2012_val_00000001.JPEG and so on; remove the file or give it that name"
            )
        try:
            found.append((name, wnids[int(lines[number - 1])]))
        except (ValueError, KeyError):
            raise UserError(
                f"{path}: line {number} is {lines[number - 1]!r}, not an ID of meta.mat; copy the devkit again"
            ) from None
    return found


def _read_meta(path: Path) -> dict[int, str]:
    """ILSVRC2012_ID -> WordNet ID of the classes that have no class below them."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(f"{path}: is read by the package scipy; pip install scipy") from None
    try:
        synsets = loadmat(path, squeeze_me=True)["synsets"]
        leaves = synsets[synsets["num_children"] == 0]
        return {int(number): str(wnid) for number, wnid in zip(leaves["ILSVRC2012_ID"], leaves["WNID"], strict=True)}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); it is part of the devkit") from None
    except Exception as error:  # scipy raises errors of many kinds for a damaged file
        raise UserError(f"{path}: not the devkit's meta.mat ({first_line(error)}); copy the devkit again") from None


def _file_of(images: list[str]) -> dict[str, str]:
    """Image name with and without its suffix -> image name."""
    return {os.path.splitext(name)[0]: name for name in images} | {name: name for name in images}


def _class_names(path: Path, labels: list[tuple[int, str]], classes: tuple[str, ...]) -> list[str]:
    """The class of each (line, label), where labels are all names or all numbers."""
    known = set(classes)
    values = [label for _, label in labels]
    if not known.issuperset(values) and all(map(str.isdecimal, values)) and not any(map(str.isdecimal, classes)):
        numbers = list(map(int, values))
        first = 0 if min(numbers) == 0 else 1
        if first == 1 and max(numbers) < len(classes):
            raise UserError(
                f"{path}: labels {min(numbers)} to {max(numbers)} of {count(len(classes), 'class')} may count from 0 "
                "or from 1; write the names of the classes instead"
            )
        if max(numbers) < len(classes) + first:
            return [classes[number - first] for number in numbers]
    _check_classes(path, labels, classes)
    return values


def _check_classes(path: Path, labels: list[tuple[int, str]], classes: tuple[str, ...]) -> None:
    known = set(classes)
    others = {label: line for line, label in reversed(labels) if label not in known}  # with the first line of each
    if others:
        label, line = min(others.items(), key=lambda item: item[1])
        alike, such = describe_alike(others, classes), count(len(others), "such label")
        raise UserError(
            f"{path}: line {line} has the label {label!r}, which is none of the {count(len(classes), 'class')} of "
            f"train/ ({first_names(classes)}); {f'{alike}; ' if alike else ''}correct {such}, or add what "
            "is missing to train/"
        )


def _match(path: Path, folder: Path, images: list[str], rows: list[tuple[int, str, str]]) -> Labels:
    """The class of each image from rows (line, file, class); a file may have folders in front, and lack its suffix."""
    files = _file_of(images)
    found: dict[str, tuple[int, str]] = {}
    missing = []
    for line, stated, label in rows:
        name = files.get(os.path.basename(stated))
        if name is None:
            missing.append(f"{stated} in line {line}")
        elif name in found:
            raise UserError(f"{path}: line {line} labels {name}, as line {found[name][0]} does; remove one of them")
        else:
            found[name] = line, label
    if missing:
        raise UserError(
            f"{path}: names {count(len(missing), 'file')} missing in {folder} ({first_names(missing)}); copy the "
            "images again, or remove the lines"
        )
    unlabeled = [name for name in images if name not in found]
    if unlabeled:
        raise UserError(
            f"{path}: has no label for {count(len(unlabeled), 'image')} of {folder} ({first_names(unlabeled)}); add "
            "lines, or remove the images"
        )
    return [(name, found[name][1]) for name in images]


def first_names(names: Sequence[str]) -> str:
    """The first names, and whether there are more: `a, b, c, ...`."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
