"""Which images sources name, in which order, and which classes they are of."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.damage import JPEG
from utils.data.formats import webdataset
from utils.data.formats.shards import Shards, index_entries
from utils.data.images.records import Entry
from utils.errors import UserError
from utils.inference.inputs import NO_TARGET, expand_sources, files_manifest, list_inputs, shards_manifest, split_shards


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(JPEG)


def names_of(*sources: str) -> list[str]:
    return [entry.name for entry in list_inputs(sources).files]


def test_the_order_is_that_of_the_sources_and_of_a_training_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path, "val/a/2.jpg", "val/a/1.png", "val/a-b/3.jpg", "val/.hidden/4.jpg", "z.jpg", "notes.txt", "val/x.md"
    )
    monkeypatch.chdir(tmp_path)
    in_val = ["val/a/1.png", "val/a/2.jpg", "val/a-b/3.jpg"]  # folder by folder: "a-b/3" < "a/1" as text
    assert names_of("val") == in_val
    assert names_of("z.jpg", "val", "notes.txt") == ["z.jpg", *in_val, "notes.txt"]
    assert names_of("val/*/*.jpg", "z.jpg") == ["val/a/2.jpg", "val/a-b/3.jpg", "z.jpg"]
    assert names_of("z.jpg", "z.jpg") == ["z.jpg", "z.jpg"]
    assert list_inputs(["val"]).ignored == {".md": 1}
    write(
        tmp_path, "val/a/@eaDir/1.jpg/THUMB.jpg", "val/__MACOSX/a/._1.jpg", "val/__MACOSX/a/5.jpg"
    )  # of a NAS, of macOS
    assert names_of("val") == in_val
    assert names_of("val/**/*.jpg") == ["val/a/2.jpg", "val/a-b/3.jpg"]
    assert names_of("val/__MACOSX/**/*.jpg") == ["val/__MACOSX/a/5.jpg"]
    write(tmp_path, "a[1].jpg")
    assert names_of("a[1].jpg") == ["a[1].jpg"]  # a file of that name is no pattern


def test_the_class_of_a_file_is_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "red/1.jpg", "other/2.jpg", "blue/3.jpg")
    (tmp_path / "red" / "empty.jpg").write_bytes(b"")
    manifest = files_manifest(list_inputs([str(tmp_path)]).files, ("blue", "red"))
    assert manifest.labels.tolist() == [0, NO_TARGET, 1, 1]
    assert manifest.bad == {str(tmp_path / "red" / "empty.jpg"): "an empty file"}
    monkeypatch.chdir(tmp_path / "red")
    manifest = files_manifest(list_inputs(["1.jpg"]).files, ("blue", "red"))
    assert manifest.labels.tolist() == [1]
    assert manifest.record(0) == ("1.jpg", "1.jpg")


def test_shards_are_found_where_there_is_no_image(tmp_path: Path) -> None:
    for name in ("val/b.tar", "val/a.tar", "train/c.tar", "train/.d.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    inputs = list_inputs([str(tmp_path)])
    assert [path.name for path in inputs.shards] == ["c.tar", "a.tar", "b.tar"]
    groups = [(split, len(paths)) for _, split, paths in split_shards(inputs.shards)]
    assert groups == [("train", 1), ("val", 2)]
    write(tmp_path, "val/x.jpg")
    assert list_inputs([str(tmp_path)]).shards == []


def test_folders_of_shards_are_searched_as_those_of_images(tmp_path: Path) -> None:
    """Links to folders are followed, hidden folders are not."""
    for name in ("elsewhere/a.tar", "data/.cache/b.tar"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
    data = tmp_path / "data"
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("circle", "circle-2"):
        (data / name).symlink_to(data)
    assert list_inputs([str(data)]).shards == [data / "linked" / "a.tar"]


def test_sources_without_images(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"x\.parquet is parquet"):
        list_inputs([str(tmp_path / "x.parquet")])
    (tmp_path / "y.ZIP").write_bytes(b"")
    with pytest.raises(UserError, match="a ZIP archive"):
        expand_sources([str(tmp_path / "*.ZIP")])


def shards_of(folder: Path, labels: Sequence[int | str]) -> Shards:
    entries = [Entry(f"{number}.jpg", label, ((100 * number, 10),)) for number, label in enumerate(labels)]
    counts = np.array([len(labels)])
    return Shards("val", folder, (str(folder / "val.tar"),), np.array([0]), counts, index_entries(folder, entries))


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (["red", "blue", "green"], None, [1, 0, NO_TARGET]),
        ([0, 1, 0], None, [0, 1, 0]),
        ([1, 2, 1], None, [0, 1, 0]),
        ([1, 1], None, [NO_TARGET] * 2),  # from 0 or from 1?
        ([0, 2], None, [NO_TARGET] * 2),  # more classes than the network has
        ([0, 1, 2], "red\ngreen\nblue\n", [1, NO_TARGET, 0]),
        ([1, 3], "red\ngreen\nblue\n", [1, 0]),
    ],
)
def test_labels_of_shards(tmp_path: Path, labels: Sequence[int | str], names: str | None, expected: list[int]) -> None:
    if names is not None:
        (tmp_path / "classes.txt").write_text(names)
    manifest = shards_manifest([(webdataset, shards_of(tmp_path, labels))], ("blue", "red"))
    assert manifest.labels.tolist() == expected
    assert manifest.record(1).name == f"{tmp_path}/val.tar:1.jpg"
    assert manifest.record(1).location == (str(tmp_path / "val.tar"), ((100, 10),))


def test_numbers_that_are_class_names(tmp_path: Path) -> None:
    manifest = shards_manifest([(webdataset, shards_of(tmp_path, [3, 2]))], ("1", "2", "3"))
    assert manifest.labels.tolist() == [2, 1]


def test_several_shards_keep_their_order_and_parts(tmp_path: Path) -> None:
    other = tmp_path / "other"
    split = [Entry("a.jpg", "red", ((5, 3), (20, 4))), Entry("b.jpg", "blue", ((40, 0),))]
    second = Shards("val", other, (str(other / "v.tar"),), np.array([0]), np.array([2]), index_entries(other, split))
    groups = [(webdataset, shards_of(tmp_path, ["red"])), (webdataset, second)]
    manifest = shards_manifest(groups, ("blue", "red"))
    assert manifest.labels.tolist() == [1, 1, 0]
    assert manifest.record(1).location == (os.fspath(other / "v.tar"), ((5, 3), (20, 4)))
    assert manifest.bad == {f"{other}/v.tar:b.jpg": "an empty file"}
