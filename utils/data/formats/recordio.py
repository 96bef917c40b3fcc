"""MXNet's RecordIO files, as im2rec writes them: train.rec and val.rec.

A record is a word that is always the same, the magic number, then a word of flag and length, the data, and zeros up to
a multiple of 4. The data is a header with the label, then the image. Where the magic number stands in the data at a
multiple of 4, the writer splits the record there and leaves the number out of the data: the one of the next part's
header takes its place.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from utils.data.formats.naming import find_shards
from utils.data.formats.shard_file import ShardFile, check_index
from utils.data.images.records import Entry

NAME = "RecordIO files"
MAGIC = 0xCED7230A
WORD = 4  # bytes; records are multiples of it
PART = struct.Struct("<II")  # magic number; flag in the upper 3 bits, length of the data in the lower 29
IMAGE = struct.Struct("<IfQQ")  # number of labels behind this header, or 0; label; two ids
LABEL = struct.Struct("<f")
WHOLE, FIRST, MIDDLE, LAST = range(4)  # flags
Ranges = tuple[tuple[int, int], ...]


def is_shard(name: str) -> bool:
    """See `ShardFormat`."""
    return name.lower().endswith(".rec")


def find(data_dir: Path) -> dict[str, list[Path]]:
    """See `ShardFormat`."""
    return find_shards(data_dir, is_shard)


def scan(shard: Path) -> Iterator[Entry]:
    """The images of a shard in stored order, whose keys are their ids. An index beside it is compared at the end.

    Raises:
        UserError: the shard is damaged, an image has several labels or one that is no class, or the index beside the
            shard is of another one.
        OSError: it cannot be opened or read.
    """
    offsets = array("q")
    with ShardFile(shard) as file:
        offset = 0
        while offset < file.size:
            file.begin_record(offset)
            offsets.append(offset)
            ranges, offset = _read_parts(file, offset)
            yield _read_image(file, ranges)
    index = shard.with_suffix(".idx")
    if index.exists():
        check_index(index, shard, columns=(1,), expected=np.array(offsets)[:, None])


def class_names(shards: Sequence[Path]) -> tuple[str, ...] | None:
    """None: im2rec writes no names."""
    return None


def _read_parts(file: ShardFile, offset: int) -> tuple[Ranges, int]:
    """Where the data of the record at `offset` lies, and where the next record begins."""
    ranges: list[tuple[int, int]] = []
    allowed = (WHOLE, FIRST)
    while True:
        flag, start, end = _read_part(file, offset)
        if flag not in allowed:
            raise file.damaged("is not as its writer left it (a part of a split record is missing)")
        if flag in (WHOLE, LAST):
            next_record = end + -end % WORD
            if next_record > file.size:
                raise file.cut_off(next_record)
            return (*ranges, (start, end - start)), next_record
        if end % WORD:
            raise file.damaged(f"is split at byte {end}, which is no multiple of {WORD}")
        ranges.append((start, end + WORD - start))  # with the magic number of the next part
        offset, allowed = end, (MIDDLE, LAST)


def _read_part(file: ShardFile, offset: int) -> tuple[int, int, int]:
    """Flag of the part at `offset`, and from where to where its data goes."""
    magic, word = PART.unpack(file.read(offset, PART.size))
    if magic != MAGIC:
        raise file.damaged(f"has {magic:#010x} at byte {offset} instead of {MAGIC:#010x}")
    start = offset + PART.size
    end = start + (word & (1 << 29) - 1)
    if end > file.size:
        raise file.cut_off(end)
    return word >> 29, start, end


def _read_image(file: ShardFile, ranges: Ranges) -> Entry:
    """The image of a record with this data."""
    if sum(length for _, length in ranges) < IMAGE.size:
        raise file.damaged(f"has no header of {IMAGE.size} bytes, as im2rec writes it", "write the shard with im2rec")
    num_labels, label, image_id, _ = IMAGE.unpack(_read_start(file, ranges, IMAGE.size))
    if num_labels > 1:
        raise file.damaged(f"has {num_labels} labels", "write the shard again with one label an image")
    start = IMAGE.size + num_labels * LABEL.size
    if sum(length for _, length in ranges) <= start:
        raise file.damaged("has no image", "write the shard again without this record")
    if num_labels:
        (label,) = LABEL.unpack(_read_start(file, ranges, start)[IMAGE.size :])
    if not (label >= 0 and label.is_integer()):
        raise file.damaged(
            f"has the label {label:g}, not a whole number from 0 on", "write the shard with class numbers"
        )
    return Entry(f"{image_id:08}", int(label), _without_start(ranges, start))


def _read_start(file: ShardFile, ranges: Ranges, count: int) -> bytes:
    """The first `count` bytes of the data, which has so many."""
    start = b""
    for offset, length in ranges:
        start += file.read(offset, min(length, count - len(start)))
    return start


def _without_start(ranges: Ranges, count: int) -> Ranges:
    """The data without its first `count` bytes."""
    rest = []
    for offset, length in ranges:
        skipped = min(count, length)
        count -= skipped
        if length > skipped:
            rest.append((offset + skipped, length - skipped))
    return tuple(rest)
