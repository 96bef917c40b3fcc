"""Recognizes data whose images cannot be read one by one, such as parquet and compressed archives, and refuses it."""

import contextlib
import json
import os
import re
from pathlib import Path

from utils.data.formats.naming import SPLIT_NAMES, is_hidden, split_of
from utils.errors import UserError

FOLDERS = ("", *SPLIT_NAMES, "data")  # where data sets keep their files; the hub of `datasets` uses data/
_CONVERT = "scripts/convert_dataset.py {folder} NEW converts it"
_OWN_LIBRARY = "write class folders or WebDataset tars with the library that wrote it"
_MDS = (
    "read it by StreamingDataset of the package mosaicml-streaming, and write its images into class folders, as "
    "docs/data.md shows"
)
_SHARD = re.compile(r".*\.(tar|tfrec(ord)?s?|rec|arrow|mdb|lmdb)", re.IGNORECASE)
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
    r".*\.mds(\.(zstd|gz|br|bz2|snappy)\S*)?": ("an MDS shard, which is not read", _MDS),
    r".*\.(h5|hdf5)": ("an HDF5 file, which is not read", _OWN_LIBRARY),
    r".*\.np[yz]": ("an array of NumPy, which is not read", "write its images into class folders or WebDataset tars"),
}


def refuse_unreadable(data_dir: Path) -> None:
    """Raise UserError if `data_dir` holds data of a kind that cannot be read. It names the first file and the remedy.

    To be called where no readable format was found: an archive may lie beside the data that came from it. Only names
    are looked at, and what `index.json` lists.
    """
    for folder in (data_dir / name for name in FOLDERS):
        names = _file_names(folder)
        for name in names:
            if reason := describe_refused(folder / name, data_dir):
                raise UserError(f"--data-dir: {reason}")
        _refuse_unnamed(folder, [name for name in names if _SHARD.fullmatch(name)])
        if "index.json" in names and _has_key(folder / "index.json", "shards"):
            raise UserError(f"--data-dir: {folder / 'index.json'} lists MDS shards, which are not read; {_MDS}")
        chunks = [name for name in names if re.fullmatch(r"chunk-\S+\.bin", name)]
        if chunks and "index.json" in names and _has_key(folder / "index.json", "chunks"):
            raise UserError(
                f"--data-dir: {folder / chunks[0]} is a chunk of LitData, whose layout changes with its version; "
                f"{_OWN_LIBRARY}"
            )


def describe_refused(path: Path, data_dir: Path | None = None) -> str:
    """What a file is whose images cannot be read, by its name, and the remedy; "" for all others.

    Args:
        data_dir: folder of the data set, for the remedy; None for that of the file.
    """
    for pattern, (kind, remedy) in _KINDS.items():
        if re.fullmatch(pattern, path.name, re.IGNORECASE):
            return f"{path} is {kind}; {remedy.format(folder=data_dir or path.parent, path=path)}"
    return ""


def _file_names(folder: Path) -> list[str]:
    """Sorted; none if the folder is missing or cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not is_hidden(entry.name) and entry.is_file())
    return []


def _refuse_unnamed(folder: Path, shards: list[str]) -> None:
    """Raise UserError for shards that are not found, as their name or folder is of no split."""
    if shards and folder.name == "data" and split_of(shards[0]):
        raise UserError(f"--data-dir: {folder / shards[0]} lies in a folder of its own; give --data-dir {folder}")
    if shards and folder.name not in SPLIT_NAMES and not split_of(shards[0]):
        raise UserError(
            f"--data-dir: {folder / shards[0]} is a shard by its name, but of no split; give it a name with train or "
            "val, or name the shards by --train-data and --val-data"
        )


def _has_key(index: Path, key: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(index.read_bytes())
        return isinstance(content, dict) and key in content
    return False
