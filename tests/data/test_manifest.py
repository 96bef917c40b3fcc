"""The manifest: torchvision's labels, on names of any kind; a fingerprint of the content, in any folder."""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

import pipelines
from tests.conftest import resolved
from utils.data.formats.folder import list_images, scan, scan_splits
from utils.data.formats.naming import SYSTEM_NAMES
from utils.data.formats.split_folders import check_folders
from utils.data.images.manifest import FileEntry, Manifest, describe, describe_counts, stat_file, synthetic
from utils.data.loaders.cache import decoded_bytes
from utils.data.reading.reader import read_image
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig

# Names that sort, split, quote or encode in some unlucky way; a class and its images.
UNUSUAL = {
    "-rf": ("-rf.jpg", "--help.jpg", "plain.jpg"),
    "10": ("2.jpg", "10.jpg", "1.jpg"),
    "9": ("a.JPEG", "a.jpeg", "A.jpg", "a.JPG"),
    "Zebra": ("no extension.png", "dots.in.name.jpg"),
    "apple": ("~.jpg", "#.jpg", "%20.jpg", "$HOME.jpg", "*.jpg"),
    'it\'s "quoted"': ("it's.jpg", 'a"b.jpg', "back\\slash.jpg", "semi;colon.jpg"),
    "new\nline": ("two\nlines.jpg", "tab\tbed.jpg"),
    "with space ": (" leading.jpg", "in the middle.jpg", "before .jpg"),
    "žluťoučký kůň": ("猫.jpg", "🐎.jpg", "e\u0301.jpg", "\u00e9.jpg"),  # one letter, composed and not
    os.fsdecode(b"not-\xff-utf8"): (os.fsdecode(b"\xfe.jpg"), "plain.jpg"),
}


def write_unusual(root: Path) -> Path:
    """A file of its own color for every name in UNUSUAL, in a different order than any that sorts."""
    colors = iter(np.random.default_rng(0).integers(20, 236, size=(100, 3), dtype=np.uint8))
    for name in reversed(UNUSUAL):
        (root / name).mkdir(parents=True)
        for file in UNUSUAL[name]:
            Image.new("RGB", (40, 40), tuple(map(int, next(colors)))).save(root / name / file, quality=95)
    return root


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("unusual")
    write_unusual(root / "train")
    write_unusual(root / "val")
    return root


def test_labels_and_paths_are_those_of_torchvision(unusual: Path) -> None:
    found = scan(unusual, "train")
    reference = ImageFolder(str(unusual / "train"))
    assert list(found.classes) == reference.classes
    assert [(found.record(index).name, int(found.labels[index])) for index in range(len(found))] == reference.samples
    assert len(found) == sum(map(len, UNUSUAL.values()))
    assert found.labels.dtype == np.int64
    assert found.root == unusual / "train"


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_loaders_read_unusual_names(unusual: Path, cpu: DistEnv, loader: str) -> None:
    manifest = scan(unusual, "val")
    config = resolved(
        loader="dali" if loader == "dali" else "torch",
        batch_size=8,
        image_size=32,
        val_resize=36,
        workers=1,
        hw_decoder_load=0.65,
        prefetch=2,
    )
    batches = list(pipelines.create_val_loader(config, manifest, cpu))
    targets = torch.cat([batch.targets for batch in batches])
    assert targets.tolist() == manifest.labels.tolist()
    images = torch.cat([batch.images for batch in batches]).float()
    assert images.shape == (len(manifest), 3, 32, 32)
    for index, image in enumerate(images):
        with Image.open(manifest.record(index).name) as file:
            color = torch.tensor(file.convert("RGB").getpixel((20, 20)))
        assert (image.mean((1, 2)) - color).abs().max() < 3, manifest.name(index)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    root = tmp_path / "small"
    for split in ("train", "val"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for file in ("1.jpg", "2.jpg"):
                (root / split / name / file).write_bytes(b"content")
    return root


def test_images_nested_deeper_are_refused(small: Path) -> None:
    """Also beside other files; they would be missing in silence."""
    (small / "train" / "a" / "more" / "still more").mkdir(parents=True)
    assert len(scan(small, "train")) == 4
    for name in ("notes.txt", "3.jpg"):
        (small / "train" / "a" / "more" / "still more" / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"train/a/more/still more: images nested deeper than train/CLASS/IMAGE"):
        scan(small, "train")


def test_hidden_entries_and_other_files_are_ignored(small: Path) -> None:
    before = scan(small, "train")
    (small / "train" / ".git").mkdir()
    (small / "train" / ".git" / "1.jpg").write_bytes(b"x")
    (small / "train" / "a" / ".thumbnails").mkdir()
    (small / "train" / "a" / ".thumbnails" / "1.jpg").write_bytes(b"x")
    (small / "train" / "a" / "._1.jpg").write_bytes(b"x")
    (small / "train" / "a" / "notes").mkdir()
    (small / "train" / "a" / "notes" / "read.me").write_bytes(b"x")
    for name in ("labels.csv", "a/Thumbs.db", "a/1.gif", "a/1.jpg.part", "b/jpg"):
        (small / "train" / name).write_bytes(b"x")
    after = scan(small, "train")
    assert after.names() == before.names() == ["a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg"]
    assert after.classes == before.classes == ("a", "b")
    assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize(
    "name", sorted({*SYSTEM_NAMES, "@eaDir", "__MACOSX", "Thumbs.db", "._x", ".ipynb_checkpoints"})
)
def test_what_a_system_puts_beside_the_data_is_ignored(small: Path, name: str) -> None:
    """Wherever it lies, and whether it is a file or a folder: thumbnails of a NAS are no training images."""
    before = scan_splits(small)
    for folder in (small, small / "train", small / "val", small / "train" / "a", small / "val" / "b"):
        (folder / name / "1.jpg").mkdir(parents=True)
        (folder / name / "1.jpg" / "SYNOPHOTO_THUMB_M.jpg").write_bytes(b"x")
        (folder / name / "2.jpg").write_bytes(b"x")
    (small / "train" / "b" / name).write_bytes(b"x")
    after = scan_splits(small)
    assert [each.names() for each in after] == [each.names() for each in before]
    assert [each.ignored for each in after] == [{}, {}]
    assert [entry.name for entry in list_images(small)[0]] == [
        f"{split}/{path}" for split in ("train", "val") for path in ("a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg")
    ]
    shutil.rmtree(small / "val")
    with pytest.raises(UserError, match="has no val/ folder; it must hold"):
        check_folders(TrainConfig(data_dir=small))
    shutil.move(small / "train", small / "other")
    with pytest.raises(UserError, match="has no train/ folder; it must hold"):  # no image lies there
        check_folders(TrainConfig(data_dir=small))


def test_what_is_ignored_is_counted_and_described(small: Path) -> None:
    before = scan(small, "train")
    assert (before.ignored, describe_counts(before.ignored)) == ({}, "")
    (small / "train" / "loose.JPG").write_bytes(b"x")
    (small / "train" / "labels.csv").write_bytes(b"x")  # no image
    for number in range(4):
        (small / "train" / "ab"[number % 2] / f"{number}.jfif").write_bytes(b"x")
    (small / "train" / "a" / "5.JFIF").write_bytes(b"x")
    (small / "train" / "b" / "README").write_bytes(b"x")
    (small / "train" / "b" / "README too").write_bytes(b"x")
    for name in (".DS_Store", "a/.DS_Store", "b/._1.jfif"):
        (small / "train" / name).write_bytes(b"x")
    found = scan(small, "train")
    assert found.ignored == {".jfif": 5, "without a suffix": 2, "without a class folder": 1}
    described = "5 files .jfif, 2 files without a suffix, 1 image without a class folder"
    assert describe_counts(found.ignored) == described
    assert (found.names(), found.fingerprint) == (before.names(), before.fingerprint)
    assert found.without({"a/1.jpg": "damaged"}).ignored == found.ignored
    assert found.with_replacements({"a/1.jpg": "damaged"}).ignored == found.ignored
    assert scan(small, "val").ignored == {}
    for number in range(12):
        (small / "train" / "a" / f"x.{number:02}").write_bytes(b"x")
    (small / "train" / "a" / "x.\n").write_bytes(b"x")
    described = "5 files .jfif, 2 files without a suffix, 1 file .\\n, 1 file .00, 1 file .01, 10 more files"
    assert describe_counts(scan(small, "train").ignored) == f"{described}, 1 image without a class folder"


def test_a_class_of_other_files_alone_names_them(small: Path) -> None:
    for name in ("1.jpg", "2.jpg"):
        (small / "train" / "a" / name).rename(small / "train" / "a" / f"{name}.part")
    with pytest.raises(
        UserError, match=r"train/a: a class without images \(2 files \.part\); remove the folder or add"
    ):
        scan(small, "train")


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("target", ["nowhere", "c"])
def test_a_class_that_is_a_link_to_nowhere_is_refused(small: Path, split: str, target: str) -> None:
    """Dropped in silence, it would be missing in both splits, and every label after it would be another."""
    link = small / split / "c"
    link.symlink_to(target)
    with pytest.raises(
        UserError, match=r"/c: a link that leads to no class folder \(.*\); restore its target or remove"
    ):
        scan_splits(small)
    link.unlink()
    (small / split / ".c").symlink_to(target)
    (small / split / "c.jpg").symlink_to(target)  # nothing shows that it was a class
    assert scan(small, split).ignored == {"without a class folder": 1}


@pytest.mark.parametrize(
    "suffix", ["jpg", "jpeg", "jpe", "png", "webp", "bmp", "tif", "tiff", "ppm", "pgm", "pnm", "JPEG", "Png"]
)
def test_suffixes(small: Path, suffix: str) -> None:
    (small / "train" / "b" / f"3.{suffix}").write_bytes(b"x")
    assert f"b/3.{suffix}" in scan(small, "train").names()


def test_links_are_followed(small: Path) -> None:
    (small / "train").rename(small / "elsewhere")
    (small / "train").mkdir()
    for name in ("a", "b"):
        (small / "train" / name).symlink_to(small / "elsewhere" / name)
    (small / "elsewhere" / "a" / "3.jpg").symlink_to("1.jpg")
    assert scan(small, "train").names() == ["a/1.jpg", "a/2.jpg", "a/3.jpg", "b/1.jpg", "b/2.jpg"]


def test_relative_folder_stays_found_from_elsewhere(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    found = scan(Path("small"), "train")
    monkeypatch.chdir("/")
    assert read_image(found.record(0)) == b"content"


CHANGES: dict[str, Callable[[Path], object]] = {
    "renamed file": lambda root: (root / "a" / "1.jpg").rename(root / "a" / "0.jpg"),
    "changed size": lambda root: (root / "a" / "1.jpg").write_bytes(b"content."),
    "moved to another class": lambda root: (root / "a" / "2.jpg").rename(root / "b" / "3.jpg"),
    "renamed class": lambda root: (root / "a").rename(root / "c"),
    "added file": lambda root: (root / "b" / "3.jpg").write_bytes(b"content"),
    "removed file": lambda root: (root / "b" / "2.jpg").unlink(),
    "swapped sizes": lambda root: [
        (root / "a" / "1.jpg").write_bytes(b"conten"),
        (root / "a" / "2.jpg").write_bytes(b"content."),
    ],
    "other letter case": lambda root: (root / "a" / "1.jpg").rename(root / "a" / "1.JPG"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_of_another_content(small: Path, change: str) -> None:
    before = scan(small, "train").fingerprint
    CHANGES[change](small / "train")
    assert scan(small, "train").fingerprint != before


def test_fingerprint_is_frozen(small: Path) -> None:
    # A checkpoint holds it and resumes with no other.
    listed = b"".join(name + b"\0" + b"7\0" for name in (b"a/1.jpg", b"a/2.jpg", b"b/1.jpg", b"b/2.jpg"))
    assert scan(small, "train").fingerprint == hashlib.sha256(listed).hexdigest()[:32]


def test_fingerprint_of_the_same_content(small: Path, tmp_path: Path) -> None:
    before = scan(small, "train")
    assert scan(small, "train").fingerprint == before.fingerprint
    shutil.copytree(small, tmp_path / "copied" / "there")
    shutil.move(small, tmp_path / "moved")
    for root in (tmp_path / "copied" / "there", tmp_path / "moved"):
        after = scan(root, "train")
        assert after.fingerprint == before.fingerprint
        assert after.names() == before.names()
        assert after.root == root / "train"


def test_bad_files_are_excluded_as_if_they_did_not_exist(small: Path) -> None:
    """So that a run with --bad-files skip resumes as well after they are deleted."""
    (small / "train" / "a" / "0.jpg").write_bytes(b"")
    os.mkfifo(small / "train" / "b" / "9.jpg")
    (small / "train" / "b" / "gone.jpg").symlink_to("nowhere")
    (small / "train" / "b" / "round.jpg").symlink_to("round.jpg")
    (small / "train" / "b" / "3.jpg").write_bytes(b"other content")
    with pytest.raises(UserError, match=r"a/0\.jpg: an empty file, .*b/9\.jpg: not a regular file, .*b/gone\.jpg: "):
        scan(small, "train")
    with pytest.raises(UserError, match=r"a/0\.jpg: an empty file"):
        scan_splits(small)
    assert stat_file(str(small / "train" / "b" / "gone.jpg")) == FileEntry(
        "gone.jpg", 0, 0, "cannot be read (No such file or directory)"
    )
    torn = {f"{number}.jpg": "torn" for number in range(1004)}
    assert describe(dict(list(torn.items())[:3])) == "0.jpg: torn, 1.jpg: torn, 2.jpg: torn"
    assert describe(torn) == "0.jpg: torn, 1.jpg: torn, 2.jpg: torn and 1,001 more"
    listed = scan(small, "train", skip_bad=True)
    assert list(listed.bad) == ["a/0.jpg", "b/9.jpg", "b/gone.jpg", "b/round.jpg"]
    assert listed.bad["b/9.jpg"] == "not a regular file"
    left = listed.without({"a/2.jpg": "damaged", "b/3.jpg": "damaged too"})
    assert left.bad == {**listed.bad, "a/2.jpg": "damaged", "b/3.jpg": "damaged too"}
    for name in left.bad:
        (small / "train" / name).unlink()
    clean = scan(small, "train")
    assert left.names() == clean.names() == ["a/1.jpg", "b/1.jpg", "b/2.jpg"]
    assert left.fingerprint == clean.fingerprint != listed.fingerprint
    for one, other in ((left.labels, clean.labels), (left.sizes, clean.sizes), (left.mtimes, clean.mtimes)):
        assert one.tolist() == other.tolist()
    assert clean.bad == {}


def test_replacements_keep_the_order(small: Path) -> None:
    for number in range(4, 8):
        (small / "train" / "b" / f"{number}.jpg").write_bytes(b"x" * number)
    listed = dataclasses.replace(scan(small, "train"), weights=np.arange(8.0))
    assert listed.names() == ["a/1.jpg", "a/2.jpg", *(f"b/{number}.jpg" for number in (1, 2, 4, 5, 6, 7))]
    bad = {"a/2.jpg": "damaged", "b/2.jpg": "damaged", "b/4.jpg": "torn", "b/7.jpg": "gone"}
    replaced = listed.with_replacements(bad)
    files = ["a/1.jpg", "a/1.jpg", "b/1.jpg", "b/5.jpg", "b/5.jpg", "b/5.jpg", "b/6.jpg", "b/1.jpg"]
    assert replaced.names() == files
    assert replaced.labels.tolist() == listed.labels.tolist()
    assert replaced.fingerprint == listed.fingerprint
    assert replaced.weights is not None
    assert replaced.weights.tolist() == list(range(8)), "which decide the order"
    assert replaced.sizes.tolist() == [(small / "train" / name).stat().st_size for name in files]
    assert replaced.mtimes.tolist() == [(small / "train" / name).stat().st_mtime_ns for name in files]
    assert replaced.bad == bad
    assert replaced.replacements == {
        "a/2.jpg": "a/1.jpg", "b/2.jpg": "b/5.jpg", "b/4.jpg": "b/5.jpg", "b/7.jpg": "b/1.jpg",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"train/a: no image is left .*repair one \(a/1\.jpg: cut\)"):
        listed.with_replacements({"a/1.jpg": "cut", "a/2.jpg": "damaged"})


def test_a_class_of_bad_files_alone_is_refused(small: Path) -> None:
    (small / "train" / "a" / "1.jpg").write_bytes(b"")
    listed = scan(small, "train", skip_bad=True)
    with pytest.raises(UserError, match=r"train/a: a class without a readable image, its 2 files are bad"):
        listed.without({"a/2.jpg": "damaged"}).with_all_classes()
    (small / "train" / "a" / "2.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"train/a: a class without a readable image, its 2 files are bad"):
        scan(small, "train", skip_bad=True)


def test_splits_share_their_classes(small: Path) -> None:
    train, val = scan_splits(small)
    assert isinstance(train, Manifest)
    assert train.classes == val.classes == ("a", "b")
    assert (train.root, val.root) == (small / "train", small / "val")
    (small / "val" / "c").mkdir()
    (small / "val" / "c" / "1.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match=r"1 class of val/ is missing in train/ \('c'\)"):
        scan_splits(small)


def test_only_some_of_many_missing_classes_are_named(small: Path) -> None:
    for index in range(9):
        (small / "val" / f"more{index}").mkdir()
        (small / "val" / f"more{index}" / "1.jpg").write_bytes(b"x")
        if index == 2:
            with pytest.raises(UserError, match=r"3 classes of val/ .* \('more0', 'more1', 'more2'\); add"):
                scan_splits(small)
    with pytest.raises(UserError, match=r"9 classes of val/ .* \('more0', 'more1', 'more2', \.\.\.\)"):
        scan_splits(small)


def test_labels_of_val_are_those_of_train_where_it_lacks_classes(small: Path) -> None:
    """A class without validation images has none left, by its folder or because its files are bad."""
    shutil.rmtree(small / "val" / "a")
    train, val = scan_splits(small)
    assert train.classes == val.classes == ("a", "b")
    assert val.labels.tolist() == [1] * len(val)
    assert val.without(dict.fromkeys(val.names()[1:], "damaged")).labels.tolist() == [1]


def test_size_of_the_decoded_images(tmp_path: Path) -> None:
    """Which decides whether they are cached in memory. Three bytes a pixel, also of what is gray or transparent."""
    (tmp_path / "train" / "a").mkdir(parents=True)
    for number, (mode, width, height) in enumerate([("RGB", 40, 30), ("L", 7, 5), ("RGBA", 1, 1), ("P", 1, 200)]):
        Image.new(mode, (width, height)).save(tmp_path / "train" / "a" / f"{number}.png")
    total = 3 * (40 * 30 + 7 * 5 + 1 + 200)
    found = scan(tmp_path, "train")
    assert decoded_bytes(found) == decoded_bytes(found, sample=4) == total
    one = decoded_bytes(found, sample=1)
    assert one in {4 * 3 * 40 * 30, 4 * 3 * 7 * 5, 4 * 3, 4 * 3 * 200}
    assert decoded_bytes(found, sample=1) == one, "the same on all ranks"
    (tmp_path / "train" / "a" / "5.png").write_bytes(b"no image")
    assert decoded_bytes(scan(tmp_path, "train")) == total * 5 / 4, "counted with the mean size"
    for path in (tmp_path / "train" / "a").glob("[0-3].png"):
        path.unlink()
    assert decoded_bytes(scan(tmp_path, "train")) == 0
    assert decoded_bytes(synthetic(1000, 10)) == 0


def test_synthetic_classes_alternate() -> None:
    found = synthetic(5, 3)
    assert (found.labels.tolist(), found.classes, len(found)) == ([0, 1, 2, 0, 1], ("0", "1", "2"), 5)
