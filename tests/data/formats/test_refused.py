"""Data whose images cannot be read one by one: the line names the first file and the remedy."""

from pathlib import Path

import pytest

from utils.data.formats.refused import refuse_unreadable
from utils.errors import UserError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train.parquet", "is parquet"),
        ("val/x.PARQUET", "is parquet"),
        ("train/0.tgz", ".* run gunzip {root}/train/0.tgz"),
        ("0.tar.bz2", ".* run bunzip2"),
        ("0.tar.xz", ".* run unxz"),
        ("validation/x.tfrecord.gz", "is a compressed TFRecord file; .*; run gunzip {root}/validation/x.tfrecord.gz"),
        ("shard.00000.mds", "is an MDS shard"),
        ("val/shard.00000.mds.br", "is an MDS shard"),
        ("data/all.hdf5", "is an HDF5 file"),
        ("all.tfrecord", "is a shard by its name, but of no split"),
        ("data/all.rec", "is a shard by its name, but of no split"),
    ],
)
def test_unreadable_data_is_refused(tmp_path: Path, name: str, expected: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(UserError, match=f"^--data-dir: {path} {expected.format(root=tmp_path)}"):
        refuse_unreadable(tmp_path)


def test_mds_in_other_folders(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/index.json").write_text('{"version": 2, "shards": [{"format": "mds"}]}')
    with pytest.raises(UserError, match=r"train/index.json lists MDS shards, which are not read; read it by Streaming"):
        refuse_unreadable(tmp_path)


def test_other_files_are_not_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").mkdir()
    (tmp_path / "train").mkdir()
    for name in (
        "a-val.tar",
        ".a.parquet",
        "x-train.tfrecord",
        "train/chunk-0-0.bin",
        "train/a.jpg",
        "train/0.tar",
        "x.gz",
    ):
        (tmp_path / name).touch()
    (tmp_path / "train/index.json").write_text('{"columns": []}')
    refuse_unreadable(tmp_path)
    refuse_unreadable(tmp_path / "gone")
