"""Building a run from config, data and checkpoint."""

import contextlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import models
import pipelines
from models import Network
from utils.config import ResolvedConfig
from utils.data.dali import DALI_VERSION
from utils.data.manifest import Manifest
from utils.data.sampler import Sampler
from utils.data.splits import Splits
from utils.distributed.collectives import broadcast
from utils.distributed.group import DistEnv
from utils.distributed.stop import StopRequest
from utils.errors import UserError
from utils.log import Log
from utils.network.augment import BatchAugment, Normalize
from utils.network.gradients import AMP_DTYPES, ForwardBackward, GraphedForwardBackward, capture_stream, on_stream
from utils.network.parallel import FlatAllReduce, distribute, exchanges_by_ddp
from utils.seed import seed_process, seed_weights
from utils.training import checkpoint
from utils.training.batch_layout import layout_of, saved_layout
from utils.training.checkpoint import RunRecord
from utils.training.metrics import Meter
from utils.training.optim import create_ema, create_optimizer, create_schedule
from utils.training.resume import (
    check_folder,
    check_resume,
    describe_files,
    describe_schedule_change,
    history,
    library_versions,
    restore,
    saved_normalization,
)
from utils.training.run import Run
from utils.training.state import TrainState


def create_sampler(config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> Sampler:
    """The order of the training images.

    Raises:
        UserError: fewer images than processes, or than one global batch.
    """
    sampler = Sampler(len(manifest), config.batch_size, config.grad_accum_steps, env.rank, env.world_size, config.seed)
    if len(manifest) < env.world_size:
        raise UserError(
            f"--data-dir {config.data_dir}: {len(manifest)} training images for {env.world_size} processes; "
            f"start at most {len(manifest)}",
            on_all_ranks=True,
        )
    if sampler.steps_per_epoch == 0:
        raise UserError(
            f"--batch-size {config.batch_size}: {env.world_size} processes x {config.batch_size} images x "
            f"{config.grad_accum_steps} batches is a global batch of {sampler.global_batch_size}, more than the "
            f"{len(manifest)} training images; lower it",
            on_all_ranks=True,
        )
    return sampler


def create_gradients(
    config: ResolvedConfig, net: nn.Module, state: TrainState, stream: torch.cuda.Stream | None
) -> ForwardBackward | GraphedForwardBackward:
    """What a step does with a batch; with a `stream` to record on, as a CUDA graph."""
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    exchange = None
    if state.env.world_size > 1 and not exchanges_by_ddp(config, state.env):
        dtype = torch.bfloat16 if config.grad_compression == "bf16" else torch.float32
        exchange = FlatAllReduce(state.model.parameters(), dtype)
    gradients = ForwardBackward(net, criterion, state.scaler, AMP_DTYPES[config.amp], config.grad_accum_steps, exchange)
    return gradients if stream is None else GraphedForwardBackward(gradients, stream)


def create_state(
    config: ResolvedConfig,
    sampler: Sampler,
    env: DistEnv,
    started: float,
    classes: Sequence[str],
    saved: dict[str, Any],
) -> tuple[TrainState, Network]:
    """Everything that a checkpoint keeps, as it is before the first step, and its network."""
    seed_weights(config.seed)
    network = models.create_network(config, env, classes, saved_normalization(saved))
    model = network.model
    seed_process(config.seed, env.rank, step=0)
    state = TrainState(
        model=model,
        optimizer=create_optimizer(config, model, sampler.global_batch_size),
        scaler=GradScaler(env.device.type, enabled=config.amp == "fp16"),
        ema=create_ema(model, config.ema_decay) if config.ema_decay > 0 else None,
        meter=Meter(env),
        env=env,
        started=started,
    )
    return state, network


def create_run(
    config: ResolvedConfig,
    splits: Splits,
    listed: Splits,
    env: DistEnv,
    stack: contextlib.ExitStack,
    stop: StopRequest,
    started: float,
    path: Path | None,
    saved: dict[str, Any],
) -> Run:
    """Build everything from the network to the loaders, from the checkpoint if there is one. A collective.

    Args:
        config: resolved.
        splits: what is trained and evaluated on.
        listed: the same with the files that `--bad-files skip` has left out.
        env: this process.
        stack: closes what was opened.
        stop: not armed.
        started: `time.perf_counter()` at the launch.
        path, saved: of `open_checkpoint`.

    Raises:
        UserError: on all ranks, for a checkpoint or a data set that does not fit.
    """
    train, val = splits["train"], splits["val"]
    sampler = create_sampler(config, train, env)
    fingerprint = checkpoint.fingerprint(config, train, val, env, DALI_VERSION)
    replaced: list[Path] = check_folder(config, path, saved, env)
    if path is not None:
        check_resume(path, saved, fingerprint, config, env)
    excluded_files = (
        saved["excluded_files"] if saved else {split: sorted(manifest.bad) for split, manifest in splits.items()}
    )
    files, changed = describe_files(config, listed, excluded_files, path, saved, env)
    state, network = create_state(config, sampler, env, started, train.classes, saved)
    record = RunRecord(
        run=saved["run"] if saved else broadcast(uuid.uuid4().hex, env),
        fingerprint=fingerprint,
        classes=train.classes,
        normalization=network.normalization,
        excluded_files=excluded_files,
        files=files,
        versions=library_versions(),
    )
    stream = capture_stream(env.device) if config.cuda_graph else None
    net = distribute(state.model, config, env, stream)
    schedule = create_schedule(config, state.optimizer, sampler.steps_per_epoch)
    val_loader = pipelines.create_val_loader(config, val, env)
    with on_stream(stream):
        loader_state = restore(state, net, saved, config)
    first_batch = state.step * config.grad_accum_steps
    train_loader = pipelines.create_train_loader(config, train, sampler, env, first_batch, loader_state)
    stack.callback(train_loader.close)
    gradients = create_gradients(config, net, state, stream)
    stack.callback(gradients.close)
    log = Log(config.output_dir, env.is_main, config.epochs, sampler.steps_per_epoch, config.tensorboard, state.step)
    stack.callback(log.close)
    before = saved_layout(saved) if saved else None
    normalize = Normalize(*network.normalization, dtype=AMP_DTYPES[config.amp], device=env.device)
    warnings = []
    if saved:
        warnings = [*changed, *checkpoint.version_changes(saved["versions"], record.versions)]
        warnings += describe_schedule_change(config, path, saved, sampler)
    return Run(
        config=config,
        env=env,
        state=state,
        gradients=gradients,
        schedule=schedule,
        sampler=sampler,
        train_loader=train_loader,
        val_loader=val_loader,
        num_val=len(val),
        augment=BatchAugment(config, normalize, config.num_classes or 0, env.device),
        amp_dtype=AMP_DTYPES[config.amp],
        record=record,
        origin=f"from {path}" if saved else network.origin,
        changes=checkpoint.changes(saved["config"], config, env.world_size) if saved else [],
        warnings=warnings,
        shared_before=before if before != layout_of(config, env.world_size) else None,
        log=log,
        stop=stop,
        kept=history(path, saved, config, state),
        replaced=replaced,
    )
