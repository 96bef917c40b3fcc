"""Flat validation folders: labels from Kaggle's file, the devkit and CSVs; each mistake in one line."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from utils.data.formats.flat import find_cls_loc, label_flat
from utils.errors import UserError

CLASSES = ("n01", "n02", "n03")
IMAGES = ("b.jpg", "a.JPEG", "c.png")
LABELED = [("a.JPEG", "n03"), ("b.jpg", "n01"), ("c.png", "n02")]


def write_flat(folder: Path, names: Iterable[str] = IMAGES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*names, ".hidden.jpg", "notes.txt"):
        (folder / name).touch()
    return folder


def label(root: Path, text: str, name: str = "val.csv", classes: tuple[str, ...] = CLASSES) -> list[tuple[str, str]]:
    folder = write_flat(root / "val")
    (root / name).write_text(text)
    found = label_flat(folder, classes)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["val.csv", "val_labels.csv", "val/val.csv"])
@pytest.mark.parametrize(
    "text",
    [
        "path,label\nb.jpg,n01\na.JPEG,n03\nc.png,n02\n",
        "b.jpg,n01\na.JPEG,n03\nc.png,n02",
        "\ufefffile,class\r\nb,n01\r\na,n03\r\n\r\nval/c.png, n02\r\n",
        'b.jpg,0\na.JPEG,2\n"c.png",1\n',
        "b.jpg,1\na.JPEG,3\nc.png,2\n",
    ],
)
def test_labels_in_a_csv(tmp_path: Path, text: str, name: str) -> None:
    write_flat(tmp_path / "val")
    assert label(tmp_path, text, name) == LABELED


def test_classes_that_are_numbers_are_names(tmp_path: Path) -> None:
    classes = tuple(sorted(map(str, range(1, 11))))
    found = label(tmp_path, "b.jpg,10\na.JPEG,2\nc.png,1\n", classes=classes)
    assert found == [("a.JPEG", "2"), ("b.jpg", "10"), ("c.png", "1")]


GOOD = "b.jpg,n01\na.JPEG,n03\n"
REFUSED = {
    "number too high": ("b.jpg,0\na.JPEG,3\nc.png,1\n", "line 1 has the label '0', which is none"),
    "negative": ("b.jpg,0\na.JPEG,-1\nc.png,1\n", "has the label '0', which is none"),
    "one column": ("b.jpg\n", "line 1 is 'b.jpg'; it must be"),
    "no class": (GOOD + "c.png,\n", "line 3 is 'c.png,'; it must be"),
    "empty": ("", "has no label for 3 images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_in_a_csv(tmp_path: Path, case: str) -> None:
    text, expected = REFUSED[case]
    with pytest.raises(UserError, match=expected) as caught:
        label(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_folders_that_are_not_flat_or_have_no_labels(tmp_path: Path) -> None:
    folder = write_flat(tmp_path / "val")
    assert label_flat(folder, CLASSES) is None
    (tmp_path / "val.csv").write_text("b.jpg,n01\n")
    (folder / "n01").mkdir()
    assert label_flat(folder, CLASSES) is None


def test_kaggles_tree_is_found_from_each_level(tmp_path: Path) -> None:
    root = tmp_path / "ILSVRC/Data/CLS-LOC"
    assert find_cls_loc(tmp_path) is None
    (root / "train/n01").mkdir(parents=True)
    levels = (tmp_path, tmp_path / "ILSVRC", tmp_path / "ILSVRC/Data", root)
    assert [find_cls_loc(level) for level in levels] == [root] * 4
    names = [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 2)]
    folder = write_flat(root / "val", names)
    solution = (f"{names[1][:-5]},n03 1 2 3 4 n03 5 6 7 8 \n", f"{names[0][:-5]},n02 1 2 3 4\n")
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(solution))
    assert label_flat(folder, CLASSES) == [(names[0], "n02"), (names[1], "n03")]


def write_devkit(folder: Path, lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text(lines)
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(1.0, "n03", "x", 0.0), (2.0, "n01", "y", 0.0), (3.0, "n02", "z", 0.0), (4.0, "n00", "all", 3.0)]
    savemat(folder / "meta.mat", {"synsets": np.array(rows, dtype=fields).reshape(-1, 1)})


@pytest.mark.parametrize("where", ["", "ILSVRC2012_devkit_t12/data"])
def test_labels_of_the_devkit(tmp_path: Path, where: str) -> None:
    names = [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 2, 4)]
    folder = write_flat(tmp_path / "val", names)
    write_devkit(tmp_path / where, "2\n3\n1\n1\n")
    assert label_flat(folder, CLASSES) == list(zip(names, ("n01", "n02", "n03"), strict=True))
    with pytest.raises(UserError, match=r"line 4 has the label 'n03', which is none of the 2 classes"):
        label_flat(folder, CLASSES[:2])
    write_devkit(tmp_path / where, "2\n3\n1\n4\n")
    with pytest.raises(UserError, match=r"ground_truth.txt: line 4 is '4', not an ID of meta.mat"):
        label_flat(folder, CLASSES)
    write_devkit(tmp_path / where, "2\n3\n1\n1\n")
    (folder / "cat.jpg").touch()
    with pytest.raises(UserError, match=r"cat.jpg: no label, .* has 4 lines"):
        label_flat(folder, CLASSES)
    (tmp_path / where / "meta.mat").unlink()
    with pytest.raises(UserError, match=r"meta.mat: cannot be read"):
        label_flat(folder, CLASSES)
