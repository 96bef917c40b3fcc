"""The look at some images before a run: gray images of 16 bits, and kinds with pixels that DALI gets wrong."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.harness import ROOT
from tests.pages import blocks
from utils.data.formats.folder import scan, scan_splits
from utils.data.reading.sample import describe_depth, gray_range
from utils.data.splits.oddities import describe_oddities


def write_gray(root: Path, lowest: int, highest: int, kind: str = "u2") -> None:
    """A training image of each of two classes, from `lowest` to `highest`."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            ramp = np.linspace(lowest, highest, 32 * 32).round().reshape(32, 32).astype(kind)
            path = root / split / name / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(ramp if name == "a" else ramp.T.copy()).save(path)


@pytest.mark.parametrize(
    ("lowest", "highest", "kind", "levels"),
    [(0, 4095, "u2", 17), (300, 1023, "u2", 4), (40000, 50000, "u2", 40), (0, 65535, "u2", 0), (0, 20, "u1", 0)],
)
def test_levels_that_8_bits_leave(tmp_path: Path, lowest: int, highest: int, kind: str, levels: int) -> None:
    write_gray(tmp_path, lowest, highest, kind)
    train = scan(tmp_path, "train")
    assert gray_range(train) == ((lowest, highest) if kind == "u2" else None)
    line = describe_depth(train)
    found = re.search(r"from ([\d,]+) to ([\d,]+) of 65,535, of which 8 bits leave (\d+) of 256 levels", line)
    assert (found and found.groups()) == ((f"{lowest:,}", f"{highest:,}", str(levels)) if levels else None)


def test_stretched_images_have_all_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the page: before it the start warns, after it all levels are there."""
    write_gray(tmp_path / "raw", 0, 4095)
    page = ROOT / "docs" / "own-data.md"
    (program,) = (block.text for block in blocks(page) if "sys.argv[4]" in block.text)
    words = ["stretch.py", str(tmp_path / "raw"), str(tmp_path / "stretched"), "0", "4095"]
    monkeypatch.setattr(sys, "argv", words)
    exec(compile(program, "stretch.py", "exec"), {})
    (stretched,) = {len(np.unique(np.asarray(Image.open(path)))) for path in (tmp_path / "stretched").rglob("*.png")}
    assert stretched == 256
    warned, done = (
        describe_oddities(dict(zip(("train", "val"), scan_splits(tmp_path / name), strict=True)), 10, 0)
        for name in ("raw", "stretched")
    )
    line = "gray images of 16 bits have values from 0 to 4,095 of 65,535, of which 8 bits leave 17 of 256 levels"
    assert any(each.startswith(line) for each in warned)
    assert not any("16 bits" in each for each in done)
