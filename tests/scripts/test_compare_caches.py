"""scripts/compare_caches.py: every place of the images is measured, alone and in training."""

import functools
import json
from pathlib import Path

import pytest

from scripts import compare_caches
from tests.conftest import Refused
from tests.harness import launch
from utils.benchmark.verdict import SYNTHETIC

PROGRAM = Path(compare_caches.__file__)
FLAGS = ("--arch", "test_resnet", "--image-size", "32", "--batch-size", "4", "--workers", "1")


def check(out: Path, printed: str, forms: list[str]) -> None:
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows[1:]] == forms
    found = json.loads((out / "caches.json").read_text())
    assert list(found) == forms
    for form in forms:
        for kind in ("training", "alone")[: 1 + (form != SYNTHETIC)]:
            assert len(found[form][kind]["images_per_second"]) == 5
            assert min(found[form][kind]["images_per_second"]) > 0
            assert all(0 <= share <= 1 for share in found[form][kind]["data_wait"])


@pytest.mark.slow  # seven cases of six windows
def test_every_place_is_measured(tmp_path: Path) -> None:
    images = ("--images", 60, "--side", 40, "--device", "cpu", "--window-seconds", 0.05)
    done = launch(*FLAGS, *images, "--output-dir", tmp_path / "out", program=PROGRAM)
    assert done.status == 0, done.err
    names = [SYNTHETIC, compare_caches.FILES, compare_caches.HOST, compare_caches.BY_KERNEL]
    check(tmp_path / "out", done.out, names)


@pytest.mark.gpu
def test_every_place_is_measured_on_the_gpu(data: Path, tmp_path: Path) -> None:
    done = launch(
        *FLAGS, "--data-dir", data, "--window-seconds", 0.2, "--output-dir", tmp_path / "out", program=PROGRAM
    )
    assert done.status == 0, done.err
    names = [SYNTHETIC, compare_caches.FILES, compare_caches.HOST, compare_caches.BY_DALI]
    check(tmp_path / "out", done.out, [*names, compare_caches.BY_KERNEL])


def test_refusals(data: Path, tmp_path: Path, refused: Refused) -> None:
    refuse = functools.partial(refused, main=compare_caches.main, program="compare_caches.py")
    refuse("--data-dir", tmp_path / "none")(f"{tmp_path}/none: no such folder")
    refuse("--windows", 4)("--windows 4: a median needs 5 or more")
    refuse("--side", 2)("--side 2")
    refuse("--images", 0)("--images 0")
    refuse("--data-dir", data, *FLAGS, "--device", "cpu", "--batch-size", 64, "--output-dir", tmp_path / "out")(
        "--batch-size 64: there are 41 images; lower it"
    )
