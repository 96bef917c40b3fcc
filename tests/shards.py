"""Writes a data set of class folders in other formats, with the library of each format."""

from pathlib import Path

import webdataset
from tfrecord.writer import TFRecordWriter

from tests.data.formats import test_recordio as recordio


def write_webdataset(folder: Path, target: Path, per_shard: int = 10) -> Path:
    """WebDataset tars `SPLIT-0000.tar`, ... of train/ and val/ of `folder`, and the names of the classes."""
    target.mkdir(parents=True)
    classes = sorted(path.name for path in (folder / "train").iterdir())
    (target / "classes.txt").write_text("".join(f"{name}\n" for name in classes))
    for split in ("train", "val"):
        with webdataset.ShardWriter(str(target / f"{split}-%04d.tar"), maxcount=per_shard, verbose=0) as writer:
            for path in sorted((folder / split).glob("*/*")):
                sample = {path.suffix[1:]: path.read_bytes(), "cls": classes.index(path.parent.name)}
                writer.write({"__key__": path.stem, **sample})
    return target


def write_tfrecord(folder: Path, target: Path) -> Path:
    """TFRecord shards `SPLIT-00000-of-00002` as TF-slim writes them: labels count from 1."""
    target.mkdir(parents=True)
    classes = sorted(path.name for path in (folder / "train").iterdir())
    (target / "labels.txt").write_text("".join(f"{label}:{name}\n" for label, name in enumerate(classes, start=1)))
    for split in ("train", "val"):
        files = sorted((folder / split).glob("*/*"))
        for number, part in enumerate((files[::2], files[1::2])):
            writer = TFRecordWriter(str(target / f"{split}-{number:05}-of-00002"))
            for path in part:
                writer.write(
                    {
                        "image/encoded": (path.read_bytes(), "byte"),
                        "image/class/label": (classes.index(path.parent.name) + 1, "int"),
                        "image/filename": (path.name.encode(), "byte"),
                    }
                )
            writer.close()
    return target


def write_recordio(folder: Path, target: Path) -> Path:
    """`train.rec` and `val.rec` with their indexes, as MXNet's im2rec writes them; the names of classes are in names.txt."""
    target.mkdir(parents=True)
    classes = sorted(path.name for path in (folder / "train").iterdir())
    for split in ("train", "val"):
        files = sorted((folder / split).glob("*/*"))
        images = [
            recordio.image(path.read_bytes(), classes.index(path.parent.name), number)
            for number, path in enumerate(files)
        ]
        recordio.write(target / f"{split}.rec", images)
    (target / "names.txt").write_text("".join(f"{name}\n" for name in classes))
    return target
