"""Brisk trains an image classifier from a folder of images, at the speed of the GPU.

    torchrun --nproc_per_node=8 train.py --data-dir /data/imagenet

The same command on a laptop's CPU, one GPU, a node of eight and many nodes; the same command again resumes. Leaves
config.json, metrics.jsonl, last.pt, best.pt and summary.json in --output-dir.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

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
from utils.data.splits.selection import hold_out_by_default, read_data, select_images
from utils.data.staging.stage import stage
from utils.distributed.elastic import report_status
from utils.distributed.group import DistEnv, process_group
from utils.distributed.launcher import read_launch
from utils.distributed.ownership import own_process
from utils.distributed.startup import print_once, show_startup
from utils.distributed.stop import StopRequest
from utils.distributed.watchdog import watchdog
from utils.inference.best import write_results
from utils.inference.evaluate import evaluate, evaluate_checkpoint
from utils.inference.mistakes import NUM_SAMPLES, check_report
from utils.network.compiler import enable_compile_cache
from utils.network.convolutions import choose_search
from utils.network.parallel import average_buffers
from utils.options.cli import TRAIN
from utils.options.config import TrainConfig
from utils.options.validation import require_tracker
from utils.progress import end_status
from utils.training.build import build, open_output, prepare_run, resolve_settings
from utils.training.optimization.optim import check_optimizer
from utils.training.preflight import check_best_by
from utils.training.run import Run
from utils.training.settings.preprocessing import adopt_arch
from utils.training.summary import log_run_summary


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
    result: dict[str, Any] = {}
    for name, network in run.state.networks().items() if run.is_evaluation_due else ():
        average_buffers(network, run.env)
        batches, normalize = run.val_batches(), run.augment.normalize
        found = evaluate(network, batches, normalize, run.num_val, run.val_targets, run.env, run.amp_dtype)
        prefix = "val/" if name == "model" else "val/ema_"
        result |= {prefix + key: value for key, value in found.items()}
    run.end_epoch(result)


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
        config = adopt_arch(hold_out_by_default(stage(config, env), env), env)
        listed = read_data(config, env)
        show_startup("preparing the run")
        opened = open_output(config, env, stack)
        saved = opened.saved
        resolved, settings = resolve_settings(config, saved, listed, env)
        check_report(resolved, listed["train"], env)  # a launch that is refused makes no folder
        prepare_run(resolved, opened, listed, env, stack)
        listed, splits = select_images(resolved, listed, env, saved.initial_files if saved else None)
        check_best_by(resolved.best_by, resolved.num_classes, splits["val"])  # which may have been held out only now
        choose_search(resolved.epochs * len(splits["train"]) // env.world_size)
        if resolved.compile:
            enable_compile_cache()
        built = build(resolved, splits, listed, env, stack, stop, saved)
        built.facts = log_run_summary(built, splits, settings, saved)
        built.augment.keep_samples(NUM_SAMPLES if resolved.report else 0)
        del saved, opened  # memory for the whole run otherwise
        if not built.is_finished():
            train(built)
            built.claim_output_dir()  # where nothing was left to train
            built.require_saved()
            write_results(built, splits, settings.cpu_threads)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    try:
        return report_status(TRAIN.run(argv, run, functools.partial(print_once, TRAIN)))
    finally:
        end_status()


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))  # so that torchrun's report has its exception
