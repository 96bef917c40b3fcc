"""--val-fraction: an image's side follows from its content alone, and every class has both sides."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import write_data
from tests.contract import CONTRACT
from utils.data.formats.folder import scan
from utils.data.images.manifest import Manifest
from utils.data.splits.holdout import choose, choose_by_content, choose_by_name, describe_shares, divide
from utils.distributed.group import DistEnv
from utils.errors import UserError


def digests_of(*contents: str) -> NDArray[np.int64]:
    found = [hashlib.blake2b(text.encode(), digest_size=16).digest()[:8] for text in contents]
    return np.array([int.from_bytes(first, signed=True) for first in found], dtype=np.int64)


def zeros(count: int) -> NDArray[np.int64]:
    return np.zeros(count, dtype=np.int64)


def test_the_choice_is_the_same_for_ever() -> None:
    """These numbers must never change: a data set's held-out images would be others, which were trained on before."""
    chosen = choose(digests_of(*map(str, range(100))), zeros(100), 0.1)
    assert np.flatnonzero(chosen).tolist() == [0, 16, 18, 22, 31, 36, 38, 55, 58]


def test_other_images_and_their_order_do_not_matter() -> None:
    random = np.random.default_rng(0)
    digests = random.integers(-(2**63), 2**63, size=20_000)
    labels = np.sort(random.integers(0, 10, size=len(digests)))
    chosen = choose(digests, labels, 0.1)
    shares = np.bincount(labels, weights=chosen) / np.bincount(labels)
    assert np.abs(shares - 0.1).max() < 4 * (0.09 / 2000) ** 0.5
    some = np.sort(random.permutation(len(digests))[:5_000])
    np.testing.assert_array_equal(choose(digests[some], labels[some], 0.1), chosen[some])
    within = np.lexsort((random.random(len(digests)), labels))  # another order within the classes
    np.testing.assert_array_equal(choose(digests[within], labels, 0.1), chosen[within])
    assert (chosen <= choose(digests, labels, 0.25)).all()


def test_every_class_has_both_sides_and_copies_stay_together() -> None:
    """Digests as numbers from 0 to 1: those of 0 and more are small, and -1 is the largest."""
    classes = {
        (-10, -1, -1): [True, False, False],  # none is below 0.9: that with the smallest is held out
        (0, 5, 0): [True, False, True],  # all are below: that with the largest is not
        (7, -1): [True, False],
        (-10, 8, -5): [True, True, False],  # a copy of one that another class holds out
    }
    digests = np.array([number for numbers in classes for number in numbers], dtype=np.int64)
    labels = np.repeat(np.arange(len(classes)), [len(numbers) for numbers in classes])
    assert choose(digests, labels, 0.9).tolist() == [side for sides in classes.values() for side in sides]


@pytest.fixture
def train(tmp_path: Path) -> Manifest:
    """14 + 14 + 13 images; what a test changes in their files it lists again."""
    return scan(write_data(tmp_path / "data"), "train")


def held_out(manifest: Manifest, folder: Path, env: DistEnv, fraction: float = 0.3) -> list[str]:
    return divide(manifest, choose_by_content(manifest, fraction, folder, 1, env))["val"].names()


def test_files_are_read_once(train: Manifest, tmp_path: Path, cpu: DistEnv) -> None:
    out = tmp_path / "out"
    out.mkdir()
    names = held_out(train, out, cpu)
    first = json.loads((out / "digests.json").read_text())
    assert sorted(first) == CONTRACT["files"]["digests.json"]
    assert train.root is not None
    for name in train.names():  # a change that nothing shows
        path = train.root / name
        times = path.stat()
        path.write_bytes(bytes(times.st_size))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert held_out(train, out, cpu) == names
    assert json.loads((out / "digests.json").read_text()) == first
    path.touch()
    held_out(scan(train.root.parent, "train"), out, cpu)
    second = json.loads((out / "digests.json").read_text())
    digest = first["fields"].index("digest")
    changed = [name for name in first["files"] if first["files"][name][digest] != second["files"][name][digest]]
    assert changed == [f"train/{train.names()[-1]}"]


def test_names_do_not_matter(train: Manifest, tmp_path: Path, cpu: DistEnv) -> None:
    out = tmp_path / "out"
    out.mkdir()
    names = held_out(train, out, cpu)
    assert train.root is not None
    for name in train.names():
        path = train.root / name
        path.rename(path.with_name(f"{hashlib.sha256(name.encode()).hexdigest()}.jpg"))
    hashed = sorted(hashlib.sha256(name.encode()).hexdigest() for name in names)
    assert sorted(Path(name).stem for name in held_out(scan(train.root.parent, "train"), out, cpu)) == hashed


def test_a_class_that_cannot_be_divided_is_refused(train: Manifest, tmp_path: Path, cpu: DistEnv) -> None:
    assert train.root is not None
    (tmp_path / "out").mkdir()
    for number, refusal in ((1, "has 1 image"), (2, "has 2 images, which are copies of others")):
        (train.root / "alone").mkdir(exist_ok=True)
        shutil.copy(train.root / train.name(0), train.root / "alone" / f"{number}.jpg")
        listed = scan(train.root.parent, "train")
        with pytest.raises(UserError, match=f"^--val-fraction 0.3: {train.root}/alone {refusal}, but .* add "):
            held_out(listed, tmp_path / "out", cpu)


def test_a_file_that_cannot_be_read_is_refused(train: Manifest, tmp_path: Path, cpu: DistEnv) -> None:
    path = Path(str(train.root), train.name(0))
    path.unlink()
    (tmp_path / "out").mkdir()
    with pytest.raises(
        UserError, match=rf"^{path}: cannot be read \(No such file.*\); delete or replace it, .* --bad-files skip$"
    ):
        held_out(train, tmp_path / "out", cpu)


def test_a_divided_manifest_is_that_of_two_folders(train: Manifest, tmp_path: Path) -> None:
    chosen = choose_by_name(train, [*train.names()[3:14:4], "green/green-001.jpg", "red/red-000.jpg"])
    assert chosen is not None
    assert choose_by_name(train, [*train.names()[:3], "blue/gone.jpg"]) is None
    assert choose_by_name(train, []) is None
    splits = divide(train, chosen)
    for split, manifest in splits.items():
        for name in manifest.names():
            path = tmp_path / "two" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(str(train.root), name), path)
        listed = scan(tmp_path / "two", split)
        assert (manifest.classes, manifest.names(), manifest.fingerprint) == (
            listed.classes, listed.names(), listed.fingerprint,
        )  # fmt: skip
        np.testing.assert_array_equal(manifest.labels, listed.labels)
    assert (splits["train"].title, splits["val"].title) == ("train/", "the held-out part of train/")
    assert describe_shares(splits["train"], splits["val"]) == "1 to 3 of each class"
