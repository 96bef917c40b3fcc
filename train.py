"""Brisk trains an image classifier from a folder of images, at the speed of the GPU.

    torchrun --nproc_per_node=8 train.py --data-dir /data/imagenet

The same command on a laptop's CPU, one GPU, a node of eight and many nodes; the same command again resumes. Leaves
config.json, metrics.jsonl, last.pt, best.pt and summary.json in --output-dir.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # before the imports that take seconds
    from utils.distributed.signals import exit_on_signals

    exit_on_signals()

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import models
import pipelines
from utils.cli import parse
from utils.config import ResolvedConfig, TrainConfig, require_data
from utils.data.batch import Batch
from utils.data.splits import Splits, check_files, describe_skipped, leave_out_bad, read_data
from utils.distributed.collectives import all_gather_object, broadcast, sync_errors
from utils.distributed.group import DistEnv, process_group
from utils.distributed.launcher import read_launch, seconds_since_launch, terminate_torchrun
from utils.distributed.ownership import own_process
from utils.distributed.signals import restore_defaults
from utils.distributed.stop import StopRequest
from utils.distributed.watchdog import watchdog
from utils.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    RunFailed,
    Stopped,
    UserError,
    escape_control_chars,
)
from utils.files import atomic_write_text
from utils.log import emit
from utils.network.augment import Normalize
from utils.network.compiler import enable_compile_cache
from utils.network.gradients import AMP_DTYPES
from utils.network.parallel import average_buffers
from utils.training.autotune import choose_common_loader_settings, resolve
from utils.training.build import create_run
from utils.training.checkpoint import lacks_best
from utils.training.evaluate import evaluate
from utils.training.optim import check_optimizer
from utils.training.output import EVALUATION, SUMMARY, lock_output, prepare_output
from utils.training.resume import keep_start, open_checkpoint, saved_normalization, settings_of_checkpoint
from utils.training.run import Run
from utils.training.state import SHARED_MODULES, TrainState
from utils.training.summary import log_run_summary

MIN_LOSS_SCALE = 1e-3  # of the loss in fp16: 26 steps that overflow, from torch's first scale
DATA_WAIT_WARNING = 0.02  # data wait above which the user is told what to do


def train_one_epoch(run: Run) -> None:
    """Train from the state's step to the end of its epoch, and save before evaluation can fail.

    Raises:
        Stopped: the ranks agreed to stop; the checkpoint is written.
    """
    state, config = run.state, run.config
    end = (state.epoch + 1) * run.sampler.steps_per_epoch
    start = end - run.sampler.steps_per_epoch
    if state.step == end:
        return  # resumed before the evaluation
    state.model.train()
    run.log.start_epoch(state.epoch, state.step)
    state.meter.start()
    while state.step < end:
        train_step(run)
        run.log.advance()
        if run.seconds_to_first_step is None:
            run.stop.enable(run.env)  # at once: a signal that finds one rank armed and not the other ends them unlike
            note_first_step(run)
            run.begin()
        if (state.step - start) % config.log_steps == 0 or state.step == end:
            log_interval(run)
        if run.stop.should_stop():
            run.save()
            raise_stopped(run)
        if state.step == end or (config.checkpoint_steps and state.step % config.checkpoint_steps == 0):
            run.save()


def train_step(run: Run) -> None:
    """One optimizer step, on as many batches as `--grad-accum-steps` says. Waits for input, not for the device."""
    state = run.state
    run.schedule.step_update(state.step)
    for micro in range(run.config.grad_accum_steps):
        with state.meter.waiting():
            batch = next(run.train_loader)
        loss = run.gradients(*run.augment(*batch), micro)
        state.meter.update(loss, len(batch.targets))
    state.meter.end_step()
    optimizer_step(run)
    state.step += 1


def optimizer_step(run: Run) -> None:
    """Clip, then update the weights and their moving average."""
    state, config = run.state, run.config
    if config.clip_grad > 0:
        state.scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.model.parameters(), config.clip_grad)
    update_weights(state)
    if state.ema is not None:
        state.ema.update(state.model, step=state.step)


def update_weights(state: TrainState) -> None:
    """The optimizer's step; of fp16, unless a gradient overflowed, which is counted without waiting for the device."""
    if not state.scaler.is_enabled():
        state.optimizer.step()
        return
    one = torch.ones((), device=state.env.device)
    scale = state.scaler.scale(one)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.meter.count_skipped(state.scaler.scale(one) < scale)


def note_first_step(run: Run) -> None:
    """Say how long it took to get going: imports, compilation, the first images."""
    if run.env.device.type == "cuda":
        torch.cuda.synchronize(run.env.device)
    run.seconds_to_first_step = seconds_since_launch()
    run.log.say(f"first step done {run.seconds_to_first_step:.1f} s after the launch")


def log_interval(run: Run) -> None:
    """Read the meter and write a line of metrics. A collective.

    Raises:
        RunFailed: the loss has not been finite for too many steps, or fp16 finds no scale for it.
    """
    interval = run.state.meter.read()
    run.log.train(
        {
            "epoch": run.state.epoch + 1,
            "step": run.state.step,
            "train/loss": interval.loss,
            "lr": run.state.optimizer.param_groups[0]["lr"],
            "images_per_second": round(interval.images_per_second, 1),
            "data_wait": round(interval.data_wait, 4),
        }
        | ({"skipped_steps": interval.skipped_steps} if run.state.scaler.is_enabled() else {})
    )
    where = f"at step {run.state.step}, lr {run.state.optimizer.param_groups[0]['lr']:.4g}"
    remedy = "lower --lr, set --clip-grad 1, or warm up longer; the last good checkpoint stands"
    if 0 < run.config.max_bad_steps <= interval.bad_steps:
        raise RunFailed(f"{where}: the loss has not been finite for {interval.bad_steps} steps in a row; {remedy}")
    if run.config.max_bad_steps and run.state.scaler.is_enabled() and run.state.scaler.get_scale() < MIN_LOSS_SCALE:
        raise RunFailed(f"{where}: fp16 gradients overflow at any scale of the loss; use --amp bf16, or {remedy}")


def raise_stopped(run: Run) -> NoReturn:
    """End the run after its checkpoint."""
    require_saved(run)
    run.log.say(f"stopped by {run.stop.reason} at step {run.state.step}; {run.again} resumes here")
    if not run.stop.by_signal:
        terminate_torchrun()
    raise Stopped


def require_saved(run: Run) -> None:
    """Raise RunFailed if the run is about to end and its last checkpoint could not be written. A collective.

    Nobody leaves before it is written: as soon as one process ends, torchrun signals the others.
    """
    last_save_error = all_gather_object(run.last_save_error, run.env)[0]
    if last_save_error is not None:
        raise RunFailed(
            f"--output-dir {run.config.output_dir}: the checkpoint of step {run.state.step} could not be written "
            f"({last_save_error}); {run.again} goes on from the one before it"
        )


def evaluate_epoch(run: Run) -> None:
    """Evaluate, note the best, and save: the end of an epoch.

    Raises:
        Stopped: the ranks agreed to stop; the checkpoint from before the evaluation stands.
    """
    state = run.state
    run.stop.enable(run.env)
    run.begin()
    result = evaluate_networks(run)
    top1 = max(result["val/top1"], result.get("val/ema_top1", 0.0))
    if broadcast(lacks_best(run.config.output_dir), run.env):
        state.best_top1 = -1.0  # resumed in another folder: its best.pt is the best of those that it has seen
    before, is_best = state.best_top1, top1 > state.best_top1
    state.epoch += 1
    state.best_top1 = max(top1, state.best_top1)
    state.result = {"epoch": state.epoch, "step": state.step} | result
    run.log.evaluation(state.result)
    run.save(is_best)
    if broadcast(run.last_save_error, run.env) is not None:
        state.best_top1 = before  # what best.pt has, and the next epoch is to be compared with


def evaluate_networks(run: Run) -> dict[str, Any]:
    """Evaluate the model and its moving average over all ranks: the keys `val/...` of metrics.jsonl."""
    result: dict[str, Any] = {}
    for name, module in run.state.modules().items():
        average_buffers(module, run.env)
        prefix = "val/" if name == "model" else "val/ema_"
        found = evaluate(module, val_batches(run), run.augment.normalize, run.num_val, run.env, run.amp_dtype)
        result |= {prefix + key: value for key, value in found.items()}
    return result


def val_batches(run: Run) -> Iterator[Batch]:
    """This rank's validation images, once.

    Raises:
        Stopped: between two batches, on all ranks.
    """
    batches = iter(run.val_loader)
    of_a_rank = math.ceil(run.num_val / run.env.world_size)  # at most; others have one less
    for _ in range(math.ceil(of_a_rank / run.config.batch_size)):
        batch = next(batches, None)
        if batch is not None:
            yield batch
        if run.stop.should_stop():
            raise_stopped(run)


def evaluate_checkpoint(
    config: ResolvedConfig, splits: Splits, env: DistEnv, path: Path | None, saved: dict[str, Any], notes: list[str]
) -> None:
    """`--evaluate`: the networks of a checkpoint, or pretrained weights, on val/; writes evaluation.json.

    Raises:
        UserError: on all ranks, if the weights do not fit the data or the flags.
    """
    val = splits["val"]
    if saved and saved["classes"] != list(val.classes):
        raise UserError(
            f"--data-dir {config.data_dir}: its classes are not those of {path}, labels would mean something else; "
            "give the data set that it was trained on",
            on_all_ranks=True,
        )
    model, normalization, origin, note = models.create_network(config, env, val.classes, saved_normalization(saved))
    normalize = Normalize(*normalization, dtype=AMP_DTYPES[config.amp], device=env.device)
    loader = pipelines.create_val_loader(config, val, env)
    result: dict[str, Any] = {"checkpoint": str(path) if path else f"pretrained {config.pretrained}"}
    result |= {} if path else {"weights": origin}
    result |= {"image_size": config.image_size, "val_resize": config.val_resize}
    for name in SHARED_MODULES if saved else SHARED_MODULES[:1]:
        if saved and name not in saved:
            continue
        if saved:
            load_weights(model, saved, name, config)
        found = evaluate(model, loader, normalize, len(val), env, AMP_DTYPES[config.amp])
        result |= {("" if name == "model" else "ema_") + key: value for key, value in found.items()}
    if env.is_main:
        if skipped := describe_skipped(config, splits):
            emit(f"skipped {skipped}")
        for line in [*notes, *([note] if note else [])]:
            emit(f"note: {line}")
        write_json(config.output_dir / EVALUATION, result)
        emit("  ".join(f"{key} {value}" for key, value in result.items()))


def load_weights(model: nn.Module, saved: dict[str, Any], name: str, config: TrainConfig) -> None:
    """Put one network of a checkpoint into `model`, or say in one line why it does not fit."""
    try:
        model.load_state_dict(saved[name])
    except RuntimeError:
        raise UserError(
            f"--num-classes {config.num_classes}: the checkpoint's head has {saved['config']['num_classes']} classes; "
            "leave --num-classes out",
            on_all_ranks=True,
        ) from None


def write_summary(run: Run) -> None:
    """summary.json and the closing lines.

    Raises:
        RunFailed: on rank 0, if the file cannot be written.
    """
    state, config = run.state, run.config
    totals = state.meter.totals
    summary = {
        "top1": state.result["val/top1"],
        "top5": state.result["val/top5"],
        "best_top1": state.best_top1,
        "epochs": state.epoch,
        "images_per_second": round(totals.images_per_second, 1),
        "data_wait": round(totals.data_wait, 4),
        "timed_steps": totals.steps,
        "seconds": round(state.seconds, 2),
        "world_size": run.env.world_size,
        "arch": config.arch,
    }
    if state.ema is not None:
        summary |= {"ema_top1": state.result["val/ema_top1"], "ema_top5": state.result["val/ema_top5"]}
    if run.env.is_main:
        try:
            write_json(config.output_dir / SUMMARY, summary)
        except OSError as error:
            raise RunFailed(
                f"--output-dir {config.output_dir}: {SUMMARY} could not be written ({error.strerror}); {run.again} "
                "tries again"
            ) from error
    run.log.say(
        f"top-1 {summary['top1']:.2f} %  top-5 {summary['top5']:.2f} %  best top-1 {summary['best_top1']:.2f} %  "
        f"{state.seconds:.0f} s  {totals.images_per_second:,.0f} images/s\n"
        f"{describe_wait(totals.data_wait, config)}\n"
        f"{describe_timed(totals.steps, state.step)}"
        f"{describe_overflows(state)}"
        f"{config.output_dir}: {SUMMARY}, metrics.jsonl, best.pt, last.pt"
    )


def describe_wait(data_wait: float, config: TrainConfig) -> str:
    """A sentence on the share of time, 0 to 1, in which the device had nothing to do; advice where it is worth it."""
    sentence = f"data wait {data_wait:.1%}: the device had nothing to do for that share of the time, as input was late"
    if data_wait <= DATA_WAIT_WARNING or config.loader == "synthetic":
        return sentence
    where = f"scripts/benchmark.py --data-dir {config.data_dir} --arch {config.arch}"
    return f"{sentence}; {where} finds what limits it; more --workers (now {config.workers}) help where the CPU does"


def describe_timed(timed: int, steps: int) -> str:
    """A line on how many of the run's steps images/s and data wait cover; nothing if all."""
    if timed == steps:
        return ""
    return (
        f"images/s and data wait cover {timed:,} of {steps:,} steps: not each launch's first, in which buffers grow\n"
    )


def describe_overflows(state: TrainState) -> str:
    """A line on the steps that fp16 skipped; nothing if there were none."""
    skipped = state.meter.skipped_steps
    return f"fp16 skipped {skipped:,} of {state.step:,} steps, whose gradients overflowed\n" if skipped else ""


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file that is whole or not there; JSON has null for what is not finite."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    atomic_write_text(path, json.dumps(finite, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def processes(config: TrainConfig) -> Iterator[tuple[DistEnv, contextlib.ExitStack, StopRequest]]:
    """All processes of a run, who stop together, and a stack that is closed at its end."""
    device = own_process(config.device, None if config.evaluate else config.deterministic)
    with (
        process_group(device, config.timeout, print_error) as env,
        contextlib.ExitStack() as stack,
        env.guard(print_error),
        watchdog(env, print_error),
    ):
        stop = StopRequest(config.time_limit, env.monitor)
        stack.enter_context(stop.handling_signals())
        yield env, stack, stop


def evaluate_only(config: TrainConfig) -> None:
    """`--evaluate`: what was not given is as in the checkpoint.

    Raises:
        UserError: flags, data or the checkpoint do not fit.
    """
    with processes(config) as (env, _, _):
        path, saved = open_checkpoint(config, env)
        notes: list[str] = []
        with sync_errors(env):
            if saved:
                config, notes = settings_of_checkpoint(config, saved["config"], path or "", env)
            elif config.pretrained not in (None, "timm"):
                weights = models.read_weights(Path(config.pretrained or ""), config.pretrained_ema)
                if weights.settings is not None:
                    config, notes = settings_of_checkpoint(config, weights.settings, weights.source, env)
            require_data(config)
            splits = read_data(config)
        feed = choose_common_loader_settings(config, env, saved, splits["val"])
        resolved = resolve(config, splits["val"].classes, env, feed, saved)
        check_files(resolved, splits, env)
        prepare_output(resolved, env)
        splits = leave_out_bad(resolved, splits, env, saved)
        evaluate_checkpoint(resolved, splits, env, path, saved, notes)


def train(config: TrainConfig) -> None:
    """The whole run, from the folder of images to the summary.

    Raises:
        UserError: flags, data or a checkpoint do not fit; nothing was written over.
        Stopped: a signal came; the checkpoint is written.
    """
    started = time.perf_counter()
    check_optimizer(config.optimizer, read_launch().world_size)
    models.check_arch(config.arch)
    listed = read_data(config)
    with processes(config) as (env, stack, stop):
        # Before the checkpoint is read: a launch that is ending may be about to write another.
        locked = lock_output(config, env, stack)
        path, saved = open_checkpoint(config, env)
        config = keep_start(config, path, saved)
        feed = choose_common_loader_settings(config, env, saved, listed["train"])
        resolved = resolve(config, listed["train"].classes, env, feed, saved)
        check_files(resolved, listed, env)
        prepare_output(resolved, env)
        if not locked:
            lock_output(resolved, env, stack)
        splits = leave_out_bad(resolved, listed, env, saved)
        if resolved.compile:
            enable_compile_cache()
        run = create_run(resolved, splits, listed, env, stack, stop, started, path, saved)
        del saved  # memory for the whole run otherwise
        log_run_summary(run, splits, feed)
        if run.state.epoch >= resolved.epochs and broadcast(os.path.isfile(resolved.output_dir / SUMMARY), env):
            return
        while run.state.epoch < resolved.epochs:
            train_one_epoch(run)
            evaluate_epoch(run)
            if run.state.epoch < resolved.epochs and run.stop.should_stop():
                raise_stopped(run)
            if run.seconds_to_first_step is None:  # resumed before the evaluation; now the first step compiles
                run.stop.disable()
        require_saved(run)
        write_summary(run)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    try:
        config = parse(argv)
        if config.evaluate:
            evaluate_only(config)
        else:
            train(config)
    except UserError as error:
        restore_defaults()  # torchrun ends the others with SIGTERM as soon as one has ended
        report(error)
        return EXIT_USER_ERROR
    except RunFailed as failure:
        if not failure.on_all_ranks or read_launch().rank == 0:
            print_error(str(failure))
        return EXIT_FAILED
    except Stopped:
        return EXIT_STOPPED
    return EXIT_DONE


def print_error(text: str) -> None:
    """The one line that explains a failure."""
    with contextlib.suppress(OSError):
        print(f"train.py: {escape_control_chars(text)}", file=sys.stderr, flush=True)


def report(error: UserError) -> None:
    """One line on one rank.

    Rank 0 speaks for all where they are known to meet the same error. Where they need not (a file system that only one
    machine cannot read), the others give rank 0 the time to speak and torchrun the time to end them, then speak too.
    """
    with contextlib.suppress(UserError):  # of the launch itself, which then is `error`
        if read_launch().rank != 0:
            time.sleep(5)
            if error.on_all_ranks:
                return
    print_error(str(error))


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))  # its words of an exception stand in torchrun's report
