"""Files: written atomically, so that a reader sees the old content or the new one; and JSON without nan."""

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from utils.errors import UserError, readable

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_writable(output_dir: Path) -> None:
    """Make a folder, and check that files can be written there.

    Raises:
        UserError: they cannot.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output_dir).close()
    except OSError as error:
        raise UserError(
            f"--output-dir {output_dir}: cannot be written ({error.strerror}); give another folder"
        ) from None


def atomic_write_bytes(path: Path, content: bytes, concurrent: bool = False) -> None:
    """Replace the content of a file. After a crash at any time it holds all of the old content or of the new one.

    Args:
        path: of the file; its folder exists.
        concurrent: whether other processes may write the same file at the same time. The temporary file then has a name
            with the process id, and is not removed if this process is killed; else the next write replaces it.

    Raises:
        OSError: it could not be written; the temporary file is removed.
    """
    temporary = temporary_of(path, concurrent)
    try:
        write_temporary(path, lambda file: file.write(content), concurrent)
        rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str, concurrent: bool = False) -> None:
    """As `atomic_write_bytes`, with text in UTF-8; `\\udce9` is written for the byte of a name that is not."""
    atomic_write_bytes(path, readable(text).encode(), concurrent)


def temporary_of(path: Path, concurrent: bool = False) -> Path:
    """Where the new content of `path` is written first; `concurrent` as for `atomic_write_bytes`."""
    process = f".{os.getpid()}" if concurrent else ""
    return path.with_name(f".{path.name}{process}.tmp")


def write_temporary(path: Path, write: Callable[[BinaryIO], object], concurrent: bool = False) -> Path:
    """Write the new content of `path` beside it, down to the disk; `path` itself stays as it is.

    Returns:
        The temporary file, for `rename`.

    Raises:
        OSError: it could not be written. The temporary file may be left.
    """
    temporary = temporary_of(path, concurrent)
    temporary.unlink(missing_ok=True)  # after a crash it can be another name of a file that is in use
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def link_temporary(source: Path, path: Path) -> Path:
    """As `write_temporary`, with the content of `source`: a hard link, or a copy where the file system has none."""
    temporary = temporary_of(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    return temporary


def rename(temporary: Path, path: Path) -> None:
    """Give a file its final name, down to the disk where the file system can sync a folder."""
    temporary.replace(path)
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, indented, with null for numbers that are not finite.

    Raises:
        OSError: as `atomic_write_bytes`.
    """
    atomic_write_text(path, json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON of nested dicts, lists and tuples, with null for numbers that are not finite."""
    return json.dumps(_without_nonfinite(value), indent=indent, allow_nan=False)


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
