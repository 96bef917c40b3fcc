"""Files: written whole, or left as they were."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
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
