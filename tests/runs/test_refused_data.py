"""Wrong data sets: each ends in exit status 2 and one line that names the file or folder and the remedy."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Refused


def _train_is_a_file(root: Path) -> None:
    shutil.rmtree(root / "train")
    (root / "train").write_text("")


def _no_class(root: Path) -> None:
    shutil.rmtree(root / "val")
    (root / "val").mkdir()


def _empty_class(root: Path) -> None:
    (root / "val" / "nothing").mkdir()


def _many_empty(root: Path) -> None:
    for name, count in (("blue", 1), ("red", 50)):
        for index in range(count):
            (root / "train" / name / f"{index}.jpg").write_bytes(b"")


TREES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (_train_is_a_file, ("--data-dir {}:", "no train/ folder")),
    (_no_class, ("{}/val:", "no class folders", "put the images of each class into a folder")),
    (_empty_class, ("{}/val/nothing:", "a class without images", "remove the folder or add files", ".jpg")),
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
    ("train first second", "", ("--data-dir {}: has no val/ folder",)),
    ("train", "--val-split dev", ("has no dev/ folder; give the name of one that is there",)),
    ("train/blue valid", "--val-split valid", ("2 classes of valid/", "missing in train/", "'green', 'red'")),
    (
        "train valid/blue/deep",
        "--val-split valid",
        ("nested deeper than valid/CLASS/IMAGE", "below valid/ is the class"),
    ),
    (
        "train valid",
        "--val-fraction 0.1",
        ("has valid/, which would not be used; leave --val-fraction out, or move valid/ away",),
    ),
    ("train", "--val-fraction 0.1 --val-split dev", ("--val-split dev with --val-fraction 0.1:", "give one of them")),
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
