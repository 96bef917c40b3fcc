"""Reading encoded images: one module opens them, and nothing else depends on where their bytes are."""

import ast
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import pipelines
from tests import damage
from tests.conftest import resolved, write_images
from tests.test_imports import FILES, name_of, room_of
from utils.data.formats.folder import file_record, scan
from utils.data.images.batch import Batch
from utils.data.images.manifest import Manifest
from utils.data.images.records import Record
from utils.data.loaders.cache import decoded_bytes
from utils.data.loaders.sampler import RandomSampler
from utils.data.reading.decode_pool import decode_files
from utils.data.reading.decoding import DecodeError, dali_decode
from utils.data.reading.reader import BatchReader, open_image, read_image, request_of
from utils.data.reading.shard_reader import ShardFiles
from utils.distributed.group import DistEnv
from utils.errors import BadFile

READERS = (  # DALI's own reader is `--loader stock`; a user's code is no image; a conversion and staging write files
    "utils.data.reading.reader", "utils.data.reading.shard_reader", "utils.data.loaders.stock_loader",
    "utils.data.augmentation.user_code", "utils.data.conversion.convert", "utils.data.conversion.parquet",
    "utils.data.staging.staged_files", "utils.data.staging.stage",
)  # fmt: skip
FORMATS = "utils.data.formats."
ROOMS_WITH_IMAGES = ("data", "pipelines", "benchmark")  # where a file that is opened would be an image
OPENS = ("open", "os.open", "io.open", "os.fdopen", "np.fromfile", "np.memmap")


def offences(source: str, module: str) -> list[str]:
    """What `module` does that only the reader may do: open an image, or look at where its bytes are."""
    tree = ast.parse(source)
    opened = {
        ast.unparse(item.optional_vars)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if item.optional_vars is not None and ast.unparse(item.context_expr).startswith("open_image(")
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attribute = ast.unparse(node)
            if attribute in ("fn.io", "fn.readers") or (
                node.attr in ("location", "locations") and not module.startswith(FORMATS)
            ):
                found.append(f"{module} uses {attribute}")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "Image.open":
                argument = ast.unparse(node.args[0])
                forbidden = not (argument.startswith("io.BytesIO(") or argument in opened)
            else:
                in_room = room_of(module).partition(".")[0] in ROOMS_WITH_IMAGES or module == "scripts.benchmark"
                in_room = in_room and not (
                    module.startswith(FORMATS) and module != f"{FORMATS}folder"
                )  # they open shards
                forbidden = in_room and (called in OPENS or called.endswith((".open", ".read_bytes")))
            if forbidden:
                found.append(f"{module} calls {ast.unparse(node)}")
    return found


def test_only_the_reader_opens_images() -> None:
    others = [file for file in FILES if name_of(file) not in READERS]
    assert [offence for file in others for offence in offences(file.read_text(), name_of(file))] == []


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("open(path)", "utils.data.loaders.cache", 1),
        ("open(path)", "utils.data.formats.folder", 1),
        ("open(path)", "utils.data.formats.webdataset", 0),
        ("os.open(path, os.O_RDONLY)", "pipelines", 1),
        ("Path(path).read_bytes()", "utils.benchmark.measure", 1),
        ("path.open('rb')", "scripts.benchmark", 1),
        ("Image.open(path)", "utils.training.settings.autotune", 1),
        ("fn.io.file.read(paths)", "pipelines", 1),
        ("fn.readers.file(files=paths)", "pipelines", 1),
        ("os.stat(record.location)", "utils.data.reading.decode_pool", 1),
        ("os.stat(record.location)", "utils.data.formats.tar", 0),
        ("path.open('w')", "utils.files", 0),
        ("Image.open(io.BytesIO(content))", "utils.data.reading.decoding", 0),
        ("with open_image(record) as file, Image.open(file) as image: pass", "utils.data.loaders.cache", 0),
        ("with open(path) as file, Image.open(file) as image: pass", "utils.data.loaders.cache", 2),
    ],
)
def test_what_only_the_reader_may_do_is_found(source: str, module: str, count: int) -> None:
    assert len(offences(source, module)) == count


@dataclasses.dataclass(frozen=True)
class StoreTable:
    """A format of this test: one flat folder of numbered files, whose paths hold neither class nor name."""

    names: NDArray[np.bytes_]
    paths: NDArray[np.bytes_]

    def record(self, index: int) -> Record:
        return Record(f"store:{os.fsdecode(self.names[index])}", os.fsdecode(self.paths[index]))

    def locations(self, indices: NDArray[np.int64]) -> NDArray[np.bytes_]:
        return self.paths[indices]

    def select(self, indices: NDArray[np.int64]) -> "StoreTable":
        return StoreTable(self.names[indices], self.paths[indices])


def store(manifest: Manifest, folder: Path) -> Manifest:
    """The same images, copied into a store; the folders that they come from are not read any more."""
    folder.mkdir()
    paths = []
    for index in range(len(manifest)):
        paths.append(os.fsencode(shutil.copy(manifest.record(index).name, folder / f"{7 * index:x}")))
    table = StoreTable(manifest.table().names, np.array(paths))
    return dataclasses.replace(manifest, images=table, root=folder.parent / "nowhere")


def batches_of(loader: Any, count: int) -> Iterator[Batch]:
    with contextlib.closing(loader):
        for _ in range(count):
            yield next(loader)


@pytest.mark.parametrize(
    ("loader", "cache"),
    [("dali", "none"), ("dali", "host"), ("torch", "none"), pytest.param("proxy", "none", marks=pytest.mark.slow)],
)
def test_another_format_feeds_every_loader(data: Path, tmp_path: Path, cpu: DistEnv, loader: str, cache: str) -> None:
    listed = scan(data, "train")
    stored = store(listed, tmp_path / "store")
    config = resolved(
        loader=loader, cache=cache, decode="full", image_size=32, val_resize=36, deterministic=True, batch_size=8
    )
    trains = [pipelines.create_train_loader(config, one, RandomSampler(len(one), 8), cpu) for one in (listed, stored)]
    for one, other in zip(*(batches_of(train, 2) for train in trains), strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.targets, other.targets)
    vals = [pipelines.create_val_loader(config, one, cpu) for one in (listed, stored)]
    assert torch.equal(next(iter(vals[0])).images, next(iter(vals[1])).images)


def test_another_format_is_verified(data: Path, tmp_path: Path) -> None:
    listed = scan(data, "train")
    stored = store(listed, tmp_path / "store")
    (tmp_path / "store" / "15").write_bytes(b"")  # hexadecimal of 7 * 3
    reports = dict(decode_files(map(stored.record, range(len(stored))), dali_decode, 1))
    assert {stored.name(index): report.bad for index, report in reports.items() if report.bad} == {
        listed.name(3): "an empty file"
    }
    assert decoded_bytes(stored, len(stored)) > 0


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_a_bad_image_has_the_name_that_its_format_gives_it(
    data: Path, tmp_path: Path, cpu: DistEnv, loader: str
) -> None:
    stored = store(scan(data, "train"), tmp_path / "store")
    (tmp_path / "store" / "15").write_bytes(b"no image")
    config = resolved(loader=loader, image_size=32, val_resize=36, batch_size=8)
    with pytest.raises(BadFile, match=f"store:{stored.name(3)}: a text file, not an image"):
        list(pipelines.create_val_loader(config, stored, cpu))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage_file", "reason"),
    [
        (empty, "an empty file"),
        (remove, "cannot be read (No such file or directory)"),
        (cut, "a jpeg that DALI cannot decode"),
        (replace_by_folder, "not a regular file"),
    ],
)
@pytest.mark.parametrize("cache", ["none", "host"])
def test_a_file_that_turns_bad_after_the_listing_is_named(
    tmp_path: Path, cpu: DistEnv, damage_file: Callable[[Path], None], reason: str, cache: Literal["none", "host"]
) -> None:
    write_images(tmp_path / "train", (2, 2, 2))
    manifest = scan(tmp_path, "train")
    path = Path(manifest.record(3).name)
    damage_file(path)
    config = resolved(image_size=32, batch_size=6, decode="full", cache=cache)
    with pytest.raises(BadFile) as caught:
        next(pipelines.create_train_loader(config, manifest, RandomSampler(6, 6), cpu))
    assert caught.value.path == str(path)
    assert caught.value.reason.startswith(reason)


def test_batches_are_the_bytes_of_the_files(data: Path) -> None:
    manifest = scan(data, "train")
    order = [np.array(indices) for indices in ([3, 0, 17, 17], [40, 39, 1, 2], [5, 6, 7, 8])]
    reader = BatchReader(
        manifest, lambda position: order[position % 3], device="cpu", batch_size=4, threads=2, prefetch=2, first=1
    )
    for position in (1, 2, 3):
        images, targets = reader.read(position)
        expected = [read_image(manifest.record(int(index))) for index in order[position % 3]]
        assert [images.at(at).tobytes() for at in range(4)] == expected
        assert targets.as_array().tolist() == manifest.labels[order[position % 3], None].tolist()


@pytest.mark.timeout(20)
def test_reading_a_pipe_does_not_wait_for_its_writer(tmp_path: Path) -> None:
    """A file may become one after the listing."""
    os.mkfifo(tmp_path / "pipe.jpg")
    assert read_image(file_record(str(tmp_path / "pipe.jpg"))) == b""


def test_a_header_is_read_without_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"header and more")
    with open_image(file_record(str(tmp_path / "a.jpg"))) as file:
        assert file.read(6) == b"header"


def test_a_request_of_a_cut_jpeg_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(damage.JPEG)
    assert request_of(file_record(str(path)), ShardFiles(), "cpu").tobytes() == os.fsencode(path)
    path.write_bytes(damage.JPEG[:-40])
    with pytest.raises(DecodeError, match="that DALI cannot decode"):
        request_of(file_record(str(path)), ShardFiles(), "cpu")
