"""Label files with any number of labels an image: the sets, what stands for them, and what is held out."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines import Feed
from tests.damage import ARITHMETIC as JPEG
from tests.data.formats.test_label_files import ROWS, VAL, read, text_of
from tests.refused_folders import files
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import image_weights
from utils.data.splits.groups import choose_groups
from utils.data.splits.holdout import _keep_all_classes, choose
from utils.errors import UserError


def sets_of(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """File -> the classes of each image."""
    assert manifest.label_sets is not None
    rows = manifest.label_sets[manifest.labels]
    found = [tuple(np.array(manifest.classes)[row].tolist()) for row in rows]
    return {manifest.path(manifest.name(index)): found[index] for index in range(len(manifest))}


SEVERAL = {"a.jpg": "red|blue", "b.png": "", "sub/c.jpg": " blue | red |", "d.jpg": "blue", "e.jpg": "red"}


@pytest.mark.parametrize("form", ["csv", "jsonl", "by a flag"])
def test_several_labels(tmp_path: Path, form: str) -> None:
    """One row with several is enough, in either split; their order does not count, and none is a set, too."""
    files(dict.fromkeys([*SEVERAL, *VAL], JPEG))(tmp_path)
    (tmp_path / "val.csv").write_text(text_of(VAL))
    if form == "jsonl":
        lines = [json.dumps({"file": n, "label": c.split("|")}) for n, c in SEVERAL.items()]
        (tmp_path / "train.jsonl").write_text("\n".join(lines))
    else:
        (tmp_path / "train.csv").write_text(text_of(SEVERAL if form == "csv" else ROWS))
    listed = read(tmp_path, task="multilabel") if form == "by a flag" else read(tmp_path)
    train, val = listed["train"], listed["val"]
    both = {} if form == "by a flag" else {"a.jpg": ("blue", "red"), "b.png": (), "sub/c.jpg": ("blue", "red")}
    assert sets_of(train) == {name: (label,) for name, label in ROWS.items()} | both
    assert sets_of(val) == {name: (label,) for name, label in VAL.items()}
    assert np.array_equal(train.label_sets, val.label_sets)  # type: ignore[arg-type]
    assert (train.task, train.classes) == ("multilabel", ("blue", "red"))
    counts = [2, 3] if form == "by a flag" else [3, 3]
    assert train.class_counts().tolist() == counts
    assert val.class_counts(np.array([2.0, 0.5])).tolist() in ([2, 0.5], [0.5, 2])
    with Feed(tmp_path, "val", batch_size=2, image_size=8, device="cpu", workers=1) as feed:
        for _, targets in feed if form != "by a flag" else ():
            assert (targets.dtype, targets.sum().item()) == (torch.float32, 2)


def test_the_rarest_class_stands_for_an_image(tmp_path: Path) -> None:
    """In what is held out, and in how often an image comes."""
    rows = {f"{at}.jpg": "common" for at in range(8)} | {"x.jpg": "common|rare", "y.jpg": "rare|common", "z.jpg": ""}
    files(dict.fromkeys([*rows, *VAL], JPEG))(tmp_path)
    (tmp_path / "train.csv").write_text(text_of(rows))
    (tmp_path / "val.csv").write_text(text_of(dict.fromkeys(VAL, "rare")))
    train = read(tmp_path)["train"]
    found = dict(zip((train.path(train.name(at)) for at in range(len(train))), train.strata().tolist(), strict=True))
    assert found == {f"{at}.jpg": 0 for at in range(8)} | {"x.jpg": 1, "y.jpg": 1, "z.jpg": 2}
    weights = image_weights(train, 1.0)
    assert weights is not None
    sums = np.bincount(train.strata(), weights=weights)
    np.testing.assert_allclose(sums, 1)
    again = train.numbered_as(("common", "new", "rare"))
    assert (again.class_counts().tolist(), again.strata().tolist()[-1] >= 0) == ([10, 0, 2], True)
    bad = {train.name(at): "damaged" for at in range(len(train)) if "rare" in train.name(at)}
    with pytest.raises(UserError, match=": rare of train: a class without a readable image, its 2 files are bad"):
        train.without(bad).with_all_classes()
    assert len(train.with_replacements(bad)) == len(train)


def test_unique_sets_of_labels_are_held_out_in_proportion(tmp_path: Path) -> None:
    """And each class keeps a training image, also in groups."""
    rows = {f"{at:03}.jpg": "common" if at % 3 else f"common|c{at % 40}|d{at % 41}" for at in range(200)}
    rows |= {"x.jpg": "a|b", "y.jpg": "a", "z.jpg": "b"}
    files(dict.fromkeys(rows, JPEG))(tmp_path)
    (tmp_path / "train.csv").write_text(text_of(rows))
    train = read(tmp_path, val_fraction=0.2)["train"]
    sizes = []
    for seed in range(8):
        digests = np.random.default_rng(seed).integers(-(2**63), 2**63, size=len(train))
        chosen = choose(digests, train.strata(), 0.2)
        _keep_all_classes(train, digests, chosen)
        assert (train.class_counts((~chosen).astype(np.float64)) > 0).all()
        sizes.append(chosen.sum())
        groups = np.random.default_rng(seed).permutation(len(train)).astype(str)
        grouped = choose_groups(dataclasses.replace(train, groups=groups), 0.2)
        assert (train.class_counts((~grouped).astype(np.float64)) > 0).all()
    assert 0.14 < np.mean(sizes) / len(train) < 0.26
