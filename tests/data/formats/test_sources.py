"""Which form a data set has. What is refused is in tests/refused_folders.py."""

from pathlib import Path
from typing import Any

import pytest

from utils.data.formats.sources import find_source
from utils.options.config import TrainConfig


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def source_of(root: Path, **values: Any) -> tuple[str, dict[str, list[str]]]:
    found = find_source(TrainConfig(data_dir=root, **values), ("train", "val"))
    shards = {split: [path.relative_to(root).as_posix() for path in paths] for split, paths in found.shards.items()}
    return found.format.NAME if found.format else "folders", shards


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("train/a/1.jpg", "val/a/1.jpg", "train-0.tar"), "folders"),
        (("imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar"), "WebDataset tars"),
        (("train/0.tar", "val/0.tar"), "WebDataset tars"),
        (("train-00000-of-00001", "validation-00000-of-00001"), "TFRecord files"),
        (("train.rec", "train.idx", "val.rec", "val.idx"), "RecordIO files"),
        (("train_lmdb/data.mdb", "val_lmdb/data.mdb"), "Caffe LMDB"),
        (("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"), "ILSVRC archives"),
    ],
)
def test_the_form_is_found(tmp_path: Path, names: tuple[str, ...], expected: str) -> None:
    assert source_of(touch(tmp_path, *names))[0] == expected


def test_patterns(tmp_path: Path) -> None:
    touch(tmp_path, "a-0.tar", "a-1.tar", "b-0.tar", "train-0.tar", "val-0.tar")
    assert source_of(tmp_path, train_data="a-*")[1] == {"train": ["a-0.tar", "a-1.tar"], "val": ["val-0.tar"]}
    assert source_of(tmp_path, train_data="a-*", val_data=str(tmp_path / "b-*"))[1]["val"] == ["b-0.tar"]


def test_a_pattern_names_the_folder_of_a_database(tmp_path: Path) -> None:
    touch(tmp_path, "a/data.mdb", "a/lock.mdb", "b/data.mdb")
    expected = {"train": ["a/data.mdb"], "val": ["b/data.mdb"]}
    assert source_of(tmp_path, train_data="a", val_data="b") == ("Caffe LMDB", expected)
