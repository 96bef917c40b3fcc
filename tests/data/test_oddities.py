"""Odd data gives a warning: few classes, few images, and images of train/ in val/."""

import shutil
from pathlib import Path

from PIL import Image

from utils.data.formats.folder import scan_splits
from utils.data.images import manifest
from utils.data.splits.oddities import describe_oddities, find_copies
from utils.data.splits.selection import Splits


def splits_of(root: Path) -> Splits:
    return dict(zip(("train", "val"), scan_splits(root), strict=True))


def test_classes_and_steps(tmp_path: Path) -> None:
    for classes, text in ((1, "only one class (class0)"), (2, ""), (6, "")):
        root = tmp_path / str(classes)
        for split, size in (("train", 8), ("val", 9)):
            for number in range(classes):
                path = root / split / f"class{number}" / "image.jpg"
                path.parent.mkdir(parents=True)
                Image.new("RGB", (size, 8), (number, 0, 0)).save(path)
        lines = describe_oddities(splits_of(root), steps_per_epoch=10, balance=0)
        assert [line[: len(text)] for line in lines] == ([text] if text else [])
    (line,) = describe_oddities(splits_of(tmp_path / "6"), steps_per_epoch=9, balance=0)
    assert line == "9 steps per epoch, as train/ has 6 images: a smaller --batch-size gives more"
    (line,) = describe_oddities(splits_of(tmp_path / "6"), steps_per_epoch=1, balance=0)
    assert line.startswith("1 step per epoch, ")


def test_uneven_classes(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    for path in sorted((tmp_path / "data" / "train" / "red").iterdir())[1:]:
        path.unlink()
    splits = splits_of(tmp_path / "data")
    (line,) = [line for line in describe_oddities(splits, 10, balance=0) if "uneven" in line]
    assert line.startswith("classes are uneven (blue 14 to red 1 image, 14 : 1): ")
    assert not [line for line in describe_oddities(splits, 10, balance=0.5) if "uneven" in line]


def test_copies(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    splits = splits_of(tmp_path / "data")
    assert list(find_copies(splits["train"], splits["val"])) == []
    first, last = splits["train"].names()[0], splits["train"].names()[-1]
    for number, name in enumerate((first, last)):
        split_class = splits["val"].names()[0].split("/")[0]
        shutil.copy(tmp_path / "data" / "train" / name, tmp_path / "data" / "val" / split_class / f"copy{number}.jpg")
    splits = splits_of(tmp_path / "data")
    found = dict(find_copies(splits["train"], splits["val"]))
    assert found == {f"{split_class}/copy0.jpg": first, f"{split_class}/copy1.jpg": last}
    (line,) = [line for line in describe_oddities(splits, 10, balance=0) if line.startswith("val/")]
    assert "and 1 more of those that were compared" in line


def test_synthetic_data_has_no_copies() -> None:
    synthetic = manifest.synthetic(10, 10)
    assert list(find_copies(synthetic, synthetic)) == []
