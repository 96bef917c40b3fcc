"""Held out by group: a group is on one side, classes are divided as the groups allow, order changes nothing."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedGroupKFold

from tests.conftest import write_data
from utils.data.formats.folder import scan_splits
from utils.data.images.manifest import Manifest, synthetic
from utils.data.splits.groups import choose_groups, find_groups
from utils.data.splits.holdout import describe_shares, divide
from utils.data.splits.oddities import describe_oddities
from utils.errors import UserError


def grouped(groups: NDArray[np.str_], labels: NDArray[np.int64]) -> Manifest:
    return dataclasses.replace(synthetic(len(labels), int(labels.max()) + 1), labels=labels, groups=groups)


def many(seed: int = 0) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """200 groups of 1 to 30 images, mostly of one of four classes, which are uneven."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 31, 200)
    main = random.choice(4, 200, p=[0.6, 0.25, 0.1, 0.05])
    groups = np.repeat([f"p{at}" for at in range(200)], sizes)
    labels = np.where(random.random(sizes.sum()) < 0.8, np.repeat(main, sizes), random.integers(0, 4, sizes.sum()))
    return groups, labels


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_whole_groups_and_classes_in_proportion(fraction: float) -> None:
    groups, labels = many()
    chosen = choose_groups(grouped(groups, labels), fraction)
    assert not set(groups[chosen]) & set(groups[~chosen])
    shares = np.bincount(labels[chosen], minlength=4) / np.bincount(labels)
    library = next(
        StratifiedGroupKFold(round(1 / fraction), shuffle=True, random_state=0).split(labels, labels, groups)
    )
    theirs = np.bincount(labels[library[1]], minlength=4) / np.bincount(labels)
    assert np.abs(shares - fraction).max() <= max(0.02, np.abs(theirs - fraction).max())
    order = np.random.default_rng(1).permutation(len(labels))
    np.testing.assert_array_equal(choose_groups(grouped(groups[order], labels[order]), fraction), chosen[order])


def test_a_class_keeps_its_last_training_image_and_gets_a_validation_image_if_groups_allow() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2])
    groups = np.array(["a", "b", "c", "d", "e", "f", "g", "g", "g"])
    manifest = grouped(groups, labels)
    chosen = choose_groups(manifest, 0.01)
    assert np.bincount(labels[chosen], minlength=3).tolist() == [1, 1, 0]
    assert np.bincount(labels[choose_groups(manifest, 0.99)], minlength=3).tolist() == [3, 1, 0]
    with pytest.raises(UserError, match="of 2 groups none can be held out"):
        choose_groups(grouped(np.array(["a", "b"]), np.array([0, 1])), 0.5)


def test_a_rare_class_does_not_take_a_large_group_along() -> None:
    labels = np.array([0] * 95 + [1] + [0] * 5 + [1])
    groups = np.array(["big"] * 96 + ["small"] * 6)
    assert set(groups[choose_groups(grouped(groups, labels), 0.1)]) == {"small"}


def test_groups_of_paths(tmp_path: Path) -> None:
    train, val = scan_splits(write_data(tmp_path / "data"))
    found = find_groups(train, r"-(\d)(\d)")
    assert found.groups is not None
    assert found.groups.tolist() == [f"{name[-7]}/{name[-6]}" for name in train.names()]
    assert set(find_groups(train, r"-0\d").groups.tolist()) == {"-00", "-01"}  # type: ignore[union-attr]
    assert find_groups(train, None) is train
    assert find_groups(found, "other") is found
    # blue-000 to blue-009 and so on lie in one group, and are on one side
    chosen = choose_groups(find_groups(train, r"\w+/(\w+-\d\d)"), 0.3)
    names = np.array([name.rpartition("/")[2][:-5] for name in train.names()])
    assert not set(names[chosen]) & set(names[~chosen])
    splits = divide(find_groups(train, r"\w+/(\w+-\d\d)"), chosen)
    held = int(chosen.sum())
    shares = describe_shares(splits["train"], splits["val"])
    assert shares.startswith(f"3 of 6 groups: {100 * held / 41:.1f} % of the images, ")
    both = {"train": found, "val": find_groups(val, r"-(\d)(\d)")}
    (line,) = [line for line in describe_oddities(both, 10, balance=0) if "group" in line]
    assert line.startswith("val/ has 2 groups of train/ (0/0, 0/1): ")
