"""The files of predictions and embeddings, written in order, with their names at the end."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from utils.files import rename, temporary_of
from utils.inference.predictions import Columns

ROWS = 20_000  # of a row group of parquet, at least: many small ones are slow to read


class _NamedAtEnd:
    """A file that has its name when it is complete.

    Args:
        path: of the file. What is written before `publish` is in a temporary file beside it.

    Raises:
        OSError: it cannot be written; as every method.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        temporary = temporary_of(path)
        temporary.unlink(missing_ok=True)  # of a run that was killed
        self._file = temporary.open("wb")

    def complete(self) -> None:
        """Write what is left, down to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def publish(self) -> None:
        """Give the complete file its name."""
        rename(temporary_of(self._path), self._path)

    def release(self) -> None:
        """Close the file, whether it is complete or not; it gets no name."""
        with contextlib.suppress(OSError):
            self._file.close()


class PredictionsFile(_NamedAtEnd):
    """Rows that `Columns.encode` has encoded."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(path)
        self._file.write(columns.heading())
        self._parquet: Any = None
        self._batches: list[Any] = []
        if columns.format == "parquet":
            import pyarrow.parquet

            self._parquet = pyarrow.parquet.ParquetWriter(self._file, columns.schema())

    def write(self, piece: bytes) -> None:
        """Append rows that `Columns.encode` has encoded; b"" is none."""
        if self._parquet is None:
            self._file.write(piece)
        elif piece:
            import pyarrow as pa

            self._batches += pa.ipc.open_stream(piece)
            if sum(batch.num_rows for batch in self._batches) >= ROWS:
                self._write_batches()

    def _write_batches(self) -> None:
        import pyarrow as pa

        if self._batches:
            self._parquet.write_table(pa.Table.from_batches(self._batches))
        self._batches = []

    def complete(self) -> None:
        """Write what is left, down to the disk."""
        if self._parquet is not None:
            self._write_batches()
            self._parquet.close()
        super().complete()

    def release(self) -> None:
        """Close the file, whether it is complete or not; it gets no name."""
        with contextlib.suppress(OSError):
            if self._parquet is not None:
                self._parquet.close()
        super().release()


class ArrayFile(_NamedAtEnd):
    """A .npy file of float32 (num_rows, width)."""

    def __init__(self, path: Path, num_rows: int, width: int) -> None:
        super().__init__(path)
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, width)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def write(self, rows: NDArray[np.float32]) -> None:
        """Append rows, (n, width)."""
        self._file.write(rows.astype("<f4", copy=False).tobytes())
