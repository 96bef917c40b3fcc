"""A shard of records as a scan reads it: in small windows, with messages that name the record, and its index file."""

import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from utils.errors import UserError
from utils.text import count

WINDOW_BYTES = 4096  # holds what stands before an image, and what stands between two
COPY_AGAIN = "copy the shard again from its source"


class ShardFile:
    """A shard that a scan walks through record by record.

    Attributes:
        size: bytes.

    Raises:
        UserError: the shard is empty.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe of that name must not block
        self.size = os.fstat(self._fd).st_size
        self._number, self._offset = -1, 0
        self._window, self._window_offset = b"", 0
        self._other_window, self._other_offset = b"", 0  # a parser goes to the end of an image and back
        if self.size == 0:
            os.close(self._fd)
            raise UserError(f"{path}: an empty file without records; delete it, or {COPY_AGAIN}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def begin_record(self, offset: int) -> int:
        """Number, from 0 on, of the next record, which begins at byte `offset`; messages name it from now on."""
        self._number, self._offset = self._number + 1, offset
        return self._number

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of a short range; raises as `window`."""
        window, at = self.window(offset, length)
        return window[at : at + length]

    def window(self, offset: int, length: int) -> tuple[bytes, int]:
        """Bytes of the shard, and the position in them where those from `offset` to `offset + length` begin.

        Raises:
            UserError: the shard ends before.
            OSError: it cannot be read.
        """
        at = offset - self._window_offset
        if at < 0 or at + length > len(self._window):
            window, window_offset = self._window, self._window_offset
            self._window, self._window_offset = self._other_window, self._other_offset
            self._other_window, self._other_offset = window, window_offset
            at = offset - self._window_offset
        if at < 0 or at + length > len(self._window):
            self._window, self._window_offset, at = os.pread(self._fd, max(length, WINDOW_BYTES), offset), offset, 0
            if len(self._window) < length:
                raise self.cut_off(offset + length)
        return self._window, at

    def cut_off(self, end: int) -> UserError:
        """An error for a record that goes on to byte `end`, behind the end of the shard."""
        return self.damaged(f"goes on to byte {end}, but the shard ends at byte {self.size}")

    def damaged(self, reason: str, remedy: str = COPY_AGAIN) -> UserError:
        """An error that names the shard and the record that was begun last."""
        return UserError(f"{self.path}: record {self._number} at byte {self._offset} {reason}; {remedy}")


def check_index(index: Path, shard: Path, columns: tuple[int, ...], expected: NDArray[np.int64]) -> None:
    """Compare a text file of offsets, as DALI and MXNet need it beside a shard, with the shard itself.

    An index that is not of this shard means that one of the two was replaced.

    Args:
        index: one record a line, numbers between white space.
        shard: as messages name it.
        columns: of the index to compare.
        expected: their values, sorted: (num_records, len(columns)).

    Raises:
        UserError: the index has other values, or cannot be read.
    """
    values = array("q")
    try:
        with open(index, encoding="utf-8") as file:
            for line in file:
                words = line.split()
                values.extend(int(words[column]) for column in columns)
    except (ValueError, IndexError, OverflowError):
        raise UserError(
            f"{index}: is no index of {shard} (its lines are not numbers); delete it or write it again"
        ) from None
    except OSError as error:
        raise UserError(f"{index}: cannot be read ({error.strerror}); delete it or check its permissions") from None
    found = np.array(values).reshape(-1, len(columns))
    if not np.array_equal(found[np.argsort(found[:, 0])], expected):
        counts = count(len(found), "record") if len(found) != len(expected) else "other places"
        raise UserError(
            f"{index}: is not the index of {shard} (it lists {counts}, the shard has "
            f"{count(len(expected), 'record')}); delete it or write it again"
        )
