"""TFRecord files of tf.train.Example messages, as TF-slim and TensorFlow Datasets write them.

A record is its length, a checksum of the length, the message and a checksum of the message. The message is a map from
keys to values, which `tf_example.py` reads without the image, so the message's checksum is not computed.
"""

import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from utils.data.formats.naming import SPLIT_NAMES, find_shards, one_list, read_names
from utils.data.formats.shard_file import ShardFile, check_index
from utils.data.formats.tf_example import read_example
from utils.data.images.records import Entry
from utils.errors import UserError

NAME = "TFRecord files"
SHARD_NAME = re.compile(r"(.*\.tfrec(ord)?s?(-\d+-of-\d+)?(\.gz)?|(.*-)?[^.]*-\d+-of-\d+)", re.IGNORECASE | re.DOTALL)
LENGTH = struct.Struct("<QI")  # of the message in bytes; its checksum
CHECKSUM_BYTES = 4  # behind the message
TFDS_CLASSES, SLIM_CLASSES = "label.labels.txt", "labels.txt"
INDEX_FOLDERS = (".", "idx", "idx_files")


def is_shard(name: str) -> bool:
    """Whether it is named as `train-00000-of-00128`, `*.tfrecord` or `*.tfrecord-00000-of-01024` are."""
    return SHARD_NAME.fullmatch(name) is not None


def find(data_dir: Path) -> dict[str, list[Path]]:
    """See `ShardFormat`."""
    return find_shards(data_dir, is_shard)


def scan(shard: Path) -> Iterator[Entry]:
    """The images of a shard in stored order, whose keys are their file names. An index is compared at the end.

    Raises:
        UserError: the shard is compressed or damaged, a record has not one image and one label, or an index of
            tfrecord2idx beside the shard is of another one.
        OSError: it cannot be opened or read.
    """
    records = array("q")
    with ShardFile(shard) as file:
        offset = 0
        while offset < file.size:
            number = file.begin_record(offset)
            start = offset + LENGTH.size
            end = start + _read_length(file, offset)
            image = read_example(file, start, end)
            yield Entry(image.file_name or f"{number:08}", image.label, ((image.start, image.end - image.start),))
            records.extend((offset, end + CHECKSUM_BYTES - offset))
            offset = end + CHECKSUM_BYTES
    for index in _index_paths(shard):
        if index.is_file():
            check_index(index, shard, columns=(0, 1), expected=np.array(records).reshape(-1, 2))


def class_names(shards: Sequence[Path]) -> tuple[str, ...] | None:
    """The names in `label.labels.txt` of TensorFlow Datasets or `labels.txt` of TF-slim, in the shards' folder.

    They may also lie above, where the shards are in folders of their splits. TF-slim's class 0, "background", has no
    images and is left out.

    Raises:
        UserError: a line of `labels.txt` is not `NUMBER:NAME`, a number is missing, a file is not UTF-8, or two folders
            have different lists.
        OSError: the file cannot be read.
    """
    return one_list(shards, _find_list)


def _find_list(folder: Path) -> tuple[Path, tuple[str, ...]] | None:
    for parent in (folder, folder.parent) if folder.name in SPLIT_NAMES else (folder,):
        if (path := parent / TFDS_CLASSES).is_file():
            return path, read_names(path)
        if (path := parent / SLIM_CLASSES).is_file():
            return path, _slim_class_names(path)
    return None


def _slim_class_names(path: Path) -> tuple[str, ...]:
    names: dict[int, str] = {}
    for line in read_names(path):
        number, colon, name = line.partition(":")
        if not (colon and number.isdecimal()):
            raise UserError(f"{path}: has the line {line!r} instead of NUMBER:NAME; correct it or move the file away")
        names[int(number)] = name
    if names.get(0) == "background":
        del names[0]
    if sorted(names) not in (list(range(len(names))), list(range(1, len(names) + 1))):
        raise UserError(f"{path}: its numbers are not those from 0 or 1 on; correct it or move the file away")
    return tuple(names[number] for number in sorted(names))


def _index_paths(shard: Path) -> Iterator[Path]:
    """Where the index of a shard may lie: tfrecord2idx leaves the name to its user."""
    for folder in INDEX_FOLDERS:
        yield shard.parent / folder / f"{shard.name}.idx"
        if re.fullmatch(r"\.tfrec(ord)?s?", shard.suffix.lower()):  # otherwise all shards would share the stem
            yield shard.parent / folder / f"{shard.stem}.idx"
            yield shard.parent / folder / f"{shard.stem}.tfindex"


def _crc32c_table() -> tuple[int, ...]:
    """What each value of a byte adds to a CRC-32C (Castagnoli): its reflected polynomial is 0x82F63B78."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


CRC32C = _crc32c_table()


def masked_crc32c(data: bytes) -> int:
    """Checksum of a TFRecord: the CRC-32C, rotated by 15 bits to the right, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_length(file: ShardFile, offset: int) -> int:
    """Length of the message of the record at `offset`, which ends within the shard."""
    head = file.read(offset, LENGTH.size)
    length, checksum = LENGTH.unpack(head)
    if masked_crc32c(head[:8]) != checksum:
        if offset == 0 and head[:2] == b"\x1f\x8b":
            name = file.path.name.removesuffix(".gz")
            rename = "" if file.path.suffix == ".gz" else f"mv {name} {name}.gz && "
            raise UserError(f"{file.path}: compressed with GZIP; unpack it: {rename}gunzip {name}.gz")
        if offset == 0 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0:  # header of a zlib stream
            raise UserError(f"{file.path}: compressed with ZLIB; write it again without compression")
        raise file.damaged("has a wrong checksum of its length")
    end = offset + LENGTH.size + length + CHECKSUM_BYTES
    if end > file.size:
        raise file.cut_off(end)
    return int(length)
