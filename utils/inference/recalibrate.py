"""`predict.py --calibrate`: the temperature of a checkpoint, fitted on images whose classes are known."""

import contextlib
import dataclasses
import os

import numpy as np
import torch

from utils.distributed.collective import collective
from utils.distributed.collectives import sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError, first_line
from utils.files import check_writable, write_json
from utils.inference.calibration import Calibration, Calibrator
from utils.inference.evaluate import compute_logits
from utils.inference.inputs import NO_TARGET
from utils.inference.predictions import CALIBRATION, PredictOptions
from utils.inference.predictor import Predictor, create_predictor
from utils.inference.sources import list_images, resolve_config
from utils.inference.weights import choose_network, open_best_checkpoint, write_temperature
from utils.log import emit
from utils.progress import end_status, show_status, with_bar
from utils.text import count
from utils.training.state.checkpoint import EARLIER, LAST, Checkpoint
from utils.training.state.output import lock_output, prepare_output


@collective
def recalibrate(options: PredictOptions, env: DistEnv, stack: contextlib.ExitStack) -> None:
    """Fit the temperature, and write it into the checkpoint.

    Raises:
        UserError: on all ranks: as `utils.inference.predict.predict`, the checkpoint cannot get a temperature, or there
            are fewer than two images of known class.
    """
    saved = open_best_checkpoint(options.checkpoint, env)
    assert saved.path is not None, "read from a file"
    folder, out = saved.path.parent, options.output_dir
    with sync_errors(env):
        _check(options, saved, env)
    if out is not None:
        prepare_output(out, env, stack, (CALIBRATION,))
        lock_output(out, env, stack)
    if out is None or not os.path.samefile(folder, out):
        lock_output(folder, env, stack)  # a run would replace its best.pt
    show_status("listing the images")
    manifest, _ = list_images(options, saved.record.classes, env)
    known = int((manifest.labels != NO_TARGET).sum())
    if known < 2:
        raise UserError(
            f"--calibrate: needs two images whose class is known, and found {known}; give validation images in folders "
            f"with the names of the classes, such as {saved.record.classes[0]}/",
            on_all_ranks=True,
        )
    show_status("preparing the network")
    config = resolve_config(options, saved, manifest, env)
    network = choose_network(saved, options.ema)
    without = dataclasses.replace(saved, temperature={})  # what is wrong there is replaced
    predictor = create_predictor(config, without, network, options, manifest, env)
    end_status()
    found, num_bad = _calibrate(predictor, env)
    with sync_errors(env):
        if env.is_main:
            if found is None:
                raise UserError(
                    f"--calibrate: {saved.path} gives logits that are not finite, or fewer than two images can be "
                    "read; give another checkpoint, or other images"
                )
            _write(found, num_bad, options, saved, network)


def _check(options: PredictOptions, saved: Checkpoint, env: DistEnv) -> None:
    """Refuse a checkpoint that cannot get a temperature."""
    assert saved.path is not None, "read from a file"
    if saved.path.name in (LAST, *EARLIER):
        raise UserError(f"--calibrate: {saved.path} is what a resume reads, and stays as it is; give best.pt of a run")
    if saved.config.task == "multilabel":
        raise UserError(
            f"--calibrate: {saved.path} gives an image any number of classes, and a folder names one; train.py fits "
            "its temperatures at the end of a run, leave --calibrate out"
        )
    if env.is_main:
        try:
            check_writable(saved.path.parent)
        except UserError:
            raise UserError(
                f"--calibrate: the folder of {saved.path} cannot be written; give a copy in another one"
            ) from None


@collective
@torch.inference_mode()
def _calibrate(predictor: Predictor, env: DistEnv) -> tuple[Calibration | None, int]:
    """The calibration on rank 0, and how many images of this rank cannot be read."""
    reader, labels = predictor.reader, predictor.manifest.labels
    calibrator = Calibrator(len(labels), predictor.num_outputs, env)
    for images, pixels in with_bar(reader, "evaluating", predictor.rounds, env.is_main):
        kept = np.array([image not in reader.bad for image in images.tolist()]) & (labels[images] != NO_TARGET)
        if pixels is not None and kept.any():
            logits = compute_logits(predictor.model, pixels, predictor.normalize, env, predictor.amp_dtype)
            of_kept = logits[torch.from_numpy(kept).to(logits.device)]
            calibrator.collect(
                images[kept], of_kept, of_kept.topk(1).indices[:, 0], torch.from_numpy(labels[images[kept]])
            )
    return calibrator.calibrate(), len(reader.bad)


def _write(found: Calibration, num_bad: int, options: PredictOptions, saved: Checkpoint, network: str) -> None:
    """Into the checkpoint, and into calibration.json where there is a folder for it."""
    bad = f", {num_bad:,} cannot be read" if num_bad else ""
    emit(
        f"{saved.path}: {count(found.count, 'image')}{bad}; each half with the temperature of the other half:\n{found}"
    )
    try:
        write_temperature(saved, network, found.temperature)
        if options.output_dir is not None:
            write_json(options.output_dir / CALIBRATION, found.figures() | {"count": found.count})
    except (OSError, RuntimeError) as error:  # the latter from torch's writer, which hides the former
        raise UserError(
            f"--calibrate: {saved.path} or {CALIBRATION} cannot be written ({first_line(error)}); make room there"
        ) from None
