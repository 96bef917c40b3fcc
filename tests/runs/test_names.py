"""Names of classes, images and folders that are odd or not UTF-8: every program works, and no two names become one."""

import csv
import html
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import scripts.check_dataset
import scripts.convert_dataset
import scripts.export
import scripts.predict
import scripts.report
import scripts.runs
import scripts.watch
import train
from tests.conftest import TINY, Main, Refused, call_main
from tests.forked import launch_forked

NAMES = (
    b"caf\xe9", b"caf\xe8", b"\xff\xfe", '\U0001f98a fox, "red"'.encode(), "\u540d\u524d".encode(), "e\u0301".encode(),
    b"two\nlines", b"cr\r\nlf", b"back\\slash", b"tab\there", b"-rf", b"<b>&amp;", b"%s {x} $y$", b" lead", b"trail ",
    b"\x1b[31mred", "u\u2028sep".encode(), "nb\u00a0sp".encode(), b"=1+1", b"#5", b"*?[a]", b"x" * 240,
)  # fmt: skip
CLASSES = sorted(map(os.fsdecode, NAMES))
SHOWN = [name.encode(errors="backslashreplace").decode() for name in CLASSES]
FLAGS = (*TINY, "--batch-size", 8, "--epochs", 1)


def write_images(root: Path) -> None:
    """Two images of each class in train/ and one in val/, with the names of the classes as names."""
    colors = np.random.default_rng(0)
    for split, count in (("train", 2), ("val", 1)):
        for number, name in enumerate(NAMES):
            folder = root / split / os.fsdecode(name)
            folder.mkdir(parents=True)
            for image in range(count):
                path = folder / os.fsdecode(NAMES[number - 1][:200] + b"%d.jpg" % image)
                Image.fromarray(colors.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The data set and the output folder of a run with --report, on a machine that knows ASCII alone."""
    root = tmp_path_factory.mktemp("names") / os.fsdecode(b"\xe9 $x$")
    write_images(root / "data")
    run = root / "run \U0001f98a"
    flags = ("--data-dir", root / "data", "--output-dir", run, *FLAGS, "--report")
    program = "import sys, train; sys.stdout.reconfigure(encoding='ascii', errors='strict'); "
    program += "sys.exit(train.main(sys.argv[1:]))"
    done = launch_forked(*flags, program=program)
    assert (done.status, done.err) == (0, ""), done
    assert done.out.endswith("run \\U0001f98a: report.html, report.json\n"), "what ASCII lacks is escaped"
    return root / "data", run


def test_the_page_has_all_names(trained: tuple[Path, Path]) -> None:
    page = html.unescape((trained[1] / "report.html").read_bytes().decode())
    pictures = json.loads((trained[1] / "report.json").read_text(encoding="utf-8"))
    assert sorted(each["name"] for each in pictures["classes"]) == sorted(SHOWN)
    assert all(name in page for name in SHOWN)


@pytest.mark.slow
def test_every_program(trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = trained
    val, out, export = data / "val", tmp_path / os.fsdecode(b"out \xff"), tmp_path / "exported \U0001f98a"
    commands: tuple[tuple[Main, tuple[object, ...]], ...] = (
        (train.main, ("--evaluate", "--report", "--output-dir", run, "--device", "cpu")),
        (scripts.report.main, (run, "--output", out.with_name(os.fsdecode(b"\xe9.html")))),
        (scripts.predict.main, (run, val, "--output-dir", out / "csv", "--device", "cpu")),
        (scripts.predict.main, (run, val, "--output-dir", out / "json", "--device", "cpu", "--format", "jsonl")),
        (scripts.export.main, (run, "--format", "timm", "--output-dir", export)),
        (scripts.export.main, (run, "--format", "pt2", "--output-dir", export)),
        (scripts.convert_dataset.main, (data, out / "folder", "--to", "folder")),
        (scripts.check_dataset.main, (data, "--output-dir", out / "check")),
        (scripts.runs.main, (run.parent,)),
        (scripts.watch.main, (run,)),
    )
    for main, words in commands:
        done = call_main(main, words, capsys)
        assert (done.status, done.err) == (0, ""), (words, done)
    with (out / "csv" / "per_class.csv").open(encoding="utf-8", newline="") as file:
        assert [row["class"] for row in csv.DictReader(file)] == SHOWN
    lines = (out / "json" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert len({json.loads(line)["path"] for line in lines}) == len(NAMES)
    assert json.loads((export / "config.json").read_text(encoding="utf-8"))["label_names"] == SHOWN
    labels = (export / "labels.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(set(labels)) == len(labels) == len(NAMES)
    assert {path.name for path in (out / "folder" / "train").iterdir()} == set(CLASSES)


def test_what_other_packages_cannot_write_is_refused(
    trained: tuple[Path, Path], tmp_path: Path, refused: Refused
) -> None:
    other = tmp_path / os.fsdecode(b"\xe9")
    check = refused(trained[1], "--format", "pt2", "--output-dir", other, main=scripts.export.main, program="export.py")
    check("--output-dir", "\\udce9: the packages that write there need a name in UTF-8; give another folder")
    check = refused(trained[0], tmp_path / "tars", main=scripts.convert_dataset.main, program="convert_dataset.py")
    check("class 'caf\\udce8': not UTF-8, as classes.txt is; rename it, or give --to folder")


def test_what_the_end_needs_is_tried_at_the_start(
    data: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    flags = ("--data-dir", data, "--output-dir", run, *FLAGS)
    (run / "report.html").mkdir(parents=True)
    refused(*flags, "--report")(f"--report: {run}/report.html is a folder, not a file to replace; move it")
    (run / "report.html").rmdir()
    (run / "tensorboard").touch()
    refused(*flags, "--tensorboard")(f"--tensorboard: {run}/tensorboard cannot be written (File exists); move it")
    other = tmp_path / os.fsdecode(b"\xe9")
    refused(*flags, "--output-dir", other, "--tensorboard")("--tensorboard with --output-dir", "needs a name in UTF-8")
    assert not other.exists()
    monkeypatch.setattr("utils.report.page.TEMPLATES", tmp_path)  # an installation without page.html
    refused(*flags, "--report")("--report: no page can be made (", "page.html", "restore utils/report/,")


def test_a_class_in_another_unicode_form(
    data: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data of a checkpoint that were copied from a Mac: each use says why names that look the same are not."""
    root, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(data, root)
    forms = ("caf\u00e9", "cafe\u0301")
    differ = "'cafe\\u0301' and 'caf\\xe9' differ only in their Unicode form"
    for split in ("train", "val"):
        (root / split / "green").rename(root / split / forms[0])
    flags = ("--data-dir", root, "--output-dir", run, *FLAGS)
    assert call_main(train.main, flags, capsys).status == 0
    for split in ("train", "val"):
        (root / split / forms[0]).rename(root / split / forms[1])
    refused(*flags, "--epochs", 2)(
        "train/ has 14 files more", "'cafe\\u0301/green-000.jpg' and 'caf\\xe9/green-000.jpg'"
    )
    refused("--evaluate", *flags)("its classes are not those of", differ)
    done = call_main(scripts.predict.main, (run, root / "val", "--output-dir", run / "out", "--device", "cpu"), capsys)
    assert done.status == 0
    assert f"note: the true class of some images is not known: {differ}, a folder's name and a class\n" in done.out
    weights = call_main(train.main, (*flags, "--output-dir", tmp_path / "new", "--pretrained", run / "best.pt"), capsys)
    assert f"head new (other class names: {differ}; --pretrained-head keep keeps it)" in weights.out
    shutil.copytree(root / "train" / forms[1], root / "train" / forms[0])
    shutil.copytree(root / "val" / forms[1], root / "val" / forms[0])
    both = call_main(train.main, (*flags, "--output-dir", tmp_path / "both"), capsys)
    assert f"warning: two classes look the same: {differ}\n" in both.out
