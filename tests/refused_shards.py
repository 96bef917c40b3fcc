"""Data sets of TFRecord, RecordIO, LMDB, Arrow and other files that train.py refuses."""

import gzip
import json
import pickle
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.damage import ARITHMETIC as JPEG
from tests.data.formats import test_arrow_cache as arrow
from tests.data.formats import test_lmdb_database as caffe
from tests.data.formats import test_recordio as recordio
from tests.data.formats import test_tfrecord as tfrecord
from tests.refused_folders import Case, Make, cut, files, patch


def both(name: str, content: bytes, change: Make | None = None) -> Make:
    """The same file for train and val, then a change; `name` has SPLIT in it."""

    def make(root: Path) -> None:
        files({name.replace("SPLIT", split): content for split in ("train", "val")})(root)
        if change is not None:
            change(root)

    return make


# ---------------------------------------------------------------------------------------------------------------------
# TFRecord


def example(label: int | bytes | None, image: bytes = JPEG) -> bytes:
    """A record as TensorFlow Datasets writes it; a label of bytes is in a list of bytes."""
    entries = [tfrecord.feature("image", tfrecord.field(1, image), 1)]
    if label is not None:
        kind = 1 if isinstance(label, bytes) else 3
        entries.append(tfrecord.feature("label", tfrecord.field(1, label), kind))
    return tfrecord.framed(tfrecord.example(*entries))


RECORDS = example(0) + example(1) + example(2)
TF = "TFRecord files"
TF_NAME = "SPLIT-00000-of-00001"
NO_IMAGE = tfrecord.framed(tfrecord.example(tfrecord.LABEL))
LISTS = (("train", "cat\ndog\neel\n"), ("val", "dog\ncat\ncow\n"))
TFRECORDS = [
    Case(TF, "cut in the middle", both(TF_NAME, RECORDS, cut("train-00000-of-00001"))),
    Case(TF, "a wrong checksum of a length", both(TF_NAME, RECORDS, patch("train-00000-of-00001", 8, b"\0\0\0\0"))),
    Case(TF, "an empty file", both(TF_NAME, b"")),
    Case(TF, "GZIP", both(TF_NAME, gzip.compress(RECORDS))),
    Case(TF, "ZLIB", both(TF_NAME, zlib.compress(RECORDS))),
    Case(TF, "no message", both(TF_NAME, tfrecord.framed(b"\xff" * 30))),
    Case(TF, "no image", both(TF_NAME, NO_IMAGE)),
    Case(TF, "an empty image", both(TF_NAME, example(0, b""))),
    Case(TF, "no label", both(TF_NAME, example(None))),
    Case(TF, "a label that is text", both(TF_NAME, example(b"cat"))),
    Case(TF, "a split without labels", both(TF_NAME, example((1 << 64) - 1))),
    Case(TF, "the index of another file", both("SPLIT.tfrecord", RECORDS, files({"train.idx": "0 99\n"}))),
    Case(TF, "a labels.txt of another form", both(TF_NAME, RECORDS, files({"labels.txt": "tench\n"}))),
    Case(
        TF,
        "lists with other names",
        files({f"{s}/{n}": c for s, name in LISTS for n, c in (("0.tfrecord", RECORDS), ("label.labels.txt", name))}),
    ),
    Case(TF, "a missing shard", files({"train-00000-of-00002": RECORDS, "val-00000-of-00001": RECORDS})),
    Case(TF, "two copies of a split", files({f"train-0-of-{n}{i}": RECORDS for n, i in ((1, ""), (2, ""))})),
]

# ---------------------------------------------------------------------------------------------------------------------
# RecordIO


def images(*labels: float) -> bytes:
    """Records as im2rec writes them."""
    return b"".join(recordio.record(recordio.image(JPEG, label, number)) for number, label in enumerate(labels))


REC = "RecordIO files"
RECORDIO = [
    Case(REC, "cut in the middle", both("SPLIT.rec", images(0, 1, 2), cut("train.rec"))),
    Case(REC, "no magic number", both("SPLIT.rec", images(0, 1), patch("train.rec", 0, b"\0\0\0\0"))),
    Case(REC, "an empty file", both("SPLIT.rec", b"")),
    Case(REC, "a part of a split record", both("SPLIT.rec", recordio.part(1, bytes(40)) + images(0))),
    Case(REC, "no header of im2rec", both("SPLIT.rec", recordio.record(b"text"))),
    Case(REC, "no image", both("SPLIT.rec", recordio.record(recordio.image(b"")))),
    Case(REC, "two labels", both("SPLIT.rec", recordio.record(recordio.image(JPEG, labels=(1, 2))))),
    Case(REC, "the label 1.5", both("SPLIT.rec", images(1.5))),
    Case(REC, "the index of another file", both("SPLIT.rec", images(0, 1), files({"train.idx": "0\t0\n1\t9\n"}))),
    Case(REC, "an index that is none", both("SPLIT.rec", images(0, 1), files({"train.idx": "a\tb\n"}))),
]

# ---------------------------------------------------------------------------------------------------------------------
# LMDB


def lmdb(values: Mapping[str, bytes], change: Make | None = None) -> Make:
    """The same database for train and val, then a change."""

    def make(root: Path) -> None:
        for split in ("train", "val"):
            caffe.write(root / f"{split}_lmdb", values)
        if change is not None:
            change(root)

    return make


DATUM = {str(number): caffe.datum(JPEG, number) for number in range(3)}
FILE = "train_lmdb/data.mdb"
DATABASE = "Caffe LMDB"
LMDB = [
    Case(DATABASE, "cut in the middle", lmdb(DATUM, cut(FILE))),
    Case(DATABASE, "zeros", lmdb(DATUM, files({FILE: bytes(9000)}))),
    Case(DATABASE, "pixels", lmdb({"0": caffe.datum(bytes(48), 0, (3, 4, 4), 0)})),
    Case(DATABASE, "a Datum without an image", lmdb({"0": caffe.datum(None, 0)})),
    Case(DATABASE, "JPEGs without a label", lmdb({"0": JPEG})),
    Case(DATABASE, "pickled objects", lmdb({"0": pickle.dumps((JPEG, 1))})),
    Case(DATABASE, "text", lmdb({"0": b"cat.jpg 3"})),
    Case(DATABASE, "the label -1", lmdb({"0": caffe.datum(JPEG, -1)})),
    Case(DATABASE, "no labels", lmdb({"0": caffe.datum(JPEG, None), "1": caffe.datum(JPEG, None)})),
    Case(DATABASE, "two of a split", lmdb(DATUM, lambda root: shutil.copytree(root / "val_lmdb", root / "a_val_lmdb"))),
]  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Arrow


def table(images: Sequence[Any] = (JPEG, JPEG), labels: Sequence[Any] = (0, 1), **names: Any) -> pa.Table:
    return arrow.table(list(images), list(labels), **names)


def saved(content: pa.Table, change: Make | None = None, **options: Any) -> Make:
    """The same Arrow file for train and val, then a change."""

    def make(root: Path) -> None:
        for split in ("train", "val"):
            arrow.write(root / split / "data.arrow", content, **options)
        if change is not None:
            change(root)

    return make


def state(**content: Any) -> Make:
    """What `save_to_disk` writes beside the shards."""
    return files({"train/state.json": json.dumps(content)})


def double(root: Path) -> None:
    path = root / "train/data.arrow"
    path.write_bytes(2 * path.read_bytes())


DATA_FILE = {"filename": "data.arrow"}
PATH = {"bytes": None, "path": "x/cat.jpg"}
FORM = "Arrow files"
ARROW = [
    Case(FORM, "cut in the middle", saved(table(), cut("train/data.arrow"))),
    Case(FORM, "an empty file", saved(table(), files({"train/data.arrow": ""}))),
    Case(FORM, "a JPEG", saved(table(), files({"train/data.arrow": JPEG}))),
    Case(FORM, "compressed", saved(table(), compression="zstd")),
    Case(FORM, "two files joined by cat", saved(table(), double)),
    Case(FORM, "an image that is a path", saved(table([JPEG, PATH]))),
    Case(FORM, "no image in a record", saved(table([JPEG, None]))),
    Case(FORM, "no label in a record", saved(table(labels=[0, None]))),
    Case(FORM, "no column of images", saved(table(image="x"))),
    Case(FORM, "no column of labels", saved(table(label="x"))),
    Case(FORM, "labels that are fractions", saved(table(labels=[0.5, 1.0]))),
    Case(FORM, "images that are text", saved(table(["a", "b"], kind=pa.string()))),
    Case(FORM, "a shard missing", saved(table(), state(_data_files=[DATA_FILE, {"filename": "more.arrow"}]))),
    Case(FORM, "a selection", saved(table(), state(_data_files=[DATA_FILE], _indices_data_files=[DATA_FILE]))),
]

# ---------------------------------------------------------------------------------------------------------------------
# What has no image that could be read alone

OTHERS = [
    Case("parquet", "", files({"data/train-00000-of-00001.parquet": "", "data/val-00000-of-00001.parquet": ""})),
    Case("compressed tars", "gzip", both("SPLIT-0.tar.gz", b"")),
    Case("compressed tars", "zstd", both("SPLIT-0.tar.zst", b"")),
    Case("compressed TFRecord files", "by name", both("SPLIT.tfrecord.gz", gzip.compress(RECORDS))),
    Case("ZIP", "", files({"imagenet.zip": ""})),
    Case("FFCV", "", both("SPLIT.beton", b"")),
    Case("MDS", "", both("SPLIT/shard.00000.mds", b"")),
    Case("MDS", "compressed", both("SPLIT/shard.00000.mds.zstd", b"")),
    Case("HDF5", "", both("SPLIT.h5", b"")),
    Case("arrays of NumPy", "", both("SPLIT.npz", b"")),
    Case("tars", "names of no split", files({"0.tar": "", "1.tar": ""})),
    Case("tars", "one folder deeper", both("data/SPLIT-0.tar", b"")),
    Case("LitData", "", both("SPLIT/chunk-0-0.bin", b"", files({"train/index.json": '{"chunks": []}'}))),
]
