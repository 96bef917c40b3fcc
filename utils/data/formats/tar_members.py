"""Reads the headers of a tar file: name, offset and size of each member, without reading the members."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import NamedTuple

from utils.errors import UserError

BLOCK = 512  # bytes; headers and members begin at multiples of it
WINDOW = 4096  # bytes read at once: a header, and mostly the next ones, of small members
MAX_SMALL = 1 << 20  # bytes of a label or an extended header
CHUNK = 1 << 20  # bytes read at once of what is behind the end
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"BZ": "bzip2", b"\xfd7": "xz"}
_ADLER = 65521  # zlib.adler32 sums modulo this prime
_HARD_LINK, _SYMBOLIC_LINK, _FOLDER, _SPARSE = b"1", b"2", b"5", b"S"
_LINKS = (_HARD_LINK, _SYMBOLIC_LINK)
_FILES = (b"0", b"\0", b"7")
_WITHOUT_CONTENT = (*_LINKS, b"3", b"4", _FOLDER, b"6")  # whatever their size is
_EXTENDED = (b"x", b"X", b"L", b"K")  # say something of the next member; X is Solaris'
_OF_ALL = b"g"  # says something of all members: a comment, mostly
_NOT_SPARSE = "a sparse file, whose holes are not in the tar; write the tar without --sparse"


class Member(NamedTuple):
    """A file in a tar: its path, and where its content is, in bytes.

    Attributes:
        problem: why the content cannot be read there, and the remedy; "" if it can.
    """

    name: str
    offset: int
    size: int
    problem: str = ""


class _Extended(NamedTuple):
    """What extended headers say of the next member."""

    name: str = ""
    link: str = ""
    size: int | None = None
    is_sparse: bool = False


_NOTHING = _Extended()


def read_members(shard: Path, descriptor: int, start: int = 0, end: int | None = None) -> list[Member]:
    """The files of the tar that is `descriptor`, or its bytes from `start` to `end`, in stored order.

    Reads POSIX (pax), GNU and old headers, as POSIX.1-2001 and the GNU tar manual define them. A link is the file that
    it leads to, if that is in the tar. Folders are left out.

    Raises:
        UserError: it is compressed, is no tar, is damaged, ends within a member or before the block of zeros behind the
            last, or goes on behind that.
        OSError: it cannot be read.
    """
    headers = _Headers(shard, descriptor, os.fstat(descriptor).st_size if end is None else end)
    if method := _COMPRESSED.get(os.pread(descriptor, 2, start)):
        raise UserError(f"{shard}: compressed ({method}); images in it cannot be addressed, decompress it first")
    members: list[Member] = []
    links: dict[int, tuple[bytes, str]] = {}  # number of a member -> its kind, and the path that it leads to
    at, extended = start, _NOTHING
    while any(header := headers.read(at)):  # two blocks of zeros end a tar; some writers leave the second out
        kind = header[156:157]
        offset, size = headers.content(at, header, extended.size)
        at = offset + -(-size // BLOCK) * BLOCK
        if kind in _EXTENDED:
            extended = _extend(shard, extended, kind, read_small(shard, descriptor, Member("a header", offset, size)))
        elif kind != _OF_ALL:
            name = extended.name or _name(header)
            if kind in _LINKS:
                links[len(members)] = kind, extended.link or _text(header[157:257])
            if kind != _FOLDER and not (kind == b"\0" and name.endswith("/")):  # which is an old header's folder
                members.append(Member(name, offset, size, _NOT_SPARSE if extended.is_sparse else _problem(kind)))
            extended = _NOTHING
    _refuse_rest(shard, descriptor, at, headers.end)
    return _follow(members, links) if links else members


def read_small(shard: Path, descriptor: int, member: Member) -> bytes:
    """The content of a small member.

    Raises:
        UserError: it is not small.
    """
    if member.size > MAX_SMALL:
        raise UserError(f"{shard}: {member.name} has {member.size:,} bytes, more than a label has; write the tar again")
    return os.pread(descriptor, member.size, member.offset)


class _Headers:
    """The headers of a tar that ends at byte `end`."""

    def __init__(self, shard: Path, descriptor: int, end: int) -> None:
        self.end = end
        self._shard, self._descriptor = shard, descriptor
        self._window, self._window_at = b"", 0

    def read(self, at: int) -> bytes:
        """The header at byte `at`, or the zeros there that end the tar."""
        if at + BLOCK > self.end:
            raise UserError(
                f"{self._shard}: cut off, the block of zeros that ends a tar is missing; copy or write it again"
            )
        if not self._window_at <= at <= self._window_at + len(self._window) - BLOCK:
            self._window_at = at
            self._window = os.pread(self._descriptor, min(WINDOW, self.end - at), at)
        header = self._window[at - self._window_at : at - self._window_at + BLOCK]
        if len(header) < BLOCK:
            raise self._cut(at)
        if any(header) and not _has_checksum(header):
            what = "not a tar" if at == 0 else f"damaged at byte {at:,}"
            raise UserError(f"{self._shard}: {what}; copy or write it again")
        return header

    def content(self, at: int, header: bytes, size: int | None) -> tuple[int, int]:
        """Offset and size of what the header at byte `at` describes; `size` is that of an extended header."""
        kind, offset = header[156:157], at + BLOCK
        if kind in _WITHOUT_CONTENT:
            return offset, 0
        if kind == _SPARSE:
            goes_on = header[482]
            while goes_on:  # blocks that continue its map stand before the content
                goes_on, offset = self._byte(offset + 504), offset + BLOCK
        if size is None or kind not in _FILES:
            size = _number(self._shard, header[124:136], at)
        if offset + size > self.end:
            raise self._cut(at)
        return offset, size

    def _byte(self, at: int) -> int:
        return (os.pread(self._descriptor, 1, at) or b"\0")[0]

    def _cut(self, at: int) -> UserError:
        return UserError(f"{self._shard}: cut off in the member at byte {at:,}; copy or write it again")


def _follow(members: list[Member], links: Mapping[int, tuple[bytes, str]]) -> list[Member]:
    """The members, where links have the content of what they lead to, perhaps over other links.

    A hard link leads to a member before it, a symbolic one, whose path begins at its own folder, to any.
    """
    goals: dict[int, int | None] = {}
    numbers: dict[str, int] = {}
    for number, member in enumerate(members):
        if number in links and links[number][0] == _HARD_LINK:
            goals[number] = numbers.get(normpath(links[number][1]))
        numbers[normpath(member.name)] = number
    for number, (kind, path) in links.items():
        if kind == _SYMBOLIC_LINK:
            goals[number] = numbers.get(normpath(join(dirname(members[number].name), path)))
    followed = list(members)
    for number, (_, path) in links.items():
        goal: int | None = number
        passed = set()
        while goal in goals and goal not in passed:  # some lead to each other in a circle
            passed.add(goal)
            goal = goals[goal]
        if goal is None or goal in passed:
            problem = (
                f"a link to {path}, which is not in the tar; write the tar with the file itself "
                "(tar --dereference --hard-dereference)"
            )
            followed[number] = members[number]._replace(problem=problem)
        else:
            followed[number] = members[goal]._replace(name=members[number].name)
    return followed


def _refuse_rest(shard: Path, descriptor: int, at: int, total: int) -> None:
    """Raise UserError unless there are only zeros from byte `at` on, the end of the tar."""
    while at < total:
        chunk = os.pread(descriptor, min(CHUNK, total - at), at)
        if zeros := len(chunk) - len(chunk.lstrip(b"\0")):
            at += zeros
        if zeros < len(chunk) or not chunk:
            raise UserError(
                f"{shard}: ends before byte {at:,}, but has more behind it, as tars that were joined by cat; unpack it "
                "with tar --ignore-zeros and pack it again"
            )


def _problem(kind: bytes) -> str:
    if kind in _FILES or kind in _LINKS:
        return ""
    return _NOT_SPARSE if kind == _SPARSE else f"a member of type {kind.decode('latin-1')!r}, no file; write it again"


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return os.fsdecode(field.partition(b"\0")[0])


def _number(shard: Path, field: bytes, at: int) -> int:
    """A size: octal digits, or binary in base 256 if the top bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:])
    digits = field.partition(b"\0")[0].strip()
    try:
        return int(digits or b"0", 8)
    except ValueError:
        raise UserError(f"{shard}: damaged at byte {at:,} (a size of {digits!r}); copy or write it again") from None


def _extend(shard: Path, known: _Extended, kind: bytes, content: bytes) -> _Extended:
    if kind == b"L":
        return known._replace(name=_text(content))
    if kind == b"K":
        return known._replace(link=_text(content))
    try:
        return _pax(known, content)
    except ValueError:
        raise UserError(f"{shard}: a damaged pax header ({content[:40]!r}); copy or write it again") from None


def _pax(known: _Extended, content: bytes) -> _Extended:
    """What the lines of `LENGTH KEY=VALUE` of a pax header say.

    Raises:
        ValueError: it is no such header.
    """
    while content.strip(b"\0"):
        digits, space, _ = content.partition(b" ")
        length = int(digits)
        if not len(digits) + len(space) < length <= len(content):
            raise ValueError("a line that is no part of the header")
        key, _, value = content[len(digits) + 1 : length].removesuffix(b"\n").partition(b"=")
        if key in (b"path", b"GNU.sparse.name"):
            known = known._replace(name=os.fsdecode(value))
        elif key == b"linkpath":
            known = known._replace(link=os.fsdecode(value))
        elif key == b"size":
            known = known._replace(size=int(value))
        if key.startswith(b"GNU.sparse."):
            known = known._replace(is_sparse=True)
        content = content[length:]
    return known


def _has_checksum(header: bytes) -> bool:
    """Whether a header has the sum of its bytes, of which those of the sum itself count as spaces."""
    field = header[148:156]
    try:
        stored = int(field.partition(b"\0")[0].strip() or b"x", 8)
    except ValueError:
        return False
    spaces = 8 * 32 - sum(field)
    # The lower half of an Adler-32 is 1 + the sum: 0.1 us, where sum() takes 3.
    if (stored - (zlib.adler32(header) & 0xFFFF) + 1 - spaces) % _ADLER == 0:
        return True
    return stored == sum(byte - 256 if byte > 127 else byte for byte in header) + spaces  # old programs' signed bytes
