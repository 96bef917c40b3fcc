"""Probes of embeddings: nearest neighbors and logistic regression, and pairs of images that are nearly the same."""

import heapq
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from utils.inference.embedding_files import Embeddings

NEIGHBORS = (1, 5, 20)  # k
STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # C: the larger, the weaker the penalty on the weights
ITERATIONS = 1000  # of a regression, at most
BLOCK = 2**25  # similarities at a time, 128 MB
MAX_PAIRS = 10_000


def similarities(rows: Tensor, others: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Cosine similarities in blocks of rows: the first row of the block, and float32 (n, num_others).

    Args:
        rows, others: float32 (N, width), of length 1 each.
    """
    step = max(1, BLOCK // len(others))
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step] @ others.T


def _unit(embeddings: Embeddings) -> Tensor:
    return normalize(torch.from_numpy(embeddings.features))


def label_arrays(train: Embeddings, val: Embeddings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels of both, int64 (num_images,), -1 where the class is not known; names that both have get one number."""
    numbers = {name: number for number, name in enumerate(sorted({*train.targets, *val.targets} - {""}))}
    found = (np.array([numbers.get(name, -1) for name in each.targets]) for each in (train, val))
    return next(found), next(found)


def neighbor_accuracies(train: Embeddings, val: Embeddings, neighbors: Sequence[int] = NEIGHBORS) -> dict[int, float]:
    """k -> top-1 in percent on `val` by the majority of the k nearest images of `train`, by cosine similarity.

    As scikit-learn's KNeighborsClassifier with `metric="cosine"`: of classes that are as frequent the first one counts.
    A k that `train` has not so many images for is left out.
    """
    labels, answers = label_arrays(train, val)
    known, asked = labels >= 0, answers >= 0
    rows, others, labels, answers = _unit(val)[asked], _unit(train)[known], labels[known], answers[asked]
    neighbors = [k for k in neighbors if k <= len(labels)]
    hits = dict.fromkeys(neighbors, 0)
    for start, block in similarities(rows, others):
        nearest = labels[block.topk(max(neighbors), dim=1).indices.numpy()]
        expected = answers[start : start + len(nearest)]
        for k in neighbors:
            votes = np.zeros((len(nearest), labels.max() + 1), np.int32)
            np.add.at(votes, (np.arange(len(nearest))[:, None], nearest[:, :k]), 1)
            hits[k] += int((votes.argmax(axis=1) == expected).sum())
    return {k: 100 * hit / len(answers) for k, hit in hits.items()}


class Fit(NamedTuple):
    """Top-1 of a regression in percent, and whether it came to an end within `ITERATIONS`."""

    top1: float
    converged: bool


def regression_accuracies(
    train: Embeddings, val: Embeddings, strengths: Sequence[float] = STRENGTHS
) -> dict[float, Fit]:
    """C -> figures on `val` of scikit-learn's logistic regression on the standardized features of `train`."""
    # The import takes a second.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    labels, answers = label_arrays(train, val)
    known, asked = labels >= 0, answers >= 0
    scaler = StandardScaler().fit(train.features[known])
    rows, others = scaler.transform(val.features[asked]), scaler.transform(train.features[known])
    probe, found = LogisticRegression(max_iter=ITERATIONS, warm_start=True), {}
    for strength in strengths:  # each begins with the weights of the one before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # `converged` says it
            probe.set_params(C=strength).fit(others, labels[known])
        top1 = 100 * float((probe.predict(rows) == answers[asked]).mean())
        found[strength] = Fit(top1, bool((probe.n_iter_ < ITERATIONS).all()))
    return found


class Pair(NamedTuple):
    """Two images that are nearly the same: each with the name of its split and its row."""

    similarity: float
    split: str
    row: int
    other_split: str
    other_row: int


def near_duplicates(train: Embeddings, val: Embeddings, threshold: float) -> tuple[list[Pair], dict[str, int]]:
    """The pairs across the splits, and within each split those across classes, whose similarity is `threshold` or more.

    Returns:
        The most similar ones first, `MAX_PAIRS` at most; and how many there are: `across splits`, `across classes`.
    """
    splits = {"train": _unit(train), "val": _unit(val)}
    labels = dict(zip(splits, map(torch.from_numpy, label_arrays(train, val)), strict=True))
    kept: list[Pair] = []
    counts = {"across splits": 0, "across classes": 0}
    for split, other in (("val", "train"), ("val", "val"), ("train", "train")):
        for start, block in similarities(splits[split], splits[other]):
            is_pair = block >= threshold
            if split == other:
                own, others = labels[split][start : start + len(block), None], labels[split][None]
                is_pair = (is_pair & (own != others) & (own >= 0) & (others >= 0)).triu_(start + 1)
            counts["across classes" if split == other else "across splits"] += int(is_pair.sum())
            values = block[is_pair]
            best = values.topk(min(MAX_PAIRS, len(values))).indices
            for (row, other_row), value in zip(is_pair.nonzero()[best].tolist(), values[best].tolist(), strict=True):
                kept.append(Pair(min(value, 1.0), split, start + row, other, other_row))
        kept = heapq.nsmallest(MAX_PAIRS, kept, key=lambda pair: (-pair.similarity, pair.split, pair.row))
    return kept, counts
