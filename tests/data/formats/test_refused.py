"""Data whose images cannot be read one by one: the line names the first file and the remedy."""

from pathlib import Path

import pytest

from utils.data.formats.refused import refuse_unreadable
from utils.errors import UserError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("data/train-00000-of-00002.parquet", "is parquet, .*; scripts/convert_dataset.py {root} NEW converts it"),
        ("train.parquet", "is parquet"),
        ("val/x.PARQUET", "is parquet"),
        ("train-0.tar.gz", "is a compressed tar; .*; run gunzip {root}/train-0.tar.gz"),
        ("train/0.tgz", ".* run gunzip {root}/train/0.tgz"),
        ("0.tar.zst", ".* run unzstd --rm {root}/0.tar.zst"),
        ("0.tar.bz2", ".* run bunzip2"),
        ("0.tar.xz", ".* run unxz"),
        ("validation/x.tfrecord.gz", "is a compressed TFRecord file; .*; run gunzip {root}/validation/x.tfrecord.gz"),
        ("all.zip", "is a ZIP archive; unzip it"),
        ("train.beton", "is an FFCV file, .*; write class folders or WebDataset tars with the library"),
        (
            "train/shard.00000.mds.zstd",
            "is an MDS shard, which is not read; read it by StreamingDataset of the package",
        ),
        ("train/shard.00000.mds", "is an MDS shard, which is not read; read it by StreamingDataset"),
        ("shard.00000.mds", "is an MDS shard"),
        ("val/shard.00000.mds.br", "is an MDS shard"),
        ("train.h5", "is an HDF5 file, which is not read; write class folders"),
        ("data/all.hdf5", "is an HDF5 file"),
        ("train.npz", "is an array of NumPy, which is not read; write its images into class folders"),
        (
            "0000.tar",
            "is a shard by its name, but of no split; give it a name with train or val, or name the shards by",
        ),
        ("all.tfrecord", "is a shard by its name, but of no split"),
        ("data/all.rec", "is a shard by its name, but of no split"),
        ("data/train-0.tar", "lies in a folder of its own; give --data-dir {root}/data"),
        ("train/chunk-0-0.bin", "is a chunk of LitData, .*; write class folders or WebDataset tars"),
    ],
)
def test_unreadable_data_is_refused(tmp_path: Path, name: str, expected: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (path.parent / "index.json").write_text('{"chunks": [], "config": {}}')
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
