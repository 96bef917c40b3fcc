"""The index of shards: saved, read again, and what becomes of shards that change."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.formats.test_recordio import image
from tests.data.formats.test_recordio import write as write_records
from tests.shards import write_tar, write_webdataset
from utils.data.formats import recordio, webdataset
from utils.data.formats.index import index_path, read_shards
from utils.data.formats.shards import ClassNames, Shards, create_manifests
from utils.data.images.manifest import Manifest
from utils.data.reading.reader import read_image
from utils.distributed.group import DistEnv
from utils.errors import UserError


def read(root: Path, output: Path, env: DistEnv, splits: tuple[str, ...] = ("train", "val")) -> list[Shards]:
    shards = webdataset.find(root)
    return [read_shards(split, webdataset, shards[split], output, 2, env) for split in splits]


def manifests(shards: list[Shards], names: tuple[str, ...] | None = None) -> dict[str, Manifest]:
    return create_manifests(shards, ClassNames(names, "NAMES"), webdataset.NAME, skip_bad=False)


def test_the_images_of_the_folder(data: Path, tmp_path: Path, cpu: DistEnv) -> None:
    from utils.data.formats.folder import scan

    root = write_webdataset(data, tmp_path / "data")
    for _ in ("scanned", "from the index"):
        found = manifests(read(root, tmp_path / "out", cpu), ("blue", "green", "red"))
        for split in ("train", "val"):
            listed = scan(data, split)
            assert found[split].names() == listed.names()
            assert np.array_equal(found[split].labels, listed.labels)
            assert found[split].fingerprint == listed.fingerprint
            for index in range(len(listed)):
                assert read_image(found[split].record(index)) == read_image(listed.record(index))
    assert not (tmp_path / "out").exists()


def test_only_changed_shards_are_read_again(data: Path, tmp_path: Path, cpu: DistEnv) -> None:
    root = write_webdataset(data, tmp_path / "data")
    before = manifests(read(root, tmp_path, cpu, ("train",)))["train"]
    changed, unchanged = root / "train-0001.tar", root / "train-0002.tar"
    status = unchanged.stat()
    unchanged.write_bytes(bytes(status.st_size))  # which reading would find
    os.utime(unchanged, ns=(status.st_atime_ns, status.st_mtime_ns))
    write_tar(changed, {"new.jpg": b"x", "new.cls": b"1"})
    after = manifests(read(root, tmp_path, cpu, ("train",)))["train"]
    assert len(after) == len(before) - 10 + 1
    assert "1/new.jpg" in after.names()
    assert read(root, tmp_path, cpu, ("train",))[0].counts.tolist() == [10, 1, 10, 10, 1]


def test_a_missing_shard_is_named(data: Path, tmp_path: Path, cpu: DistEnv) -> None:
    root = write_webdataset(data, tmp_path / "data")
    read(root, tmp_path, cpu)
    (root / "train-0003.tar").unlink()
    with pytest.raises(UserError, match=r"train-0003\.tar: missing, but the index has it; copy it there"):
        read(root, tmp_path, cpu)


def test_an_index_that_cannot_lie_beside_the_shards(data: Path, tmp_path: Path, cpu: DistEnv) -> None:
    root = write_webdataset(data, tmp_path / "data")
    index_path(root, "train").mkdir()  # as a folder without permission, for root too
    read(root, tmp_path / "out", cpu, ("train",))
    assert os.listdir(tmp_path / "out") == ["train.index.npz"]
    shutil.rmtree(index_path(root, "train"))
    shards = webdataset.find(root)["train"]
    for shard in shards:  # which reading would find
        status = shard.stat()
        shard.write_bytes(bytes(status.st_size))
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(read(root, tmp_path / "out", cpu, ("train",))[0].index) == 41


@pytest.mark.parametrize("damage", [b"", b"text", None])
def test_a_damaged_index_is_made_anew(data: Path, tmp_path: Path, cpu: DistEnv, damage: bytes | None) -> None:
    root = write_webdataset(data, tmp_path / "data")
    read(root, tmp_path, cpu)
    path = index_path(root, "train")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert len(read(root, tmp_path, cpu)[0].index) == 41


def samples(label: object, *keys: str, suffix: str = "cls") -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for key in keys:
        text = str(label) if suffix == "cls" else json.dumps({"label": label})
        members |= {f"{key}.jpg": b"content of " + key.encode(), f"{key}.{suffix}": text.encode()}
    return members


def test_labels_from_1_and_names_that_come_twice(tmp_path: Path, cpu: DistEnv) -> None:
    """The same file name in two shards, and labels that count from 1."""
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}-0.tar", samples(1, "a", "b"))
        write_tar(tmp_path / f"{split}-1.tar", samples(1, "a") | samples(2, "b"))
    train = manifests(read(tmp_path, tmp_path, cpu))["train"]
    assert train.classes == ("1", "2")
    assert train.names() == ["1/train-0.tar:a.jpg", "1/train-0.tar:b.jpg", "1/train-1.tar:a.jpg", "2/train-1.tar:b.jpg"]
    assert train.record(2).name == f"{tmp_path}/train-1.tar:a.jpg"
    assert read_image(train.record(3)) == b"content of b"


def test_records_of_one_name(tmp_path: Path, cpu: DistEnv) -> None:
    """A library counts records, whatever their ids are: here all are 0, in two shards of one name."""
    contents = [[b"%d of %d" % (number, shard) for number in range(3)] for shard in range(2)]
    for split in ("train", "val"):
        for shard, images in enumerate(contents):
            (tmp_path / split / str(shard)).mkdir(parents=True)
            write_records(tmp_path / split / str(shard) / "0.rec", [image(content, 0, 0) for content in images])
    shards = [
        read_shards(split, recordio, [tmp_path / split / str(shard) / "0.rec" for shard in range(2)], tmp_path, 2, cpu)
        for split in ("train", "val")
    ]
    train = create_manifests(shards, ClassNames(None), recordio.NAME, skip_bad=False)["train"]
    assert [read_image(train.record(number)) for number in range(6)] == [*contents[0], *contents[1]]
    assert train.names()[:2] == ["0/0.rec:00000000:00000000", "0/0.rec:00000001:00000000"]
    assert train.record(4).name == f"{tmp_path}/train/1/0.rec:00000004:00000000"
