"""Brisk trains an image classifier from a folder of images, at the speed of the GPU.

    torchrun --nproc_per_node=8 train.py --data-dir /data/imagenet

The same command on a laptop's CPU, one GPU, a node of eight and many nodes; the same command again resumes. Leaves
config.json, metrics.jsonl, last.pt, best.pt and summary.json in --output-dir.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence

if __name__ == "__main__":  # before the imports that take seconds
    from utils.data.formats.sources import check_source
    from utils.distributed.elastic import launch_processes
    from utils.distributed.startup import start_imports, start_program
    from utils.options.cli import TRAIN

    given = start_program(TRAIN, sys.argv[1:], check_source)
    launch_processes(given.processes, given.max_restarts, sys.argv)
    start_imports(given.device, given.deterministic)

from torch.distributed.elastic.multiprocessing.errors import record

import models
import pipelines
from utils.data.loaders.sampler import create_sampler
from utils.data.loaders.settings import LoaderSettings, keeps_val_batches, with_val_batch
from utils.data.splits.selection import Splits, initial_manifest, read_data, select_images
from utils.data.staging.stage import stage
from utils.distributed.collectives import sync_errors
from utils.distributed.elastic import report_status
from utils.distributed.group import DistEnv, process_group
from utils.distributed.launcher import read_launch
from utils.distributed.ownership import own_process
from utils.distributed.startup import print_once, show_startup
from utils.distributed.stop import StopRequest
from utils.distributed.watchdog import watchdog
from utils.inference.evaluate import evaluate, evaluate_checkpoint, report_best
from utils.inference.mistakes import NUM_SAMPLES
from utils.log import Log
from utils.network.augment import create_augment
from utils.network.compiler import enable_compile_cache
from utils.network.convolutions import choose_search
from utils.network.gradients import AMP_DTYPES, capture_stream, on_stream
from utils.network.parallel import average_buffers, create_forward_backward, distribute
from utils.options.cli import TRAIN
from utils.options.config import ResolvedConfig, TrainConfig
from utils.options.validation import require_tracker
from utils.progress import end_status
from utils.report.tracking.sender import TrackerProcess
from utils.seed import seed_process, seed_weights
from utils.training.optimization.lr_schedule import create_schedule
from utils.training.optimization.optim import check_optimizer
from utils.training.preflight import check_start
from utils.training.resume.compatibility import check_fingerprint, create_record, resume_warnings
from utils.training.resume.restore import (
    files_to_replace,
    inherit_start,
    metrics_resume_point,
    open_checkpoint,
    restore,
)
from utils.training.run import Run
from utils.training.settings.autotune import choose_common_loader_settings, resolve
from utils.training.settings.preprocessing import fill_preprocessing
from utils.training.state.checkpoint import Checkpoint
from utils.training.state.checkpoint_writer import CheckpointWriter
from utils.training.state.output import lock_output, prepare_output
from utils.training.state.train_state import create_state
from utils.training.summary import log_run_summary, write_summary


def train(run: Run) -> None:
    """Train and evaluate the epochs that are left.

    Raises:
        Stopped: a signal came, or the time is over; the checkpoint is written.
    """
    for _ in run.remaining_epochs():
        train_epoch(run)
        evaluate_epoch(run)


def train_epoch(run: Run) -> None:
    """Train to the end of the epoch."""
    for _ in run.remaining_steps():
        train_step(run)
        run.after_step()  # logs, saves, stops


def train_step(run: Run) -> None:
    """One optimizer step, on as many batches as `--grad-accum-steps` says. Waits for input, not for the device."""
    state = run.state
    run.schedule.step_update(state.step)
    for micro in range(run.config.grad_accum_steps):
        with state.meter.waiting():
            batch = next(run.train_loader)
        images, targets = run.augment(*batch)
        loss = run.forward_backward(images, targets, micro)
        state.meter.update(loss, len(batch.targets))
    state.meter.end_step()
    state.optimizer_step(run.config.clip_grad)
    state.step += 1


def evaluate_epoch(run: Run) -> None:
    """Evaluate the model and its moving average over all ranks, where that is due, and save: the end of an epoch."""
    run.begin_evaluation()
    result: dict[str, float | int] = {}
    for name, network in run.state.networks().items() if run.is_evaluation_due else ():
        average_buffers(network, run.env)
        found = evaluate(network, run.val_batches(), run.augment.normalize, run.num_val, run.env, run.amp_dtype)
        prefix = "val/" if name == "model" else "val/ema_"
        result |= {prefix + key: value for key, value in found.items()}
    run.end_epoch(result)


def build(
    config: ResolvedConfig,
    splits: Splits,
    listed: Splits,
    env: DistEnv,
    stack: contextlib.ExitStack,
    stop: StopRequest,
    saved: Checkpoint | None = None,
) -> Run:
    """Everything that the loop holds, from the checkpoint `saved` if there is one. Collective: call on every rank.

    `listed` are the `splits` with the files that `--bad-files skip` excludes; `stack` closes what is opened here.
    """
    sampler = create_sampler(config, len(splits["train"]), env)
    replaced = files_to_replace(config, saved, env)
    identity = check_fingerprint(config, splits, env, saved)

    show_startup("creating the network")
    seed_weights(config.seed)
    normalization = saved.record.normalization if saved else None
    network = models.create_network(config, env, splits["train"].classes, normalization)
    seed_process(config.seed, env.rank, step=0)
    run_record, changed_files = create_record(config, identity, splits, listed, network.normalization, env, saved)
    state = create_state(config, network.model, env, sampler.global_batch_size)
    stream = capture_stream(env.device) if config.cuda_graph else None
    net = distribute(state.model, config, env, stream)
    schedule = create_schedule(config, state.optimizer, sampler.steps_per_epoch)
    show_startup("opening the loaders")
    val_loader = pipelines.create_val_loader(with_val_batch(config), splits["val"], env, keeps_val_batches(config, env))
    with on_stream(stream):
        loader_state = restore(state, net, saved, config, identity, sampler)
    first_batch = state.step * config.grad_accum_steps
    train_loader = pipelines.create_train_loader(config, splits["train"], sampler, env, first_batch, loader_state)
    stack.callback(train_loader.close)
    forward_backward = create_forward_backward(config, net, state.model, state.scaler, env, stream, state.epoch)
    stack.callback(forward_backward.close)
    log = Log(config.output_dir, env.is_main, config.epochs, sampler.steps_per_epoch, config.tensorboard, state.step)
    stack.callback(log.close)
    tracker = stack.enter_context(TrackerProcess(config, env.is_main, log))
    writer = stack.enter_context(CheckpointWriter(config.output_dir, env, log))
    return Run(
        config=config, env=env, state=state, forward_backward=forward_backward, schedule=schedule, sampler=sampler,
        train_loader=train_loader, val_loader=val_loader, num_val=len(splits["val"]), log=log, tracker=tracker,
        augment=create_augment(config, network.normalization, env), amp_dtype=AMP_DTYPES[config.amp], stop=stop,
        writer=writer, record=run_record, origin=network.origin, replaced=replaced,
        initial={name: initial_manifest(each, run_record.excluded_files[name]) for name, each in listed.items()},
        warnings=[*changed_files, *resume_warnings(config, saved, run_record, sampler, state, splits)],
        metrics_cutoff=metrics_resume_point(state, saved, replaced, config),
    )  # fmt: skip


def open_output(
    given: TrainConfig, listed: Splits, env: DistEnv, stack: contextlib.ExitStack
) -> tuple[ResolvedConfig, LoaderSettings, Checkpoint | None]:
    """Lock the output folder, read its checkpoint, and resolve the configuration. Collective: call on every rank."""
    # Before the checkpoint is read: a launch that is ending may be about to write another.
    locked = lock_output(given.output_dir, env, stack)
    saved = open_checkpoint(given, env)
    given = inherit_start(given, saved)
    with sync_errors(env):
        given, by_weights = fill_preprocessing(given, saved)
    settings = choose_common_loader_settings(given, env, saved, listed["train"])
    settings = dataclasses.replace(settings, reasons=settings.reasons | by_weights)
    config = resolve(given, listed["train"].classes, env, settings, saved, len(listed["train"]))
    check_start(config, listed, env)
    prepare_output(config.output_dir, env, stack)
    if not locked:
        lock_output(config.output_dir, env, stack)
    return config, settings, saved


@contextlib.contextmanager
def processes(config: TrainConfig) -> Iterator[tuple[DistEnv, contextlib.ExitStack, StopRequest]]:
    """All processes of a run, which end together, and a stack that is closed at its end."""
    show_startup("joining the processes")
    device = own_process(config.device, None if config.evaluate else config.deterministic)
    with (
        process_group(device, config.timeout, TRAIN.print_error) as env,
        contextlib.ExitStack() as stack,
        env.guard(TRAIN.print_error),
        watchdog(env, TRAIN.print_error),
    ):
        stop = StopRequest(config.time_limit, env.monitor)
        stack.enter_context(stop.handling_signals())
        yield env, stack, stop


def run(config: TrainConfig) -> None:
    """Evaluate, or build and train.

    Raises:
        UserError: flags, data or a checkpoint do not fit; nothing was written over.
        RunFailed: the run cannot go on.
        Stopped: a signal came, or the time is over; the checkpoint is written.
    """
    if config.evaluate:
        with processes(config) as (env, _, _):
            evaluate_checkpoint(config, env)
        return
    check_optimizer(config.optimizer, read_launch().world_size)
    models.check_arch(config.arch)
    require_tracker(config.track)
    with processes(config) as (env, stack, stop):
        show_startup("listing the images")
        config = stage(config, env)
        listed = read_data(config, env)
        show_startup("preparing the run")
        resolved, settings, saved = open_output(config, listed, env, stack)
        listed, splits = select_images(resolved, listed, env, saved.initial_files if saved else None)
        choose_search(resolved.epochs * len(splits["train"]) // env.world_size)
        if resolved.compile:
            enable_compile_cache()
        built = build(resolved, splits, listed, env, stack, stop, saved)
        log_run_summary(built, splits, settings, saved)
        built.augment.keep_samples(NUM_SAMPLES if resolved.report else 0)
        del saved  # memory for the whole run otherwise
        if not built.is_finished():
            train(built)
            built.claim_output_dir()  # where nothing was left to train
            built.require_saved()
            write_summary(built, settings.cpu_threads)
            report_best(built, splits["val"])


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    try:
        return report_status(TRAIN.run(argv, run, functools.partial(print_once, TRAIN)))
    finally:
        end_status()


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))  # so that torchrun's report has its exception
