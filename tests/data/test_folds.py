"""--fold: the parts are disjoint and even, have all images, and follow from contents and groups alone."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import write_data
from utils.data.formats.folder import scan
from utils.data.images.manifest import Manifest
from utils.data.splits.folds import check_parts, choose_fold_of_contents, choose_fold_of_groups, parts_of_contents
from utils.data.splits.holdout import choose_by_content, divide
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.folds import Fold


def test_the_parts_are_the_same_for_ever() -> None:
    """These numbers must never change: a run that goes on without its listing would have trained on its val."""
    digests = np.array([5, -3, 9, 1, -8, 2, 7], dtype=np.int64)
    strata = np.array([0, 0, 0, 0, 1, 1, 1])
    assert parts_of_contents(digests, strata, 3).tolist() == [2, 0, 0, 1, 1, 2, 0]


def test_parts_are_even_and_copies_are_in_one() -> None:
    """Of all images and of each class; the order of the images does not matter."""
    random = np.random.default_rng(0)
    digests = random.integers(-(2**63), 2**63, size=5_003)
    strata = random.integers(0, 10, size=len(digests))
    parts = parts_of_contents(digests, strata, 7)
    assert np.ptp(np.bincount(parts)) <= 1
    table = np.zeros((10, 7), dtype=int)
    np.add.at(table, (strata, parts), 1)
    assert np.ptp(table, axis=1).max() <= 1
    order = random.permutation(len(digests))
    np.testing.assert_array_equal(parts_of_contents(digests[order], strata[order], 7), parts[order])
    copies = np.concatenate([digests, digests[:100]])  # some of them of another class
    found = parts_of_contents(copies, np.concatenate([strata, strata[1:101]]), 7)
    np.testing.assert_array_equal(found[-100:], found[:100])


@pytest.fixture
def train(tmp_path: Path) -> Manifest:
    """14 + 14 + 13 images."""
    return scan(write_data(tmp_path / "data"), "train")


def folds_of(manifest: Manifest, parts: int, folder: Path, env: DistEnv) -> list[dict[str, Manifest]]:
    folder.mkdir(exist_ok=True)
    folds = (Fold(number, parts) for number in range(1, parts + 1))
    return [divide(manifest, choose_by_content(manifest, fold, folder, 1, env)) for fold in folds]


def test_the_folds_of_files(train: Manifest, tmp_path: Path, cpu: DistEnv) -> None:
    folds = folds_of(train, 4, tmp_path / "out", cpu)
    held_out = [fold["val"].names() for fold in folds]
    assert sorted(itertools.chain(*held_out)) == sorted(train.names())
    assert [len(names) for names in held_out] == [11, 10, 10, 10]
    for fold in folds:
        assert sorted(fold["train"].names() + fold["val"].names()) == sorted(train.names())
        assert fold["val"].held_out
    assert train.root is not None
    for name in train.names():
        path = train.root / name
        path.rename(path.with_name(f"{1000 - int(path.stem[-3:])}-{path.name}"))
    renamed = folds_of(scan(train.root.parent, "train"), 4, tmp_path / "again", cpu)
    later = [[name.replace(name.split("/")[1], name.split("-", 1)[1]) for name in f["val"].names()] for f in renamed]
    assert [sorted(names) for names in later] == [sorted(names) for names in held_out]


def test_whole_groups_are_in_a_part(train: Manifest) -> None:
    groups = np.array([f"camera-{at % 10}" for at in range(len(train))])
    grouped = dataclasses.replace(train, groups=groups)
    chosen = [choose_fold_of_groups(grouped, Fold(number, 4)) for number in range(1, 5)]
    np.testing.assert_array_equal(np.sum(chosen, axis=0), 1)
    for one in chosen:
        assert set(groups[one]).isdisjoint(groups[~one])
        shares = grouped.class_counts(one.astype(np.float64)) / grouped.class_counts()
        assert shares.min() > 0.1
        assert shares.max() < 0.45


def test_what_cannot_be_divided_is_refused(train: Manifest) -> None:
    """By every fold alike, so that the first run shows it."""
    digests = np.arange(len(train))
    last = np.where(train.labels == 2, 7, digests)  # copies of one another
    for number in (1, 2, 3):
        with pytest.raises(UserError, match=rf"^--fold {number}/3: part \d would have all of red \(13 images, copies"):
            choose_fold_of_contents(train, last, Fold(number, 3))
    with pytest.raises(UserError, match=r"^--fold 1/9: part 4 would be empty; give fewer parts$"):
        choose_fold_of_contents(train, digests % 3, Fold(1, 9))
    with pytest.raises(UserError, match=r"^--fold 1/42: 41 training images cannot fill 42 parts; give fewer$"):
        check_parts(train, Fold(1, 42))
