"""scripts/convert_dataset.py: every form of data to tars and back to a folder, also when it is killed in between."""

import contextlib
import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from scripts import convert_dataset
from tests import damage
from tests.conftest import TINY, Refused, assert_same_run, resolved
from tests.forked import launch_series
from tests.harness import ROOT
from tests.shards import (
    write_arrow,
    write_ilsvrc,
    write_lmdb,
    write_recordio,
    write_tar,
    write_tfrecord,
    write_webdataset,
)
from utils.data.conversion.convert import key_of
from utils.data.splits.selection import read_data
from utils.distributed.group import DistEnv

SCRIPT = ROOT / "scripts" / "convert_dataset.py"
SMALL = ("--shard-size", "0.05", "--workers", "2")  # five shards of a split of `data`


def convert(*words: object) -> None:
    assert convert_dataset.main(list(map(str, words))) == 0


def files_of(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of the images below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*/*"))}


def shards_of(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of everything but the indexes, which have the times of the shards."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".npz"}


def write_flat(folder: Path, target: Path) -> Path:
    """The folder with a flat val/ and val.csv."""
    shutil.copytree(folder / "train", target / "train")
    (target / "val").mkdir()
    lines = ["file,label\n"]
    for path in sorted((folder / "val").glob("*/*")):
        shutil.copy(path, target / "val")
        lines.append(f"{path.name},{path.parent.name}\n")
    (target / "val.csv").write_text("".join(lines))
    return target


def write_parquet(folder: Path, target: Path) -> Path:
    """What `datasets` writes to parquet, with embedded images and in data/ as on its hub, in a process of its own."""
    program = (
        "import sys, datasets; from datasets.table import embed_table_storage\n"
        "loaded = datasets.load_dataset('imagefolder', data_dir=sys.argv[1], cache_dir=sys.argv[2])\n"
        "for split, rows in loaded.items():\n"
        "    rows = rows.with_format('arrow').map(embed_table_storage, batched=True)\n"
        "    for at in range(2):\n"
        "        part = rows.shard(2, at)\n"
        "        name = f'{split}-0000{at}-of-00002-{part._fingerprint}.parquet'\n"  # as push_to_hub named them
        "        part.to_parquet(f'{sys.argv[3]}/{name}')"
    )
    (target / "data").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", program, folder, target.parent / "cache", target / "data"], check=True)
    return target


WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "folder": lambda folder, target: shutil.copytree(folder, target),
    "flat": write_flat,
    "webdataset": write_webdataset,
    "ilsvrc": write_ilsvrc,
    "tfrecord": write_tfrecord,
    "recordio": write_recordio,
    "lmdb": write_lmdb,
    "arrow": write_arrow,
    "parquet": write_parquet,
}
QUICK = (
    "folder",
    "ilsvrc",
)  # the others differ from these in what is read, which tests/data has


@pytest.fixture(scope="module")
def named(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data`, with names of validation images as ImageNet has them."""
    root = shutil.copytree(data, tmp_path_factory.mktemp("named") / "data")
    for number, path in enumerate(sorted((root / "val").glob("*/*")), start=1):
        path.rename(path.with_name(f"ILSVRC2012_val_{number:08}.JPEG"))
    return root


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WRITERS]
)
def test_every_form_to_tars_and_back_to_a_folder(named: Path, tmp_path: Path, name: str, cpu: DistEnv) -> None:
    source = WRITERS[name](named, tmp_path / "source")
    names = source / "names.txt"
    flags = ("--class-names", names) if names.exists() else ()
    convert(source, tmp_path / "tars", *flags, *SMALL)
    convert(tmp_path / "tars", tmp_path / "back", "--to", "folder")
    assert sorted(path.name for path in (tmp_path / "tars").iterdir()) == sorted(
        ["classes.txt", "convert.json", "train.index.npz", "val.index.npz"]
        + [f"{split}-{number:04}.tar" for split in ("train", "val") for number in range(5)]
    )
    expected, found = files_of(named), files_of(tmp_path / "back")
    if name == "recordio":  # which has no names, but numbers in the order of the files
        assert list(found.values()) == list(expected.values())
        assert "train/blue/00000000.jpg" in found
    else:
        assert found == expected
    if name != "parquet":
        config = resolved(data_dir=source, output_dir=tmp_path, class_names=names if names.exists() else None)
        before = read_data(config, cpu)
        after = read_data(resolved(data_dir=tmp_path / "tars", output_dir=tmp_path), cpu)
        for split in ("train", "val"):
            assert after[split].classes == before[split].classes
            assert (after[split].labels == before[split].labels).all()
            assert name == "recordio" or after[split].fingerprint == before[split].fingerprint


@pytest.mark.slow  # bytes of the images are compared quickly
def test_the_same_bits_in_training(data: Path, tmp_path: Path) -> None:
    convert(data, tmp_path / "tars", *SMALL)
    flags = (*TINY, "--batch-size", 8, "--epochs", 1)
    sources = {"source": data, "converted": tmp_path / "tars"}
    runs = (("--data-dir", root, *flags, "--output-dir", tmp_path / name) for name, root in sources.items())
    for done in launch_series(*runs):
        assert done.status == 0, done.err
    assert_same_run(tmp_path / "source", tmp_path / "converted", without=["files"])


# ---------------------------------------------------------------------------------------------------------------------
# Names


def names_after(root: Path, target: Path, cpu: DistEnv, *flags: object) -> tuple[list[str], list[str]]:
    """Names of the training images before and after a conversion."""
    convert(root, target, *flags)
    before, after = (
        read_data(resolved(data_dir=folder, output_dir=folder), cpu, ("train",))["train"].names()
        for folder in (root, target)
    )
    return before, after


def test_folders_of_other_names(data: Path, tmp_path: Path) -> None:
    for split, name in (("train", "fit"), ("val", "dev")):
        shutil.copytree(data / split, tmp_path / "data" / name)
    convert(tmp_path / "data", tmp_path / "out", "--to", "folder", "--train-split", "fit", "--val-split", "dev")
    assert files_of(tmp_path / "out") == files_of(data)


def test_unusual_names_of_files(tmp_path: Path, cpu: DistEnv) -> None:
    """Names with one key, other alphabets, control characters, and bytes that are no text."""
    names = [b"a.1.jpg", b"a.2.jpg", b"a.jpg", b"b.PNG", "ü-例.jpeg".encode(), b"two\nlines.jpg", b"\xff.jpg"]
    names += [b"x" * 150 + b"%d.jpg" % number for number in range(2)]
    for folder in ("one", "two words"):
        (tmp_path / "data" / "train" / folder).mkdir(parents=True)
        for number, name in enumerate(names):
            path = os.fsencode(tmp_path / "data" / "train" / folder) + b"/" + name
            Path(os.fsdecode(path)).write_bytes(damage.JPEG + b"%d" % number)
    before, after = names_after(tmp_path / "data", tmp_path / "tars", cpu)
    assert after == before
    assert len(after) == 2 * len(names)
    convert(tmp_path / "tars", tmp_path / "back", "--to", "folder")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "data")
    with tarfile.open(tmp_path / "tars" / "train-0000.tar") as tar:
        assert "one/a.1.jpg" in tar.getnames()
        assert {(info.mtime, info.uid, info.gid, info.mode) for info in tar} == {(0, 0, 0, 0o644)}


@pytest.mark.parametrize(
    ("members", "to_tars", "to_folder"),
    [
        (["p/x.jpg", "q/x.jpg"], ["p/x.jpg", "q/x.jpg"], ["p_x.jpg", "q_x.jpg"]),
        (["p/x.1.jpg", "p/x.2.jpg"], ["x.1.jpg", "x.2.jpg"], ["x.1.jpg", "x.2.jpg"]),
        (["p/x.jpg", "p_/x.jpg"], ["p/x.jpg", "p_/x.jpg"], ["00000000.jpg", "00000001.jpg"]),
    ],
    ids=["whole keys", "one key", "order lost"],
)
def test_names_of_members(
    tmp_path: Path, cpu: DistEnv, members: Sequence[str], to_tars: Sequence[str], to_folder: Sequence[str]
) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "val"):
        for shard, member in enumerate(members):
            key = key_of(member)
            write_tar(tmp_path / "data" / f"{split}-{shard}.tar", {member: damage.JPEG, f"{key}.cls": b"0"})
    before, after = names_after(tmp_path / "data", tmp_path / "tars", cpu)
    assert before == after == [f"0/{name}" for name in to_tars]
    _, after = names_after(tmp_path / "data", tmp_path / "folder", cpu, "--to", "folder")
    assert after == [f"0/{name}" for name in to_folder]


# ---------------------------------------------------------------------------------------------------------------------
# Parquet


def write_rows(path: Path, images: Sequence[bytes | None], labels: Sequence[object], column: str = "image") -> None:
    """A parquet file as pyarrow writes it, in row groups of two."""
    path.parent.mkdir(parents=True, exist_ok=True)
    structs = [{"bytes": content, "path": f"{number}.jpg"} for number, content in enumerate(images)]
    pyarrow.parquet.write_table(pa.table({"id": range(len(images)), column: structs, "label": labels}), path, 2)


def test_parquet_of_pyarrow(tmp_path: Path) -> None:
    """Several columns, several row groups, names of classes as text, and train alone."""
    images = [damage.JPEG + bytes([number]) for number in range(5)]
    write_rows(tmp_path / "data" / "train.parquet", images, ["b", "a", "b", "a", "b"])
    convert(tmp_path / "data", tmp_path / "back", "--to", "folder")
    expected = {f"train/{'ba'[number % 2]}/{number}.jpg": images[number] for number in range(5)}
    assert files_of(tmp_path / "back") == expected
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["convert.json", "train"]


@pytest.mark.parametrize(
    ("name", "images", "column", "fragments"),
    [
        ("train.parquet", None, "", ("{file}: no readable parquet file", "copy it again")),
        ("train.parquet", [damage.JPEG], "picture", ("{file}: no column of images, but id, picture, label",)),
        ("train.parquet", [damage.JPEG, None], "image", ("{file}: an image is not in it, only its path",)),
        ("0.parquet", [damage.JPEG], "image", ("{file}: no split in its name; give it one with train or val",)),
    ],
    ids=["damaged", "no images", "paths", "no split"],
)
def test_parquet_that_is_refused(
    tmp_path: Path, refused: Refused, name: str, images: Sequence[bytes] | None, column: str, fragments: tuple[str, ...]
) -> None:
    file = tmp_path / "data" / name
    if images is None:
        file.parent.mkdir()
        file.write_bytes(b"PAR1" + bytes(100))
    else:
        write_rows(file, images, [0] * len(images), column)
    check = refused(file.parent, tmp_path / "out", main=quiet_main, program="convert_dataset.py")
    check(*(fragment.format(file=file) for fragment in fragments))


def quiet_main(words: list[str]) -> int:
    """The script without what it prints on standard output, so that an error can be the only line."""
    with contextlib.redirect_stdout(io.StringIO()):
        return convert_dataset.main(words)


# ---------------------------------------------------------------------------------------------------------------------
# Smaller images


def test_larger_images_become_smaller(data: Path, tmp_path: Path) -> None:
    """Upright, in the colors of the source; those that fit keep their bytes."""
    root = shutil.copytree(data, tmp_path / "data")
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    pixels = np.zeros((60, 200, 3), dtype=np.uint8)
    pixels[:, :100] = 255
    Image.fromarray(pixels).save(root / "train" / "red" / "turned.jpg", exif=exif, quality=95)
    Image.new("LA", (300, 200), (90, 0)).save(root / "train" / "red" / "gray.png")
    sizes = {}
    for quality in (95, 30):
        out = tmp_path / str(quality)
        convert(root, out, "--to", "folder", "--max-side", 50, "--quality", quality)
        before, after = files_of(root), files_of(out)
        assert before.keys() == after.keys()
        for name, content in before.items():
            with Image.open(io.BytesIO(content)) as source, Image.open(io.BytesIO(after[name])) as written:
                if max(source.size) <= 50:
                    assert after[name] == content
                else:
                    assert (written.format, max(written.size)) == ("JPEG", 50)
        with Image.open(out / "train" / "red" / "turned.jpg") as turned:
            assert (turned.size, turned.getexif().get(0x0112, 1)) == ((15, 50), 1)
            assert np.asarray(turned)[:20].min() > 200
            assert np.asarray(turned)[30:].max() < 50
        with Image.open(out / "train" / "red" / "gray.png") as gray:
            assert (gray.mode, gray.size) == ("RGB", (50, 33))
        sizes[quality] = sum(map(len, after.values()))
    assert sizes[30] < sizes[95] < sum(map(len, before.values()))


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion of `data` to tars."""
    target = tmp_path_factory.mktemp("done") / "out"
    convert(data, target)
    return target


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("nowhere", "{tmp}/new"), ("nowhere: no such folder; give a data set",)),
        (("{data}", "{tmp}/full"), ("{tmp}/full: has other files (notes.txt, ...); give an empty or a new folder",)),
        (("{data}", "{data}/new"), ("{data}/new: lies in {data}, which is read; give a folder outside of it",)),
        (("{data}", "{data}"), ("{data}: lies in {data}",)),
        (("{data}", "{tmp}/full/notes.txt"), ("{tmp}/full/notes.txt: cannot be written (File exists)",)),
        (("{tmp}/full", "{tmp}/new"), ("{tmp}/full", "train")),
        (("{data}", "{done}", "--to", "folder"), ("{done}: holds a conversion with --to tar, not folder",)),
        (("{data}", "{done}", "--max-side", "9"), ("with --max-side None, not 9; give another folder, or delete",)),
        (("{tmp}/data", "{done}"), ("{done}: holds a conversion with source {data}, not {tmp}/data; give",)),
        (("{data}", "{tmp}/new", "--quality", "90"), ("--quality 90: counts only with --max-side",)),
        (("{data}", "{tmp}/new", "--max-side", "9", "--quality", "101"), ("--quality 101: must be at least 1 and",)),
        (("{data}", "{tmp}/new", "--max-side", "0"), ("--max-side 0: must be 1 or more",)),
        (("{data}", "{tmp}/new", "--shard-size", "0"), ("--shard-size 0.0: must be more than 0",)),
        (("{data}", "{tmp}/new", "--shard-size", "1", "--to", "folder"), ("--shard-size 1: a folder has no shards",)),
        (("{data}", "{tmp}/new", "--to", "zip"), ("zip", "--help")),
        (("{data}",), ("DST", "--help")),
    ],
)
def test_refusals(
    refused: Refused, data: Path, done: Path, tmp_path: Path, words: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    (tmp_path / "data").mkdir()
    places = {"data": data, "tmp": tmp_path, "done": done}
    before = [sorted(folder.rglob("*")) for folder in (tmp_path, done)]
    check = refused(*(word.format(**places) for word in words), main=convert_dataset.main, program="convert_dataset.py")
    check(*(fragment.format(**places) for fragment in fragments))
    assert [sorted(folder.rglob("*")) for folder in (tmp_path, done)] == before


def test_images_that_cannot_be_read_are_named(refused: Refused, data: Path, tmp_path: Path) -> None:
    root = shutil.copytree(data, tmp_path / "data")
    words = (root, tmp_path / "out", "--max-side", 40)
    bad = root / "train" / "green" / "bad.jpg"
    bad.symlink_to("bad.jpg")  # to itself
    refused(*words, main=convert_dataset.main, program="convert_dataset.py")(
        f"{root}/train: green/bad.jpg: cannot be read (Too many levels of symbolic links); replace or remove"
    )
    assert not (tmp_path / "out").exists()
    bad.unlink()
    bad.write_bytes(damage.CONTENTS["text"])
    refused(*words, main=convert_dataset.main, program="convert_dataset.py")(
        f"{bad}: Pillow cannot decode it (cannot identify image file", "replace or remove it, scripts/check_dataset.py"
    )
    assert not list((tmp_path / "out").glob("train*.tar"))
    assert not list((tmp_path / "out").glob(".train*"))
    for path in (tmp_path / "out").glob("val*.tar"):
        path.unlink()
    shutil.copy(root / "train" / "red" / "red-000.jpg", bad)
    convert(*words)  # as no image was written before
    bad.unlink()
    refused(*words, main=convert_dataset.main, program="convert_dataset.py")(
        f"{root}: has other images than when {tmp_path / 'out'} was begun; give another folder, or delete that one"
    )


def test_one_conversion_at_a_time(
    refused: Refused, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_dataset, "LOCK_SECONDS", 0.1)
    (tmp_path / "out").mkdir()
    folder = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        check = refused(data, tmp_path / "out", main=convert_dataset.main, program="convert_dataset.py")
        check(f"{tmp_path / 'out'}: another conversion writes there; wait for its end")
    finally:
        os.close(folder)


def test_classes_that_folders_sort_otherwise(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    """Tars keep the order; folders cannot, which is printed. A name that is no folder's is refused."""
    root = write_webdataset(data, tmp_path / "data")
    (root / "classes.txt").write_text("z\na/b\nm\n")
    convert(root, tmp_path / "tars")
    assert (tmp_path / "tars" / "classes.txt").read_text() == "z\na/b\nm\n"
    assert "labels" not in capsys.readouterr().out
    convert(tmp_path / "tars", tmp_path / "folder", "--to", "folder")
    assert "the classes of folders are sorted by name, so the labels are not those" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "folder" / "train" / "z").iterdir())
    assert names == sorted(path.name for path in (data / "train" / "blue").iterdir())
    (root / "classes.txt").write_text("z\n..\nm\n")
    check = refused(root, tmp_path / "bad", "--to", "folder", main=convert_dataset.main, program="convert_dataset.py")
    check("class '..': no name for a folder")
