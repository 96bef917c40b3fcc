"""LMDB databases of Caffe's Datum records: keys, labels and offsets of the encoded images in `data.mdb`.

The `lmdb` package, which is optional, walks the database. A value that it gives is a view into its map of the file, so
the address of an image in memory gives its offset in the file.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data.formats.naming import SPLIT_NAMES, VAL_NAMES, find_shards, split_of
from utils.data.images.records import Entry
from utils.errors import UserError, escape_control_chars
from utils.text import count

NAME = "Caffe LMDB"
DATA = "data.mdb"  # in the folder of a database
_SUFFIXES = (".mdb", ".lmdb")  # of a file
_FOLDER = re.compile(r".*[_.-]lmdb", re.IGNORECASE | re.DOTALL)
_INT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_CHANNELS, _HEIGHT, _WIDTH, _DATA, _LABEL, _FLOATS, _ENCODED = range(1, 8)  # fields of a Datum
_WIRE_TYPES = {
    _CHANNELS: {_INT}, _HEIGHT: {_INT}, _WIDTH: {_INT}, _DATA: {_BYTES}, _LABEL: {_INT}, _FLOATS: {_BYTES, _FIXED32},
    _ENCODED: {_INT}, 0: set(),
}  # fmt: skip
_SKIPPED = {_INT, _FIXED64, _BYTES, _FIXED32}  # of fields that others added
_CONTENTS = {  # how another value begins, and what it is
    rb"\xff\xd8\xff": "a JPEG without a label",
    rb"\x89PNG": "a PNG without a label",
    rb"\x80[\x02-\x05]": "a pickled Python object",
}
_REMEDY = "write the images into class folders or WebDataset tars with the program that wrote the database"
_NOT_DATUM = f"not a Datum of Caffe; {_REMEDY}"
_HEAD = 16  # bytes that prove an offset


class _Datum(NamedTuple):
    image: tuple[int, int]  # first byte and end, within the Datum
    label: int | None
    is_raw: bool  # pixels, not encoded


def is_shard(name: str) -> bool:
    """Whether a file of this name can be a database."""
    return name.lower().endswith(_SUFFIXES) and name != "lock.mdb"


def find(data_dir: Path) -> dict[str, list[Path]]:
    """`train_lmdb`, `train.lmdb` and the like, which are files or folders with `data.mdb`, and `train/data.mdb`.

    Raises:
        UserError: a folder cannot be read, or a split is there twice.
    """
    found = find_shards(data_dir, is_shard)
    folders: dict[str, list[Path]] = {}
    for path in sorted(data_dir.iterdir()) if data_dir.is_dir() else []:
        split = split_of(path.name)
        if split and path.name not in SPLIT_NAMES and _FOLDER.fullmatch(path.name) and (path / DATA).is_file():
            folders.setdefault(split, []).append(path / DATA)
    val = next((name for name in VAL_NAMES if name in folders), "val")
    for split, databases in (("train", folders.get("train", [])), ("val", folders.get(val, []))):
        candidates = [*found.get(split, []), *databases]
        if databases and len(candidates) > 1:
            raise UserError(f"{candidates[0]} and {candidates[1]} are both of {split}; move one of the two away")
        if databases:
            found[split] = databases
    return found


def scan(shard: Path) -> Iterator[Entry]:
    """The images in the order of their keys. The database is closed when the iterator ends or is closed.

    The process must not be forked before that.

    Raises:
        UserError: the `lmdb` package is missing, the file is damaged or a folder, or a value is no Datum with an
            encoded image.
        OSError: it cannot be opened.
    """
    try:
        import lmdb
    except ImportError:
        raise UserError(f"{shard}: an LMDB database is read by the package lmdb; pip install lmdb") from None
    if (shard / DATA).is_file():
        raise UserError(f"{shard}: a folder; give {shard / DATA} instead")
    with open(shard, "rb") as file:
        size = os.stat(shard).st_size
        try:
            with lmdb.open(
                str(shard), map_size=max(size, 1), subdir=False, readonly=True, lock=False, readahead=False
            ) as environment:
                _check_length(shard, size, (environment.info()["last_pgno"] + 1) * environment.stat()["psize"])
                with lmdb.Transaction(environment, buffers=True) as transaction:
                    yield from _entries(shard, file.fileno(), size, transaction.cursor())
        except lmdb.Error as error:
            raise UserError(f"{shard}: no readable LMDB database ({error}); copy it again") from None


def class_names(shards: Sequence[Path]) -> tuple[str, ...] | None:
    """None: a Datum has only a number."""
    return None


def _check_length(shard: Path, size: int, needed: int) -> None:
    """Refuse a file with fewer bytes than its pages have: reading one behind its end would kill the process."""
    if size < needed:
        raise UserError(
            f"{shard}: cut off, has {size:,} of {needed:,} bytes; copy it again, by mdb_copy if its source is as short"
        )


def _entries(shard: Path, file: int, size: int, items: Iterable[tuple[memoryview, memoryview]]) -> Iterator[Entry]:
    mapping, base, key, is_labeled = range(0), 0, None, False
    for stored, value in items:
        key = os.fsdecode(bytes(stored))
        record = f"{shard}:{escape_control_chars(key)}"
        if not value:
            raise UserError(f"{record}: is empty, {_NOT_DATUM}")
        address = np.frombuffer(value, dtype=np.uint8).__array_interface__["data"][0]
        if address not in mapping:
            mapping, base = _mapping_of(address)
            assert os.pread(file, _HEAD, address - base)[: len(value)] == value[:_HEAD], f"{shard}: not its map"
        if address - base + len(value) > size:
            raise UserError(f"{record}: would end behind the end of the file; copy the database again")
        try:
            datum = _parse(value)
        except (IndexError, ValueError):
            raise UserError(f"{record}: is {_describe(value)}, {_NOT_DATUM}") from None
        _check_image(record, datum)
        is_labeled |= datum.label is not None
        start, end = datum.image
        yield Entry(key, datum.label or 0, ((address - base + start, end - start),))
    if key is not None and not is_labeled:
        raise UserError(f"{shard}: no record has a label; {_REMEDY}")


def _check_image(record: str, datum: _Datum) -> None:
    start, end = datum.image
    if start == end:
        raise UserError(f"{record}: a Datum without an image; {_REMEDY}")
    if datum.is_raw:
        raise UserError(
            f"{record}: holds pixels, not an encoded image; write the database again with convert_imageset --encoded"
        )
    if datum.label is not None and datum.label < 0:
        raise UserError(f"{record}: has the label {datum.label}; labels count from 0 or 1 on, {_REMEDY}")


def _mapping_of(address: int) -> tuple[range, int]:
    """The memory mapping of a file that holds `address`, and the address that belongs to the file's first byte."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, _ = line.split(maxsplit=3)
            start, end = (int(number, 16) for number in span.split("-"))
            if start <= address < end:
                return range(start, end), start - int(offset, 16)
    raise AssertionError(f"{address:#x} is in no mapping")


def _parse(value: memoryview) -> _Datum:
    """The fields of a Datum.

    Raises:
        ValueError, IndexError: it is none.
    """
    numbers: dict[int, int] = {}
    image = (0, 0)
    position, end = 0, len(value)
    while position < end:
        tag, position = _varint(value, position)
        field, wire_type = tag >> 3, tag & 7
        if wire_type not in _WIRE_TYPES.get(field, _SKIPPED):
            raise ValueError(f"field {field} of type {wire_type}")
        if wire_type == _INT:
            numbers[field], position = _varint(value, position)
            continue
        length, position = _varint(value, position) if wire_type == _BYTES else (_FIXED_SIZES[wire_type], position)
        if position + length > end:
            raise ValueError(f"field {field} is cut off")
        if field == _DATA:
            image = (position, position + length)
        position += length
    if image == (0, 0) and not numbers.keys() & _WIRE_TYPES.keys():
        raise ValueError("no field of a Datum")
    label = numbers.get(_LABEL)
    if label is not None and label >= 1 << 63:  # a negative one
        label -= 1 << 64
    pixels = numbers.get(_CHANNELS, 0) * numbers.get(_HEIGHT, 0) * numbers.get(_WIDTH, 0)
    return _Datum(image, label, not numbers.get(_ENCODED, pixels != image[1] - image[0]))


def _varint(value: memoryview, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the position behind it."""
    number = shift = 0
    while True:
        byte = value[position]
        position += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _describe(value: memoryview) -> str:
    head = bytes(value[:_HEAD])
    return next((name for start, name in _CONTENTS.items() if re.match(start, head)), count(len(value), "byte"))
