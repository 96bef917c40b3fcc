"""The folder in which the objects of a store are staged: its lock, the record of what is there, files in progress.

`.stage/objects.jsonl` has a line for each object that is there under its final name. A file whose size or time is not
that of the line counts as missing. Files in progress lie in `.stage/`, too, and become the final ones by a rename.
"""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from utils.errors import UserError
from utils.files import atomic_write_text

STAGE, RECORD = ".stage", "objects.jsonl"


class StoredObject(NamedTuple):
    """An object of a store.

    Attributes:
        name: its key below the prefix.
        size: bytes.
        tag: its ETag without quotes, or the time of its last change where the store has no ETag.
        mtime: the time of its last change, nanoseconds since 1970.
        version: of the store, once it was read; "" where the store counts none.
    """

    name: str
    size: int
    tag: str
    mtime: int
    version: str = ""

    def is_same(self, other: "StoredObject | None") -> bool:
        """Whether the content is the same, as far as the store says so."""
        return other is not None and (self.size, self.tag) == (other.size, other.tag)


class StagedFiles:
    """The staged objects of one URL.

    Args:
        folder: of the data set; it is made.

    Raises:
        UserError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inside = folder / STAGE
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._folder_file = -1
        try:
            self._inside.mkdir(parents=True, exist_ok=True)
            probe = self.new_part()
            probe.write_bytes(b"")
            probe.unlink()
            self._folder_file = os.open(self._inside, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"--stage-dir: {folder} cannot be written ({error.strerror}); give another") from None

    def try_lock(self) -> bool:
        """Keep other processes out until `close`; False if one is in. Where the file system has no locks all are in."""
        try:
            fcntl.flock(self._folder_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        for part in self._inside.glob("*.part"):  # of a process that was killed
            part.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Let others in."""
        if self._folder_file >= 0:
            os.close(self._folder_file)
            self._folder_file = -1

    def known(self) -> dict[str, StoredObject]:
        """The objects that are there, by name."""
        found: dict[str, StoredObject] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self._inside / RECORD).read_text(errors="surrogateescape").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a process that was killed
                    values = json.loads(line)
                    each = StoredObject(*(values[name] for name in StoredObject._fields))
                    found[each.name] = each
        return {name: each for name, each in found.items() if self._is_there(each)}

    def _is_there(self, found: StoredObject) -> bool:
        try:
            status = os.stat(self.folder / found.name)
        except OSError:
            return False
        # A file system may round times.
        return status.st_size == found.size and abs(status.st_mtime_ns - found.mtime) < 2e9

    def start_record(self, known: Mapping[str, StoredObject], listed: Iterable[StoredObject]) -> int:
        """Write the record again, with what is there of `listed`; delete what the store no longer has.

        Returns:
            How many files were deleted.
        """
        still_there = {each.name: known[each.name] for each in listed if each.name in known}
        for name in known.keys() - still_there.keys():
            (self.folder / name).unlink(missing_ok=True)
        atomic_write_text(self._inside / RECORD, "".join(_line(each) for each in still_there.values()))
        return len(known) - len(still_there)

    def new_part(self) -> Path:
        """A file for an object in progress."""
        with self._lock:
            number = next(self._numbers)
        return self._inside / f"{os.uname().nodename}.{os.getpid()}.{number}.part"

    def add(self, part: Path, found: StoredObject) -> None:
        """Give a complete file its final name and time, and record it.

        There is no fsync: where a machine crash loses bytes of a file, it also has another size.
        """
        target = self.folder / found.name
        os.utime(part, ns=(found.mtime, found.mtime))
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
        with self._lock, (self._inside / RECORD).open("a", errors="surrogateescape") as file:
            file.write(_line(found))

    def free_bytes(self) -> int:
        """Of the disk."""
        return shutil.disk_usage(self.folder).free


def _line(found: StoredObject) -> str:
    return json.dumps(found._asdict()) + "\n"
