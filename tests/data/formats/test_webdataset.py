"""WebDataset tars, of the library and of tar programs, against Python's tarfile; and damaged ones."""

import gzip
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shards import write_tar, write_webdataset
from utils.data.formats import webdataset
from utils.data.formats.tar_members import read_members
from utils.errors import UserError

LONG = "folder-" * 20 + "/" + "name-" * 30 + "0001"


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


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_are_those_of_tarfile(tmp_path: Path, format: int) -> None:
    members = {"a.jpg": b"x" * 700, "empty.cls": b"", "folder/b.txt": b"y" * 512, "é.jpg": b"z"}
    if format != tarfile.USTAR_FORMAT:
        members |= {f"{LONG}.jpg": b"w" * 10}
    path = write_tar(tmp_path / "a.tar", members, format)
    with tarfile.open(path) as tar:
        expected = [(member.name, member.offset_data, member.size) for member in tar.getmembers()]
    descriptor = os.open(path, os.O_RDONLY)
    assert list(read_members(path, descriptor)) == expected
    os.close(descriptor)


def test_a_size_in_base_256_and_no_magic(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.jpg": b"x" * 700}, tarfile.USTAR_FORMAT)
    content = bytearray(path.read_bytes())
    content[124:136] = b"\x80" + (700).to_bytes(11)
    content[257:265] = bytes(8)
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    assert list(read_members(path, descriptor)) == [("a.jpg", 512, 700)]
    os.close(descriptor)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"1.jpg": b"x", "1.cls": b"7"}, [("1.jpg", 7)]),
        ({"1.cls": b" 7\n", "1.PNG": b"x", "1.json": b"{}"}, [("1.PNG", 7)]),
        ({"1.webp": b"x", "1.json": b'{"label": 3}'}, [("1.webp", 3)]),
        ({"t/cat/1.jpg": b"x", "t/cat/1.json": b'{"class_name": "cat"}'}, [("t/cat/1.jpg", "cat")]),
        ({"a.jpg": b"x", "a.cls": b"dog", "._a.jpg": b"m", "readme.txt": b"t"}, [("a.jpg", "dog")]),
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
        ({"1.jpg": b"x", "2.jpg": b"y", "1.cls": b"7"}, None, ":1: an image without a label"),
        ({"1.jpg": b"x", "1.cls": b""}, None, ":1.cls: no label in it"),
        ({"1.jpg": b"x", "1.json": b"[1"}, None, ":1.json: no label in it"),
        ({"1.jpg": b"x", "1.png": b"y", "1.cls": b"1"}, None, "images .jpg .png of one key"),
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
