"""Members of tars against Python's tarfile: links, long names, other kinds; and what cannot be read."""

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shards import write_tar
from utils.data.formats import webdataset
from utils.data.formats.tar_members import Member, read_members
from utils.errors import UserError

LONG = "folder-" * 20 + "/" + "name-" * 30 + "0001"
FORMATS = pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])


def members_of(path: Path) -> list[Member]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_members(path, descriptor)
    finally:
        os.close(descriptor)


def ours(path: Path) -> list[tuple[str, bytes]]:
    """Name and content of each member."""
    content = path.read_bytes()
    found = members_of(path)
    assert not any(member.problem for member in found)
    return [(member.name, content[member.offset :][: member.size]) for member in found]


def theirs(path: Path) -> list[tuple[str, bytes]]:
    """The same, by tarfile."""
    with tarfile.open(path) as tar:
        found = [(member.name, tar.extractfile(member)) for member in tar if not member.isdir()]
        return [(name, file.read()) for name, file in found if file is not None]


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    info.pax_headers = {"comment": "é"}
    return info


def write(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def file(name: str, content: bytes = b"content") -> tuple[tarfile.TarInfo, bytes]:
    return member(name, content), content


def hard(name: str, goal: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.LNKTYPE, link=goal), b""


def soft(name: str, goal: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.SYMTYPE, link=goal), b""


@FORMATS
def test_members_are_those_of_tarfile(tmp_path: Path, format: int) -> None:
    members = {"a.jpg": b"x" * 700, "empty.cls": b"", "folder/b.txt": b"y" * 512, "é.jpg": b"z"}
    if format != tarfile.USTAR_FORMAT:
        members |= {f"{LONG}.jpg": b"w" * 10}
    path = write_tar(tmp_path / "a.tar", members, format)
    with tarfile.open(path) as tar:
        expected = [(member.name, member.offset_data, member.size, "") for member in tar.getmembers()]
    assert members_of(path) == expected


@FORMATS
def test_links_are_what_they_lead_to(tmp_path: Path, format: int) -> None:
    long = "n" * 90 if format == tarfile.USTAR_FORMAT else LONG
    members = [
        file("a/1.jpg", b"one"),
        hard("a/2.jpg", "a/1.jpg"),
        soft("a/3.jpg", "1.jpg"),
        soft("b/4.jpg", "../a/2.jpg"),  # to a link
        soft("b/5.jpg", "6.jpg"),  # to a member behind it
        file("b/6.jpg", b"six"),
        hard("b/7.jpg", "b/4.jpg"),  # to a link to a link
        file(f"./{long}", b"long"),
        hard("8.jpg", long),
        soft("9.jpg", f"./{long}"),
        file("a/1.jpg", b"another"),
        hard("10.jpg", "a/1.jpg"),
    ]
    path = write(tmp_path / "a.tar", members, format)
    assert ours(path) == theirs(path)
    assert [content for _, content in ours(path)] == [
        b"one", b"one", b"another", b"one", b"six", b"six", b"one", b"long", b"long", b"long", b"another", b"another",
    ]  # fmt: skip


@pytest.mark.parametrize("flags", ["", "--format=gnu", "--format=pax", "--format=v7", "--format=ustar"])
def test_hard_links_of_files_as_tar_writes_them(tmp_path: Path, flags: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.jpg").write_bytes(name.encode() * 600)
        (folder / f"{name}.cls").write_bytes(b"1")
        os.link(folder / f"{name}.jpg", folder / f"{name}2.jpg")
        (folder / f"{name}2.cls").symlink_to(f"{name}.cls")
    path = tmp_path / "train.tar"
    subprocess.run(["tar", "cf", path, *flags.split(), "-C", folder, "."], check=True)
    assert sorted(ours(path)) == sorted(theirs(path))
    found = {entry.key: (entry.label, entry.ranges[0][1]) for entry in webdataset.scan(path)}
    assert found == {f"./{name}{number}.jpg": (1, 600) for name in ("a", "b", "c") for number in ("", "2")}


def test_other_kinds_of_members(tmp_path: Path) -> None:
    """Folders, also of old headers and with a size; what has no content; the type of contiguous files."""
    members = [
        (member("a", kind=tarfile.DIRTYPE), b""),
        (member("b/", kind=tarfile.AREGTYPE), b""),
        (member("pipe", kind=tarfile.FIFOTYPE), b""),
        (member("disk", kind=tarfile.BLKTYPE), b""),
        (member("a/1.jpg", b"one", tarfile.CONTTYPE), b"one"),
        (member("a/2.jpg", b"two", tarfile.AREGTYPE), b"two"),
    ]
    path = write(tmp_path / "a.tar", members, tarfile.USTAR_FORMAT)
    content = bytearray(path.read_bytes())
    content[124:136], content[148:156] = b"%011o\0" % 4096, b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)
    found = [(name, problem) for name, _, _, problem in members_of(path)]
    assert [name for name, problem in found if not problem] == [name for name, _ in theirs(path) if name != "b"]
    assert [name for name, problem in found if problem] == ["pipe", "disk"]


def test_a_size_in_base_256_no_magic_and_a_signed_checksum(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"é.jpg": b"x" * 700}, tarfile.USTAR_FORMAT)
    content = bytearray(path.read_bytes())
    content[124:136] = b"\x80" + (700).to_bytes(11)
    content[257:265] = bytes(8)
    content[148:156] = b" " * 8
    for signed in (0, 256 * sum(byte > 127 for byte in content[:512])):
        content[148:156] = b" " * 8
        content[148:156] = b"%06o\0 " % (sum(content[:512]) - signed)
        path.write_bytes(content)
        assert members_of(path) == [("é.jpg", 512, 700, "")]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([soft("a/1.jpg", "../../1.jpg")], "a/1.jpg: a link to ../../1.jpg, which is not in the tar"),
        ([soft("1.jpg", "2.jpg"), soft("2.jpg", "1.jpg")], "1.jpg: a link to 2.jpg, which is not in the tar"),
        ([soft("1.jpg", "1.jpg")], "1.jpg: a link to 1.jpg, which is not in the tar"),
        ([hard("1.jpg", "2.jpg"), file("2.jpg")], "1.jpg: a link to 2.jpg, which is not in the tar"),
        ([hard("1.jpg", "gone.jpg")], "1.jpg: a link to gone.jpg, which is not in the tar"),
        ([file("1.jpg"), hard("1.cls", "gone.cls")], "1.cls: a link to gone.cls, which is not in the tar"),
        ([(member("1.jpg", kind=tarfile.FIFOTYPE), b"")], "1.jpg: a member of type '6', no file"),
        ([(member("1.jpg", b"x", b"M"), b"x")], "1.jpg: a member of type 'M', no file"),
        ([file("1.cls"), file("1.jpg"), file("1.CLS")], "1.cls: comes twice"),
        ([file("1.jpg"), file("1.cls"), file("2.jpg"), file("2.cls"), file("1.cls")], "1.cls: comes twice"),
        ([file("1.cls"), file("1.jpg"), file("2.cls"), file("1.jpg")], "1.jpg: comes twice"),
    ],
)
def test_an_image_or_label_without_content_is_named(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], message: str
) -> None:
    path = write(tmp_path / "train.tar", [file("0.jpg"), file("0.cls", b"1"), soft("README", "../README"), *members])
    with pytest.raises(UserError) as error:
        list(webdataset.scan(path))
    assert str(error.value).startswith(f"{path}:{message}")


@pytest.mark.parametrize(
    "flags", ["--format=gnu", *(f"--format=pax --sparse-version={v}" for v in ("0.0", "0.1", "1.0"))]
)
@pytest.mark.parametrize("holes", [1, 9])
def test_sparse_files_are_named(tmp_path: Path, flags: str, holes: int) -> None:
    with (tmp_path / "1.jpg").open("wb") as sparse:
        for hole in range(holes):
            sparse.seek((hole + 1) << 20)
            sparse.write(b"x")
    (tmp_path / "2.jpg").write_bytes(b"y")
    (tmp_path / "2.cls").write_bytes(b"1")
    path = tmp_path / "train.tar"
    subprocess.run(["tar", "cSf", path, *flags.split(), "-C", tmp_path, "1.jpg", "2.jpg", "2.cls"], check=True)
    assert [(each.name, bool(each.problem)) for each in members_of(path)] == [
        ("1.jpg", True), ("2.jpg", False), ("2.cls", False),
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"train\.tar:1\.jpg: a sparse file, .*; write the tar without --sparse"):
        list(webdataset.scan(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content + b"x", "ends before byte 10,240, but has more behind it"),
        (lambda content: content[:2560] + b"\0" * 512 + content[:2560] + bytes(1024), "ends before byte 3,072, but"),
        (lambda content: content[:2560] + bytes(3 << 20) + b"x" * 7, "ends before byte 3,148,288, but"),
        (lambda content: content[:2048] + bytes(300), "cut off, the block of zeros that ends a tar is missing"),
        (lambda content: content[:1600], "cut off, the block of zeros that ends a tar is missing"),
        (lambda content: content[:1024] + b"9" + content[1025:], "damaged at byte 1,024"),  # its name
        (lambda content: content[:1180] + b"9" + content[1181:], "damaged at byte 1,024"),  # its type
    ],
)
def test_a_tar_that_is_not_as_its_writer_left_it(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = write_tar(tmp_path / "train.tar", {"1.jpg": b"x", "1.cls": b"7"}, tarfile.USTAR_FORMAT)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as error:
        members_of(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_a_key_that_begins_anew_is_another_sample(tmp_path: Path) -> None:
    """As in two tars of equal keys that `tar --concatenate` has joined; WebDataset reads each."""
    names = ("1.cls", "1.jpg", "3.cls", "2.cls", "2.jpg", "1.cls", "1.jpg", "1.jpg", "1.cls")
    path = write(tmp_path / "train.tar", [file(name, b"%d" % number) for number, name in enumerate(names)])
    expected = [("1.jpg", 0), ("2.jpg", 3), ("1.jpg", 5), ("1.jpg", 8)]
    assert [(entry.key, entry.label) for entry in webdataset.scan(path)] == expected


def test_zeros_behind_the_end_are_no_data(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train.tar", {"1.jpg": b"x"}, tarfile.USTAR_FORMAT)
    content = path.read_bytes()[:1024]
    for zeros in (512, 1024, 10_241, (3 << 20) + 5):
        path.write_bytes(content + bytes(zeros))
        assert ours(path) == [("1.jpg", b"x")]


@pytest.mark.parametrize("lines", [b"0 path=a\n", b"99 path=a\n", b"path=a\n", b"12 size=1x\n\n", b"9 path=a\n7"])
def test_a_damaged_pax_header_is_named(tmp_path: Path, lines: bytes) -> None:
    path = write(tmp_path / "train.tar", [(member("x", lines, b"x"), lines), file("1.jpg")], tarfile.USTAR_FORMAT)
    with pytest.raises(UserError, match=r"train\.tar: a damaged pax header"):
        members_of(path)
