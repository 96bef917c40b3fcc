"""WebDataset tars, of the library and of tar programs, against Python's tarfile; and damaged ones."""

import gzip
import tarfile
from collections.abc import Callable
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


def cut(content: bytes) -> bytes:
    return content[:1500]


@pytest.mark.parametrize(
    ("members", "change", "message"),
    [
        ({"1.jpg": b"x" * 3000, "1.cls": b"7"}, cut, "cut off in the member at byte 0"),
        ({"1.jpg": b"x", "1.cls": b"7"}, gzip.compress, "compressed (gzip)"),
        ({"1.jpg": b"x", "1.cls": b"7"}, lambda _: b"text " * 500, "not a tar"),
        (
            {"1.jpg": b"x", "1.cls": b"7"},
            lambda content: content[:2048] + b"?" * 512 + content[2560:],
            "damaged at byte",
        ),
        (
            {"1.jpg": b"x", "2.jpg": b"y", "1.cls": b"7"},
            None,
            ":2.jpg: an image without a label; it needs a file 2.cls",
        ),
        (
            {"1.05.jpg": b"x", "1.05.cls": b"7"},
            None,
            ":1.05.jpg: an image without a label; it needs a file 1.cls, or 1.json with the key label, as WebDataset "
            "splits a name at its first dot: leave out the dots before the suffix",
        ),
        (
            {f"22.{number}.jpg": b"x" for number in range(1001)},
            None,
            ":22: 1,001 images of one key (.0.jpg .1.jpg .10.jpg and 998 more); give each a key of its own, as "
            "WebDataset splits a name at its first dot",
        ),
        (
            {"1.gif": b"x", "1.cls": b"7"},
            None,
            ":1.gif: has a label, but is no image by its name; convert it to one that",
        ),
        ({"1.json": b'{"label": 7}', "1.npy": b"x"}, None, ":1.npy: has a label, but is no image by its name"),
        ({"a/1.jpg": b"x", "b/1.jpg": b"x"}, None, "the key label; if its folder is the class, unpack the tar"),
        ({"1.jpg": b"x", "1.cls": b""}, None, ":1.cls: no label in it"),
        ({"1.jpg": b"x", "1.json": b"[1"}, None, ":1.json: no label in it"),
        (
            {"1.jpg": b"x", "1.png": b"y", "1.cls": b"1"},
            None,
            ":1: 2 images of one key (.jpg .png); give each a key of its own",
        ),
        ({"1.jpg": b"x", "1.cls": b"1" * 2_000_000}, None, "1.cls has 2,000,000 bytes"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, members: dict[str, bytes], change: Callable[[bytes], bytes] | None, message: str
) -> None:
    path = write_tar(tmp_path / "train.tar", members, tarfile.USTAR_FORMAT)
    if change is not None:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as error:
        list(webdataset.scan(path))
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
