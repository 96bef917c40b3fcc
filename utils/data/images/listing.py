"""listing.zip in the output folder: names and sizes of the files that a run began with, to say later what differs."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from utils.data.images.manifest import Manifest
from utils.files import rename, write_temporary
from utils.text import count, describe_alike

LISTING = "listing.zip"
COMPARED = 1000  # names that are looked at for those that look the same


def save_listing(folder: Path, splits: Mapping[str, Manifest]) -> None:
    """Write the names, ending with a zero byte each, and the sizes, int64, of each split; nothing for synthetic data.

    Raises:
        OSError: it could not be written.
    """
    if any(manifest.images is None for manifest in splits.values()):
        return

    def write(file: object) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:  # type: ignore[call-overload]
            for split, manifest in splits.items():
                archive.writestr(f"{split}.names", b"".join(name + b"\0" for name in manifest.table().names.tolist()))
                archive.writestr(f"{split}.sizes", manifest.sizes.tobytes())

    path = folder / LISTING
    rename(write_temporary(path, write), path)


def load_listing(folder: Path, split: str) -> dict[str, int]:
    """Name -> size of the files of a split, relative to it; {} if there is no listing that can be read."""
    try:
        with zipfile.ZipFile(folder / LISTING) as archive:
            names = archive.read(f"{split}.names").split(b"\0")[:-1]
            sizes = np.frombuffer(archive.read(f"{split}.sizes"), dtype=np.int64).tolist()
        return {name.decode(errors="surrogateescape"): size for name, size in zip(names, sizes, strict=True)}
    except (OSError, KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):  # any damage
        return {}


def describe_difference(before: Mapping[str, int], now: Manifest) -> str:
    """How many files are new, missing and of another size, with the first of each; "" if `before` is empty or the same.

    `before` is as `load_listing` gives it.
    """
    if not before:
        return ""
    sizes = dict(zip(now.names(), now.sizes.tolist(), strict=True))
    more, fewer = ([name for name in one if name not in other] for one, other in ((sizes, before), (before, sizes)))
    parts = (
        _count(more, "more"),
        _count(fewer, "fewer"),
        _count([name for name, size in sizes.items() if before.get(name, size) != size], "of another size"),
        describe_alike(more[:COMPARED], fewer[:COMPARED]),
    )
    return ", ".join(filter(None, parts))


def _count(names: Sequence[str], what: str) -> str:
    if not names:
        return ""
    shown = names[0] + (", ..." if len(names) > 1 else "")
    return f"{count(len(names), 'file')} {what} ({shown})"
