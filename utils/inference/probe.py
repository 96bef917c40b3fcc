"""Probes of embeddings: nearest neighbors and logistic regression, and pairs of images that are nearly the same."""

import heapq
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
ROUNDING = 1e-6  # a float32 vector of length 1 and its copy may have a similarity of 0.9999999
MAX_PAIRS = 10_000


def similarities(rows: Tensor, others: Tensor, is_upper: bool = False) -> Iterator[tuple[int, Tensor]]:
    """Cosine similarities in blocks of rows: the first row of the block, and float32 (n, num_others).

    Args:
        rows, others: float32 (N, width), of length 1 each.
        is_upper: leave out the others before the block's first row.
    """
    step = max(1, BLOCK // len(others))
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step] @ others[start if is_upper else 0 :].T


def _unit(embeddings: Embeddings, device: torch.device) -> Tensor:
    return normalize(torch.from_numpy(embeddings.features).to(device))


def label_arrays(train: Embeddings, val: Embeddings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels of both, int64 (num_images,), -1 where the class is not known; names that both have get one number."""
    numbers = {name: number for number, name in enumerate(sorted({*train.targets, *val.targets} - {""}))}
    found = (np.array([numbers.get(name, -1) for name in each.targets]) for each in (train, val))
    return next(found), next(found)


def neighbor_accuracies(
    train: Embeddings, val: Embeddings, device: torch.device, neighbors: Sequence[int] = NEIGHBORS
) -> dict[int, float]:
    """k -> top-1 in percent on `val` by the majority of the k nearest images of `train`, by cosine similarity.

    As scikit-learn's KNeighborsClassifier with `metric="cosine"`: of classes that are as frequent the first one counts.
    A k that `train` has not so many images for is left out.
    """
    labels, answers = label_arrays(train, val)
    known, asked = labels >= 0, answers >= 0
    rows, others = _unit(val, device)[torch.from_numpy(asked)], _unit(train, device)[torch.from_numpy(known)]
    labels, answers = labels[known], answers[asked]
    neighbors = [k for k in neighbors if k <= len(labels)]
    hits = dict.fromkeys(neighbors, 0)
    for start, block in similarities(rows, others):
        nearest = labels[block.topk(max(neighbors), dim=1).indices.cpu().numpy()]
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
    train: Embeddings, val: Embeddings, device: torch.device, strengths: Sequence[float] = STRENGTHS
) -> dict[float, Fit]:
    """C -> figures on `val` of scikit-learn's logistic regression on the standardized features of `train`.

    On the device where scikit-learn can, from 1.9 on; else on the CPU.
    """
    # The import takes a second.
    from sklearn import config_context
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    labels, answers = label_arrays(train, val)
    known, asked = labels >= 0, answers >= 0
    scaler = StandardScaler().fit(train.features[known])
    probe, found = LogisticRegression(max_iter=ITERATIONS, warm_start=True), {}
    on_device = takes_tensors(probe)
    arrays = (scaler.transform(train.features[known]), labels[known], scaler.transform(val.features[asked]))
    rows, classes, others = (torch.from_numpy(each).to(device) for each in arrays) if on_device else arrays
    for strength in strengths:  # each begins with the weights of the one before
        with warnings.catch_warnings(), config_context(array_api_dispatch=on_device):
            warnings.simplefilter("ignore", ConvergenceWarning)  # `converged` says it
            probe.set_params(C=strength).fit(rows, classes)
            predicted = probe.predict(others)
        predicted = predicted.cpu().numpy() if on_device else predicted
        top1 = 100 * float((predicted == answers[asked]).mean())
        found[strength] = Fit(top1, bool((probe.n_iter_ < ITERATIONS).all()))
    return found


def takes_tensors(estimator: Any) -> bool:
    """Whether an estimator of scikit-learn fits tensors, on their device."""
    from sklearn import config_context

    tags = getattr(estimator, "__sklearn_tags__", None)  # since 1.6
    if tags is None or not tags().array_api_support:
        return False
    try:
        with config_context(array_api_dispatch=True):
            return True
    except (RuntimeError, ImportError):  # scipy was imported without SCIPY_ARRAY_API=1
        return False


class Pair(NamedTuple):
    """Two images that are nearly the same: each with the name of its split and its row."""

    similarity: float
    split: str
    row: int
    other_split: str
    other_row: int


def near_duplicates(
    train: Embeddings, val: Embeddings, device: torch.device, threshold: float
) -> tuple[list[Pair], dict[str, int]]:
    """The pairs across the splits, and within each split those across classes, whose similarity is `threshold` or more.

    Returns:
        The most similar ones first, `MAX_PAIRS` at most; and how many there are: `across splits`, `across classes`.
    """
    splits = {"train": _unit(train, device), "val": _unit(val, device)}
    numbers = (torch.from_numpy(each).to(device) for each in label_arrays(train, val))
    labels = dict(zip(splits, numbers, strict=True))
    kept: list[Pair] = []
    counts = {"across splits": 0, "across classes": 0}
    for split, other in (("val", "train"), ("val", "val"), ("train", "train")):
        is_same = split == other
        for start, block in similarities(splits[split], splits[other], is_upper=is_same):
            found, others = (block >= threshold - ROUNDING).nonzero(as_tuple=True)
            values, found, others = block[found, others], found + start, others + (start if is_same else 0)
            if is_same:
                own, theirs = labels[split][found], labels[split][others]
                is_pair = (found < others) & (own != theirs) & (own >= 0) & (theirs >= 0)
                values, found, others = values[is_pair], found[is_pair], others[is_pair]
            counts["across classes" if is_same else "across splits"] += len(values)
            best = values.topk(min(MAX_PAIRS, len(values))).indices
            for value, row, other_row in zip(*(each[best].tolist() for each in (values, found, others)), strict=True):
                kept.append(Pair(min(value, 1.0), split, row, other, other_row))
        kept = heapq.nsmallest(MAX_PAIRS, kept, key=lambda pair: (-pair.similarity, pair.split, pair.row))
    return kept, counts
