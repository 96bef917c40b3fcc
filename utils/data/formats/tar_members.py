"""Reads the headers of a tar file: name, offset and size of each member, without reading the members."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from utils.errors import UserError

BLOCK = 512  # bytes; headers and members begin at multiples of it
WINDOW = 4096  # bytes read at once: a header, and mostly the next ones, of small members
MAX_SMALL = 1 << 20  # bytes of a label or an extended header
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"BZ": "bzip2", b"\xfd7": "xz"}


class Member(NamedTuple):
    """A regular file in a tar: its path, and where its content is, in bytes."""

    name: str
    offset: int
    size: int


def read_members(shard: Path, descriptor: int, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The regular files of the tar that is `descriptor`, or its bytes from `start` to `end`, in stored order.

    Reads POSIX (pax), GNU and old headers, as POSIX.1-2001 and the GNU tar manual define them.

    Raises:
        UserError: it is compressed, is no tar, or ends within a member or before the block of zeros behind the last.
        OSError: it cannot be read.
    """
    total = os.fstat(descriptor).st_size if end is None else end
    at, window_at, window = start, start, b""
    if method := _COMPRESSED.get(os.pread(descriptor, 2, start)):
        raise UserError(f"{shard}: compressed ({method}); images in it cannot be addressed, decompress it first")
    name = ""  # from an extended header, for the next member
    size: int | None = None
    while at + BLOCK <= total:
        if not window_at <= at <= window_at + len(window) - BLOCK:
            window_at, window = at, os.pread(descriptor, min(WINDOW, total - at), at)
        header = window[at - window_at : at - window_at + BLOCK]
        if len(header) < BLOCK:
            raise _cut(shard, at)
        if header[257:262] != b"ustar":
            if not any(header):
                return  # two blocks of zeros end a tar; some writers leave the second out
            if not _is_old_header(header):
                raise UserError(_unreadable(shard, at))
        kind, offset = header[156:157], at + BLOCK
        stored = size if size is not None and kind in b"\007" else _number(shard, header[124:136], at)
        if offset + stored > total:
            raise _cut(shard, at)
        at = offset + -(-stored // BLOCK) * BLOCK
        if kind in (b"x", b"L"):
            extended = read_small(shard, descriptor, Member("an extended header", offset, stored))
            name, size = _pax(extended, name, size) if kind == b"x" else (_text(extended), size)
        elif kind in (b"g", b"K"):
            continue
        else:
            if kind in (b"0", b"\0", b"7"):
                yield Member(name or _name(header), offset, stored)
            name, size = "", None
    if at == total:
        raise UserError(f"{shard}: cut off, the block of zeros that ends a tar is missing; copy or write it again")
    raise _cut(shard, at)


def read_small(shard: Path, descriptor: int, member: Member) -> bytes:
    """The content of a small member.

    Raises:
        UserError: it is not small.
    """
    if member.size > MAX_SMALL:
        raise UserError(f"{shard}: {member.name} has {member.size:,} bytes, more than a label has; write the tar again")
    return os.pread(descriptor, member.size, member.offset)


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return os.fsdecode(field.partition(b"\0")[0])


def _number(shard: Path, field: bytes, at: int) -> int:
    """A size: octal digits, or binary in base 256 if the top bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:])
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8)
    except ValueError:
        raise UserError(f"{shard}: damaged at byte {at:,} (a size of {digits!r}); copy or write it again") from None


def _pax(content: bytes, name: str, size: int | None) -> tuple[str, int | None]:
    """`path` and `size` of an extended header, which is lines of `LENGTH KEY=VALUE`."""
    while content:
        length = int(content.split(b" ", 1)[0])
        key, _, value = content[:length].split(b" ", 1)[1].rstrip(b"\n").partition(b"=")
        if key == b"path":
            name = os.fsdecode(value)
        elif key == b"size":
            size = int(value)
        content = content[length:]
    return name, size


def _is_old_header(header: bytes) -> bool:
    """Whether this is a header of before POSIX, which has no magic: its checksum counts itself as spaces."""
    try:
        stored = int(header[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return stored == sum(header[:148]) + 8 * 32 + sum(header[156:])


def _cut(shard: Path, at: int) -> UserError:
    return UserError(f"{shard}: cut off in the member at byte {at:,}; copy or write it again")


def _unreadable(shard: Path, at: int) -> str:
    return f"{shard}: {'not a tar' if at == 0 else f'damaged at byte {at:,}'}; copy or write it again"
