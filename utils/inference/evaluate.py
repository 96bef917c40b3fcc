"""Exact evaluation: every validation image counts once, on any number of ranks and at any batch size; `--evaluate`."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import models
import pipelines
from utils.data.images.manifest import Manifest
from utils.data.splits.selection import (
    check_files,
    create_targets,
    describe_exclusions,
    hold_out_by_default,
    read_data,
    select_images,
)
from utils.data.staging.stage import stage
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, all_reduce_sum, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.shared_memory import check_shared_memory
from utils.errors import UserError
from utils.figures import better_network, figure
from utils.files import write_json
from utils.inference.calibration import EvaluationCalibrator
from utils.inference.heatmaps import HeatMaps
from utils.inference.metrics import EVAL_METRICS, EvalMetric
from utils.inference.mistakes import Mistakes, check_report, val_indices, write_page
from utils.inference.multilabel import MULTILABEL_METRICS
from utils.inference.multilabel_mistakes import create_mistakes
from utils.inference.real_labels import RealAccuracy, read_real_labels
from utils.log import emit
from utils.network.augment import Normalize
from utils.network.gradients import AMP_DTYPES
from utils.network.published_weights import published_weights, require_published
from utils.network.weight_files import read_weights
from utils.options.config import TrainConfig
from utils.options.flags import flag
from utils.options.resolved import ResolvedConfig
from utils.options.validation import require_data
from utils.progress import show_status, with_bar
from utils.report.pictures import Pictures
from utils.targets import Targets
from utils.text import count, describe_alike
from utils.training.resume.restore import open_checkpoint, settings_of_checkpoint
from utils.training.settings.autotune import choose_common_loader_settings, resolve
from utils.training.settings.preprocessing import adopt_arch, fill_preprocessing
from utils.training.state.checkpoint import Checkpoint
from utils.training.state.output import EVALUATION, prepare_output
from utils.training.state.train_state import NETWORKS


def start_evaluation(model: nn.Module) -> None:
    """Put a network that has just got its weights into evaluation mode."""
    # Until train() is called, timm before 1.0.30 keeps attention biases of an earlier evaluation, of other weights.
    model.train()
    model.eval()


def compute_logits(
    model: nn.Module,
    images: Tensor,
    normalize: Callable[[Tensor], Tensor],
    env: DistEnv,
    amp_dtype: torch.dtype,
) -> Tensor:
    """Logits float32 (N, num_classes) of uint8 images (N, 3, H, W); the arguments are those of `evaluate`.

    Images that together need more memory than the GPU has left are computed in parts.

    Raises:
        torch.OutOfMemoryError: one image needs more.
    """
    with contextlib.suppress(torch.OutOfMemoryError) if len(images) > 1 else contextlib.nullcontext():
        with torch.autocast(env.device.type, dtype=amp_dtype, enabled=amp_dtype != torch.float32):
            logits: Tensor = model(normalize(images))
        return logits.float()
    # Here, where the exception and what it kept alive are gone.
    return torch.cat([compute_logits(model, part, normalize, env, amp_dtype) for part in images.chunk(2)])


class FlipAverage(nn.Module):
    """A network whose logits are the mean of those of an image and of its mirror image: float32 (N, num_classes)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        both: Tensor = self.model(images).float() + self.model(images.flip(-1)).float()
        return both / 2


class PresentClasses(nn.Module):
    """A network that answers with classes of `labels` only: other logits are -inf."""

    def __init__(self, model: nn.Module, labels: NDArray[np.int64], num_classes: int, device: torch.device) -> None:
        super().__init__()
        self.model = model
        absent = np.bincount(labels, minlength=num_classes) == 0
        self.absent = torch.from_numpy(absent).to(device)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        return logits.float().masked_fill(self.absent, -torch.inf)


class Observer(Protocol):
    """What gets all predictions of an evaluation on this rank."""

    def add(self, images: Tensor, logits: Tensor, predicted: Tensor, labels: Tensor, /) -> None:
        """The next batch, in the loader's order.

        Args:
            images: uint8 (N, 3, H, W).
            logits: float32 (N, num_classes).
            predicted: int64 (N,), the classes that count as top-1.
            labels: int64 (N,), not yet targets.
        """


@collective
@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    normalize: Callable[[Tensor], Tensor],
    num_images: int,
    targets: Targets,
    env: DistEnv,
    amp_dtype: torch.dtype,
    observers: Iterable[Observer] = (),
    own: Sequence[EvalMetric] = (),
) -> dict[str, Any]:
    """The figures of the task's metrics, and of those in `own`, of `model` over all ranks' `batches`.

    A figure follows from the images of all ranks, as a mean of means weighs images unequally. A rank may have none.

    Args:
        model: maps images (N, 3, H, W) to logits (N, num_classes); neither compiled nor wrapped, as batches differ
            in size and a rank may have none.
        batches: this rank's uint8 images (N, 3, H, W) and int64 labels (N,) on `env.device`.
        normalize: uint8 images to floating point.
        num_images: validation images over all ranks.
        targets: what the labels stand for; has the number of outputs of `model`.
        amp_dtype: of the forward pass; float32 is full precision.
        observers: get all predictions.

    Returns:
        The figures by name, and `count`, the images; of any number of classes also `THRESHOLDS`, fitted on them.

    Raises:
        RuntimeError: images were lost or counted twice.
    """
    was_training = model.training
    start_evaluation(model)
    metrics, seen = [*_create_metrics(targets, env), *own], 0
    for images, labels in batches:
        if len(labels) == 0:
            continue
        logits = compute_logits(model, images, normalize, env, amp_dtype)
        predicted = logits.topk(min(5, logits.shape[1]), dim=1).indices
        for metric in metrics:
            metric.update(logits, predicted, targets(labels))
        seen += len(labels)
        for observer in observers:
            observer.add(images, logits, predicted[:, 0], labels)
    model.train(was_training)
    count, states = _combine(seen, metrics, env)
    if count != num_images:
        raise RuntimeError(f"evaluation saw {count} of {num_images} validation images; its result would be wrong")
    found = [metric.compute(state, num_images) for metric, state in zip(metrics, states, strict=True)]
    return {name: value for each in found for name, value in each.items()} | {"count": num_images}


def _create_metrics(targets: Targets, env: DistEnv) -> list[EvalMetric]:
    kinds = EVAL_METRICS if targets.task == "multiclass" else MULTILABEL_METRICS
    return [kind(targets.num_classes, env.device) for kind in kinds]


@collective
def _combine(seen: int, metrics: Sequence[EvalMetric], env: DistEnv) -> tuple[int, list[Tensor]]:
    """Images seen by all ranks, and each metric's state of all ranks, float64 on the CPU."""
    summed = [torch.tensor(float(seen)), *(each.state for each in metrics if each.reduce == "sum")]
    parts = [state.to(env.device, torch.float64).flatten() for state in summed]
    count, *sums = torch.split(all_reduce_sum(torch.cat(parts)).cpu(), [part.numel() for part in parts])  # one exchange
    rows = all_gather_object([each.state.cpu() for each in metrics if each.reduce == "cat"], env)
    left, joined = iter(sums), map(torch.cat, zip(*rows, strict=True))
    states = [next(left).view(each.state.shape) if each.reduce == "sum" else next(joined) for each in metrics]
    return int(count), states


class _Reported(NamedTuple):
    """What `--report` says of one network."""

    mistakes: Mistakes
    calibrator: EvaluationCalibrator
    create_heatmaps: Callable[[], HeatMaps]


@collective
def evaluate_checkpoint(config: TrainConfig, env: DistEnv) -> None:
    """`--evaluate`: the networks of a checkpoint, or pretrained weights, on val; writes evaluation.json.

    What was not given is as in the checkpoint.

    Raises:
        UserError: on all ranks: flags, data or the weights do not fit.
    """
    show_status("preparing the evaluation")
    config = adopt_arch(config, env)
    saved = open_checkpoint(config, env)
    notes: list[str] = []
    classes: tuple[str, ...] | None = None
    with sync_errors(env):
        if saved:
            config, notes = settings_of_checkpoint(config, saved.config, saved.path or "", env)
            classes = saved.record.classes
        else:
            config, notes, classes = _settings_of_weights(config, env)
        require_data(config)
    config = hold_out_by_default(stage(config, env), env)
    listed = {
        split: manifest.numbered_as(classes)
        if classes and manifest.images is not None and {*manifest.classes} < {*classes}
        else manifest
        for split, manifest in read_data(config, env).items()
    }
    manifest = next(iter(listed.values()))  # of train, if a part of it is held out
    settings = choose_common_loader_settings(config, env, saved, manifest)
    resolved = resolve(config, manifest.classes, env, settings, saved, task=manifest.task)
    check_files(listed, resolved.data_dir, env)
    prepare_output(resolved.output_dir, env)
    check_report(resolved, manifest, env)
    _, splits = select_images(resolved, listed, env, saved.initial_files if saved else None)
    check_shared_memory(resolved, len(splits["val"]), env)
    with sync_errors(env):
        answers = None
        if resolved.real_labels:
            answers = read_real_labels(resolved.real_labels, splits["val"], resolved.num_classes)
    result, note, observers = _evaluate_networks(resolved, splits["val"], env, saved, answers)
    pictures = _pictures(observers, describe_source(result, saved, resolved.best_by)) if observers else None
    if env.is_main:
        if skipped := describe_exclusions(splits, resolved.output_dir):
            emit(f"skipped {skipped}")
        for line in [*notes, *([note] if note else [])]:
            emit(f"note: {line}")
        write_json(config.output_dir / EVALUATION, result)
        emit(describe_result(result, result.get("eval_classes", resolved.num_classes)))
        if pictures is not None:
            emit(write_page(resolved.output_dir, pictures))


def _settings_of_weights(config: TrainConfig, env: DistEnv) -> tuple[TrainConfig, list[str], tuple[str, ...] | None]:
    """What was not given is as the weights of `--pretrained` want it; also notes on that, and their classes."""
    published = config.pretrained in (None, "timm")
    weights = published_weights(config.arch) if published else read_weights(Path(config.pretrained or ""))
    if weights.settings is not None:
        before = TrainConfig.from_dict(weights.settings)
        return *settings_of_checkpoint(config, before, weights.source, env), weights.classes
    config, sources = fill_preprocessing(config, None)
    if config.pretrained == "timm":
        require_published(config.arch)
    names = [name for name in sources if name != "pretrained"]
    chosen = ", ".join(f"{flag(name)} {getattr(config, name)}" for name in names)
    return config, [f"{chosen}: {sources[names[-1]]}"] if chosen else [], weights.classes


@collective
def _pictures(reported: _Reported, source: dict[str, Any]) -> Pictures | None:
    found = reported.calibrator.calibrate()
    calibration = found.to_dict() if found else {}
    return reported.mistakes.pictures(source, calibration=calibration, create_heatmaps=reported.create_heatmaps)


def describe_result(result: Mapping[str, Any], num_classes: int) -> str:
    """One line of an evaluation's keys and values, without those that say nothing of so few classes."""
    names = {key: key.removeprefix("ema_").removeprefix("real_") for key in result}
    shown = {key: value for key, value in result.items() if num_classes >= figure(names[key]).min_classes}
    return "  ".join(f"{key} {_shown(key, value)}" for key, value in shown.items() if not isinstance(value, list))


def _shown(key: str, value: Any) -> str:
    digits = 4 if key.endswith("loss") else 2
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


@collective
def _evaluate_networks(
    config: ResolvedConfig, val: Manifest, env: DistEnv, saved: Checkpoint | None, answers: NDArray[np.bool_] | None
) -> tuple[dict[str, Any], str, _Reported | None]:
    """The content of evaluation.json, a note on what pretrained weights leave open ("" for none), and `--report`'s.

    `answers` are the labels of `--real-labels`, of all images.
    """
    if saved and saved.record.classes != val.classes:
        raise UserError(
            f"--data-dir {config.data_dir}: its classes are not those of {saved.path}, labels would mean something "
            f"else; {describe_alike(val.classes, saved.record.classes) or 'give the data set that it was trained on'}",
            on_all_ranks=True,
        )
    network = models.create_network(config, env, val.classes, saved.record.normalization if saved else None)
    amp_dtype = AMP_DTYPES[config.amp]
    normalize = Normalize(*network.normalization, dtype=amp_dtype, device=env.device)
    loader = pipelines.create_val_loader(config.padded_with(network.normalization[0]), val, env)
    result: dict[str, Any] = {"checkpoint": str(saved.path) if saved else f"pretrained {config.pretrained}"}
    result |= {} if saved else {"weights": network.origin}
    result |= {"image_size": config.val_image_size, "val_resize": config.val_resize}
    result |= {"val_crop": config.val_crop, "interpolation": config.val_interpolation}
    result |= {"eval_flip": True} if config.eval_flip else {}
    model = FlipAverage(network.model) if config.eval_flip else network.model
    if config.eval_classes == "present":
        model = PresentClasses(model, val.labels, config.num_classes, env.device)
        result["eval_classes"] = int(torch.count_nonzero(~model.absent))
    targets = create_targets(config, val, env)
    own = None if answers is None else torch.from_numpy(answers[val_indices(config, len(val), env)])
    reported: dict[str, _Reported] = {}
    for name in saved.state.networks if saved else NETWORKS[:1]:
        if saved:
            load_network(network.model, saved, name, config)
        batches = with_bar(loader, "evaluating", -(-len(val) // (env.world_size * config.batch_size)), env.is_main)
        if config.report:
            weights = saved.state.networks[name] if saved else network.model.state_dict()
            reported[name] = _Reported(
                create_mistakes(config, val, env),
                EvaluationCalibrator(config, len(val), targets, env),
                functools.partial(HeatMaps, weights, config, network.normalization, env.device),
            )
        real = [] if own is None else [RealAccuracy(own, env.device)]
        observers = reported[name][:2] if config.report else ()
        found = evaluate(model, batches, normalize, len(val), targets, env, amp_dtype, observers, real)
        result |= {("" if name == "model" else "ema_") + key: value for key, value in found.items()}
    return result, network.note, reported.get(better_network(result, config.best_by, prefix=""))


def load_network(model: nn.Module, saved: Checkpoint, name: str, config: ResolvedConfig) -> None:
    """Load the weights of the network `name` of a checkpoint.

    Raises:
        UserError: on all ranks: the head is of another size, or the weights are of another architecture.
    """
    try:
        model.load_state_dict(saved.state.networks[name])
    except RuntimeError:
        if config.num_classes == saved.config.num_classes:
            raise UserError(
                f"{saved.path}: its weights do not fit {config.arch} with {count(config.num_classes, 'class')}; give "
                "another file",
                on_all_ranks=True,
            ) from None
        raise UserError(
            f"--num-classes {config.num_classes}: the checkpoint's head has "
            f"{count(saved.config.num_classes, 'class')}; leave --num-classes out",
            on_all_ranks=True,
        ) from None


def describe_source(result: dict[str, Any], saved: Checkpoint | None, best_by: str) -> dict[str, Any]:
    """What report.json says of an evaluation with this `result`."""
    network = better_network(result, best_by, prefix="")
    of_network = "" if network == "model" else "ema_"
    names = dict.fromkeys(("top1", best_by))
    there = [name for name in names if of_network + name in result]  # one class has no AUC
    found = {figure(name).title: figure(name).show.format(result[of_network + name]) for name in there}
    of_epoch = {"epoch": saved.state.epoch} if saved else {}
    return {"checkpoint": result["checkpoint"]} | of_epoch | {"network": network} | found
