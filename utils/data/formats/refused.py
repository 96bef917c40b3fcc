"""Recognises data whose images cannot be read one by one, such as parquet and compressed archives, and refuses it."""

import contextlib
import json
import os
import re
from pathlib import Path

from utils.data.formats.naming import SPLIT_NAMES
from utils.errors import UserError

FOLDERS = ("", *SPLIT_NAMES, "data")  # where data sets keep their files; the hub of `datasets` uses data/
_CONVERT = "scripts/convert_dataset.py {folder} NEW converts it"
_OWN_LIBRARY = "write class folders or WebDataset tars with the library that wrote it"
_UNPACK = "no image in it can be read alone; run {program} {path}"
# Pattern of a name -> what such a file is, and the remedy.
_KINDS = {
    r".*\.parquet": ("parquet, which packs many images into one block", _CONVERT),
    r".*\.(tar\.gz|tgz)": ("a compressed tar", _UNPACK.replace("{program}", "gunzip")),
    r".*\.(tar\.bz2|tbz2?)": ("a compressed tar", _UNPACK.replace("{program}", "bunzip2")),
    r".*\.(tar\.xz|txz)": ("a compressed tar", _UNPACK.replace("{program}", "unxz")),
    r".*\.(tar\.zst|tzst)": ("a compressed tar", _UNPACK.replace("{program}", "unzstd --rm")),
    r".*\.tfrecords?\.gz": ("a compressed TFRecord file", _UNPACK.replace("{program}", "gunzip")),
    r".*\.zip": ("a ZIP archive", "unzip it, or pack its images into WebDataset tars"),
    r".*\.beton": ("an FFCV file, whose images are not files any more", _OWN_LIBRARY),
    r".*\.mds\.(zstd|gz|br|bz2|snappy)\S*": (
        "a compressed MDS shard",
        "decompress the shards with the package mosaicml-streaming, or write them without compression",
    ),
}


def refuse_unreadable(data_dir: Path) -> None:
    """Raise UserError if `data_dir` holds data of a kind that cannot be read. It names the first file and the remedy.

    To be called where no readable format was found: an archive may lie beside the data that came from it. Only names
    are looked at, and `index.json` beside `chunk-*.bin`.
    """
    for folder in (data_dir / name for name in FOLDERS):
        names = _file_names(folder)
        for name in names:
            if reason := describe_refused(folder / name, data_dir):
                raise UserError(f"--data-dir: {reason}")
        chunks = [name for name in names if re.fullmatch(r"chunk-\S+\.bin", name)]
        if chunks and "index.json" in names and _is_litdata(folder / "index.json"):
            raise UserError(
                f"--data-dir: {folder / chunks[0]} is a chunk of LitData, whose layout changes with its version; "
                f"{_OWN_LIBRARY}"
            )


def describe_refused(path: Path, data_dir: Path | None = None) -> str:
    """What a file is whose images cannot be read, by its name, and the remedy; "" for all others.

    Args:
        path: of the file.
        data_dir: folder of the data set, for the remedy; None for that of the file.
    """
    for pattern, (kind, remedy) in _KINDS.items():
        if re.fullmatch(pattern, path.name, re.IGNORECASE):
            return f"{path} is {kind}; {remedy.format(folder=data_dir or path.parent, path=path)}"
    return ""


def _file_names(folder: Path) -> list[str]:
    """Sorted; none if the folder is missing or cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file())
    return []


def _is_litdata(index: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(index.read_bytes())
        return isinstance(content, dict) and "chunks" in content
    return False
