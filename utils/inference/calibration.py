"""Probabilities that can be trusted: a temperature by which logits are divided, and how sure answers are beside it.

A temperature is one number, or where an image has any number of classes one for each (Guo et al., On Calibration of
Modern Neural Networks, 2017). It changes no answer.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from utils.distributed.collective import collective
from utils.distributed.collectives import gather_to_rank0
from utils.distributed.group import DistEnv
from utils.inference.counts import THRESHOLDS, Answered
from utils.inference.mistakes import val_indices
from utils.options.resolved import ResolvedConfig
from utils.targets import Targets
from utils.training.state.checkpoint import Temperature

NUM_BINS = 15
BOUNDS = math.log(0.01), math.log(100)  # of 1 / temperature
MAX_VALUES = 2**28  # logits that are kept: 1 GB
CHUNK = 2**20  # logits that are computed at once, in float64
CPU = torch.device("cpu")
Scores = NDArray[np.float32]
Labels = NDArray[np.int64] | NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well probabilities say how often answers are right.

    Attributes:
        ece: expected calibration error, 0 to 1: mean distance of probability and accuracy over `NUM_BINS` bins of equal
            width, of the likeliest class; of several labels the mean over the classes that have images.
        nll: mean negative log-likelihood of an image, of several labels of an image and class.
        brier: mean of the squared distance to the target: summed up over classes, 0 to 2; of several labels 0 to 1.
        bins: of each bin, images (of several labels images and classes), mean probability and accuracy.
    """

    ece: float
    nll: float
    brier: float
    bins: list[tuple[int, float, float]]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What an evaluation says of probabilities.

    Attributes:
        temperature: fitted on all images; see `calibrate`.
        before, after: each half of the images after division by the temperature of the other half.
        answered: with one class an image, of probabilities as `after`; [] otherwise. See `Answered.rows`.
        count: images.
    """

    temperature: Temperature
    before: Quality
    after: Quality
    answered: list[tuple[float, float, float | None]]
    count: int

    def figures(self) -> dict[str, Any]:
        """As summary.json has them."""
        found: dict[str, Any] = {"temperature": self.temperature}
        for prefix, quality in (("", self.before), ("calibrated_", self.after)):
            found |= {prefix + name: getattr(quality, name) for name in ("ece", "nll", "brier")}
        return found

    def to_dict(self) -> dict[str, Any]:
        """As report.json has it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        found = self.temperature
        shown = f"{found:.3g}" if isinstance(found, float) else f"{min(found):.3g} to {max(found):.3g}"
        names = {"ECE": "ece", "NLL": "nll", "Brier": "brier"}
        pairs = {name: (getattr(self.before, key), getattr(self.after, key)) for name, key in names.items()}
        return f"temperature {shown}: " + ", ".join(f"{name} {a:.4f} -> {b:.4f}" for name, (a, b) in pairs.items())


class Calibrator:
    """Logits and targets of one evaluation on this rank, in the host's memory: 4 bytes for each image and class.

    Above `MAX_VALUES` over all ranks every second, third, ... image is kept.

    Args:
        num_images, num_classes: of all ranks.
    """

    def __init__(self, num_images: int, num_classes: int, env: DistEnv) -> None:
        self._env = env
        self._stride = -(-num_images * num_classes // MAX_VALUES)
        self._rows: list[tuple[NDArray[np.int64], Scores, NDArray[np.int64], Labels]] = []

    def collect(self, indices: NDArray[np.int64], logits: Tensor, answers: Tensor, targets: Tensor) -> None:
        """Keep a batch; waits for the device.

        Args:
            indices: of the images among all, int64 (N,).
            logits, answers, targets: see `calibrate`.
        """
        kept = indices % self._stride == 0
        scores, found, labels = (each.cpu().numpy()[kept] for each in (logits, answers, targets))
        self._rows.append((indices[kept], scores, found, labels))

    @collective
    def calibrate(self) -> Calibration | None:
        """The calibration on rank 0, the same on any number of them; None on the others, and of what cannot have one.

        That is fewer than two images, and logits that are not finite.
        """
        ranks = gather_to_rank0(self._rows, self._env)
        self._rows = []
        rows = [row for each in ranks or () for row in each]
        if not rows:
            return None
        indices, *columns = map(np.concatenate, zip(*rows, strict=True))
        order = np.argsort(indices, kind="stable")
        scores, answers, labels = (column[order] for column in columns)
        return calibrate(scores, answers, labels, self._env.device)


class EvaluationCalibrator(Calibrator):
    """Of `utils.inference.evaluate.evaluate`, which gives it the batches of the validation loader.

    Args:
        num_images: of all ranks.
    """

    def __init__(self, config: ResolvedConfig, num_images: int, targets: Targets, env: DistEnv) -> None:
        super().__init__(num_images, targets.num_classes, env)
        self._indices, self._targets, self._done = val_indices(config, num_images, env), targets, 0

    def add(self, images: Tensor, logits: Tensor, predicted: Tensor, labels: Tensor) -> None:
        """As `utils.inference.evaluate.Observer.add`."""
        indices = self._indices[self._done : self._done + len(labels)]
        self._done += len(labels)
        self.collect(indices, logits, predicted, self._targets(labels))


def calibrate(
    scores: Scores, answers: NDArray[np.int64], labels: Labels, device: torch.device = CPU
) -> Calibration | None:
    """Fit a temperature, and measure each half of the images, every second one, with the temperature of the other half.

    Where that does not lower their NLL, as of few images, a temperature says nothing of others: it is then 1.

    Args:
        scores: logits float32 (N, num_classes).
        answers: the classes that count as top-1, int64 (N,), as half precision makes equal logits.
        labels: int64 (N,), or of several labels float32 (N, num_classes) of 0 and 1.
        device: where to compute, some of the images at a time.

    Returns:
        None of fewer than two images, and where a logit is not finite.
    """
    if len(scores) < 2 or not np.isfinite(scores).all():
        return None
    half = np.arange(len(scores)) % 2
    others = np.stack([fit_temperatures(scores[start::2], labels[start::2], device) for start in (1, 0)])
    before, uncalibrated = judge(scores, answers, labels, np.ones((len(scores), 1)), device)
    after, answered = judge(scores, answers, labels, others[half], device)
    fitted = fit_temperatures(scores, labels, device)
    if after.nll >= before.nll:
        after, answered = before, uncalibrated
        fitted = np.ones_like(fitted)
    return Calibration(
        temperature=fitted.tolist() if labels.ndim == 2 else float(fitted[0]),
        before=before,
        after=after,
        answered=answered,
        count=len(scores),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Fit


def fit_temperatures(scores: Scores, labels: Labels, device: torch.device = CPU) -> NDArray[np.float64]:
    """The temperature with the lowest NLL, float64 (1,), of several labels (num_classes,), in six digits.

    NLL is convex in 1 / temperature, so its slope has one zero. Where no answer is wrong, it falls for ever: labels are
    then smoothed by 1 / N, as if one of the N images could be of any class. 1 where there is no zero within `BOUNDS`,
    as where no answer is right, and for a label that no image has, or each.
    """
    if labels.ndim == 1:
        smoothing = _smoothing(scores.max(1) > scores[np.arange(len(scores)), labels.astype(np.int64)])
        return np.array([_find_temperature(lambda beta: _slope(scores, labels, smoothing, beta, device))])
    return np.array([_find_temperature(_binary_slope(*each, device)) for each in zip(scores.T, labels.T, strict=True)])


def _smoothing(wrong: NDArray[np.bool_]) -> float:
    return 0.0 if wrong.any() else 1 / len(wrong)


def _find_temperature(slope: Callable[[float], float]) -> float:
    import scipy.optimize  # here, as it takes time

    low, high = (slope(math.exp(bound)) for bound in BOUNDS)
    if not low < 0 < high:
        return 1.0
    found = scipy.optimize.brentq(
        lambda at: slope(math.exp(at)), *BOUNDS, xtol=1e-8
    )  # the logarithm of 1 / temperature
    return float(f"{math.exp(-found):.6g}")


def _slope(scores: Scores, labels: Labels, smoothing: float, beta: float, device: torch.device) -> float:
    """Of the summed NLL by `beta`, 1 / temperature: logit that is expected less logit of the target."""
    total = []
    for at in _chunks(scores):
        logits = torch.from_numpy(scores[at]).to(device).double()
        of_target = logits.gather(1, torch.from_numpy(labels[at]).to(device)[:, None])[:, 0]
        # Sums along a row do not depend on the number of threads; those over rows are numpy's, which has one.
        expected = ((logits * beta).softmax(1) * logits).sum(1)
        total.append((expected - of_target.lerp(logits.mean(1), smoothing)).cpu().numpy())
    return float(np.concatenate(total).sum())


def _binary_slope(scores: Scores, labels: Labels, device: torch.device) -> Callable[[float], float]:
    if labels.min() == labels.max():
        return lambda beta: 0.0
    logits, targets = (torch.from_numpy(each.copy()).to(device).double() for each in (scores, labels))
    smoothing = _smoothing(scores * (labels - 0.5) < 0)
    targets = targets * (1 - smoothing) + smoothing / 2
    return lambda beta: float((logits * ((logits * beta).sigmoid() - targets)).cpu().numpy().sum())


def _chunks(scores: Scores) -> list[slice]:
    size = max(1, CHUNK // scores.shape[1])
    return [slice(start, start + size) for start in range(0, len(scores), size)]


# ---------------------------------------------------------------------------------------------------------------------
# Quality


def judge(
    scores: Scores,
    answers: NDArray[np.int64],
    labels: Labels,
    temperatures: NDArray[np.float64],
    device: torch.device = CPU,
) -> tuple[Quality, list[tuple[float, float, float | None]]]:
    """Quality and `Answered.rows` of probabilities; the latter [] of several labels.

    Args:
        scores, answers, labels, device: see `calibrate`.
        temperatures: of each image, float64 (N, 1) or (N, num_classes).
    """
    is_multilabel = labels.ndim == 2
    columns = scores.shape[1] if is_multilabel else 1
    sums = np.zeros((3, columns * NUM_BINS))  # of each bin: answers, their probabilities, how many are right
    losses, errors, answered = [], [], Answered(THRESHOLDS)
    for at in _chunks(scores):
        loss, error, confidences, right = _compare(
            *(torch.from_numpy(each[at]).to(device) for each in (scores, answers, labels, temperatures))
        )
        losses.append(loss)
        errors.append(error)
        if not is_multilabel:
            answered.update(confidences[:, 0], right[:, 0])
        bins = (np.ceil(confidences * NUM_BINS) - 1).clip(0, NUM_BINS - 1).astype(int)
        places = (bins + NUM_BINS * np.arange(columns)).ravel()
        for row, weights in zip(sums, (None, confidences.ravel(), right.ravel()), strict=True):
            row += np.bincount(places, weights, len(row))
    known = labels.any(0) if is_multilabel else np.ones(1, bool)
    count, of_bins = len(scores), sums.reshape(3, columns, NUM_BINS)
    eces = np.abs(of_bins[1] - of_bins[2]).sum(1)[known] / count
    found = Quality(
        ece=float(eces.mean()) if len(eces) else 0.0,
        nll=float(np.concatenate(losses).sum() / count),
        brier=float(np.concatenate(errors).sum() / count),
        bins=[_bin(*each) for each in of_bins.sum(1).T.tolist()],
    )
    return found, [] if is_multilabel else answered.rows()


def _compare(scores: Tensor, answers: Tensor, labels: Tensor, temperatures: Tensor) -> tuple[NDArray[Any], ...]:
    """Of images: NLL and squared distance (N,); probabilities and whether they are right (N, 1 or num_classes)."""
    logits = scores.double() / temperatures
    if labels.ndim == 2:
        targets = labels.double()
        losses = binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
        probabilities = logits.sigmoid()
        errors = (probabilities - targets).square().mean(1)
        found = losses, errors, probabilities, targets
    else:
        logs, index = logits.log_softmax(1), labels[:, None]
        probabilities = logs.exp()
        errors = probabilities.square().sum(1) - 2 * probabilities.gather(1, index)[:, 0] + 1
        likeliest = answers[:, None]
        found = -logs.gather(1, index)[:, 0], errors, probabilities.gather(1, likeliest), likeliest == index
    return tuple(each.cpu().numpy() for each in found)


def _bin(count: float, confidences: float, right: float) -> tuple[int, float, float]:
    return int(count), confidences / max(count, 1), right / max(count, 1)
