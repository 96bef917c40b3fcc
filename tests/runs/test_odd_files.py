"""Runs on unusual images: each trains, or ends in one line that names the file; nothing is printed about good ones."""

from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.forked import run_train
from tests.harness import error_line
from tests.odd_kinds import ORIENTED, SAMPLES


def write(root: Path, *contents: bytes, suffix: str) -> Path:
    for split in ("train", "val"):
        for label in ("a", "b"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                (folder / f"{number}{suffix}").write_bytes(contents[number % len(contents)])
    return root


@pytest.mark.slow  # tests/data has what they decode
def test_decoders_of_tiffs_print_nothing(tmp_path: Path) -> None:
    contents = [SAMPLES[f"TIFF, {kind}"].content for kind in ("CMYK", "YCbCr")]
    data = write(tmp_path / "data", *contents, suffix=".tif")
    done = run_train(*TINY, "--data-dir", data, "--output-dir", tmp_path / "out", "--epochs", 1, "--batch-size", 4)
    assert (done.status, done.err) == (0, "")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("1, then 6", ("--decode", "fused")),
        pytest.param("6, then 3", ("--decode", "full"), marks=pytest.mark.slow),
        pytest.param("6, then 1", ("--loader", "proxy"), marks=pytest.mark.slow),
        pytest.param("6, then 3", ("--cache", "host"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_jpeg_of_two_orientations_is_named(tmp_path: Path, kind: str, flags: tuple[str, ...]) -> None:
    data = write(tmp_path / "data", SAMPLES["JPEG"].content, suffix=".jpg")
    (data / "train" / "b" / "2.jpg").write_bytes(ORIENTED[kind].content)
    done = run_train(
        *TINY, "--data-dir", data, "--output-dir", tmp_path / "out", "--epochs", 1, "--batch-size", 4, *flags
    )
    assert done.status == 2
    assert "train/b/2.jpg: its EXIF blocks have different orientations, which DALI mixes up;" in error_line(done)
