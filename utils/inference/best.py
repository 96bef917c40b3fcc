"""The end of a run: best.pt is evaluated once more, gets its temperature, and its mistakes go to the report."""

import dataclasses
import functools
from typing import Any

import torch

from utils.data.splits.selection import Splits
from utils.distributed.collective import collective
from utils.distributed.collectives import sync_errors
from utils.errors import UserError, first_line
from utils.figures import better_network
from utils.inference.calibration import Calibration, EvaluationCalibrator
from utils.inference.evaluate import Observer, describe_source, evaluate
from utils.inference.heatmaps import HeatMaps
from utils.inference.mistakes import write_page
from utils.inference.multilabel_mistakes import create_mistakes
from utils.inference.weights import write_temperature
from utils.network.parallel import broadcast_weights
from utils.options.resolved import ResolvedConfig
from utils.report.pictures import Pictures
from utils.training.run import Run
from utils.training.state.checkpoint import BEST, Checkpoint, load
from utils.training.summary import write_summary


@dataclasses.dataclass(frozen=True)
class Judged:
    """What is known of best.pt.

    Attributes:
        figures: of its probabilities, as summary.json has them; {} where there are none, and on other ranks than 0.
        pictures: with `--report` the content of report.json on rank 0.
    """

    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    pictures: Pictures | None = None


@collective
def write_results(run: Run, splits: Splits, cpu_threads: int) -> None:
    """At the end of a run: the temperature in best.pt, summary.json, the closing lines, and with `--report` the page.

    Args:
        cpu_threads: this process's share of the machine's.

    Raises:
        RunFailed: on rank 0, if summary.json cannot be written.
        Stopped: as `judge_best`.
    """
    judged = judge_best(run, splits)
    write_summary(run, cpu_threads, judged.figures)
    if judged.pictures is not None:
        run.log.info(write_page(run.config.output_dir, judged.pictures))


@collective
def judge_best(run: Run, splits: Splits) -> Judged:
    """Evaluate the better network of best.pt, and write the temperature of its probabilities into that file.

    After the last checkpoint, as the run's model gets other weights. Targets of `--loader synthetic` mean nothing, so
    it has no temperature. A file that cannot be read or written is a warning: the run is done.

    Raises:
        Stopped: between two batches, on all ranks; the same command judges again.
    """
    env, config = run.env, run.config
    if config.loader == "synthetic" and not config.report:
        return Judged()
    try:
        with sync_errors(env):
            saved = load(config.output_dir / BEST) if env.is_main else None
    except UserError as error:
        run.log.info(f"warning: no temperature{' and no report' if config.report else ''}: {error}")
        return Judged()
    result = {key.removeprefix("val/"): value for key, value in saved.state.result.items()} if saved else {}
    name = better_network(result, config.best_by, prefix="")
    if saved:
        run.state.model.load_state_dict(saved.state.networks[name])
    if env.world_size > 1:
        broadcast_weights(run.state.model)
    val, train = splits["val"], splits["train"]
    calibrator = EvaluationCalibrator(config, len(val), run.val_targets, env)
    mistakes = create_mistakes(config, val, env) if config.report else None
    observers: list[Observer] = [calibrator, *([mistakes] if mistakes else [])]
    normalize, targets = run.augment.normalize, run.val_targets
    run.stop.enable(env)  # a launch that only writes the results has not been asked before
    evaluate(run.state.model, run.val_batches(), normalize, run.num_val, targets, env, run.amp_dtype, observers)
    run.stop.disable("after the last step")  # the fit and the pictures have no batches between which to stop
    found = calibrator.calibrate()
    if config.loader == "synthetic":
        found = None
    if saved and found:
        _keep_temperature(run, saved, name, found)
    pictures = None
    if mistakes:
        source = describe_source(result | {"checkpoint": str(config.output_dir / BEST)}, saved, config.best_by)
        create = functools.partial(_create_heatmaps, saved, name, config, env.device) if saved else None  # on rank 0
        calibration = found.to_dict() if found else {}
        pictures = mistakes.pictures(source, train, run.augment.samples, calibration, create)
    return Judged(found.figures() if found else {}, pictures)


def _create_heatmaps(saved: Checkpoint, name: str, config: ResolvedConfig, device: torch.device) -> HeatMaps:
    return HeatMaps(saved.state.networks[name], config, saved.record.normalization, device)


def _keep_temperature(run: Run, saved: Checkpoint, network: str, found: Calibration) -> None:
    run.log.info(f"{found} (each half of the validation images with the temperature of the other half)")
    try:
        write_temperature(saved, network, found.temperature)
    except (OSError, RuntimeError) as error:  # the latter from torch's writer, which hides the former
        cause = next((each for each in (error.__cause__, error.__context__) if isinstance(each, OSError)), error)
        reason = getattr(cause, "strerror", None) or first_line(cause)
        run.log.info(
            f"warning: {saved.path} has no temperature ({reason}); make room, and scripts/predict.py {saved.path} "
            "FOLDER --calibrate writes it, FOLDER has the validation images"
        )
