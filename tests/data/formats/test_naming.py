"""Names of shards: their split, the order, and gaps in numbered series."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from utils.data.formats.naming import find_shards, read_names, split_of
from utils.errors import UserError


def is_tar(name: str) -> bool:
    return name.endswith(".tar")


def touch(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found(folder: Path) -> dict[str, list[str]]:
    return {
        split: [str(path.relative_to(folder)) for path in paths] for split, paths in find_shards(folder, is_tar).items()
    }


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.rec", "train"),
        ("train-00000-of-00128", "train"),
        ("imagenet1k-train-0000.tar", "train"),
        ("ILSVRC2012_img_val.tar", "val"),
        ("imagenet2012-train.tfrecord-00000-of-01024", "train"),
        ("imagenet2012-validation.tfrecord-00000-of-00064", "validation"),
        ("TRAIN0001.tar", "train"),
        ("valid_3.tar", "valid"),
        ("my-test-set-train-01.tar", "train"),
        ("test.tar", "test"),
        ("trainval.tar", None),
        ("latest-0000.tar", None),
        ("0000.tar", None),
    ],
)
def test_the_last_word_that_names_a_split_is_the_split(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_shards_are_sorted_by_split_and_name(tmp_path: Path) -> None:
    touch(tmp_path, ["a-train-1.tar", "a-train-0.tar", "a-val-0.tar", ".a-train-2.tar", "a-train-3.txt", "4.tar"])
    (tmp_path / "a-train-5.tar").mkdir()
    os.symlink("nowhere", tmp_path / "a-val-1.tar")
    expected = {"train": ["a-train-0.tar", "a-train-1.tar"], "val": ["a-val-0.tar", "a-val-1.tar"]}
    assert found(tmp_path) == expected


def test_shards_may_lie_in_folders_of_the_splits(tmp_path: Path) -> None:
    touch(tmp_path, ["train/1.tar", "train/0.tar", "train/.2.tar", "train/class/3.tar", "validation/a-train-0.tar"])
    assert found(tmp_path) == {"train": ["train/0.tar", "train/1.tar"], "val": ["validation/a-train-0.tar"]}


@pytest.mark.parametrize("form", ["{}-0.tar", "{}/0.tar"])
def test_the_first_name_of_validation_images_is_taken(tmp_path: Path, form: str) -> None:
    for name in ("test", "validation", "valid", "val"):
        touch(tmp_path, [form.format(name)])
        assert found(tmp_path) == {"val": [form.format(name)]}


def test_without_shards_there_is_no_split(tmp_path: Path) -> None:
    assert find_shards(tmp_path, is_tar) == find_shards(tmp_path / "none", is_tar) == {}
    touch(tmp_path, ["train", "val/class/0.tar"])
    assert find_shards(tmp_path, is_tar) == {}


@pytest.mark.parametrize("folder", ["", "train/"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_gap_in_a_series_is_named(tmp_path: Path, folder: str, first: int) -> None:
    names = [f"{folder}a-train-{number:05}-of-00012.tar" for number in range(first, first + 12)]
    touch(tmp_path, [*names, "a-val-0-of-1.tar"])
    assert found(tmp_path)["train"] == names
    for number in (5, 9):
        (tmp_path / names[number]).unlink()
    with pytest.raises(UserError, match=rf": a-train-{5 + first:05}-of-00012\.tar is missing; copy it there, all 12 "):
        find_shards(tmp_path, is_tar)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-1-of-3.tar", "train-2-of-3.tar"], "train-0-of-3.tar is missing"),
        ([f"train-{n}-of-2.tar" for n in range(4)], "train-2-of-2.tar is beyond the end of its series of 2"),
        (["test-0-of-2.tar", "val.tar"], None),  # of a split that is not used
        (["train-00000-of-00002-a09b74b3ef9c3b56.tar", "train-00001-of-00002-6bf8d3a52e1c4f70.tar"], None),
        (["train-0-of-2-a09b74b3ef9c3b56.tar", "train-1-of-2-a09b74b3ef9c3b56.tar"], None),  # one hash
        (["train-0-of-2-a09b74b3ef9c3b56.tar", "train-1-of-2.tar"], None),
        (["a/train-0-of-2-a09b74b3ef9c3b56.tar", "val-0-of-1-6bf8d3a52e1c4f70.tar"], None),
        (["train-1-of-2-a09b74b3ef9c3b56.tar", "train-2-of-2-6bf8d3a52e1c4f70.tar"], None),
        (
            ["train-0-of-2-3b241101-e2bb-4255-8caf-4136c566a962.x.tar", "train-1-of-2-5f9c2a60-0000-4255-8caf-1.x.tar"],
            None,
        ),
        (
            ["train-0-of-1-a09b74b3ef9c3b56.tar", "train-0-of-1-6bf8d3a52e1c4f70.tar"],
            None,
        ),  # two data sets, as `datasets` takes them
        (["train-0-of-2-a09b74b3ef9c3b56.tar"], "train-1-of-2-HASH.tar is missing"),
        (
            ["train-0-of-3-a09b74b3ef9c3b56.tar", "train-1-of-3-6bf8d3a52e1c4f70.tar"],
            "train-2-of-3-HASH.tar is missing",
        ),
        ([f"train-{n}-of-2-a09b74b3ef9c3b5{n}.tar" for n in range(3)], "train-2-of-2-a09b74b3ef9c3b52.tar is beyond"),
        (
            [
                "train-0-of-2-a09b74b3ef9c3b56.tar",
                "train-1-of-2-6bf8d3a52e1c4f70.tar",
                "train-0-of-2-c1f3e0a9d4b72586.tar",
                "train-1-of-2-09af6b7c8d1e2f34.tar",
            ],
            "has train-0-of-2-a09b74b3ef9c3b56.tar and train-0-of-2-c1f3e0a9d4b72586.tar, two copies of one shard",
        ),
        (
            [
                "train-0-of-1-a09b74b3ef9c3b56.tar",
                "train-0-of-2-6bf8d3a52e1c4f70.tar",
                "train-1-of-2-c1f3e0a9d4b72586.tar",
            ],
            "has shards train-...-of-1.tar and train-...-of-2.tar, two copies of one split",
        ),
        (["a-train-0-of-1.tar", "b-train-0-of-1.tar"], None),
    ],
)
def test_doubtful_series(tmp_path: Path, names: list[str], message: str | None) -> None:
    touch(tmp_path, names)
    if message is None:
        find_shards(tmp_path, is_tar)
        return
    with pytest.raises(UserError) as raised:
        find_shards(tmp_path, is_tar)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}")


def test_a_list_of_classes_from_windows(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_bytes("\ufeffcaf\u00e9\r\nred\r\n".encode())
    assert read_names(path) == ("caf\u00e9", "red")
    path.write_bytes("caf\u00e9\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"classes.txt: not UTF-8 from byte 3 on; save it as UTF-8"):
        read_names(path)
