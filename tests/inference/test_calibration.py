"""Temperatures and the figures of probabilities are those of their definitions, and of plain loops."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.conftest import assert_same
from tests.harness import read_checkpoint
from tests.inference.exported import write_checkpoint
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.inference import calibration
from utils.inference.calibration import NUM_BINS, Calibrator, calibrate, fit_temperatures, judge
from utils.inference.weights import scale_thresholds, temperature_of, thresholds_of, write_temperature
from utils.training.state.checkpoint import load

Sample = tuple[NDArray[np.float32], NDArray[Any]]


def softmax(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    powers = np.exp(scores - scores.max(1, keepdims=True), dtype=np.float64)
    return np.asarray(powers / powers.sum(1, keepdims=True), np.float64)


def sigmoid(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-scores.astype(np.float64)))


def draw(temperature: float, count: int = 4000, classes: int = 5) -> Sample:
    """Logits of a network that is too sure by this factor, and classes as often as its probabilities say."""
    random = np.random.default_rng(0)
    logits = random.normal(scale=2, size=(count, classes))
    labels = (softmax(logits).cumsum(1) > random.random((count, 1))).argmax(1)
    return (temperature * logits).astype(np.float32), labels


def draw_sets(temperatures: list[float], count: int = 4000) -> Sample:
    """As `draw`, of several labels."""
    random = np.random.default_rng(0)
    logits = random.normal(scale=2, size=(count, len(temperatures)))
    labels = (sigmoid(logits) > random.random(logits.shape)).astype(np.float32)
    return (logits * temperatures).astype(np.float32), labels


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_the_temperature_with_the_lowest_loss_is_found(temperature: float) -> None:
    scores, labels = draw(temperature)
    (found,) = fit_temperatures(scores, labels)
    assert found == pytest.approx(temperature, rel=0.06)

    def loss(divisor: float) -> float:
        return judge(scores, scores.argmax(1), labels, np.full((len(scores), 1), divisor))[0].nll

    assert loss(found) < min(loss(found * 1.001), loss(found / 1.001))
    sets, answers = draw_sets([temperature, 1.0])
    assert fit_temperatures(sets, answers) == pytest.approx([temperature, 1.0], rel=0.1)


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_answers_that_are_all_right_are_as_sure_as_their_number_allows(factor: float) -> None:
    """As if one of them said nothing; a network that is less or more sure of the same answers gets the same."""
    random = np.random.default_rng(0)
    scores = random.normal(size=(200, 5)).astype(np.float32)
    labels = random.integers(5, size=200)
    scores[np.arange(200), labels] = scores.max(1) + 3
    (found,) = fit_temperatures(factor * scores, labels)
    assert found == pytest.approx(factor * fit_temperatures(scores, labels)[0], rel=1e-4)
    smoothed = 0.995 * np.eye(5)[labels] + 0.005 / 5

    def loss(divisor: float) -> float:
        return float(-(smoothed * np.log(softmax(factor * scores / divisor))).sum())

    assert loss(found) < min(loss(found * 1.001), loss(found / 1.001))
    assert 0.98 < softmax(factor * scores / found).max(1).mean() < 0.999


def test_a_label_without_a_mistake_is_as_sure_as_its_number_allows() -> None:
    scores = np.linspace(-1, 1, 100, dtype=np.float32)[:, None]
    labels = (scores > 0).astype(np.float32)
    (found,) = fit_temperatures(scores, labels)
    smoothed = 0.99 * labels + 0.005

    def loss(divisor: float) -> float:
        probabilities = sigmoid(scores / divisor)
        return float(-(smoothed * np.log(probabilities) + (1 - smoothed) * np.log(1 - probabilities)).sum())

    assert loss(found) < min(loss(found * 1.001), loss(found / 1.001))


def test_answers_that_are_all_wrong_leave_the_temperature_at_1() -> None:
    scores, _ = draw(1.0, 50)
    assert fit_temperatures(scores, scores.argmin(1)).tolist() == [1.0]
    without_images = np.zeros((50, 5), np.float32)
    assert fit_temperatures(scores, without_images).tolist() == [1.0] * 5


def plain_ece(probabilities: NDArray[np.float64], right: NDArray[Any]) -> float:
    """One image after the other."""
    bins: list[list[tuple[float, float]]] = [[] for _ in range(NUM_BINS)]
    for probability, is_right in zip(probabilities, right, strict=True):
        (at,) = (k for k in range(NUM_BINS) if k / NUM_BINS < probability <= (k + 1) / NUM_BINS)
        bins[at].append((float(probability), float(is_right)))
    gaps = [abs(sum(p for p, _ in each) - sum(r for _, r in each)) for each in bins]
    return sum(gaps) / len(probabilities)


def test_figures_of_one_class_an_image() -> None:
    scores, labels = draw(2.0, 300)
    found, rows = judge(scores, scores.argmax(1), labels, np.full((300, 1), 1.5))
    probabilities = softmax(scores / 1.5)
    right = probabilities.argmax(1) == labels
    assert found.ece == pytest.approx(plain_ece(probabilities.max(1), right))
    assert found.nll == pytest.approx(np.mean([-math.log(p[k]) for p, k in zip(probabilities, labels, strict=True)]))
    assert found.brier == pytest.approx(np.mean(((probabilities - np.eye(5)[labels]) ** 2).sum(1)))
    assert sum(images for images, _, _ in found.bins) == 300
    for least, share, accuracy in rows:
        answered = probabilities.max(1) >= least
        assert share == pytest.approx(100 * answered.mean())
        assert accuracy == (pytest.approx(100 * right[answered].mean()) if answered.any() else None)


def test_figures_of_several_labels() -> None:
    scores, labels = draw_sets([2.0, 0.5, 1.0], 300)
    labels[:, 2] = 0  # a class without images does not count in the mean of ECE
    found, rows = judge(scores, scores.argmax(1), labels, np.array([[1.5, 1.0, 2.0]] * 300))
    probabilities = sigmoid(scores / np.array([1.5, 1.0, 2.0]))
    assert found.ece == pytest.approx(np.mean([plain_ece(probabilities[:, k], labels[:, k]) for k in range(2)]))
    expected = -np.log(np.where(labels == 1, probabilities, 1 - probabilities)).mean()
    assert found.nll == pytest.approx(expected)
    assert found.brier == pytest.approx(((probabilities - labels) ** 2).mean())
    assert rows == []


def test_each_half_is_measured_with_the_temperature_of_the_other() -> None:
    scores, labels = draw(3.0, 400)
    scores[1::2] /= 1.5  # so that the halves have temperatures of their own
    found = calibrate(scores, scores.argmax(1), labels)
    assert found is not None
    even, odd = (fit_temperatures(scores[start::2], labels[start::2])[0] for start in (0, 1))
    assert even / odd == pytest.approx(1.5, rel=0.2)
    losses = [
        judge(scores[start::2], scores[start::2].argmax(1), labels[start::2], np.full((200, 1), other))[0].nll
        for start, other in ((0, odd), (1, even))
    ]
    assert found.after.nll == pytest.approx(np.mean(losses))
    assert found.before.nll == pytest.approx(judge(scores, scores.argmax(1), labels, np.ones((400, 1)))[0].nll)
    assert odd < found.temperature < even


def test_batches_come_in_any_order_and_may_be_too_many(monkeypatch: pytest.MonkeyPatch, cpu: DistEnv) -> None:
    scores, labels = draw(2.0, 60)

    def collect(order: NDArray[np.int64]) -> Any:
        calibrator = Calibrator(60, 5, cpu)
        for part in np.array_split(order, 7):
            logits = torch.from_numpy(scores[part])
            calibrator.collect(part, logits, logits.argmax(1), torch.from_numpy(labels[part]))
        return calibrator.calibrate()

    order = np.random.default_rng(0).permutation(60)
    assert collect(order) == collect(np.arange(60)) == calibrate(scores, scores.argmax(1), labels)
    monkeypatch.setattr(calibration, "MAX_VALUES", 100)
    assert collect(order) == calibrate(scores[::3], scores[::3].argmax(1), labels[::3])
    monkeypatch.setattr(calibration, "CHUNK", 7)
    assert collect(order).count == 20


@pytest.mark.parametrize("sample", [draw(1.0, 400), draw_sets([1.0, 1.0], 400)], ids=["one class", "several labels"])
def test_a_temperature_that_other_images_do_not_share_is_not_used(sample: Sample) -> None:
    """One half is too sure, the other not sure enough."""
    scores, labels = sample
    scores = np.where(np.arange(400)[:, None] % 2, scores / 4, 4 * scores)
    found = calibrate(scores, scores.argmax(1), labels)
    assert found is not None
    assert np.all(np.array(found.temperature) == 1)
    assert found.after == found.before
    assert fit_temperatures(scores, labels) != pytest.approx(1.0)


def test_what_has_no_temperature() -> None:
    scores, labels = draw(1.0, 3)
    assert calibrate(scores[:1], labels[:1], labels[:1]) is None
    scores[2, 1] = math.nan
    assert calibrate(scores, labels, labels) is None


def test_thresholds_move_with_the_temperature() -> None:
    scores, _ = draw_sets([1.0, 1.0, 1.0], 100)
    thresholds, temperature = [0.3, 0.5, 0.0], [2.0, 0.3, 4.0]
    moved = scale_thresholds(thresholds, temperature)
    assert np.array_equal(sigmoid(scores / temperature) >= moved, sigmoid(scores) >= thresholds)
    assert scale_thresholds(thresholds, 1.0) == thresholds


def test_a_temperature_is_written_beside_all_else(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "best.pt", with_ema=True, task="multilabel")
    os.link(path, tmp_path / "last.pt")
    before = read_checkpoint(tmp_path, "best.pt")
    write_temperature(load(path), "model", [2.0, 1.0, 3.0])
    saved = load(path)
    write_temperature(saved, "model_ema", [1.0, 1.0, 0.5])
    after = read_checkpoint(tmp_path, "best.pt")
    assert after.pop("temperature") == {"model": [2.0, 1.0, 3.0], "model_ema": [1.0, 1.0, 0.5]}
    assert_same(after, before)
    assert_same(read_checkpoint(tmp_path, "last.pt"), before)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]
    assert thresholds_of(saved, "model") == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "2", [1.0, 2.0], [1.0, 2.0, math.inf]])
def test_a_temperature_that_is_none(tmp_path: Path, value: Any) -> None:
    path = write_checkpoint(tmp_path / "best.pt")
    torch.save(read_checkpoint(tmp_path, "best.pt") | {"temperature": {"model": value}}, path)
    with pytest.raises(UserError, match=r"best.pt: its temperature is .*, not a number above 0, or one a class; "):
        temperature_of(load(path), "model")
    assert temperature_of(load(path), "model_ema") == 1
