"""scripts/compare_formats.py: every form is measured, alone and in training, and forms of other images are refused."""

import functools
import json
from pathlib import Path

import pytest

from scripts import compare_formats
from tests.conftest import Refused, write_images
from tests.harness import launch
from tests.shards import write_tfrecord, write_webdataset

PROGRAM = Path(compare_formats.__file__)
FLAGS = ("--arch", "test_resnet", "--image-size", "32", "--batch-size", "4", "--workers", "1", "--device", "cpu")


@pytest.mark.slow  # eight cases of six windows
def test_every_form_is_measured(data: Path, tmp_path: Path) -> None:
    tars, records = write_webdataset(data, tmp_path / "tars"), write_tfrecord(data, tmp_path / "records")
    out = ("--output-dir", tmp_path / "out", "--window-seconds", 0.05)
    done = launch(data, tars, records, *FLAGS, *out, program=PROGRAM)
    assert done.status == 0, done.err
    forms = ["synthetic images", f"{data}: class folders", f"{data}: class folders, --loader stock"]
    forms += [f"{tars}: WebDataset tars", f"{records}: TFRecord files"]
    rows = [line.split("|")[1:-1] for line in done.out.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows[1:]] == forms
    found = json.loads((tmp_path / "out" / "formats.json").read_text())
    assert list(found) == forms
    for form in forms:
        for kind in ("training", "alone")[: 1 + (form != forms[0])]:
            assert len(found[form][kind]["windows"]) == 5
            assert min(found[form][kind]["windows"]) > 0


def test_refusals(data: Path, tmp_path: Path, refused: Refused) -> None:
    write_images(tmp_path / "other" / "train", (3, 3, 3))
    refuse = functools.partial(refused, main=compare_formats.main, program="compare_formats.py")
    refuse(data, tmp_path / "none")(f"{tmp_path}/none: no such folder")
    refuse(data, "--windows", 4)("--windows 4: a median needs 5 or more")
    refuse(data, "--decode", "auto")("--decode auto: give full or fused")
    refuse(data, tmp_path / "other", *FLAGS, "--output-dir", tmp_path / "out")(
        f"{tmp_path}/other: has 9 images, but {data} has 41; give the same images"
    )
