"""Which folders are train and val: by usual names in any case, by flags, or class folders beside each other."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from utils.data.formats.sources import with_val_fraction
from utils.data.formats.split_folders import BESIDE, find_folder, folder_of, has_val_folder
from utils.data.splits.selection import read_data
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig


def write(root: Path, *folders: str, images: int = 2) -> TrainConfig:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(images):
            (root / folder / f"{number}.jpg").write_bytes(f"{folder}{number}".encode())
    return TrainConfig(data_dir=root, output_dir=root / "run")


def chosen(config: TrainConfig) -> float | None:
    return with_val_fraction(config).val_fraction


@pytest.mark.parametrize(
    ("split", "folders", "expected"),
    [
        ("train", ["TRAIN"], "TRAIN"),
        ("train", ["Train", "Training"], "Train"),
        ("train", ["training"], "training"),
        ("train", ["trainval", "pretrain"], None),
        ("val", ["test", "Validation", "VALID", "Val"], "Val"),
        ("val", ["test", "Validation", "VALID"], "VALID"),
        ("val", ["test", "Validation"], "Validation"),
        ("val", ["Testing", "TEST"], "TEST"),
        ("val", ["Testing"], "Testing"),
    ],
    ids=str,
)
def test_a_usual_name_in_any_case(tmp_path: Path, split: str, folders: Sequence[str], expected: str | None) -> None:
    write(tmp_path, *(f"{folder}/red" for folder in folders))
    assert find_folder(tmp_path, split, split) == expected


def test_the_name_itself_comes_first_and_others_must_hold_folders(tmp_path: Path) -> None:
    config = write(tmp_path, "TRAIN/red", "train/red", "test", "Dev/red")
    assert folder_of(config, "train") == "train"
    assert find_folder(tmp_path, "val", "val") is None, "a flat test/ may be a competition's"
    assert find_folder(tmp_path, "val", "dev") == "Dev"
    assert find_folder(tmp_path, "val", "test") == "test", "named, so that its reading says what is wrong"
    write(tmp_path, "valid/red", "VALID/red")
    with pytest.raises(UserError, match="has VALID/ and valid/; give --val-split VALID, or the other"):
        find_folder(tmp_path, "val", "val")


def test_a_folder_that_may_wait_does_not_end_a_held_out_part(tmp_path: Path) -> None:
    write(tmp_path, "train/red", "Test/red")
    assert not has_val_folder(tmp_path, "val")
    assert has_val_folder(tmp_path, "test")
    write(tmp_path, "Valid/red")
    assert has_val_folder(tmp_path, "val")


def test_images_of_folders_with_other_names(tmp_path: Path, cpu: DistEnv) -> None:
    config = write(tmp_path, "Training/red", "Training/blue", "TEST/red", "extra/red", "extra/blue")
    listed = read_data(config, cpu)
    assert {split: each.title for split, each in listed.items()} == {"train": "Training/", "val": "TEST/"}
    assert listed["val"].labels.tolist() == [1, 1], "in the order of the training classes"
    named = dataclasses.replace(config, train_split="extra", val_split="Training")
    assert [each.title for each in read_data(named, cpu).values()] == ["extra/", "Training/"]


def test_class_folders_beside_each_other_validate_on_a_tenth(tmp_path: Path, cpu: DistEnv) -> None:
    config = write(tmp_path, "red", "blue", images=20)
    assert chosen(config) == 0.1
    assert chosen(dataclasses.replace(config, val_fraction=0.3)) == 0.3
    assert read_data(with_val_fraction(config), cpu).keys() == {"train"}, "which is divided later"
    assert folder_of(config, "train") == BESIDE, "for a feed, a conversion"


@pytest.mark.parametrize(
    ("files", "flags", "expected"),
    [
        ({"labels.csv": "file,label"}, {}, 0.1),
        ({"metadata.jsonl": '{"file": "1.jpg", "label": "red"}'}, {}, 0.1),
        ({"labels.csv": "file,label", "test.csv": "file"}, {}, 0.1),
        ({"labels.csv": "file,label"}, {"val_fraction": 0.0}, 0.0),
        ({"mine.csv": "file,label"}, {"train_data": "mine.csv"}, 0.1),
        ({"mine.csv": "file,label"}, {"train_data": "mine.csv", "val_split": "dev"}, None),
        ({"mine.csv": "file,label"}, {"val_data": "mine.csv"}, None),
        ({"mine.csv": "file,label", "val.csv": "file,label"}, {"train_data": "mine.csv"}, None),
        ({"labels.csv": "file,label,split"}, {}, None),
        ({"labels.csv": "file,label", "val.csv": "file,label"}, {}, None),
        ({"train.csv": "file,label"}, {}, None),
        ({"labels.csv": "file,size"}, {}, None),
    ],
    ids=str,
)
def test_one_label_file_of_all_images_validates_on_a_tenth(
    tmp_path: Path, files: dict[str, str], flags: dict[str, Any], expected: float | None
) -> None:
    for name, heading in files.items():
        (tmp_path / name).write_text(f"{heading}\n")
    given = frozenset(flags)
    assert chosen(TrainConfig(data_dir=tmp_path, output_dir=tmp_path / "run", given=given, **flags)) == expected


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path, cpu: DistEnv) -> None:
    config = dataclasses.replace(write(tmp_path, "red", "Valid"), val_fraction=0.5)
    assert read_data(config, cpu)["train"].classes == ("Valid", "red")
    (tmp_path / "Valid").rename(tmp_path / "class")
    write(tmp_path, "Valid/red")
    with pytest.raises(UserError, match="has Valid/, which would not be used"):
        read_data(config, cpu)


def test_all_images_train_and_validate_with_a_fraction_of_0(tmp_path: Path, cpu: DistEnv) -> None:
    config = dataclasses.replace(write(tmp_path, "red", "blue"), val_fraction=0.0)
    train, val = read_data(config, cpu).values()
    assert train.names() == val.names() == ["blue/0.jpg", "blue/1.jpg", "red/0.jpg", "red/1.jpg"]
    assert train.fingerprint == val.fingerprint
    write(tmp_path, "train/red", "train/blue")
    with pytest.raises(UserError, match="has no val/ folder; it must hold train/ and val/, or --val-fraction"):
        read_data(config, cpu)  # as a run of before, whose val/ is gone


@pytest.mark.parametrize(
    ("folders", "table", "flags"),
    [
        (["red", "blue", "Test"], "", {}),
        (["red", "blue"], "notes.csv", {}),
        (["red"], "", {}),
        (["train/red", "red", "blue"], "", {}),
        (["red", "blue"], "", {"val_split": "val"}),
        (["red", "blue"], "", {"train_data": "*.tar"}),
        (["images/red", "images/blue"], "", {}),
    ],
    ids=str,
)
def test_nothing_is_held_out_by_itself_where_the_form_is_not_clear(
    tmp_path: Path, folders: Sequence[str], table: str, flags: dict[str, Any]
) -> None:
    config = write(tmp_path, *folders)
    if table:
        (tmp_path / table).write_text("a,b\n")
    assert chosen(dataclasses.replace(config, given=frozenset(flags), **flags)) is None


def test_a_folder_of_images_beside_a_table_is_no_class(tmp_path: Path) -> None:
    config = dataclasses.replace(write(tmp_path, "images"), val_fraction=0.1)
    assert folder_of(config, "train") == BESIDE
    (tmp_path / "cells.csv").write_text("images/0.jpg 1\n")
    with pytest.raises(UserError, match=r"--train-data cells\.csv$"):
        folder_of(config, "train")
