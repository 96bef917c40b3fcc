"""RecordIO files: where the images lie, with which labels and keys, and what is refused."""

import math
import struct
from pathlib import Path

import numpy as np
import nvidia.dali as dali
import pytest
from nvidia.dali import fn

from tests.data.formats.shards import contents, jpegs, read_by_dali
from utils.data.formats.recordio import class_names, find, scan
from utils.errors import UserError

WORD = struct.pack("<I", 0xCED7230A)
IMAGES = jpegs(5)


def part(flag: int, data: bytes) -> bytes:
    return WORD + struct.pack("<I", flag << 29 | len(data)) + data


def record(data: bytes) -> bytes:
    """A record as the specification has it: split where the magic number stands at a multiple of 4."""
    pieces, start = [], 0
    for at in range(0, len(data) - 3, 4):
        if data[at : at + 4] == WORD:
            pieces.append(data[start:at])
            start = at + 4
    pieces.append(data[start:])
    flags = [0] if len(pieces) == 1 else [1] + [2] * (len(pieces) - 2) + [3]
    whole = b"".join(part(flag, piece) for flag, piece in zip(flags, pieces, strict=True))
    return whole + bytes(-len(whole) % 4)


def image(content: bytes, label: float = 0, number: int = 0, labels: tuple[float, ...] = ()) -> bytes:
    return struct.pack(f"<IfQQ{len(labels)}f", len(labels), label, number, 0, *labels) + content


def write(path: Path, images: list[bytes]) -> Path:
    """A shard with its index, as im2rec writes them."""
    offset, lines = 0, []
    with path.open("wb") as file:
        for number, data in enumerate(images):
            lines.append(f"{number}\t{offset}\n")
            offset += file.write(record(data))
    path.with_suffix(".idx").write_text("".join(lines))
    return path


def planted(content: bytes, *positions: int) -> bytes:
    """An image with the magic number at these bytes of the record's data, whose header has 24."""
    for position in positions:
        content = content[: position - 24] + WORD + content[position - 20 :]
    return content


SPLIT = [
    planted(IMAGES[0], 400),
    planted(IMAGES[0], 400, 404, 800),  # a part without data
    planted(IMAGES[1], 24),  # the image begins with it
    planted(IMAGES[2], 403, 1001, 1204),  # only the last is at a multiple of 4
    planted(IMAGES[3], 24, 28, 24 + len(IMAGES[3]) // 4 * 4 - 4),
    IMAGES[4][:401] + WORD + IMAGES[4][405:] + WORD[:3],  # no multiple of 4, and a cut one at the end
    WORD,
]


def test_images_labels_and_keys(tmp_path: Path) -> None:
    data = [image(content, 3.0 * number, 10**number) for number, content in enumerate(IMAGES)]
    data[2] = image(IMAGES[2], 99, 10**2, labels=(6.0,))
    shard = write(tmp_path / "train.rec", data)
    entries = list(scan(shard))
    assert contents(shard, entries) == IMAGES
    assert [entry.label for entry in entries] == [0, 3, 6, 9, 12]
    assert all(type(entry.label) is int for entry in entries)
    assert [entry.key for entry in entries] == [f"{10**number:08}" for number in range(5)]
    assert {len(entry.ranges) for entry in entries} == {1}


def test_a_split_record_is_several_ranges(tmp_path: Path) -> None:
    shard = write(
        tmp_path / "train.rec", [image(content, number) for number, content in enumerate([*SPLIT, IMAGES[0]])]
    )
    entries = list(scan(shard))
    assert contents(shard, entries) == [*SPLIT, IMAGES[0]]
    assert [len(entry.ranges) for entry in entries] == [2, 4, 2, 2, 4, 1, 1, 1]
    assert [entry.label for entry in entries] == list(range(8))
    assert all(length > 0 for entry in entries for _, length in entry.ranges)


def test_the_header_may_be_split(tmp_path: Path) -> None:
    number = struct.unpack("<Q", bytes(4) + WORD)[0]
    twice = struct.unpack("<Q", WORD + WORD)[0]
    label = struct.unpack("<f", WORD)[0]
    shard = tmp_path / "train.rec"
    shard.write_bytes(record(image(IMAGES[0], 5, number)) + record(image(IMAGES[1], label, twice, labels=(2.0,))))
    entries = list(scan(shard))
    assert contents(shard, entries) == IMAGES[:2]
    assert [(entry.label, entry.key) for entry in entries] == [(5, str(number)), (2, str(twice))]


def test_dali_reads_the_same(tmp_path: Path) -> None:
    images = [*IMAGES, *SPLIT]
    data = [image(content, 3.0 * number, number) for number, content in enumerate(images)]
    shard = write(tmp_path / "train.rec", data)
    with dali.Pipeline(batch_size=len(images), num_threads=1, device_id=None):
        outputs = fn.readers.mxnet(path=[str(shard)], index_path=[str(tmp_path / "train.idx")])
        found, labels = read_by_dali(outputs, count=len(images))
    entries = list(scan(shard))
    assert contents(shard, entries) == found == images
    assert [np.float32(entry.label).tobytes() for entry in entries] == labels


GOOD = record(image(IMAGES[0]))
SECOND = rf"record 1 at byte {len(GOOD)} "
COPY = r".*; copy the shard again from its source$"
ANEW = r".*; write the shard "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            GOOD[:-1],
            rf"record 0 at byte 0 goes on to byte {len(GOOD)}, but the shard ends at byte {len(GOOD) - 1}{COPY}",
        ),
        (GOOD + GOOD[:5], SECOND + "goes on to byte" + COPY),
        (GOOD + part(0, image(b"a")), SECOND + rf"goes on to byte {len(GOOD) + 36}, " + COPY),  # no padding
        (GOOD + part(2, bytes(40)), SECOND + "is not as its writer left it" + COPY),
        (GOOD + part(3, bytes(40)), SECOND + "is not as its writer left it" + COPY),
        (GOOD + part(4, bytes(40)), SECOND + "is not as its writer left it" + COPY),
        (GOOD + part(1, bytes(40)) + part(1, bytes(40)), SECOND + "is not as its writer left it" + COPY),
        (GOOD + part(1, bytes(40)), SECOND + "goes on to byte" + COPY),
        (GOOD + part(1, bytes(40)) + bytes(40), SECOND + r"has 0x00000000 at byte \d+ instead of" + COPY),
        (GOOD + part(1, bytes(41)) + part(3, bytes(40)), SECOND + r"is split at byte \d+, which is no multiple of 4"),
        (GOOD + record(image(b"", labels=(1,))), SECOND + "has no image" + ANEW),
        (GOOD + record(image(b"", labels=(1,))[:-2]), SECOND + "has no image" + ANEW),
        (GOOD + record(image(IMAGES[0], labels=(0.25,))), SECOND + "has the label 0.25, not a whole" + ANEW),
        (GOOD + record(image(IMAGES[0], -1)), SECOND + "has the label -1, not a whole number from 0 on" + ANEW),
        (GOOD + record(image(IMAGES[0], math.nan)), SECOND + "has the label nan, not a whole number" + ANEW),
        (GOOD + record(image(IMAGES[0], math.inf)), SECOND + "has the label inf, not a whole number" + ANEW),
    ],
)
def test_damage_is_one_line_with_the_record_and_a_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    shard = tmp_path / "train.rec"
    shard.write_bytes(content)
    with pytest.raises(UserError, match=f"^{shard}: {message}") as raised:
        list(scan(shard))
    assert "\n" not in str(raised.value)


def test_every_cut_and_every_flipped_byte_ends_in_one_line(tmp_path: Path) -> None:
    shard = tmp_path / "train.rec"
    small = record(image(b"jpeg" + WORD + b"end"))
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


def test_the_index_is_compared(tmp_path: Path) -> None:
    shard = write(tmp_path / "train.rec", [image(content) for content in IMAGES[:3]])
    index = tmp_path / "train.idx"
    entries = list(scan(shard))
    lines = index.read_text().splitlines()
    index.write_text("\n".join(reversed(lines)))
    assert list(scan(shard)) == entries
    for wrong in (lines[:2], [*lines[:2], "2\t7"], [*lines, lines[0]], [], ["a\tb"], ["1"], [f"1\t{1 << 70}"]):
        index.write_text("\n".join(wrong))
        with pytest.raises(
            UserError, match=rf"^{index}: is (not the|no) index of {shard} .*; delete it or write it again"
        ):
            list(scan(shard))
    index.unlink()
    assert list(scan(shard)) == entries


def test_find_and_class_names(tmp_path: Path) -> None:
    for name in ("train.rec", "train.idx", "train.lst", "a_val.REC"):
        (tmp_path / name).touch()
    assert find(tmp_path) == {"train": [tmp_path / "train.rec"], "val": [tmp_path / "a_val.REC"]}
    assert class_names([tmp_path / "train.rec"]) is None
