"""Parquet files, as the package `datasets` publishes them: copies their images into Arrow files, which can be read.

Parquet packs and mostly compresses many images together, so that none can be read alone. The copies have the names of
their files, the columns of images and labels, and no compression; `arrow_cache.py` reads them.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from utils.data.formats.arrow_cache import choose_columns
from utils.data.formats.naming import find_shards
from utils.errors import UserError, first_line
from utils.files import DISK_FULL, rename, temporary_of, write_temporary

FOLDERS = ("", "data")  # where data sets keep them; the hub of `datasets` uses data/
_MAGIC = b"PAR1"  # at both ends of a file
_ROWS = 256  # held in memory at once


def is_shard(name: str) -> bool:
    """Whether a file of this name can be a shard."""
    return name.lower().endswith(".parquet")


def find(data_dir: Path) -> dict[str, list[Path]]:
    """The shards of each split, in `data_dir` or in data/ in it; {} if there are none.

    Raises:
        UserError: no name has a split; and see `find_shards`.
    """
    for folder in (data_dir / name for name in FOLDERS):
        if found := find_shards(folder, is_shard):
            return found
        with contextlib.suppress(OSError):
            if names := sorted(filter(is_shard, os.listdir(folder))):
                raise UserError(f"{folder / names[0]}: no split in its name; give it one with train or val")
    return {}


def copy_as_arrow(shards: Mapping[str, Sequence[Path]], target: Path, on_progress: Callable[[], None]) -> None:
    """Write `target/SPLIT/NAME.arrow` for each shard NAME.parquet. Copies that are there already stay.

    Args:
        shards: of each split.
        target: a folder; it is made.
        on_progress: called after every few images; what it raises ends the copying.

    Raises:
        UserError: `pyarrow` is missing, or a shard is damaged, or has no columns of images and labels.
        OSError: there is no space left, or the folder cannot be written.
    """
    for split, paths in shards.items():
        (target / split).mkdir(parents=True, exist_ok=True)
        for path in paths:
            copy = target / split / f"{path.stem}.arrow"
            if not copy.exists():
                _copy(path, copy, on_progress)


def _copy(shard: Path, copy: Path, on_progress: Callable[[], None]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{shard}: a parquet file is read by the package pyarrow; pip install pyarrow") from None

    def write(file: BinaryIO) -> None:
        with pyarrow.parquet.ParquetFile(shard) as source:
            _refuse_joined(shard, source.metadata)
            schema: Any = source.schema_arrow
            columns = [name for name in schema.names if name in choose_columns(shard, schema)]
            chosen = pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)
            with pa.ipc.new_stream(file, chosen) as stream:
                for batch in source.iter_batches(_ROWS, columns=columns):
                    _check_embedded(shard, batch)
                    stream.write_batch(batch)
                    on_progress()

    try:
        rename(write_temporary(copy, write), copy)
    except (pa.ArrowException, OSError) as error:
        temporary_of(copy).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        raise UserError(f"{shard}: no readable parquet file ({first_line(error)}); copy it again") from None


def _refuse_joined(shard: Path, metadata: Any) -> None:
    """Raise UserError for files joined by cat: pyarrow takes places in the last one for places in the first one."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    end = max((chunk.data_page_offset + chunk.total_compressed_size for chunk in chunks), default=0)
    with open(shard, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if mapped.find(2 * _MAGIC, max(0, end - len(_MAGIC))) >= 0:
            raise UserError(f"{shard}: several parquet files that were joined by cat; take them apart")


def _check_embedded(shard: Path, batch: Any) -> None:
    """Raise UserError if the bytes of an image are missing."""
    for column in batch.columns:
        if hasattr(column, "field") and column.field("bytes").null_count:
            raise UserError(
                f"{shard}: an image is not in it, only its path; write the file again with its images, as push_to_hub "
                "of the package datasets does"
            )
