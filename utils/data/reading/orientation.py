"""EXIF orientation: how an image must be turned to be upright, as the first block of EXIF data in its file says.

DALI's parser and decoders take different blocks where a file has several. So the two sizes differ, or memory is
overwritten. `conflicting` names such files without decoding them.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

ORIENTATION = 274  # the tag
UPRIGHT = 1
# Formats of whole numbers, by the type of a tag.
_TYPES = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
_SHORT = 3
JPEG_START, PNG_START = b"\xff\xd8", b"\x89PNG"
EXIF = b"Exif\0\0"
_STANDALONE = {0x01, *range(0xD0, 0xD9)}  # JPEG markers without a segment
APP0, APP1, ADOBE, APP15, COMMENT, _SCAN, _END = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE, 0xDA, 0xD9
_HAS_EXIF = 8  # flag of a WebP's VP8X chunk


class _Tag(NamedTuple):
    """The orientation of one block.

    Attributes:
        value: 1 to 8; None where the block has no such tag.
        usual: whether every reader finds the same.
    """

    value: int | None
    usual: bool


def orientation(content: bytes) -> int:
    """Orientation of a JPEG, PNG or WebP by its first block of EXIF data that has one: 1 (upright) to 8.

    XMP and text chunks do not count: DALI's decoders do not look there.
    """
    return next((tag.value for tag in map(_read_tag, _blocks(content)) if tag.value is not None), UPRIGHT)


def conflicting(content: bytes) -> bool:
    """Whether several blocks of EXIF data have different orientations."""
    return len({tag.value for tag in map(_read_tag, _blocks(content))} - {None}) > 1


def is_usual(content: bytes) -> bool:
    """Whether there is at most one block of EXIF data, and it holds the orientation as the standard says."""
    blocks = list(_blocks(content))
    mark = {JPEG_START: EXIF, b"\x89P": b"eXIf", b"RI": b"EXIF"}.get(content[:2])
    marks = content.count(mark) if mark else 0
    return len(blocks) == marks <= 1 and all(_read_tag(block).usual for block in blocks)


def _blocks(content: bytes) -> Iterator[bytes]:
    """The blocks of EXIF data in a file, each from its TIFF header on, some with the mark of a JPEG's before it."""
    if content.startswith(JPEG_START):
        return _jpeg_blocks(content)
    if content.startswith(PNG_START):
        return (block for name, block in _chunks(content, 8, ">I4s", 4) if name == b"eXIf")
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return _webp_blocks(content)
    return iter(())


def jpeg_segments(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker of each segment of a JPEG before its first scan, and where its data begin and end; of other files none."""
    at = 2 if content.startswith(JPEG_START) else len(content)
    while at + 4 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF or marker in _STANDALONE:  # fill bytes before a marker
            at += 1 if marker == 0xFF else 2
            continue
        if marker in (_SCAN, _END):
            return
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4])  # a segment's length counts itself
        yield marker, at + 4, end
        at = end


def _jpeg_blocks(content: bytes) -> Iterator[bytes]:
    for marker, start, end in jpeg_segments(content):
        if marker == APP1 and content.startswith(EXIF, start):
            yield content[start + len(EXIF) : end]


def _webp_blocks(content: bytes) -> Iterator[bytes]:
    chunks = _chunks(content, 12, "<4sI", 0)
    name, header = next(chunks, (b"", b""))
    if name == b"VP8X" and header and header[0] & _HAS_EXIF:
        yield from (block for name, block in chunks if name == b"EXIF")


def _chunks(content: bytes, at: int, header: str, trailer: int) -> Iterator[tuple[bytes, bytes]]:
    """Names and data of a file's chunks from `at` on; `trailer` bytes follow each, or what makes its length even."""
    while at + 8 <= len(content):
        fields = struct.unpack_from(header, content, at)
        name, length = sorted(fields, key=lambda field: isinstance(field, int))
        yield name, content[at + 8 : at + 8 + length]
        at += 8 + length + (trailer or length % 2)


def _read_tag(block: bytes) -> _Tag:
    """The orientation in the first directory of a block."""
    if block.startswith(EXIF):  # which PNG and WebP do not have, but some programs write
        return _read_tag(block[len(EXIF) :])._replace(usual=False)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    if order is None or len(block) < 8:
        return _Tag(None, False)
    (start,) = struct.unpack_from(order + "I", block, 4)
    if start + 2 > len(block):
        return _Tag(None, False)
    (count,) = struct.unpack_from(order + "H", block, start)
    whole = start + 2 + 12 * count <= len(block)
    for at in range(start + 2, min(start + 2 + 12 * count, len(block) - 11), 12):
        tag, kind, length = struct.unpack_from(order + "HHI", block, at)
        if tag == ORIENTATION:
            if kind not in _TYPES:
                return _Tag(None, False)
            (value,) = struct.unpack_from(order + _TYPES[kind], block, at + 8)
            return _Tag(value if 1 <= value <= 8 else UPRIGHT, whole and kind == _SHORT and length == 1)
    return _Tag(None, whole)
