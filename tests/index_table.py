"""Measures how long a data set of many images takes to be listed, in every format; prints a row for each.

    python -m tests.index_table --output-dir OUT
    python -m tests.index_table --output-dir OUT --records 100000 --only tar

OUT must not exist; one format is written at a time, and removed. The images are a small JPEG with up to 511 bytes
behind it, so that lengths vary, of 1,000 classes in random order. There are --records of them, and one of each class in
the other split. Every measurement is a process of its own, which imports train.py first:

- index: `read_data` where there is no index, with 1 and 2 worker processes (CPU seconds of all processes);
- load: `read_data` where the index is there, the manifest included (CPU seconds), and of this `read_shards` alone;
- memory: what the resident memory of the loading process grows by, at the end and at most.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import pyarrow as pa

from tests.damage import encoded
from tests.data.formats import test_lmdb_database as caffe
from tests.data.formats import test_recordio as recordio
from tests.data.formats import test_tfrecord as tfrecord
from tests.harness import ROOT, environment
from tests.shards import write_devkit

NUM_CLASSES = 1000
JPEG = encoded(height=16, width=16)
CONTENTS = [JPEG + b"\0" * extra for extra in range(512)]
WNIDS = [f"n{number:08}" for number in range(NUM_CLASSES)]
BLOCK = 512  # bytes, of a tar
HEADER = (
    "format",
    "written, s",
    "index by 1, s",
    "index by 2, s",
    "index, MB",
    "load, s",
    "of it the index, s",
    "memory, MB",
)
# Prints the images, then seconds, CPU seconds, seconds of `read_shards`, and MB by which the memory grew, and at most.
READ = """
import gc, json, os, sys, time
from pathlib import Path
import torch, train
from utils.options.config import TrainConfig
from utils.data.splits import selection as splits
from utils.distributed.group import DistEnv

def resident(name):  # MB; getrusage would count what the process had before its exec, the memory of its parent
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) / 1e3

inner = 0.0
def timed(*arguments):
    global inner
    start = time.perf_counter()
    found = read_shards(*arguments)
    inner += time.perf_counter() - start
    return found

read_shards, splits.read_shards = splits.read_shards, timed
env = DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
config = TrainConfig(data_dir=Path(sys.argv[1]), output_dir=Path(sys.argv[1], "run"), workers=int(sys.argv[2]))
gc.collect()
before, start, cpu = resident("VmRSS"), time.perf_counter(), sum(os.times()[:4])
found = splits.read_data(config, env)
seconds, cpu = time.perf_counter() - start, sum(os.times()[:4]) - cpu
most = resident("VmHWM")
gc.collect()
images = {split: len(manifest) for split, manifest in found.items()}
print(json.dumps([images, seconds, cpu, inner, resident("VmRSS") - before, most - before]))
"""


class Image(NamedTuple):
    """One image to write: its file's name, its label, and which of CONTENTS it is."""

    name: str
    label: int
    content: int


def images(count: int, seed: int) -> list[Image]:
    """So many images in random order, of every class."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % NUM_CLASSES).tolist()
    contents = random.integers(0, len(CONTENTS), count).tolist()
    triples = enumerate(zip(labels, contents, strict=True))
    return [Image(f"{WNIDS[label]}_{number}.JPEG", label, content) for number, (label, content) in triples]


def parts(listed: Sequence[Image], count: int) -> Iterator[tuple[int, Sequence[Image]]]:
    """Numbers and images of `count` shards, at least 100 images each."""
    count = max(1, min(count, len(listed) // 100))
    for number in range(count):
        yield number, listed[len(listed) * number // count : len(listed) * (number + 1) // count]


# ---------------------------------------------------------------------------------------------------------------------
# Formats


def _tar_template() -> bytes:
    import tarfile

    return tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)


TEMPLATE = _tar_template()
TEMPLATE_SUM = 8 * 32 + sum(TEMPLATE[:124]) + sum(TEMPLATE[136:148]) + sum(TEMPLATE[156:])


def member(name: str, content: bytes) -> bytes:
    """A member of a tar with its header; tarfile takes ten times as long."""
    text, size = name.encode(), b"%011o\0" % len(content)
    checksum = b"%06o\0 " % (TEMPLATE_SUM + sum(text) + sum(size))
    header = text + TEMPLATE[len(text) : 124] + size + TEMPLATE[136:148] + checksum + TEMPLATE[156:]
    return header + content + bytes(-len(content) % BLOCK)


def write_tars(root: Path, split: str, listed: Sequence[Image]) -> None:
    for number, part in parts(listed, 256):
        with (root / f"{split}-{number:04}.tar").open("wb") as file:
            for name, label, content in part:
                file.write(member(name, CONTENTS[content]) + member(f"{name[:-5]}.cls", b"%d" % label))
            file.write(bytes(2 * BLOCK))


def write_tfrecords(root: Path, split: str, listed: Sequence[Image]) -> None:
    field = tfrecord.field
    shards = list(parts(listed, 1024))
    for number, part in shards:
        with (root / f"{split}-{number:05}-of-{len(shards):05}").open("wb") as file:
            for name, label, content in part:
                message = tfrecord.example(
                    tfrecord.feature("image/height", field(1, 16), 3),
                    tfrecord.feature("image/class/label", field(1, label + 1), 3),
                    tfrecord.feature("image/filename", field(1, name.encode()), 1),
                    tfrecord.feature("image/encoded", field(1, CONTENTS[content]), 1),
                )
                file.write(tfrecord.framed(message))


def write_recordio(root: Path, split: str, listed: Sequence[Image]) -> None:
    with (root / f"{split}.rec").open("wb") as file, (root / f"{split}.idx").open("w") as index:
        offset = 0
        for number, (_, label, content) in enumerate(listed):
            index.write(f"{number}\t{offset}\n")
            data = recordio.image(CONTENTS[content], label, number)
            offset += file.write(struct.pack("<II", 0xCED7230A, len(data)) + data + bytes(-len(data) % 4))


def write_lmdb(root: Path, split: str, listed: Sequence[Image]) -> None:
    with lmdb.open(str(root / f"{split}_lmdb"), map_size=1 << 34, lock=False, sync=False) as environment:
        with lmdb.Transaction(environment, write=True) as transaction:
            for number, (name, label, content) in enumerate(listed):
                key = f"{number:08}_{WNIDS[label]}/{name}".encode()
                transaction.put(key, caffe.datum(CONTENTS[content], label), append=True)
        environment.sync(True)


def write_arrow(root: Path, split: str, listed: Sequence[Image]) -> None:
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": WNIDS}}
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    shards = list(parts(listed, 64))
    for number, part in shards:
        path = root / f"imagenet-{split}-{number:05}-of-{len(shards):05}.arrow"
        with pa.ipc.new_stream(str(path), schema) as stream:
            for start in range(0, len(part), 1000):
                some = part[start : start + 1000]
                column = [{"bytes": CONTENTS[content], "path": name} for name, _, content in some]
                stream.write_batch(pa.record_batch([column, [each.label for each in some]], schema=schema))


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number + 1:08}.JPEG"


def write_ilsvrc(root: Path, split: str, listed: Sequence[Image]) -> None:
    with (root / f"ILSVRC2012_img_{split}.tar").open("wb") as file:
        if split == "train":
            classes: list[list[bytes]] = [[] for _ in WNIDS]
            for name, label, content in listed:
                classes[label].append(member(name, CONTENTS[content]))
            for label, members in enumerate(classes):
                file.write(member(f"{WNIDS[label]}.tar", b"".join([*members, bytes(2 * BLOCK)])))
        else:
            for number, each in enumerate(listed):
                file.write(member(val_name(number), CONTENTS[each.content]))
            numbers = {wnid: number for number, wnid in enumerate(WNIDS, start=1)}
            labels = [WNIDS[each.label] for each in listed]
            write_devkit(root / "ILSVRC2012_devkit_t12" / "data", numbers, labels)
        file.write(bytes(2 * BLOCK))


def write_files(root: Path, files: Sequence[tuple[str, int]]) -> None:
    """Files as links to others, which takes neither time nor space for their contents."""
    pool = root.parent / "pool"
    if not pool.exists():
        pool.mkdir()
        for number, each in enumerate(CONTENTS):
            (pool / str(number)).write_bytes(each)
    for name, content in files:
        os.link(pool / str(content), root / name)


def write_folders(root: Path, split: str, listed: Sequence[Image]) -> None:
    for wnid in WNIDS:
        (root / split / wnid).mkdir(parents=True, exist_ok=True)
    write_files(root / split, [(f"{WNIDS[label]}/{name}", content) for name, label, content in listed])


def write_flat(root: Path, split: str, listed: Sequence[Image]) -> None:
    if split == "train":
        write_folders(root, split, listed)
        return
    (root / split).mkdir()
    write_files(root / split, [(name, content) for name, _, content in listed])
    rows = (f"{name},{WNIDS[label]}\n" for name, label, _ in listed)
    (root / "val.csv").write_text("".join(rows))


Write = Callable[[Path, str, Sequence[Image]], None]
FORMATS: dict[str, tuple[Write, str]] = {  # and the split that has all images
    "WebDataset, 256 tars": (write_tars, "train"),
    "RecordIO, 1 file": (write_recordio, "train"),
    "Arrow, 64 files": (write_arrow, "train"),
    "ILSVRC tar of 1,000 tars": (write_ilsvrc, "train"),
    "LMDB": (write_lmdb, "train"),
    "class folders": (write_folders, "train"),
    "flat val/ with val.csv": (write_flat, "val"),
    "TFRecord, 1,024 files": (write_tfrecords, "train"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Measurements


def read(root: Path, workers: int) -> list[Any]:
    """What READ prints."""
    words = [sys.executable, "-c", READ, str(root), str(workers)]
    env = environment({"PYTHONPATH": ROOT})
    return list(json.loads(subprocess.run(words, check=True, capture_output=True, text=True, env=env).stdout))


def measure(name: str, root: Path, count: int) -> list[str]:
    """A row of the table; `root` is made and removed."""
    write, large = FORMATS[name]
    root.mkdir()
    start = time.perf_counter()
    for split, seed in (("train", 0), ("val", 1)):
        write(root, split, images(count if split == large else NUM_CLASSES, seed))
    written = time.perf_counter() - start
    seconds = []
    for workers in (1, 2):
        for index in root.rglob("*.index.npz"):
            index.unlink()
        found, taken, cpu, *_ = read(root, workers)
        assert found[large] == count, found
        seconds.append(f"{taken:.1f} ({cpu:.1f})")
    _, load, load_cpu, inner, memory, most = read(root, 2)
    size = "".join(f"{index.stat().st_size / 1e6:.1f}" for index in root.rglob(f"{large}.index.npz"))
    shutil.rmtree(root)
    alone = f"{inner:.2f}" if size else ""
    return [
        name,
        f"{written:.0f}",
        *seconds,
        size,
        f"{load:.2f} ({load_cpu:.2f})",
        alone,
        f"{memory:.0f} (at most {most:.0f})",
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("tests.index_table", description="Listing many images, in every format.")
    parser.add_argument("--output-dir", type=Path, required=True, help="a new folder, of about 5 GB, which is removed")
    parser.add_argument("--records", type=int, default=1_280_000, help="images")
    parser.add_argument("--only", default="", help="a part of the names of the formats")
    options = parser.parse_args(argv)
    options.output_dir.mkdir(parents=True)
    try:
        print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
        for name in FORMATS:
            if options.only in name:
                print(f"| {' | '.join(measure(name, options.output_dir / 'data', options.records))} |", flush=True)
    finally:
        shutil.rmtree(options.output_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
