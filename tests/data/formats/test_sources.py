"""Which form a data set has, and what is refused before a file is opened."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_train
from utils.config import TrainConfig
from utils.data.formats.sources import find_source, read_class_names
from utils.errors import UserError


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


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (
            ("train-0.tar", "val-0.tar", "train.rec"),
            {},
            "WebDataset tars (train-0.tar, ...) and RecordIO files (",
        ),
        (("train-0.tar",), {}, "none of val; give a name with val or valid or validation or test to its shards"),
        (("val-0.tar",), {}, "none of train; give a name with train to its shards, or name them by --train-data"),
        (
            ("train-0.tar", "val-0.tar"),
            {"train_data": "x-*"},
            "--train-data x-*: no file of that name below",
        ),
        (("train-0.tar", "test-0.tar"), {"val_split": "test"}, "--val-split test: names a folder of class folders"),
        (("train-00000-of-00002", "val-00000-of-00001"), {}, "train-00001-of-00002 is missing"),
    ],
)
def test_what_is_refused(tmp_path: Path, names: tuple[str, ...], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        source_of(touch(tmp_path, *names), **values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory); give a file with a name a line"),
        (b"\xff\xfe", "cannot be read (not text)"),
        (b"cat\ndog\ncat\n", "names cat twice (line 3)"),
        (b"cat\n\n", "has '' as a name (line 2)"),
    ],
)
def test_names_of_classes(tmp_path: Path, content: bytes | None, message: str) -> None:
    source = find_source(TrainConfig(data_dir=touch(tmp_path, "train-0.tar", "val-0.tar")), ("train", "val"))
    path = tmp_path / "names.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_class_names(path, source)
    assert str(error.value).startswith(f"--class-names {path}: {message}")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("train-00000.parquet", "scripts/convert_dataset.py "), ("train.tar.gz", "run gunzip "), ("train.beton", "FFCV")],
)
def test_data_that_cannot_be_read_is_refused(tmp_path: Path, name: str, remedy: str) -> None:
    done = run_train("--data-dir", touch(tmp_path / "data", name), "--output-dir", tmp_path / "run")
    assert done.status == 2
    assert f"{tmp_path}/data/{name} is " in done.err
    assert remedy in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
