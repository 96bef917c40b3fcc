"""LMDB databases: the records that DALI reads, small and large, and each kind of damage in one line."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import lmdb
import nvidia.dali as dali
import pytest
from nvidia.dali import fn

from tests.damage import JPEG, encoded
from utils.data.formats import lmdb_database
from utils.data.images.records import Entry
from utils.errors import UserError

SMALL = encoded(height=8, width=8)  # lies in a leaf page
IMAGES = {  # from one that fits a page to several pages
    f"{number:08}_n0144{number % 3}/é {number}.JPEG": encoded(height=8 + 12 * number, width=8 + 12 * number)
    for number in range(12)
}


def varint(number: int) -> bytes:
    head = b"" if number < 128 else bytes([number & 127 | 128])
    return head + varint(number >> 7) if head else bytes([number])


def datum(image: bytes | None, label: int | None, shape: tuple[int, ...] = (), flag: int | None = 1) -> bytes:
    """A Datum of Caffe with the fields that are given."""
    fields = [(index, value) for index, value in enumerate(shape, start=1)]
    content = b"".join(varint(index << 3) + varint(value) for index, value in fields)
    if image is not None:
        content += varint(4 << 3 | 2) + varint(len(image)) + image
    if label is not None:
        content += varint(5 << 3) + varint(label % (1 << 64))
    return content + (varint(7 << 3) + varint(flag) if flag is not None else b"")


def write(path: Path, values: Mapping[str, bytes], as_file: bool = False) -> Path:
    """A database as a folder, or as a file; returns its file."""
    size = (1 << 26) + 2 * sum(map(len, values.values()))  # of the map, at most
    with lmdb.open(str(path), map_size=size, subdir=not as_file, lock=False) as environment:
        with lmdb.Transaction(environment, write=True) as transaction:
            for key, value in values.items():
                transaction.put(os.fsencode(key), value)
        environment.sync(True)
    return path if as_file else path / "data.mdb"


def write_images(path: Path, as_file: bool = False) -> Path:
    labels = {key: number % 3 + 300 for number, key in enumerate(IMAGES)}
    return write(path, {key: datum(image, labels[key]) for key, image in IMAGES.items()}, as_file)


def read(shard: Path, entry: Entry) -> bytes:
    with open(shard, "rb") as file:
        return b"".join(os.pread(file.fileno(), length, offset) for offset, length in entry.ranges)


def test_records_are_those_that_dali_reads(tmp_path: Path) -> None:
    shard = write_images(tmp_path / "train_lmdb")
    entries = list(lmdb_database.scan(shard))

    @dali.pipeline_def(batch_size=len(IMAGES), num_threads=1, device_id=None)  # type: ignore[untyped-decorator]
    def reader() -> tuple[object, ...]:
        images, labels = fn.readers.caffe(path=str(shard.parent))  # type: ignore[misc]
        return images, labels

    images, labels = reader().run()
    assert [entry.key for entry in entries] == sorted(IMAGES)
    assert [read(shard, entry) for entry in entries] == [images.at(index).tobytes() for index in range(len(IMAGES))]
    assert [entry.label for entry in entries] == labels.as_array().ravel().tolist()
    assert [read(shard, entry) for entry in entries] == [IMAGES[key] for key in sorted(IMAGES)]


def test_values_in_leaf_pages_and_in_overflow_pages(tmp_path: Path) -> None:
    shard = write_images(tmp_path / "train.lmdb", as_file=True)
    in_page = {entry.key: entry.ranges[0][0] % 4096 for entry in lmdb_database.scan(shard)}
    header_and_tag = 16 + 1  # of an overflow page, and of the field
    large = {key for key in IMAGES if in_page[key] == header_and_tag + len(varint(len(IMAGES[key])))}
    assert large == {key for key in IMAGES if len(IMAGES[key]) > 2048}
    assert 2 < len(large) < len(IMAGES) - 2


def test_many_pages_and_deleted_records(tmp_path: Path) -> None:
    content = {f"{number:05}": os.urandom(100 + number % 3000) for number in range(3000)}
    shard = write(tmp_path / "val_lmdb", {key: datum(image, int(key) % 7) for key, image in content.items()})
    with (
        lmdb.open(str(shard.parent), map_size=1 << 26) as environment,
        lmdb.Transaction(environment, write=True) as transaction,
    ):
        for key in sorted(content)[::3]:
            assert transaction.delete(key.encode())
            del content[key]
        content["new"] = os.urandom(9000)
        transaction.put(b"new", datum(content["new"], 1))
    entries = list(lmdb_database.scan(shard))
    assert {entry.key: read(shard, entry) for entry in entries} == content


@pytest.mark.parametrize(
    ("image", "shape", "flag"),
    [(JPEG, (), None), (JPEG, (3, 70, 90), 1), (JPEG, (3, 70, 90), None), (JPEG, (0, 0, 0), 1), (SMALL, (), 1)],
)
def test_fields_that_writers_leave_out(tmp_path: Path, image: bytes, shape: tuple[int, ...], flag: int | None) -> None:
    shard = write(tmp_path / "train_lmdb", {"a": datum(image, None, shape, flag), "b": datum(image, 1, shape, flag)})
    entries = list(lmdb_database.scan(shard))
    assert [(entry.key, entry.label, read(shard, entry)) for entry in entries] == [("a", 0, image), ("b", 1, image)]


def test_other_fields_are_skipped(tmp_path: Path) -> None:
    others = varint(6 << 3 | 5) + bytes(4) + varint(9 << 3 | 1) + bytes(8) + varint(11 << 3 | 2) + b"\3abc"
    shard = write(tmp_path / "train_lmdb", {"a": others + datum(JPEG, 300) + others})
    (entry,) = lmdb_database.scan(shard)
    assert (entry.label, read(shard, entry)) == (300, JPEG)


Damage = Callable[[Path], Path]


def with_value(value: bytes) -> Damage:
    """A database in which one of three records has another value."""
    return lambda path: write(path, {"1": datum(JPEG, 0), "2": value, "3": datum(JPEG, 1)})


def with_bytes(change: Callable[[bytes], bytes]) -> Damage:
    def damage(path: Path) -> Path:
        shard = write_images(path)
        shard.write_bytes(change(shard.read_bytes()))
        return shard

    return damage


REFUSED: dict[str, tuple[Damage, str]] = {
    "cut at a page": (with_bytes(lambda content: content[:-4096]), "data.mdb: cut off, has"),
    "cut in a page": (with_bytes(lambda content: content[:-1]), "copy it again"),
    "cut in the header": (with_bytes(lambda content: content[:100]), "data.mdb: no readable LMDB database ("),
    "empty": (with_bytes(lambda content: b""), "data.mdb: no readable LMDB database ("),
    "another file": (with_bytes(lambda content: JPEG * 20), "data.mdb: no readable LMDB database ("),
    "pixels without the flag": (with_value(datum(bytes(48), 0, (3, 4, 4), None)), "data.mdb:2: holds pixels"),
    "an empty image": (with_value(datum(b"", 0)), "data.mdb:2: a Datum without an image; write"),
    "no value": (with_value(b""), "data.mdb:2: is empty, not a Datum"),
    "a pickled number": (with_value(pickle.dumps(3)), "data.mdb:2: is a pickled Python object, not a Datum"),
    "a cut Datum": (with_value(datum(JPEG, 0)[:-100]), "not a Datum"),
    "a number of 70 bits": (with_value(b"\x28" + b"\xff" * 10), "not a Datum"),
    "another protobuf": (with_value(b"\x0a\x03abc"), "data.mdb:2: is 5 bytes, not a Datum"),
    "a key with a line break": (
        lambda path: write(path, {"two\nlines": JPEG}), r"data.mdb:two\nlines: is a JPEG without a label",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_damage_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    damage, fragment = REFUSED[case]
    shard = damage(tmp_path / "train_lmdb")
    with pytest.raises(UserError) as caught:
        list(lmdb_database.scan(shard))
    assert str(caught.value).startswith(str(shard))
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_folder_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_images(tmp_path / "train_lmdb")
    with pytest.raises(UserError, match=r"train_lmdb: a folder; give .*train_lmdb/data.mdb instead"):
        list(lmdb_database.scan(shard.parent))
    with pytest.raises(FileNotFoundError):
        list(lmdb_database.scan(tmp_path / "gone.mdb"))
    monkeypatch.setitem(sys.modules, "lmdb", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"data.mdb: .*; pip install lmdb$"):
        list(lmdb_database.scan(shard))


def is_mapped(shard: Path) -> bool:
    return str(shard) in Path("/proc/self/maps").read_text()


def test_the_database_is_closed_after_the_scan(tmp_path: Path) -> None:
    shard = write_images(tmp_path / "train_lmdb")
    scan = lmdb_database.scan(shard)
    next(iter(scan))
    assert is_mapped(shard)
    list(scan)
    assert not is_mapped(shard)
    scan = lmdb_database.scan(shard)
    next(iter(scan))
    del scan
    assert not is_mapped(shard)


def test_names_of_databases(tmp_path: Path) -> None:
    def found(*names: str) -> dict[str, list[str]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        splits = lmdb_database.find(folder)
        return {split: [str(path.relative_to(folder)) for path in paths] for split, paths in splits.items()}

    both = ("train_lmdb/data.mdb", "val_lmdb/data.mdb", "train_lmdb/lock.mdb", "mean.binaryproto")
    assert found(*both) == {"train": ["train_lmdb/data.mdb"], "val": ["val_lmdb/data.mdb"]}
    assert found("train.lmdb", "valid.lmdb", "test.lmdb") == {"train": ["train.lmdb"], "val": ["valid.lmdb"]}
    assert found("ilsvrc12_train_lmdb/data.mdb") == {"train": ["ilsvrc12_train_lmdb/data.mdb"]}
    assert found("train.lmdb/data.mdb", "val.lmdb") == {"train": ["train.lmdb/data.mdb"], "val": ["val.lmdb"]}
    assert found("train/data.mdb", "train/lock.mdb", "val/data.mdb") == {
        "train": ["train/data.mdb"],
        "val": ["val/data.mdb"],
    }
    assert found("train/cat.jpg", "trainlmdb/data.mdb", "other_lmdb/data.mdb", "train_lmdb/cat.jpg") == {}
    assert lmdb_database.find(tmp_path / "gone") == {}
    with pytest.raises(UserError, match=r"data.mdb and .*data.mdb are both of train; move one"):
        found("a_train_lmdb/data.mdb", "train_lmdb/data.mdb")
    with pytest.raises(UserError, match="are both of train; move one"):
        found("train.lmdb", "train_lmdb/data.mdb")
