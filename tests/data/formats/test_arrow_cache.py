"""Arrow files: what `datasets` caches and saves and pyarrow writes, byte for byte; each kind of damage in one line."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.damage import JPEG, encoded
from tests.harness import launch
from utils.data.formats import arrow_cache
from utils.data.images.records import Entry
from utils.errors import UserError

# Writes a data set of 41 training and 8 validation images in all ways of `datasets`, and prints what it reads of them.
WRITE = """
import hashlib, io, json, sys
from pathlib import Path
import datasets
from datasets import ClassLabel, DatasetDict, Dataset, Features, Image, load_dataset, load_from_disk
import PIL.Image, numpy
root = Path(sys.argv[1])
datasets.disable_progress_bars()

def images(count):
    for number in range(count):
        content = io.BytesIO()
        size = 8 + 4 * number
        pixels = numpy.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=numpy.uint8)
        PIL.Image.fromarray(pixels).save(content, "JPEG")
        path = f"class/{number}.jpg" if number % 2 else None
        yield {"photo": {"bytes": content.getvalue(), "path": path}, "kind": number % 3}

features = Features({"kind": ClassLabel(names=["cat", "dog", "eel"]), "photo": Image()})

def create(split, count):
    return Dataset.from_generator(
        images, features=features, gen_kwargs={"count": count}, split=split, cache_dir=str(root / "cache")
    )

whole = DatasetDict(train=create("train", 41), validation=create("validation", 8))
whole["train"].map(lambda row: {"more": 1})  # is cached beside the shards
for split in whole:
    (folder,) = {str(Path(file["filename"]).parent) for file in whole[split].cache_files}
    Path(folder).rename(root / f"cached-{split}")
def cached(split):
    return Dataset.from_file(str(root / f"cached-{split}/generator-{split}.arrow"))

whole = DatasetDict({split: cached(split) for split in whole})
whole.save_to_disk(root / "saved", num_shards={"train": 3, "validation": 1})
some = whole["train"].shuffle(seed=1).select(range(0, 30, 3))
chosen = DatasetDict(train=some, val=whole["validation"].select([1, 7]))
chosen.save_to_disk(root / "chosen")
for number, row in enumerate(images(4)):
    path = root / f"files/{'ab'[number % 2]}/{number}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(row["photo"]["bytes"])
linked = load_dataset("imagefolder", data_dir=str(root / "files"), split="train", cache_dir=str(root / "linked"))
linked.save_to_disk(root / "embedded/train")

def described(data):
    image, label = ("photo", "kind") if "photo" in data.features else ("image", "label")
    rows = data.cast_column(image, Image(decode=False))
    return [(hashlib.sha256(row[image]["bytes"]).hexdigest(), row[label]) for row in rows]

print(json.dumps({
    "saved": {split: described(load_from_disk(str(root / "saved" / split))) for split in whole},
    "chosen": {split: described(load_from_disk(str(root / "chosen" / split))) for split in chosen},
    "embedded": {"train": described(load_from_disk(str(root / "embedded/train")))},
}))
"""
Described = dict[str, list[tuple[str, int | str]]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder of what `datasets` has written, and what it reads: name -> split -> (hash, label) of each image."""
    root = tmp_path_factory.mktemp("datasets")
    done = launch(root, program=WRITE, env={"HOME": root, "HF_HOME": root / "home", "HF_HUB_OFFLINE": "1"})
    assert done.status == 0, done.err
    return root, json.loads(done.out.splitlines()[-1])


def read(shard: Path, entry: Entry) -> bytes:
    with open(shard, "rb") as file:
        return b"".join(os.pread(file.fileno(), length, offset) for offset, length in entry.ranges)


def scanned(data_dir: Path) -> Described:
    """Split -> (hash, label) of each image."""
    return {
        split: [
            (hashlib.sha256(read(shard, entry)).hexdigest(), entry.label)
            for shard in shards
            for entry in arrow_cache.scan(shard)
        ]
        for split, shards in arrow_cache.find(data_dir).items()
    }


def as_tuples(described: Mapping[str, list[list[Any]]]) -> Described:
    return {"val" if split == "validation" else split: [(a, b) for a, b in rows] for split, rows in described.items()}


@pytest.mark.parametrize("name", ["saved", "chosen", "embedded"])
def test_saved_data_sets_are_those_that_datasets_reads(written: tuple[Path, Any], name: str) -> None:
    root, expected = written
    found = scanned(root / name)
    assert found == as_tuples(expected[name])
    assert {split: len(rows) for split, rows in found.items()} == {
        "saved": {"train": 41, "val": 8}, "chosen": {"train": 10, "val": 2}, "embedded": {"train": 4},
    }[name]  # fmt: skip


def test_cached_data_sets(written: tuple[Path, Any], tmp_path: Path) -> None:
    root, expected = written
    assert len(list((root / "cached-train").glob("cache-*.arrow"))) == 2  # of map() and of shuffle()
    assert scanned(root / "cached-train") == {"train": as_tuples(expected["saved"])["train"]}
    shutil.copytree(root / "cached-train", tmp_path, dirs_exist_ok=True)
    shutil.copytree(root / "cached-validation", tmp_path, dirs_exist_ok=True)
    assert scanned(tmp_path) == as_tuples(expected["saved"])


def test_keys_and_classes(written: tuple[Path, Any], tmp_path: Path) -> None:
    root, _ = written
    splits = arrow_cache.find(root / "saved")
    assert [path.name for path in splits["train"]] == [f"data-0000{number}-of-00003.arrow" for number in range(3)]
    assert [entry.key for entry in arrow_cache.scan(splits["val"][0])] == [
        "00000000", "1.jpg", "00000002", "3.jpg", "00000004", "5.jpg", "00000006", "7.jpg",
    ]  # fmt: skip
    assert arrow_cache.class_names([*splits["train"], *splits["val"]]) == ("cat", "dog", "eel")
    assert arrow_cache.class_names(arrow_cache.find(root / "embedded")["train"]) == ("a", "b")
    assert arrow_cache.class_names([write(tmp_path / "plain.arrow", table())]) is None


def test_images_stored_by_path_are_refused(written: tuple[Path, Any]) -> None:
    (shard,) = (written[0] / "linked").rglob("imagefolder-train.arrow")
    expected = (
        r"record 0 holds only the path of 0.jpg; save the data set again with save_to_disk of .*, which embeds it$"
    )
    with pytest.raises(UserError, match=expected):
        list(arrow_cache.scan(shard))


def test_class_names_beside_the_file_and_other_ones(written: tuple[Path, Any], tmp_path: Path) -> None:
    shard = write(tmp_path / "a/x-train.arrow", table(label="kind"))
    info = {"features": {"kind": {"_type": "ClassLabel", "names": ["ant", "bee"]}}}
    (shard.parent / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="no column of labels, but image, kind; call it label and save"):
        arrow_cache.class_names([shard])
    shard = write(tmp_path / "b/x-train.arrow", table())
    (shard.parent / "dataset_info.json").write_text(json.dumps(info).replace("kind", "label"))
    assert arrow_cache.class_names([shard]) == ("ant", "bee")
    other = arrow_cache.find(written[0] / "embedded")["train"][0]
    with pytest.raises(UserError, match=r"x-train.arrow: has other classes than .*embedded.*; give both the same"):
        arrow_cache.class_names([other, shard])


def table(
    images: Any = None, labels: Any = None, image: str = "image", label: str = "label", kind: Any = None
) -> pa.Table:
    """Three records, as a struct of bytes and path unless `kind` is another type."""
    kind = kind or pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = images or [JPEG, encoded(height=9, width=9), JPEG + b"end"]
    if pa.types.is_struct(kind):
        images = [content if isinstance(content, dict) else {"bytes": content} for content in images]
    return pa.table({image: pa.array(images, kind), label: pa.array(labels or [0, 2, 1])})


def write(path: Path, content: pa.Table, as_file: bool = False, rows: int = 2, compression: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_file if as_file else pa.ipc.new_stream)(str(path), content.schema, options=options) as writer:
        writer.write_table(content, max_chunksize=rows)
    return path


KINDS = {
    "struct": None, "binary": pa.binary(), "large binary": pa.large_binary(),
    "struct of large binary": pa.struct([("path", pa.string()), ("bytes", pa.large_binary())]),
}  # fmt: skip


@pytest.mark.parametrize("as_file", [False, True], ids=["stream", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_types_of_columns(tmp_path: Path, kind: str, as_file: bool) -> None:
    content = table(kind=KINDS[kind])
    shard = write(tmp_path / "train.arrow", content, as_file)
    entries = list(arrow_cache.scan(shard))
    assert [read(shard, entry) for entry in entries] == [JPEG, encoded(height=9, width=9), JPEG + b"end"]
    assert [(entry.key, entry.label) for entry in entries] == [("00000000", 0), ("00000001", 2), ("00000002", 1)]


def test_labels_that_are_names(tmp_path: Path) -> None:
    shard = write(tmp_path / "train.arrow", table(labels=["a", "b", "a"], image="img", label="labels"))
    assert [entry.label for entry in arrow_cache.scan(shard)] == ["a", "b", "a"]


Damage = Callable[[Path], Path]


def with_bytes(change: Callable[[bytes], bytes], as_file: bool = False) -> Damage:
    def damage(path: Path) -> Path:
        write(path, table(), as_file).write_bytes(change(path.read_bytes()))
        return path

    return damage


def with_table(content: pa.Table, **options: Any) -> Damage:
    return lambda path: write(path, content, **options)


NULL_PATH = {"bytes": None, "path": "x/cat.jpg"}
REFUSED: dict[str, tuple[Damage, str]] = {
    "cut in the end marker": (with_bytes(lambda content: content[:-1]), "or cut off, its end is missing"),
    "cut at the end marker": (with_bytes(lambda content: content[:-8]), "or cut off, its end is missing"),
    "cut, with an end": (with_bytes(lambda content: content[: len(content) // 2] + content[-8:]), "no readable Arrow"),
    "a cut file": (with_bytes(lambda content: content[:-1], as_file=True), "no readable Arrow file ("),
    "a file cut in the middle": (with_bytes(lambda content: content[: len(content) // 2], True), "no readable Arrow"),
    "zero bytes": (with_bytes(lambda content: bytes(len(content))), "Arrow file"),
    "a compressed file": (with_table(table(), as_file=True, compression="lz4"), "is compressed"),
    "two files": (with_bytes(lambda content: 2 * content, as_file=True), "bytes behind its end, as files that were"),
    "a longer stream behind": (
        with_bytes(lambda content: content + 99 * content[:-8] + content), "bytes behind its end, as files that were"
    ),
    "no image": (with_table(table([JPEG, JPEG, None])), "record 2 has no image; remove it and save"),
    "an empty image": (with_table(table([JPEG, b"", JPEG])), "record 1 has no image"),
    "no struct": (with_table(table([JPEG, JPEG, None], kind=pa.binary())), "record 2 has no image"),
    "no label": (with_table(table(labels=[0, None, 1])), "record 1 has no label; remove it and save"),
    "label -1": (with_table(table(labels=[0, 1, -1])), "record 2 has no label"),
    "two columns of images": (
        with_table(table().append_column("img", pa.array([1, 2, 3]))), "several columns are images (image, img)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_damage_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    damage, fragment = REFUSED[case]
    shard = damage(tmp_path / "train.arrow")
    with pytest.raises(UserError) as caught:
        list(arrow_cache.scan(shard))
    assert str(caught.value).startswith(f"{shard}: ")
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        list(arrow_cache.scan(tmp_path / "gone.arrow"))
    shard = write(tmp_path / "train.arrow", table())
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"train.arrow: .*; pip install pyarrow$"):
        list(arrow_cache.scan(shard))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("{", r"state.json: no JSON \("),
        ("[]", "state.json: does not name the shards; save"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, state: str, expected: str) -> None:
    write(tmp_path / "train/a.arrow", table())
    (tmp_path / "train/state.json").write_text(state)
    with pytest.raises(UserError, match=expected):
        arrow_cache.find(tmp_path)


def test_names_of_shards(tmp_path: Path) -> None:
    assert arrow_cache.find(tmp_path) == arrow_cache.find(tmp_path / "gone") == {}
    for name in ("x-train-00000-of-00002.arrow", "x-test.arrow", "cache-0f-train.arrow", "x-train.parquet"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"x-train-00001-of-00002.arrow is missing"):
        arrow_cache.find(tmp_path)
    (tmp_path / "x-train-00001-of-00002.arrow").touch()
    found = arrow_cache.find(tmp_path)
    assert {split: len(paths) for split, paths in found.items()} == {"train": 2, "val": 1}
