"""Files: written atomically, so that a reader sees the old content or the new one; and JSON without nan."""

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from utils.errors import UserError


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
        content: all of the new content.
        concurrent: whether other processes may write the same file at the same time. The temporary file then has a name
            with the process id, and is not removed if this process is killed; else the next write replaces it.

    Raises:
        OSError: it could not be written; the temporary file is removed.
    """
    process = f".{os.getpid()}" if concurrent else ""
    temporary = path.with_name(f".{path.name}{process}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str, concurrent: bool = False) -> None:
    """As `atomic_write_bytes`, with text in UTF-8."""
    atomic_write_bytes(path, text.encode(), concurrent)


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
