"""Where the image of a tf.train.Example message lies, its label and file name, without reading the image.

The message is in the encoding of protocol buffers: fields, each a number with the type of its value, and the value. An
Example is a map in a field of a field. An entry of the map is a key and a Feature, which is one list of bytes, of
floats or of integers. The entries may have any order. A general parser would need the whole message in memory.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from utils.data.formats.shard_file import WINDOW_BYTES, ShardFile
from utils.text import count

IMAGE_KEYS = (b"image/encoded", b"image")  # of TF-slim and of TensorFlow Datasets
LABEL_KEYS = (b"image/class/label", b"label")
FILE_NAME_KEYS = (b"image/filename", b"file_name")
KEYS = frozenset(IMAGE_KEYS + LABEL_KEYS + FILE_NAME_KEYS)
MAX_KEY = 64  # bytes; longer keys are none of these

FEATURES, MAP_ENTRY = 1, 1  # numbers of the fields that are looked at
KEY, FEATURE = 1, 2
BYTES_LIST, INT64_LIST = 1, 3

VARINT, EIGHT_BYTES, LENGTH_DELIMITED, FOUR_BYTES = 0, 1, 2, 5  # types of values
FIXED_BYTES = {EIGHT_BYTES: 8, FOUR_BYTES: 4}
MAX_VARINT = 10  # bytes
NO_EXAMPLE = "is no tf.train.Example message"

Value = tuple[int, int, int | None]  # of a field: its first byte in the shard, the first one behind, a varint's number


class Example(NamedTuple):
    """An image in a message.

    Attributes:
        start: first byte of the image in the shard.
        end: first byte behind it.
        label: as written.
        file_name: "" where there is none.
    """

    start: int
    end: int
    label: int
    file_name: str


def read_example(file: ShardFile, start: int, end: int) -> Example:
    """The image of the message that goes from byte `start` to byte `end` of a shard.

    Raises:
        UserError: it is no Example, or it has not exactly one image and one label.
    """
    features: dict[bytes, Value] = {}
    for number, (features_start, features_end, _) in _fields(file, start, end):
        if number == FEATURES:
            for entry_number, (entry_start, entry_end, _) in _fields(file, features_start, features_end):
                if entry_number == MAP_ENTRY:
                    key, feature = _read_map_entry(file, entry_start, entry_end)
                    features[key] = feature
    image_start, image_end, _ = _single_value(file, features, IMAGE_KEYS, BYTES_LIST, "image")
    if image_start == image_end:
        raise file.damaged("has an empty image", "write the shard again without this record")
    label = _read_label(file, _single_value(file, features, LABEL_KEYS, INT64_LIST, "label"))
    return Example(image_start, image_end, label, _read_file_name(file, features))


def _read_map_entry(file: ShardFile, start: int, end: int) -> tuple[bytes, Value]:
    """Key and value; the value is not looked for if the key is none of `KEYS`."""
    key = b""
    feature: Value = (end, end, None)  # what is missing is empty
    for number, value in _fields(file, start, end):
        if number == KEY:
            key = file.read(value[0], min(value[1] - value[0], MAX_KEY))
            if key not in KEYS:
                break
        elif number == FEATURE:
            feature = value
    return key, feature


def _values(file: ShardFile, feature: Value, list_type: int) -> list[Value]:
    """The values of a Feature, of its list of this type; [] if it has another one."""
    return [
        value
        for number, (start, end, _) in _fields(file, feature[0], feature[1])
        if number == list_type
        for _, value in _fields(file, start, end)
    ]


def _single_value(
    file: ShardFile, features: dict[bytes, Value], keys: Sequence[bytes], list_type: int, name: str
) -> Value:
    """The value of the first of the keys that is there, which must be the only one of its list."""
    key = next((key for key in keys if key in features), None)
    if key is None:
        wanted = " or ".join(key.decode() for key in keys)
        found = ", ".join(sorted(key.decode(errors="replace") for key in features)[:6]) or "none"
        raise file.damaged(f"has no {name} as {wanted} (keys: {found})", "write the shard again with one of these keys")
    values = _values(file, features[key], list_type)
    if len(values) != 1:
        kind = "bytes" if list_type == BYTES_LIST else "an integer"
        raise file.damaged(
            f"has {count(len(values), 'value')} of {key.decode()} as {kind}",
            f"write the shard again with one {name} a record",
        )
    return values[0]


def _read_label(file: ShardFile, value: Value) -> int:
    """The label in a list with one field: a number, or several that are packed."""
    start, end, label = value
    if label is None:
        label, length = _varint(file, file.read(start, min(end - start, MAX_VARINT)), 0)
        if length < end - start:
            raise file.damaged("has several labels", "write the shard again with one label a record")
    if label >= 1 << 63:
        reason = f"has the label {label - (1 << 64)}, which is no class"
        raise file.damaged(reason, "take the shards of a split with labels")
    return label


def _read_file_name(file: ShardFile, features: dict[bytes, Value]) -> str:
    """The file name of the image, "" where there is none."""
    for key in FILE_NAME_KEYS:
        if key in features:
            values = _values(file, features[key], BYTES_LIST)
            if len(values) == 1:
                start, end, _ = values[0]
                return os.fsdecode(file.read(start, min(end - start, WINDOW_BYTES)))
    return ""


def _fields(file: ShardFile, start: int, end: int) -> Iterator[tuple[int, Value]]:
    """Numbers and values of the fields from byte `start` to byte `end`; only what stands before a value is read."""
    window, at = b"", 0
    while start < end:
        if at + 2 * MAX_VARINT > len(window):
            window, at = file.window(start, min(2 * MAX_VARINT, end - start))
        before, varint = at, None
        tag, at = _varint(file, window, at)
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            length, at = _varint(file, window, at)
        elif kind == VARINT:
            varint, behind = _varint(file, window, at)
            length = behind - at
        elif kind in FIXED_BYTES:
            length = FIXED_BYTES[kind]
        else:
            raise file.damaged(f"{NO_EXAMPLE} (a field of type {kind} at byte {start})")
        value = start + at - before
        if value + length > end:
            raise file.damaged(f"{NO_EXAMPLE} (a field at byte {start} goes on behind the end)")
        yield tag >> 3, (value, value + length, varint)
        start = value + length
        at += length


def _varint(file: ShardFile, data: bytes, at: int) -> tuple[int, int]:
    """The varint at `data[at]` and the position behind it."""
    if at < len(data) and data[at] < 0x80:  # most are short
        return data[at], at + 1
    value, shift = 0, 0
    for position in range(at, min(at + MAX_VARINT, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    raise file.damaged(f"{NO_EXAMPLE} (a number without end)")
