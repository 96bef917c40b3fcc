"""WebDataset tars, of the library and of tar programs, against Python's tarfile; and damaged ones."""

import tarfile
from pathlib import Path

import pytest

from tests.shards import write_tar, write_webdataset
from utils.data.formats import webdataset
from utils.errors import UserError


def test_a_library_s_shards(data: Path, tmp_path: Path) -> None:
    root = write_webdataset(data, tmp_path / "data")
    shards = webdataset.find(root)
    assert [len(shards["train"]), len(shards["val"])] == [5, 5]
    assert webdataset.class_names(shards["train"]) == ("blue", "green", "red")
    found = {}
    for shard in shards["train"]:
        content = shard.read_bytes()
        for key, label, ((offset, length),) in webdataset.scan(shard):
            found[("blue", "green", "red")[int(label)], key] = content[offset : offset + length]
    expected = {(path.parent.name, path.name): path.read_bytes() for path in (data / "train").glob("*/*")}
    assert found == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"1.jpg": b"x", "1.cls": b"7"}, [("1.jpg", 7)]),
        ({"1.cls": b" 7\n", "1.PNG": b"x", "1.json": b"{}"}, [("1.PNG", 7)]),
        ({"1.webp": b"x", "1.json": b'{"label": 3}'}, [("1.webp", 3)]),
        ({"t/cat/1.jpg": b"x", "t/cat/1.json": b'{"class_name": "cat"}'}, [("t/cat/1.jpg", "cat")]),
        ({"a.jpg": b"x", "a.cls": b"dog", "._a.jpg": b"m", "readme.txt": b"t"}, [("a.jpg", "dog")]),
        ({"a.jpg": b"x", "a.cls": b"1", "b.txt": b"t", "b.json": b'{"text": "t"}'}, [("a.jpg", 1)]),
        ({"b.jpg": b"x", "a.jpg": b"y", "a.cls": b"1", "b.cls": b"2"}, [("b.jpg", 2), ("a.jpg", 1)]),
        ({"a/1.jpg": b"x", "b/1.jpg": b"y", "b/1.cls": b"1", "a/1.cls": b"2"}, [("a/1.jpg", 2), ("b/1.jpg", 1)]),
        ({"a.jpg": b"x", "a.cls": b"1", "b.cls": b"2"}, [("a.jpg", 1)]),
        ({"v1.0/1.jpg": b"x", "v1.0/1.cls": b"1", "v1.0/1.seg.npy": b"y"}, [("v1.0/1.jpg", 1)]),
    ],
)
def test_labels(tmp_path: Path, members: dict[str, bytes], expected: list[tuple[str, int | str]]) -> None:
    path = write_tar(tmp_path / "train.tar", members)
    assert [(entry.key, entry.label) for entry in webdataset.scan(path)] == expected


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.json": b'{"label": 7}', "1.npy": b"x"}, ":1.npy: has a label, but is no image by its name"),
        ({"a/1.jpg": b"x", "b/1.jpg": b"x"}, "the key label; if its folder is the class, unpack the tar"),
        ({"1.jpg": b"x", "1.json": b"[1"}, ":1.json: no label in it"),
        ({"1.jpg": b"x", "1.cls": b"1" * 2_000_000}, "1.cls has 2,000,000 bytes"),
    ],
)
def test_damage_is_named(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    path = write_tar(tmp_path / "train.tar", members, tarfile.USTAR_FORMAT)
    with pytest.raises(UserError) as error:
        list(webdataset.scan(path))
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
