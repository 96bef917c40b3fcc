"""Wrong data sets: each ends in exit status 2 and one line that names the file or folder and the remedy."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Refused


def _no_train(root: Path) -> None:
    shutil.rmtree(root / "train")


def _no_val(root: Path) -> None:
    shutil.rmtree(root / "val")


def _classes_alone(root: Path) -> None:
    shutil.rmtree(root / "val")
    for folder in list((root / "train").iterdir()):
        folder.rename(root / folder.name)
    (root / "train").rmdir()


def _train_is_a_file(root: Path) -> None:
    _no_train(root)
    (root / "train").write_text("")


def _loose(root: Path) -> None:
    for folder in list((root / "train").iterdir()):
        for file in list(folder.iterdir()):
            file.rename(root / "train" / file.name)
        folder.rmdir()


def _no_class(root: Path) -> None:
    _no_val(root)
    (root / "val").mkdir()


def _renamed_class(root: Path) -> None:
    (root / "val" / "green").rename(root / "val" / "verde")


def _class_only_in_val(root: Path) -> None:
    shutil.rmtree(root / "train" / "red")


def _nested(root: Path) -> None:
    (root / "train" / "blue" / "dark").mkdir()
    (root / "train" / "blue" / "blue-000.jpg").rename(root / "train" / "blue" / "dark" / "navy.JPG")


def _nested_twice(root: Path) -> None:
    shutil.move(root / "val" / "blue", root / "val" / "deep" / "er" / "blue")


def _empty_class(root: Path) -> None:
    (root / "val" / "nothing").mkdir()


def _undecodable_class(root: Path) -> None:
    folder = root / "train" / "foreign"
    folder.mkdir()
    Image.new("RGB", (40, 40)).save(folder / "image.gif")
    (folder / "notes.txt").write_text("none")


def _dangling_link(root: Path) -> None:
    (root / "train" / "red" / "link.jpg").symlink_to(root / "gone.jpg")


def _empty_file(root: Path) -> None:
    (root / "val" / "red" / "red-000.jpg").write_bytes(b"")


def _pipe(root: Path) -> None:
    os.mkfifo(root / "val" / "red" / "pipe.jpg")


def _many_empty(root: Path) -> None:
    for name, count in (("blue", 1), ("red", 50)):
        for index in range(count):
            (root / "train" / name / f"{index}.jpg").write_bytes(b"")


TREES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (_no_train, ("--data-dir {}:", "no train/ folder", "must hold train/ and val/")),
    (
        _classes_alone,
        ("--data-dir {}:", "no train/ folder, but 3 folders of images (blue, green, red); move them into"),
    ),
    (_no_val, ("--data-dir {}:", "no val/ folder", "must hold train/ and val/")),
    (_train_is_a_file, ("--data-dir {}:", "no train/ folder")),
    (_loose, ("{}/train:", "no class folders", "6 images", "put the images of each class into a folder")),
    (_no_class, ("{}/val:", "no class folders", "put the images of each class into a folder")),
    (_renamed_class, ("--data-dir {}:", "1 class of train/ is missing in val/", "'green'", "must hold the same")),
    (_class_only_in_val, ("--data-dir {}:", "1 class of val/ is missing in train/", "'red'")),
    (_nested, ("{}/train/blue/dark:", "nested deeper", "move them up")),
    (_nested_twice, ("{}/val/deep/er/blue:", "nested deeper", "move them up")),
    (_empty_class, ("{}/val/nothing:", "a class without images", "remove the folder or add files", ".jpg")),
    (_undecodable_class, ("{}/train/foreign:", "a class without images", ".jpg")),
    (_empty_file, ("{}/val/red/red-000.jpg:", "an empty file", "delete or replace it")),
    (_dangling_link, ("{}/train/red/link.jpg:", "No such file or directory", "delete or replace it")),
    (_pipe, ("{}/val/red/pipe.jpg: not a regular file", "--bad-files skip")),
    (_many_empty, ("{0}/train/blue/0.jpg: an empty file, {0}/train/red/0.jpg: an empty file", "and 48 more")),
]


def write_folders(root: Path, *names: str) -> None:
    """Two images of each of three classes in each folder."""
    for split in names:
        for name in ("blue", "green", "red"):
            (root / split / name).mkdir(parents=True)
            for index in range(2):
                Image.new("RGB", (40, 40)).save(root / split / name / f"{name}-{index:03}.jpg")


@pytest.mark.parametrize(("spoil", "fragments"), TREES, ids=[spoil.__name__[1:] for spoil, _ in TREES])
def test_data(
    refused: Refused, good: list[str], tmp_path: Path, spoil: Callable[[Path], None], fragments: tuple[str, ...]
) -> None:
    root = tmp_path / "data"
    write_folders(root, "train", "val")
    spoil(root)
    refused(*good, "--batch-size", "1", "--data-dir", root)(*(fragment.format(root) for fragment in fragments))
    assert not (tmp_path / "run").exists(), "refused before the output folder is made"


FOLDERS: list[tuple[str, str, tuple[str, ...]]] = [
    ("train valid test", "", ("has no val/ folder, but valid/, test/; give --val-split valid",)),
    ("train val", "--val-split dev", ("has no dev/ folder, but val/; give --val-split val",)),
    ("train", "--val-split dev", ("it must hold train/ and dev/, or --val-fraction 0.1 holds out a tenth of train/",)),
    ("train/blue valid", "--val-split valid", ("2 classes of valid/", "missing in train/", "'green', 'red'")),
    (
        "train valid/blue/deep",
        "--val-split valid",
        ("nested deeper than valid/CLASS/IMAGE", "below valid/ is the class"),
    ),
    ("train val", "--val-fraction 0.1", ("has val/, which would not be used; leave --val-fraction out, or move val/",)),
    ("train valid", "--val-fraction 0.1", ("has valid/", "leave --val-fraction out and give --val-split valid, or")),
    ("train", "--val-fraction 0.1 --val-split dev", ("--val-split dev with --val-fraction 0.1:", "give one of them")),
    ("train train/alone", "--val-fraction 0.1", ("--val-fraction 0.1: {}/train/alone has 1 image, but", "add images")),
    ("images", "--val-fraction 0.1", ("--data-dir {}:", "no train/ folder")),
]


@pytest.mark.parametrize(("folders", "flags", "fragments"), FOLDERS)
def test_folders(
    refused: Refused, good: list[str], tmp_path: Path, folders: str, flags: str, fragments: tuple[str, ...]
) -> None:
    root = tmp_path / "data"
    for folder in folders.split():
        if "/" not in folder:
            write_folders(root, folder)
            continue
        (root / folder).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(root / folder / "image.jpg")
    refused(*good, "--data-dir", root, *flags.split())(*(fragment.format(root) for fragment in fragments))
    assert not (tmp_path / "run").exists(), "refused before the output folder is made"
