"""Files: written atomically, so that a reader sees the old content or the new one, whole."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any


def atomic_write_text(path: Path, text: str) -> None:
    """Let `path` hold `text`; whatever happens meanwhile, it holds that or what it held before.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file that is whole or not there; JSON has null for what is not finite."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    atomic_write_text(path, json.dumps(finite, indent=2, allow_nan=False) + "\n")
