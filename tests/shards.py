"""Writes a data set of class folders in other formats, with the library of each format."""

import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import webdataset
from scipy.io import savemat
from tfrecord.writer import TFRecordWriter

from tests.conftest import write_data
from tests.data.formats import test_lmdb_database as caffe
from tests.data.formats import test_recordio as recordio


def write_tar(path: Path, members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


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
    """`train.rec` and `val.rec` with their indexes, as im2rec writes them; the classes are in names.txt."""
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


def write_lmdb(folder: Path, target: Path) -> Path:
    """`train_lmdb` and `val_lmdb` as Caffe's convert_imageset writes them; the classes are in names.txt."""
    target.mkdir(parents=True)
    classes = sorted(path.name for path in (folder / "train").iterdir())
    (target / "names.txt").write_text("".join(f"{name}\n" for name in classes))
    for split in ("train", "val"):
        values = {}
        for number, path in enumerate(sorted((folder / split).glob("*/*"))):
            key = f"{number:08}_{path.parent.name}/{path.name}"
            values[key] = caffe.datum(path.read_bytes(), classes.index(path.parent.name))
        caffe.write(target / f"{split}_lmdb", values)
    return target


def write_arrow(folder: Path, target: Path) -> Path:
    """What `datasets` saves of the folder, written in a process of its own."""
    program = (
        "import sys, datasets; loaded = datasets.load_dataset('imagefolder', data_dir=sys.argv[1], "
        "cache_dir=sys.argv[2]); loaded.save_to_disk(sys.argv[3], num_shards={'train': 3, 'validation': 2})"
    )
    subprocess.run([sys.executable, "-c", program, folder, target.parent / "cache", target], check=True)
    return target


def write_arrow_cache(folder: Path, target: Path) -> Path:
    """What `datasets` caches of parquet files with the images of the folder, as it caches what it has downloaded."""
    program = (
        "import sys, datasets; folder, target = sys.argv[1:]; cache = target + '-cache'; "
        "datasets.load_dataset('imagefolder', data_dir=folder, cache_dir=cache).save_to_disk(cache + '/saved'); "
        "loaded = datasets.load_from_disk(cache + '/saved'); "  # which has the bytes of the files
        "files = {split: f'{cache}/{split}.parquet' for split in loaded}; "
        "[loaded[split].to_parquet(file) for split, file in files.items()]; "
        "datasets.load_dataset('parquet', data_files=files, cache_dir=target)"
    )
    subprocess.run([sys.executable, "-c", program, folder, target], check=True)
    shutil.rmtree(f"{target}-cache")
    (train,) = target.rglob("*-train*.arrow")
    return train.parent


def write_imagenet(root: Path) -> Path:
    """Class folders whose validation images have ImageNet's names, in an order that mixes the classes."""
    return with_imagenet_names(write_data(root, train=(4, 4, 3), val=(3, 3, 3)))


def with_imagenet_names(root: Path) -> Path:
    """Give the validation images of class folders ImageNet's names, in an order that mixes the classes."""
    images = sorted((root / "val").glob("*/*"), key=lambda path: path.name[::-1])
    for number, path in enumerate(images, start=1):
        path.rename(path.with_name(f"ILSVRC2012_val_{number:08}.JPEG"))
    return root


def _write_flat(folder: Path, target: Path) -> list[Path]:
    """The folder with its validation images in val/ itself; returns where they were, sorted by name."""
    shutil.copytree(folder / "train", target / "train")
    (target / "val").mkdir()
    images = sorted((folder / "val").glob("*/*"), key=lambda path: path.name)
    for path in images:
        shutil.copyfile(path, target / "val" / path.name)
    return images


def write_kaggle(folder: Path, target: Path) -> Path:
    """The tree that Kaggle's archive unpacks to, of a folder with ImageNet's names of validation images."""
    images = _write_flat(folder, target / "ILSVRC" / "Data" / "CLS-LOC")
    rows = [f"{path.stem},{path.parent.name} 1 2 3 4\n" for path in images]
    (target / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(rows))
    return target


def write_flat_csv(folder: Path, target: Path) -> Path:
    """Validation images in one folder, and their classes in `val.csv`."""
    rows = [f"{path.name},{path.parent.name}\n" for path in _write_flat(folder, target)]
    (target / "val.csv").write_text("".join(rows))
    return target


def write_flat_devkit(folder: Path, target: Path) -> Path:
    """Validation images with ImageNet's names in one folder, and the two files of the devkit beside it."""
    images = _write_flat(folder, target)
    classes = sorted(path.name for path in (folder / "train").iterdir())
    numbers = {name: number for number, name in enumerate(reversed(classes), start=1)}  # not the order of the names
    write_devkit(target, numbers, [path.parent.name for path in images])
    return target


def write_ilsvrc(folder: Path, target: Path) -> Path:
    """The downloads of ImageNet, of a folder with its names of validation images."""
    target.mkdir(parents=True)
    classes = sorted(path.name for path in (folder / "train").iterdir())
    inner = {}
    for name in classes:
        files = {path.name: path.read_bytes() for path in sorted((folder / "train" / name).iterdir())}
        inner[f"{name}.tar"] = write_tar(target / "inner.tar", files, tarfile.USTAR_FORMAT).read_bytes()
    (target / "inner.tar").unlink()
    write_tar(target / "ILSVRC2012_img_train.tar", inner, tarfile.USTAR_FORMAT)
    val = sorted((folder / "val").glob("*/*"), key=lambda path: path.name)
    write_tar(target / "ILSVRC2012_img_val.tar", {path.name: path.read_bytes() for path in val})
    numbers = {name: number for number, name in enumerate(reversed(classes), start=1)}  # not the order of the names
    write_devkit(target / "devkit", numbers, [path.parent.name for path in val])
    with tarfile.open(target / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
        tar.add(target / "devkit", "ILSVRC2012_devkit_t12/data")
    shutil.rmtree(target / "devkit")
    return target


def write_devkit(folder: Path, numbers: Mapping[str, int], labels: Sequence[str]) -> None:
    """The two files of ImageNet's devkit that have the labels of the validation images."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{numbers[name]}\n" for name in labels)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text(lines)
    rows = [(float(number), name, "words", 0.0) for name, number in numbers.items()]
    rows.append((float(len(rows) + 1), "n00", "all", float(len(rows))))
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    savemat(folder / "meta.mat", {"synsets": np.array(rows, dtype=fields).reshape(-1, 1)})
