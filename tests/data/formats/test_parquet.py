"""Parquet files that pyarrow would read in part. What is converted is in tests/scripts/test_convert_dataset.py."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from utils.data.conversion.parquet import copy_as_arrow, find
from utils.data.formats.arrow_cache import scan
from utils.errors import UserError


def write(path: Path, rows: int, size: int = 500, **options: bool) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": bytes([row]) * size, "path": f"{row}.jpg"} for row in range(rows)]
    pyarrow.parquet.write_table(pa.table({"image": images, "label": [0] * rows}), path, 2, **options)
    return path.read_bytes()


def copy(root: Path) -> int:
    """How many images the copies have."""
    copy_as_arrow(find(root), root / "copy", lambda: None)
    return sum(len(list(scan(path))) for path in (root / "copy/train").iterdir())


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("rows", [(5, 5), (5, 1), (9, 5), (1, 40)])
def test_files_joined_by_cat(tmp_path: Path, rows: tuple[int, int], has_index: bool) -> None:
    contents = [write(tmp_path / "part", count, write_page_index=has_index) for count in rows]
    assert [write(tmp_path / f"{count}/train.parquet", count) and copy(tmp_path / str(count)) for count in rows] == [
        *rows
    ]
    file = tmp_path / "joined/train.parquet"
    file.parent.mkdir()
    file.write_bytes(b"".join(contents))
    with pytest.raises(UserError, match=r"joined/train\.parquet: (several parquet files|no readable parquet file)"):
        copy(file.parent)


def test_names_with_a_hash(tmp_path: Path) -> None:
    """As push_to_hub wrote them: another one in each name."""
    names = ("train-00000-of-00002-a09b74b3ef9c3b56", "train-00001-of-00002-6bf8d3a52e1c4f70")
    for name in names:
        write(tmp_path / f"data/{name}.parquet", 3)
    assert [path.stem for path in find(tmp_path)["train"]] == [*names]
    assert copy(tmp_path) == 6
