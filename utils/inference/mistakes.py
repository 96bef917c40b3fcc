"""Which validation images a network gets wrong, and what training images look like: report.json, and the page of a run.

`--report` makes them, at the end of a run and with `--evaluate`.
"""

import contextlib
import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import shard
from utils.data.loaders.stock_loader import stock_shard
from utils.distributed.collective import collective
from utils.distributed.collectives import gather_to_rank0, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError, first_line, readable
from utils.files import atomic_write_text, json_text
from utils.inference.heatmaps import HeatMaps, draw_heatmaps
from utils.network.augment import Samples
from utils.options.resolved import ResolvedConfig
from utils.report.output_folder import read_run
from utils.report.page import PAGE, render
from utils.report.pictures import MAX_MATRIX, MAX_PAIRS, PICTURES, Pictures, encode_picture, read_pictures

NUM_WORST, NUM_SAMPLES = 24, 12
MIN_SHARE = 0.005  # of a mixed target that is named


class Wrong(NamedTuple):
    """A validation image, with the smaller picture of it that the network saw."""

    loss: float
    position: int
    target: str
    predicted: str
    probability: float
    target_probability: float
    image: Tensor
    mapped: tuple[int, ...]  # labels whose heat maps are shown, the wrong answer first


def val_indices(config: ResolvedConfig, num_images: int, env: DistEnv) -> NDArray[np.int64]:
    """The validation images of this rank, in the order in which its loader gives them."""
    split = stock_shard if config.loader == "stock" else shard
    return split(num_images, env.rank, env.world_size)


class Mistakes:
    """Predictions of one evaluation on this rank, and its images with the largest loss.

    Args:
        manifest: the validation images of all ranks.
    """

    def __init__(self, config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
        self._indices = val_indices(config, len(manifest), env)
        self._manifest, self._env = manifest, env
        self._classes = tuple(map(readable, manifest.classes))
        self._found: list[NDArray[Any]] = []  # targets and predictions, (2, N)
        self._done = 0
        self._worst: list[Wrong] = []

    def add(self, images: Tensor, logits: Tensor, predicted: Tensor, targets: Tensor) -> None:
        """The next batch, in the loader's order; waits for the device.

        Args:
            images: uint8 (N, 3, H, W).
            logits: float32 (N, num_classes); what is not finite counts as a probability of 0.
            predicted: int64 (N,), the classes that count as top-1, as half precision makes equal logits.
            targets: int64 (N,).

        Raises:
            RuntimeError: the targets are not those of the images that should come.
        """
        indices = self._next_indices(targets)
        losses = nn.functional.cross_entropy(logits, targets, reduction="none").nan_to_num(nan=math.inf)
        probabilities = logits.softmax(dim=1).nan_to_num(nan=0.0)
        self._found.append(np.stack([targets.cpu().numpy(), predicted.cpu().numpy()]))
        for at in losses.topk(min(NUM_WORST, len(losses))).indices.tolist():
            if int(predicted[at]) != int(targets[at]):
                of_target = float(probabilities[at, targets[at]])
                self._worst.append(
                    Wrong(
                        float(losses[at]), int(indices[at]), self._class(int(targets[at])),
                        self._class(int(predicted[at])), float(probabilities[at, predicted[at]]), of_target,
                        images[at].cpu(), (int(predicted[at]), int(targets[at])),
                    )
                )  # fmt: skip
        self._keep_worst()

    def _next_indices(self, targets: Tensor) -> NDArray[np.int64]:
        """The images of the next batch, whose labels these are."""
        indices = self._indices[self._done : self._done + len(targets)]
        self._done += len(targets)
        is_named = self._manifest.images is not None  # synthetic images have targets of their own
        if is_named and not np.array_equal(self._manifest.labels[indices], targets.cpu().numpy()):
            raise RuntimeError("validation images came in another order; their names would be wrong")
        return indices

    def _keep_worst(self) -> None:
        self._worst = sorted(self._worst, key=lambda wrong: -wrong.loss)[:NUM_WORST]

    @collective
    def pictures(
        self,
        source: dict[str, Any],
        train: Manifest | None = None,
        samples: Samples | None = None,
        calibration: dict[str, Any] | None = None,
        create_heatmaps: Callable[[], HeatMaps] | None = None,
    ) -> Pictures | None:
        """The content of report.json on rank 0, None on the others.

        Args:
            source: what was evaluated, as names and JSON-ready values.
            train: the training images, if this launch has trained.
            samples: some of them, if they were kept.
            calibration: see `Pictures`.
            create_heatmaps: of the network that was evaluated; called on rank 0, which draws them alone.
        """
        ranks = gather_to_rank0((self._found, self._worst), self._env)
        if ranks is None:
            return None
        classes = self._classes
        counts, correct, pairs = self._summarize([each for batches, _ in ranks for each in batches])
        worst = sorted((wrong for _, each in ranks for wrong in each), key=lambda wrong: -wrong.loss)[:NUM_WORST]
        drawn: list[list[Image.Image]] = [[]] * len(worst)
        no_heatmaps = ""
        if create_heatmaps is not None and worst:
            drawn, no_heatmaps = draw_heatmaps([(wrong.image, wrong.mapped) for wrong in worst], create_heatmaps)
        return Pictures(
            source=source,
            classes=[
                {"name": name, "count": int(count), "correct": int(right)}
                for name, count, right in zip(classes, counts, correct, strict=True)
            ],
            confused=[
                {"target": self._class(target), "predicted": self._class(predicted), "count": count}
                for (target, predicted), count in pairs.most_common(MAX_PAIRS)
            ],
            worst=[self._describe(wrong, maps) for wrong, maps in zip(worst, drawn, strict=True)],
            samples=self._describe_samples(samples) if samples is not None else [],
            confusion=self._matrix(correct, pairs),
            training={} if train is None else dict(zip(classes, map(int, train.class_counts()), strict=True)),
            calibration=calibration or {},
            no_heatmaps=no_heatmaps,
        )

    def _matrix(self, correct: NDArray[np.int64], pairs: Counter[tuple[int, int]]) -> list[list[int]]:
        """`Pictures.confusion`."""
        size = len(self._classes)
        if size > MAX_MATRIX or any(answer >= size for _, answer in pairs):  # of a head with more outputs
            return []
        found = np.diag(correct)
        for pair, count in pairs.items():
            found[pair] = count
        return list(map(list, found.tolist()))

    def _summarize(
        self, found: list[NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Counter[tuple[int, int]]]:
        """Images of each class, those that were recognized, and how often one class was taken for another."""
        labels, answers = np.concatenate(found, axis=1)
        counts = np.bincount(labels, minlength=len(self._classes))
        correct = np.bincount(labels[labels == answers], minlength=len(self._classes))
        wrong = labels != answers
        return counts, correct, Counter(zip(labels[wrong].tolist(), answers[wrong].tolist(), strict=True))

    def _label(self, label: int) -> str:
        """What a target says, for people."""
        return self._class(label)

    def _class(self, label: int) -> str:
        names = self._classes
        return names[label] if label < len(names) else f"output {label}"  # of a head with more of them

    def _describe(self, wrong: Wrong, maps: Sequence[Image.Image]) -> dict[str, Any]:
        return {
            "path": readable(self._manifest.name(wrong.position)) if self._manifest.images is not None else "",
            "target": wrong.target,
            "predicted": wrong.predicted,
            "probability": round(wrong.probability, 4),
            "target_probability": round(wrong.target_probability, 4),
            "jpeg": _encode(wrong.image),
            "heatmaps": [
                {"class": self._class(label), "jpeg": encode_picture(drawn)}
                for label, drawn in zip(wrong.mapped, maps, strict=False)  # there may be no maps
            ],
        }

    def _describe_samples(self, samples: Samples) -> list[dict[str, Any]]:
        found = []
        for before, target, after, mixed in zip(*samples, strict=True):
            is_same = (before.float() - after).abs().max() < 4  # half precision rounds
            shares = (
                []
                if mixed.dim() == 0
                else [(self._class(at), float(mixed[at])) for at in mixed.topk(min(2, len(mixed))).indices]
            )
            found.append(
                {
                    "before": _encode(before),
                    "after": "" if is_same else _encode(after.round().clamp(0, 255).byte()),
                    "target": self._label(int(target)),
                    "mixed": [(name, round(share, 3)) for name, share in shares if MIN_SHARE < share < 1 - MIN_SHARE],
                }
            )
        return found


def _encode(image: Tensor) -> str:
    """uint8 (3, H, W) -> a small JPEG file in base64."""
    return encode_picture(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()))


@collective
def check_report(config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> None:
    """With `--report`, make a page without results in a temporary folder.

    What the end of a run needs is tried at its start: the template, its packages, the names, the pictures.

    Args:
        manifest: images with the classes of the run.

    Raises:
        UserError: on all ranks: the page cannot be made, or not be written.
    """
    with sync_errors(env):
        if not env.is_main or not config.report:
            return
        for name in (PAGE, PICTURES):
            if (config.output_dir / name).is_dir():
                raise UserError(f"--report: {config.output_dir / name} is a folder, not a file to replace; move it")
        try:
            with tempfile.TemporaryDirectory() as folder:
                config.save(Path(folder, "config.json"))
                _write_page(Path(folder), _empty_pictures(manifest))
        except OSError as error:  # jinja2's, of a template that is missing, is one
            raise UserError(
                f"--report: no page can be made ({error.strerror or first_line(error)}); restore utils/report/, make "
                f"room in {tempfile.gettempdir()}, or leave --report out"
            ) from error


def _empty_pictures(manifest: Manifest) -> Pictures:
    """Of no evaluation: the classes, and one image that is black."""
    names = tuple(map(readable, manifest.classes))
    jpeg = _encode(torch.zeros(3, 8, 8, dtype=torch.uint8))
    path = readable(manifest.name(0)) if manifest.images is not None else ""
    wrong = {"path": path, "target": names[0], "predicted": names[-1], "probability": 0.0, "target_probability": 0.0}
    return Pictures(
        source={},
        classes=[{"name": name, "count": 0, "correct": 0} for name in names],
        confused=[{"target": names[0], "predicted": names[-1], "count": 0}],
        worst=[wrong | {"jpeg": jpeg, "heatmaps": [{"class": names[0], "jpeg": jpeg}]}],
        samples=[{"before": jpeg, "after": jpeg, "target": names[0], "mixed": []}],
    )


def write_page(output_dir: Path, pictures: Pictures) -> str:
    """Write report.json, and report.html where the folder holds a run; returns a line for the user.

    What is there already of the training images is kept where `pictures` has none, as of an evaluation.
    """
    with contextlib.suppress(UserError):  # of a broken one
        if not pictures.samples and (earlier := read_pictures(output_dir)) is not None:
            training = pictures.training or earlier.training
            pictures = dataclasses.replace(pictures, samples=earlier.samples, training=training)
    try:
        written = _write_page(output_dir, pictures)
    except OSError as error:
        reason = error.strerror or first_line(error)
        return f"warning: {output_dir}: no report ({reason}); --evaluate --report writes it again"
    no_maps = f", without heat maps ({pictures.no_heatmaps})" if pictures.no_heatmaps else ""
    return f"{output_dir}: {', '.join(written)}{no_maps}"


def _write_page(output_dir: Path, pictures: Pictures) -> list[str]:
    """Write both files, or one; returns their names."""
    atomic_write_text(output_dir / PICTURES, json_text(dataclasses.asdict(pictures)) + "\n")
    run = read_run(output_dir)
    if run is None:
        return [PICTURES]
    atomic_write_text(output_dir / PAGE, render([dataclasses.replace(run, is_locked=False)]))  # the lock is ours
    return [PAGE, PICTURES]
