"""From flags to a Run: the output folder, the settings, then all that the loop holds.

Each step takes what must come before it, so that another order is a NameError. Where it does not, a comment says why.
"""

import contextlib
import dataclasses
from typing import NamedTuple

import models
import pipelines
from utils.data.loaders.sampler import create_sampler
from utils.data.loaders.settings import LoaderSettings, keeps_val_batches, with_val_batch
from utils.data.splits.selection import Splits, create_targets, initial_manifest
from utils.distributed.collective import collective
from utils.distributed.collectives import sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.startup import show_startup
from utils.distributed.stop import StopRequest
from utils.log import Log
from utils.network.augment import create_augment
from utils.network.gradients import AMP_DTYPES, capture_stream, on_stream
from utils.network.loss import create_criterion
from utils.network.parallel import create_forward_backward, distribute
from utils.network.published_weights import require_published
from utils.options.config import TrainConfig
from utils.options.resolved import ResolvedConfig
from utils.options.schedules import check_lr_schedule
from utils.report.tracking.sender import TrackerProcess
from utils.seed import seed_process, seed_weights
from utils.training.optimization.lr_schedule import create_schedule
from utils.training.optimization.optim import peak_lr
from utils.training.preflight import check_start
from utils.training.resume.compatibility import check_fingerprint, create_record, resume_warnings
from utils.training.resume.restore import (
    files_to_replace,
    inherit_start,
    open_checkpoint,
    restore,
)
from utils.training.run import Run
from utils.training.settings.autotune import choose_common_loader_settings, resolve
from utils.training.settings.batch_layout import describe_processes, layout_of
from utils.training.settings.class_weights import class_weights
from utils.training.settings.preprocessing import fill_preprocessing
from utils.training.settings.teacher import create_teacher, read_teacher
from utils.training.state.checkpoint import Checkpoint
from utils.training.state.checkpoint_writer import CheckpointWriter
from utils.training.state.output import lock_output, prepare_output
from utils.training.state.train_state import create_state


class OpenedOutput(NamedTuple):
    """The output folder at the start of a launch.

    Attributes:
        is_locked: whether other runs are kept out; not yet where there is no folder.
        saved: the checkpoint that the launch goes on from, if there is one.
    """

    is_locked: bool
    saved: Checkpoint | None


@collective
def open_output(given: TrainConfig, env: DistEnv, stack: contextlib.ExitStack) -> OpenedOutput:
    """Lock the output folder, if it is there, and read its checkpoint.

    Raises:
        UserError: on all ranks: another run holds the folder, or its checkpoint cannot be used.
    """
    # Locked first: a launch that is ending may be about to write another checkpoint.
    is_locked = lock_output(given.output_dir, env, stack)
    return OpenedOutput(is_locked, open_checkpoint(given, env))


@collective
def resolve_settings(
    given: TrainConfig, saved: Checkpoint | None, listed: Splits, env: DistEnv
) -> tuple[ResolvedConfig, LoaderSettings]:
    """What the run uses: flags, else the checkpoint's, the weights', the machine's.

    Raises:
        UserError: on all ranks: flags do not fit the checkpoint, the machine or the data.
    """
    inherited = inherit_start(given, saved)
    with sync_errors(env):
        filled, by_weights = fill_preprocessing(inherited, saved)
        if filled.pretrained == "timm" and saved is None:
            require_published(filled.arch)
    settings = choose_common_loader_settings(filled, env, saved, listed["train"])
    train = listed["train"]
    config = resolve(filled, train.classes, env, settings, saved, len(train), train.task)
    with sync_errors(env):  # with the epochs of a checkpoint, where none were given
        check_lr_schedule(dataclasses.replace(filled, epochs=config.epochs))
    reason = describe_processes(filled, layout_of(config, env.world_size))
    reasons = settings.reasons | by_weights | ({"processes": reason} if reason else {})
    return config, dataclasses.replace(settings, reasons=reasons)


@collective
def prepare_run(
    config: ResolvedConfig, opened: OpenedOutput, listed: Splits, env: DistEnv, stack: contextlib.ExitStack
) -> None:
    """Try what the run needs later, then make and lock its folder.

    Raises:
        UserError: on all ranks: something of it fails; no folder was made.
    """
    # Tried first: a launch that is refused leaves no folder behind.
    check_start(config, listed, env, opened.saved is not None)
    prepare_output(config.output_dir, env, stack)
    if not opened.is_locked:
        lock_output(config.output_dir, env, stack)


@collective
def _create_network(
    config: ResolvedConfig, env: DistEnv, classes: tuple[str, ...], saved: Checkpoint | None
) -> tuple[models.Network, ResolvedConfig]:
    """The network with its first weights, which follow from `--seed` alone, and are the same on all ranks.

    And the configuration with the color of borders, which is the mean of the network's images.
    """
    show_startup("creating the network")
    seed_weights(config.seed)  # before the network, which draws its weights from it
    network = models.create_network(config, env, classes, saved.record.normalization if saved else None)
    # After the weights, which draw as many numbers as the network wants: from here on each rank has its own.
    seed_process(config.seed, env.rank, step=0)
    return network, config.padded_with(network.normalization[0])


@collective
def build(
    config: ResolvedConfig,
    splits: Splits,
    listed: Splits,
    env: DistEnv,
    stack: contextlib.ExitStack,
    stop: StopRequest,
    saved: Checkpoint | None = None,
) -> Run:
    """Everything that the loop holds, from the checkpoint `saved` if there is one.

    `listed` are the `splits` with the files that `--bad-files skip` excludes; `stack` closes what is opened here.
    """
    train, val = splits["train"], splits["val"]
    sampler = create_sampler(config, train, env)
    replaced = files_to_replace(config, saved, env)  # refusals come before the network, which takes seconds
    trained = read_teacher(config, train.classes, env, resumes=saved is not None)
    identity = check_fingerprint(config, splits, env, saved, trained)
    network, config = _create_network(config, env, train.classes, saved)
    run_record, changed_files = create_record(config, identity, splits, listed, network.normalization, env, saved)
    state = create_state(config, network.model, env, sampler.global_batch_size)
    stream = capture_stream(env.device) if config.cuda_graph else None
    net = distribute(state.model, config, env, stream)
    peak = peak_lr(config, sampler.global_batch_size)
    schedule = create_schedule(config, state.optimizer, peak, sampler.steps_per_epoch)
    teacher, of_teacher = create_teacher(trained, config, network.normalization, env, stream, saved)
    show_startup("opening the loaders")
    val_loader = pipelines.create_val_loader(with_val_batch(config), val, env, keeps_val_batches(config, env))
    with on_stream(stream):
        restored = restore(state, net, saved, config, identity, sampler, replaced)
    first_batch = state.step * config.grad_accum_steps
    train_loader = pipelines.create_train_loader(config, train, sampler, env, first_batch, restored.loader_state)
    stack.callback(train_loader.close)
    step_parts = net, state.model, create_criterion(config, env.device, class_weights(config, train)), state.scaler
    forward_backward = create_forward_backward(config, *step_parts, env, stream, state.epoch, teacher)
    stack.callback(forward_backward.close)
    log = Log(config.output_dir, env.is_main, config.epochs, sampler.steps_per_epoch, config.tensorboard, state.step)
    stack.callback(log.close)
    # Closed backwards: the writer before the tracker, which sends what it has written, and both before the log.
    tracker = stack.enter_context(TrackerProcess(config, env.is_main, log))
    writer = stack.enter_context(CheckpointWriter(config.output_dir, env, log))
    return Run(
        config=config, env=env, state=state, forward_backward=forward_backward, schedule=schedule, sampler=sampler,
        train_loader=train_loader, val_loader=val_loader, num_val=len(val), log=log, tracker=tracker,
        augment=create_augment(config, network.normalization, create_targets(config, train, env), env),
        val_targets=create_targets(config, val, env), amp_dtype=AMP_DTYPES[config.amp], stop=stop,
        writer=writer, record=run_record, origin=network.origin, teacher=of_teacher, claim=restored.claim,
        initial={name: initial_manifest(each, run_record.excluded_files[name]) for name, each in listed.items()},
        warnings=[*changed_files, *resume_warnings(config, saved, run_record, sampler, state, splits)],
    )  # fmt: skip
