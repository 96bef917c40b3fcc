"""TFRecord files: where the images lie, with which labels and names, and what is refused."""

import gzip
import struct
import subprocess
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali as dali
import pytest
from nvidia.dali import fn
from nvidia.dali import tfrecord as features
from tfrecord import TFRecordWriter
from tfrecord.tools.tfrecord2idx import create_index

from tests.data.formats.shards import contents, jpegs, read_by_dali
from utils.data.formats.tfrecord import class_names, find, masked_crc32c, scan
from utils.errors import UserError

Datum = dict[str, tuple[Any, str]]
IMAGES = jpegs(5)


def slim(number: int) -> Datum:
    return {
        "image/height": (40, "int"),
        "image/object/bbox/xmin": ([0.1, 0.2], "float"),
        "image/class/text": (b"a name", "byte"),
        "image/encoded": (IMAGES[number], "byte"),
        "image/class/label": (number * 300 + 1, "int"),
        "image/filename": (f"n01_{number}.JPEG".encode(), "byte"),
    }


def tfds(number: int) -> Datum:
    return {
        "file_name": (f"n01_{number}.JPEG".encode(), "byte"),
        "image": (IMAGES[number], "byte"),
        "label": (number * 300, "int"),
    }


def write(path: Path, data: Sequence[Datum]) -> Path:
    writer = TFRecordWriter(str(path))
    for datum in data:
        writer.write(datum)
    writer.close()
    return path


def framed(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return b"".join((length, TFRecordWriter.masked_crc(length), message, TFRecordWriter.masked_crc(message)))


def field(number: int, value: bytes | int) -> bytes:
    """A field of a message: a varint or bytes."""
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def feature(key: str, values: bytes, list_type: int) -> bytes:
    return field(1, field(1, key.encode()) + field(2, field(list_type, values)))


def example(*entries: bytes) -> bytes:
    return field(1, b"".join(entries))


IMAGE = feature("image", field(1, IMAGES[0]), 1)
LABEL = feature("label", field(1, 7), 3)


@pytest.mark.parametrize(("kind", "first"), [(slim, 1), (tfds, 0)])
def test_images_labels_and_names(tmp_path: Path, kind: Callable[[int], Datum], first: int) -> None:
    data = [kind(number) for number in range(5)]
    data[1] = dict(reversed(data[1].items()))
    shard = write(tmp_path / "train.tfrecord", data)
    entries = list(scan(shard))
    assert contents(shard, entries) == IMAGES
    assert [entry.label for entry in entries] == [number * 300 + first for number in range(5)]
    assert [entry.key for entry in entries] == [f"n01_{number}.JPEG" for number in range(5)]


def test_without_a_file_name_the_key_is_the_number(tmp_path: Path) -> None:
    data = [tfds(number) for number in range(3)]
    del data[1]["file_name"]
    data[2]["file_name"] = (b"", "byte")
    shard = write(tmp_path / "train.tfrecord", data)
    assert [entry.key for entry in scan(shard)] == ["n01_0.JPEG", "00000001", "00000002"]


def test_dali_reads_the_same(tmp_path: Path) -> None:
    shard = write(tmp_path / "train.tfrecord", [slim(number) for number in range(5)])
    index = tmp_path / "train.idx"
    create_index(str(shard), str(index))
    with dali.Pipeline(batch_size=5, num_threads=1, device_id=None):
        read: Any = fn.readers.tfrecord(
            path=[str(shard)],
            index_path=[str(index)],
            features={
                "image/encoded": features.FixedLenFeature([], features.string, ""),
                "image/class/label": features.FixedLenFeature([1], features.int64, -1),
            },
        )
        images, labels = read_by_dali([read["image/encoded"], read["image/class/label"]], count=5)
    entries = list(scan(shard))
    assert contents(shard, entries) == images
    assert [np.int64(entry.label).tobytes() for entry in entries] == labels


@pytest.mark.parametrize(
    "entries",
    [
        (IMAGE, LABEL),
        (LABEL, IMAGE),
        (IMAGE, feature("label", field(1, varint(7)), 3)),  # packed
        (field(1, field(2, field(3, field(1, 7))) + field(1, b"label")), IMAGE),  # the value before the key
        (feature("k" * 5000, field(1, b"v"), 1), IMAGE, feature("other", field(1, bytes(9000)), 1), LABEL),
        (IMAGE, feature("label", field(1, 3), 3), LABEL),  # the last of a key counts
        (IMAGE, LABEL, feature("image/class/text", b"", 1), b"\x1d\0\0\0\0", b"\x19" + bytes(8), field(5, 1)),
        (IMAGE, feature("label", field(1, b"cat"), 1), feature("image/class/label", field(1, 7), 3)),
        (IMAGE, LABEL, feature("file_name", field(1, b"a") + field(1, b"b"), 1)),  # two names are none
    ],
)
def test_every_encoding_of_a_message_is_read(tmp_path: Path, entries: tuple[bytes, ...]) -> None:
    shard = tmp_path / "train.tfrecord"
    shard.write_bytes(framed(example(*entries)) + framed(field(1, entries[0]) + field(1, b"".join(entries[1:]))))
    found = list(scan(shard))
    assert contents(shard, found) == [IMAGES[0]] * 2
    assert [(entry.key, entry.label) for entry in found] == [("00000000", 7), ("00000001", 7)]


def test_every_alignment_of_the_windows_gives_the_same(tmp_path: Path) -> None:
    lengths = range(4000, 4140)
    shard = tmp_path / "train.tfrecord"
    shard.write_bytes(b"".join(framed(example(feature("a", field(1, bytes(n)), 1), LABEL, IMAGE)) for n in lengths))
    found = list(scan(shard))
    assert contents(shard, found) == [IMAGES[0]] * len(lengths)
    assert {entry.label for entry in found} == {7}


def test_checksum() -> None:
    for data in (b"", b"123456789", bytes(8), bytes(range(200))):
        assert struct.pack("<I", masked_crc32c(data)) == TFRecordWriter.masked_crc(data)


GOOD = framed(example(IMAGE, LABEL))
SECOND = rf"record 1 at byte {len(GOOD)} "
COPY = r".*; copy the shard again from its source"
ANEW = r".*; write the shard again with "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            GOOD[:-1],
            rf"record 0 at byte 0 goes on to byte {len(GOOD)}, but the shard ends at byte {len(GOOD) - 1}{COPY}",
        ),
        (GOOD + GOOD[:5], SECOND + "goes on to byte" + COPY),
        (GOOD + b"\x1f\x8b" + GOOD, SECOND + "has a wrong checksum of its length" + COPY),
        (GOOD + framed(b""), SECOND + r"has no image as image/encoded or image \(keys: none\)" + ANEW),
        (
            GOOD + framed(example(*(feature(key, field(1, 1), 3) for key in "dcba"))),
            SECOND + r"has no image as .* \(keys: a, b, c, d\)" + ANEW,
        ),
        (GOOD + framed(example(feature("image", b"", 1), LABEL)), SECOND + "has 0 values of image as bytes" + ANEW),
        (GOOD + framed(example(field(1, field(1, b"image")), LABEL)), SECOND + "has 0 values of image as bytes" + ANEW),
        (
            GOOD + framed(example(feature("image", field(1, b"a") * 2, 1), LABEL)),
            SECOND + "has 2 values of image" + ANEW,
        ),
        (GOOD + framed(example(feature("label", field(1, 1) * 2, 3), IMAGE)), SECOND + "has 2 values of label" + ANEW),
        (GOOD + framed(example(feature("label", field(1, b"\1\2"), 3), IMAGE)), SECOND + "has several labels" + ANEW),
        (GOOD + framed(b"\x0a\x7f"), SECOND + r"is no tf.train.Example message \(a field at byte \d+ goes on" + COPY),
        (GOOD + framed(b"\x0b"), SECOND + r"is no tf.train.Example message \(a field of type 3 at byte \d+\)" + COPY),
    ],
)
def test_damage_is_one_line_with_the_record_and_a_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    shard = tmp_path / "train.tfrecord"
    shard.write_bytes(content)
    with pytest.raises(UserError, match=f"^{shard}: {message}") as raised:
        list(scan(shard))
    assert "\n" not in str(raised.value)


def test_every_cut_and_every_flipped_byte_ends_in_one_line(tmp_path: Path) -> None:
    shard = tmp_path / "train.tfrecord"
    small = framed(example(feature("image", field(1, b"jpeg"), 1), feature("file_name", field(1, b"a"), 1), LABEL))
    whole = small + small
    for end in {*range(1, len(whole))} - {len(small)}:
        shard.write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"goes on to byte"):
            list(scan(shard))
    for at in range(len(whole)):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        message, found = "", []
        try:
            found = list(scan(shard))
        except UserError as error:
            message = str(error)
        assert message == "" or message.startswith(f"{shard}: record ")
        assert all(0 <= start < start + length <= len(whole) for entry in found for start, length in entry.ranges)


def test_a_compressed_shard_is_refused_with_the_command_that_unpacks_it(tmp_path: Path) -> None:
    plain = tmp_path / "plain.tfrecord"
    plain.write_bytes(GOOD)
    for name in ("train-00000-of-00001", "train.tfrecord.gz"):
        shard = tmp_path / name
        shard.write_bytes(gzip.compress(GOOD))
        assert find(tmp_path) == {"train": [shard]}
        with pytest.raises(UserError, match=f"^{shard}: compressed with GZIP; unpack it: ") as raised:
            list(scan(shard))
        command = str(raised.value).rpartition("unpack it: ")[2]
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        unpacked = shard.with_name(name.removesuffix(".gz"))
        assert list(scan(unpacked)) == list(scan(plain))
        unpacked.unlink()
    for level in (0, 1, 6, 9):
        shard.write_bytes(zlib.compress(GOOD, level))
        with pytest.raises(UserError, match=f"^{shard}: compressed with ZLIB; write it again without compression"):
            list(scan(shard))


@pytest.mark.parametrize(
    "name", ["train.tfrecord.idx", "train.idx", "train.tfindex", "idx/train.idx", "idx_files/train.idx"]
)
def test_an_index_is_compared(tmp_path: Path, name: str) -> None:
    shard = write(tmp_path / "train.tfrecord", [tfds(number) for number in range(3)])
    index = tmp_path / name
    index.parent.mkdir(exist_ok=True)
    create_index(str(shard), str(index))
    entries = list(scan(shard))
    lines = index.read_text().splitlines()
    for wrong in (lines[:2], [*lines[:2], "1 2"], [*lines[:2], lines[2] + "0"], [], ["a b"], ["1"], [f"{1 << 70} 1"]):
        index.write_text("\n".join(wrong))
        with pytest.raises(
            UserError, match=rf"^{index}: is (not the|no) index of {shard} .*; delete it or write it again"
        ):
            list(scan(shard))
    index.unlink()
    assert list(scan(shard)) == entries


def test_shards_of_one_series_share_no_index(tmp_path: Path) -> None:
    shard = write(tmp_path / "a-train.tfrecord-00000-of-00001", [tfds(0)])
    (tmp_path / "a-train.idx").write_text("of another program")
    assert len(list(scan(shard))) == 1


def test_names_of_shards(tmp_path: Path) -> None:
    names = [
        "a-train.tfrecord-00000-of-00001",
        "train-00000-of-00001",
        "train-00000-of-00001.tfrecord",
        "train.v2-x-0-of-1",
        "train1.tfrecords",
        "train2.tfrec",
        "train3.TFRECORD",
    ]
    others = ["train-00000-of-00001.parquet", "a-train.array_record-00000-of-00001", "train.tfrecord.idx", "train.rec"]
    for name in (*names, *others, "validation-00000-of-00001", "0.tfrecord"):
        (tmp_path / name).touch()
    expected = {"train": sorted(tmp_path / name for name in names), "val": [tmp_path / "validation-00000-of-00001"]}
    assert find(tmp_path) == expected


def test_names_of_classes(tmp_path: Path) -> None:
    shards = [tmp_path / "train.tfrecord"]
    assert class_names(shards) is None
    slim_file, tfds_file = tmp_path / "labels.txt", tmp_path / "label.labels.txt"
    slim_file.write_text("0:background\n1:tench: a fish\n2:\u00e4\n", encoding="utf-8")
    assert class_names(shards) == class_names([tmp_path / "train" / "0.tfrecord"]) == ("tench: a fish", "\u00e4")
    assert class_names([tmp_path / "other" / "0.tfrecord"]) is None
    slim_file.write_text("1:b\n0:a\n")
    assert class_names(shards) == ("a", "b")
    for wrong in ("tench\n", "x:tench\n", "0:a\n2:b\n", "2:b\n"):
        slim_file.write_text(wrong)
        with pytest.raises(UserError, match=f"^{slim_file}: .*; correct it or move the file away"):
            class_names(shards)
    tfds_file.write_text("n01440764\nn01443537\n")
    assert class_names(shards) == ("n01440764", "n01443537")
