"""Writes a data set of class folders in other formats, with the library of each format."""

from pathlib import Path

import webdataset


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
