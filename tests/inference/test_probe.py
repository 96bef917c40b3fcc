"""Probes are scikit-learn's, and all near-duplicates are found, in blocks of any size."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.harness import ROOT
from utils.inference import probe
from utils.inference.embedding_files import Embeddings
from utils.inference.probe import near_duplicates, neighbor_accuracies, regression_accuracies, takes_tensors

CPU = torch.device("cpu")
NETWORK = {"arch": "test_resnet"}


def clusters(count: int, seed: int, unknown: int = 0) -> Embeddings:
    """Five classes that overlap; the class of the last images is not known."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 5, count)
    centers = np.random.default_rng(0).normal(size=(5, 12))
    features = (centers[labels] + random.normal(size=(count, 12))).astype(np.float32)
    targets = [f"class {label}" for label in labels]
    targets[count - unknown :] = [""] * unknown
    return Embeddings(Path("x.npy"), features, [f"{seed}-{row}" for row in range(count)], targets, NETWORK, None)


@pytest.mark.parametrize("block", [1, 1000, 2**25])
def test_accuracies_are_scikit_learns(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(probe, "BLOCK", block)
    train, val = clusters(150, 1, unknown=10), clusters(70, 2, unknown=7)
    own, others = train.features[:140], val.features[:63]
    found = neighbor_accuracies(train, val, CPU, (1, 4, 20, 141))
    assert list(found) == [1, 4, 20], "there are 140 images"
    for k, top1 in found.items():
        expected = KNeighborsClassifier(k, metric="cosine").fit(own, train.targets[:140])
        assert top1 == pytest.approx(100 * expected.score(others, val.targets[:63])), k
    assert 50 < found[4] < 100
    for strength, fit in regression_accuracies(train, val, CPU, (0.1, 10.0)).items():
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        expected = 100 * model.fit(own, train.targets[:140]).score(others, val.targets[:63])
        assert fit.top1 == pytest.approx(expected, abs=2), strength  # another start of the search
        assert fit.converged


def figures(device: str) -> dict[str, Any]:
    """Of 10 classes, and which array library scikit-learn fits."""
    train, val, where = clusters(300, 1), clusters(200, 2), torch.device(device)
    pairs, counts = near_duplicates(train, val, where, 0.9)
    return {
        "similarities": [pair.similarity for pair in pairs],
        "pairs": sorted(list(pair[1:]) for pair in pairs),
        "counts": counts,
        "fits": {str(strength): list(fit) for strength, fit in regression_accuracies(train, val, where).items()},
        "neighbors": {str(k): top1 for k, top1 in neighbor_accuracies(train, val, where).items()},
        "tensors": takes_tensors(LogisticRegression()),
    }


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_tensors_give_the_same_figures(device: str) -> None:
    """As `scripts/probe.py` fits them, in a process that has not imported scipy; similarities but for rounding."""
    code = f"import json; from tests.inference.test_probe import figures; print(json.dumps(figures({device!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "SCIPY_ARRAY_API": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    can = tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 9)
    found, expected = json.loads(done.stdout), figures("cpu") | {"tensors": can}
    assert not takes_tensors(LogisticRegression()), "scipy was imported without the variable"
    assert found.pop("similarities") == pytest.approx(expected.pop("similarities"), abs=1e-6)
    assert found == expected


@pytest.mark.parametrize("block", [1, 1000, 2**25])
def test_near_duplicates_are_all_pairs(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(probe, "BLOCK", block)
    splits = {"train": clusters(60, 1, unknown=5), "val": clusters(40, 2, unknown=5)}
    unit = {name: torch.nn.functional.normalize(torch.from_numpy(each.features)) for name, each in splits.items()}
    expected = {}
    for split, other in (("val", "train"), ("val", "val"), ("train", "train")):
        for row, other_row in itertools.product(range(len(splits[split])), range(len(splits[other]))):
            one, two = splits[split].targets[row], splits[other].targets[other_row]
            value = float(unit[split][row] @ unit[other][other_row])
            if value >= 0.7 and (split != other or (row < other_row and one and two and one != two)):
                expected[split, row, other, other_row] = value
    pairs, counts = near_duplicates(splits["train"], splits["val"], CPU, 0.7)
    assert {pair[1:]: pair.similarity for pair in pairs} == pytest.approx(expected)
    assert [pair.similarity for pair in pairs] == pytest.approx(sorted(expected.values(), reverse=True))
    across = sum(split != other for split, _, other, _ in expected)
    assert counts == {"across splits": across, "across classes": len(expected) - across}
    assert 0 < across < len(expected)
    monkeypatch.setattr(probe, "MAX_PAIRS", 3)
    fewer, same = near_duplicates(splits["train"], splits["val"], CPU, 0.7)
    assert [pair.similarity for pair in fewer] == pytest.approx(sorted(expected.values(), reverse=True)[:3])
    assert same == counts


def test_a_copy_is_a_duplicate_at_any_threshold() -> None:
    """The length of a vector is rounded."""
    copies = clusters(200, 1)
    _, counts = near_duplicates(copies, copies, CPU, 1.0)
    assert counts["across splits"] == 200
