"""Data sets of folders and tars that train.py refuses, and what a case is; more are in refused_shards.py.

Images are one small JPEG of fixed bytes, so that places in a shard are the same with every version of a library.
"""

import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests import odd_images as odd
from tests.damage import ARITHMETIC as JPEG
from tests.shards import with_imagenet_names, write_devkit, write_ilsvrc, write_tar

Make = Callable[[Path], object]
BANDS, FLOATS = odd.tiff(np.zeros((16, 16, 13), "u2"), t338=[0] * 12), odd.tiff(np.zeros((16, 16), "f4"))


class Case(NamedTuple):
    """A data set that is refused.

    Attributes:
        form: of the data.
        what: is wrong.
        make: writes the data set as the folder it is given, which exists.
        flags: behind --data-dir; DATA is the folder.
        unprivileged: whether root would be able to read the data.
    """

    form: str
    what: str
    make: Make
    flags: str = ""
    unprivileged: bool = False

    def words(self, folder: Path) -> list[str]:
        """The command line of train.py, where the data set is the folder `data` in `folder`."""
        data, run = str(folder / "data"), str(folder / "run")
        given = [re.sub(r"\bDATA\b", lambda _: data, word) for word in shlex.split(self.flags)]
        return ["--data-dir", data, "--output-dir", run, "--device", "cpu", *given]


# ---------------------------------------------------------------------------------------------------------------------
# Class folders and flat ones


def files(contents: Mapping[str, bytes | str]) -> Make:
    """Files by their path, in the folder of the data set."""

    def make(root: Path) -> None:
        for name, content in contents.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def folders(*splits: str, change: Make | None = None) -> Make:
    """Two images of each of three classes in train/ and val/ or other folders, then a change."""
    names = [f"{name}/{name}-{number}.jpg" for name in ("blue", "green", "red") for number in range(2)]

    def make(root: Path) -> None:
        files({f"{split}/{name}": JPEG for split in splits or ("train", "val") for name in names})(root)
        if change is not None:
            change(root)

    return make


def renamed(train: str, val: str) -> Make:
    """Class folders whose class red has other names."""

    def change(root: Path) -> None:
        (root / "train" / "red").rename(root / "train" / train)
        (root / "val" / "red").rename(root / "val" / val)

    return folders(change=change)


def flat(
    name: str = "", labels: bytes | str = "", images: Sequence[str] = ("a.jpg", "b.jpg", "c.jpg"), more: str = ""
) -> Make:
    """Class folders in train/, `more` is another, three images in val/, and a file of their labels."""
    contents: dict[str, bytes | str] = {f"val/{image}": JPEG for image in images}
    contents |= {f"train/{more}/0.jpg": JPEG} if more else {}
    return folders("train", change=files(contents | ({name: labels} if name else {})))


def devkit(lines: int, damaged: bool = False) -> Make:
    """Two images with ImageNet's names in val/, and a devkit with so many lines of labels."""

    def make(root: Path) -> None:
        flat(images=[f"ILSVRC2012_val_{number:08}.JPEG" for number in (1, 2)])(root)
        write_devkit(root, {"blue": 1, "green": 2, "red": 3}, ["blue"] * lines)
        if damaged:
            (root / "meta.mat").write_bytes(b"x" * 200)

    return make


def move_classes_up(root: Path) -> None:
    for path in list((root / "train").iterdir()):
        path.rename(root / path.name)
    (root / "train").rmdir()


def beside_table(root: Path) -> None:
    move_classes_up(root)
    (root / "notes.csv").write_text("name,color\n")


def rename_splits(root: Path) -> None:
    (root / "train").rename(root / "images_a")
    (root / "val").rename(root / "images_b")


CSV = "a.jpg,red\nb.jpg,blue\n"
KAGGLE = "ImageId,PredictionString\na,red 1 2 3 4\n"
FOLDERS = [
    Case("none", "no such folder", lambda root: root.rmdir()),
    Case("none", "an empty folder", lambda root: None),
    Case("class folders", "no train/", folders("val")),
    Case("class folders", "classes and test/ beside each other", folders("train", "test", change=move_classes_up)),
    Case("class folders", "a class that may be a split", files({f"{name}/x.jpg": JPEG for name in ("red", "Valid")})),
    Case("class folders", "classes beside a table", folders("train", change=beside_table)),
    Case("class folders", "one folder of images", files({"images/x.jpg": JPEG})),
    Case("class folders", "one folder of images and a table", files({"images/x.jpg": JPEG, "cells.csv": "x.jpg 1\n"})),
    Case("class folders", "splits of other names", folders("train", "val", change=rename_splits)),
    Case("class folders", "the data one folder deeper", files({"data/red/x.jpg": JPEG, "data/blue/x.jpg": JPEG})),
    Case("class folders", "two names of train/", files({"Train/red/x.jpg": JPEG, "TRAIN/red/x.jpg": JPEG})),
    Case("class folders", "no val/", folders("train")),
    Case("class folders", "no class in train/", files({"train/x.jpg": JPEG, "val/red/x.jpg": JPEG})),
    Case("class folders", "a class of val/ alone", folders(change=lambda root: shutil.rmtree(root / "train/red"))),
    Case("class folders", "two Unicode forms of a class", renamed("caf\u00e9", "cafe\u0301")),
    Case("class folders", "upper case in val/", renamed("red", "Red")),
    Case("class folders", "a space in val/", renamed("red", "red ")),
    Case("class folders", "a class in Latin-1 in val/", renamed("caf\u00e9", os.fsdecode(b"caf\xe9"))),
    Case("class folders", "images one folder deeper", folders(change=files({"train/blue/dark/x.jpg": JPEG}))),
    Case("class folders", "a class without images", folders(change=files({"train/gray/x.gif": JPEG}))),
    Case("class folders", "an empty file", folders(change=files({"train/red/x.jpg": ""}))),
    Case("class folders", "a TIFF of 13 bands", folders(change=files({"train/red/x.tif": BANDS}))),
    Case("class folders", "a TIFF of floating point", folders(change=files({"train/red/x.tif": FLOATS}))),
    Case("class folders", "a broken link", folders(change=lambda root: (root / "val/red/x.jpg").symlink_to("gone"))),
    Case("class folders", "a broken class", folders(change=lambda root: (root / "val/gray").symlink_to("gone"))),
    Case("class folders", "a pipe", folders(change=lambda root: os.mkfifo(root / "val/red/x.jpg"))),
    Case(
        "class folders", "no permission", folders(change=lambda root: (root / "train/red").chmod(0)), unprivileged=True
    ),
    Case("class folders", "a list of classes", folders(change=files({"names": "x\n"})), "--class-names DATA/names"),
    Case("class folders", "val/ would not be used", folders(), "--val-fraction 0.5"),
    Case("class folders", "no fold", folders(), "--fold half"),
    Case("class folders", "one part", folders(), "--fold 1/1"),
    Case("class folders", "a fold that is not there", folders(), "--fold 5/4"),
    Case("class folders", "two shares", folders(), "--fold 1/2 --val-fraction 0.5"),
    Case("class folders", "two sources of val", folders(), "--fold 1/2 --val-split test"),
    Case("class folders", "more parts than images", folders(), "--fold 1/1000"),
    Case("class folders", "--val-split names no folder", folders(), "--val-split dev"),
    Case("class folders", "--train-split names no folder", folders(), "--train-split dev"),
    Case("flat val/", "no file of labels", flat()),
    Case("flat val/", "an image without a label", flat("val.csv", CSV)),
    Case("flat val/", "the label of no image", flat("val.csv", f"{CSV}c.jpg,red\nd.jpg,red\n")),
    Case("flat val/", "a label that is no class", flat("val.csv", f"{CSV}c.jpg,gray\n")),
    Case("flat val/", "a label in another Unicode form", flat("val.csv", f"{CSV}c.jpg,ble\u0301\n", more="bl\u00e9")),
    Case("flat val/", "numbers from 0 or from 1", flat("val.csv", "a.jpg,1\nb.jpg,2\nc.jpg,1\n")),
    Case("flat val/", "an image labeled twice", flat("val.csv", f"{CSV}c.jpg,red\na.jpg,blue\n")),
    Case("flat val/", "three columns", flat("val.csv", f"{CSV}c.jpg,red,1\n")),
    Case("flat val/", "labels that are no text", flat("val.csv", b"a.jpg,\xff\n")),
    Case("Kaggle's tree", "an image without a label", flat("LOC_val_solution.csv", KAGGLE)),
    Case("flat val/, devkit", "fewer labels than images", devkit(1)),
    Case("flat val/, devkit", "a damaged meta.mat", devkit(2, damaged=True)),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Tars


def cut(name: str) -> Make:
    """The first half of a file remains."""
    return lambda root: os.truncate(root / name, (root / name).stat().st_size // 2)


def tar(name: str, members: Mapping[str, bytes]) -> Make:
    """One tar."""

    def make(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        write_tar(root / name, dict(members), tarfile.USTAR_FORMAT)

    return make


def ilsvrc(change: Make) -> Make:
    """ImageNet's downloads, then a change of them."""

    def make(root: Path) -> None:
        source = root.parent / "source"
        folders()(source)
        root.rmdir()
        change(write_ilsvrc(with_imagenet_names(source), root))

    return make


def samples(*labels: object) -> dict[str, bytes]:
    """Members of a tar: an image for each label."""
    members: dict[str, bytes] = {}
    for number, label in enumerate(labels):
        members |= {f"{number}.jpg": JPEG, f"{number}.cls": str(label).encode()}
    return members


GOOD = samples(0, 1, 2)


def tars(train: Mapping[str, bytes] = GOOD, val: Mapping[str, bytes] = GOOD, change: Make | None = None) -> Make:
    """A tar of these members for each split, then a change of the folder."""

    def make(root: Path) -> None:
        tar("train-0.tar", train)(root)
        tar("val-0.tar", val)(root)
        if change is not None:
            change(root)

    return make


def patch(name: str, offset: int, content: bytes) -> Make:
    """Other bytes at a place of a file."""

    def change(root: Path) -> None:
        with (root / name).open("r+b") as file:
            file.seek(offset)
            file.write(content)

    return change


def write_twice(root: Path) -> None:
    with tarfile.open(root / "train-0.tar", "a") as archive:
        archive.addfile(tarfile.TarInfo("0.jpg"))


def link_outside(root: Path) -> None:
    with tarfile.open(root / "train-0.tar", "a") as archive:
        link = tarfile.TarInfo("3.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/data/3.jpg"
        archive.addfile(link)


def join(root: Path) -> None:
    (root / "train-0.tar").write_bytes((root / "train-0.tar").read_bytes() + (root / "val-0.tar").read_bytes())


ILSVRC = "ILSVRC archives"
TARS = "WebDataset tars"
TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
SHARDS = [
    Case(ILSVRC, "train cut in the middle", ilsvrc(cut(TRAIN))),
    Case(ILSVRC, "train holds images", ilsvrc(tar(TRAIN, GOOD))),
    Case(ILSVRC, "no val", ilsvrc(lambda root: (root / VAL).unlink())),
    Case(ILSVRC, "no devkit", ilsvrc(lambda root: (root / DEVKIT).unlink())),
    Case(ILSVRC, "the devkit cut in the middle", ilsvrc(cut(DEVKIT))),
    Case(TARS, "cut within an image", tars(change=lambda root: os.truncate(root / "train-0.tar", 700))),
    Case(TARS, "cut between two images", tars(change=lambda root: os.truncate(root / "train-0.tar", 4096))),
    Case(TARS, "no tar", tars(change=files({"train-0.tar": "text " * 500}))),
    Case(TARS, "a damaged header", tars(change=patch("train-0.tar", 1024, b"?" * 512))),
    Case(TARS, "a compressed tar of that name", tars(change=files({"train-0.tar": b"\x1f\x8b" + bytes(600)}))),
    Case(TARS, "an empty file", tars(change=files({"train-0.tar": ""}))),
    Case(TARS, "no image", tars({"readme.txt": b"text"})),
    Case(TARS, "an image without a label", tars({**GOOD, "3.jpg": JPEG})),
    Case(TARS, "an empty label", tars(samples(0, 1, 2, ""))),
    Case(TARS, "two images of one key", tars({**GOOD, "2.png": JPEG})),
    Case(TARS, "names with more dots", tars({"3.05.jpg": JPEG, "3.05.cls": b"0"})),
    Case(TARS, "one key of many images", tars({f"3.{number}.jpg": JPEG for number in range(1001)})),
    Case(TARS, "a member that comes twice", tars(change=write_twice)),
    Case(TARS, "a label of what is no image", tars({**GOOD, "3.gif": JPEG, "3.cls": b"0"})),
    Case(TARS, "a link out of the tar", tars(change=link_outside)),
    Case(TARS, "two tars joined by cat", tars(change=join)),
    Case(TARS, "an image of no bytes", tars({**GOOD, "3.jpg": b"", "3.cls": b"0"})),
    Case(TARS, "labels from 5 on", tars(samples(5, 6), samples(5, 6))),
    Case(TARS, "a label as high as no class", tars(samples(0, 10**12), samples(0))),
    Case(TARS, "labels with gaps", tars(samples(0, 3), samples(0, 3))),
    Case(TARS, "a class of val alone", tars(samples(0, 1), GOOD)),
    Case(TARS, "numbers and names in a shard", tars(samples(0, "cat"))),
    Case(TARS, "numbers in train, names in val", tars(GOOD, samples("cat", "dog", "eel"))),
    Case(TARS, "a label outside classes.txt", tars(change=files({"classes.txt": "cat\ndog\n"}))),
    Case(TARS, "fewer classes than labels", tars(change=files({"few": "cat\ndog\n"})), "--class-names DATA/few"),
    Case(TARS, "a class not listed", tars(samples("x"), samples("x"), files({"y": "y\n"})), "--class-names DATA/y"),
    Case(TARS, "a class listed twice", tars(change=files({"twice": "x\ny\nx\n"})), "--class-names DATA/twice"),
    Case(TARS, "a class without a name", tars(change=files({"gap": "x\n\ny\n"})), "--class-names DATA/gap"),
    Case(TARS, "a list that is no text", tars(change=files({"bytes": b"\xff\xfe"})), "--class-names DATA/bytes"),
    Case(TARS, "no such list of classes, and a cut tar", tars(change=cut("train-0.tar")), "--class-names DATA/gone"),
    Case(TARS, "a broken link", tars(change=lambda root: (root / "train-1.tar").symlink_to("gone"))),
    Case(TARS, "no permission", tars(change=lambda root: (root / "train-0.tar").chmod(0)), unprivileged=True),
    Case(TARS, "no train", tar("val-0.tar", GOOD)),
    Case(TARS, "no val", tar("train-0.tar", GOOD)),
    Case(TARS, "a pattern of nothing", tars(), "--train-data 'x-*'"),
    Case(TARS, "the folder of a split", tars(), "--val-split test"),
    Case(TARS, "val would not be used", tars(), "--val-fraction 0.5"),
    Case(TARS, "a missing shard of a series", tar("train-0-of-2.tar", GOOD)),
    Case(TARS, "two copies of a split", tars(change=tar("train/0.tar", GOOD))),
    Case("two formats", "tars and RecordIO", tars(change=files({"train.rec": "", "val.rec": ""}))),
]  # fmt: skip
