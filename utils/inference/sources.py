"""What comes before a prediction: the images that the sources name, and the checkpoint's configuration for them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.data.formats.index import read_shards
from utils.data.images.manifest import Manifest
from utils.distributed.collective import collective
from utils.distributed.collectives import broadcast, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.shared_memory import check_shared_memory
from utils.errors import UserError
from utils.inference.inputs import files_manifest, list_inputs, shards_manifest, split_shards
from utils.inference.predictions import PredictOptions
from utils.options.config import TrainConfig
from utils.options.resolved import ResolvedConfig
from utils.training.resume.restore import settings_of_checkpoint
from utils.training.settings.autotune import choose_common_loader_settings, resolve
from utils.training.state.checkpoint import Checkpoint


@collective
def list_images(options: PredictOptions, classes: tuple[str, ...], env: DistEnv) -> tuple[Manifest, Mapping[str, int]]:
    """The images of the sources, as rank 0 finds them, and `Inputs.ignored`."""
    inputs = None
    with sync_errors(env):
        if env.is_main:
            inputs = list_inputs(options.sources)
    inputs = broadcast(inputs, env)
    assert inputs is not None, "rank 0 has it"
    if not inputs.shards:
        return files_manifest(inputs.files, classes), inputs.ignored
    if options.output_dir is None:
        raise UserError(
            "--output-dir is missing: predictions of shards are written to files; give a folder", on_all_ranks=True
        )
    workers = options.workers or max(1, len(os.sched_getaffinity(0)) // env.local_world_size)
    groups = [
        (format, read_shards(split, format, paths, options.output_dir, workers, env))
        for format, split, paths in split_shards(inputs.shards)
    ]
    with sync_errors(env):
        manifest = shards_manifest(groups, classes)
    return manifest, inputs.ignored


@collective
def resolve_config(options: PredictOptions, saved: Checkpoint, manifest: Manifest, env: DistEnv) -> ResolvedConfig:
    """The configuration with which `--evaluate` evaluates the checkpoint."""
    values: dict[str, Any] = {"data_dir": Path(), "val_fraction": 0.0}  # not read
    # The loader takes memory for whole batches.
    values["batch_size"] = min(options.batch_size or saved.config.batch_size, len(manifest))
    if options.workers is not None:
        values["workers"] = options.workers
    if saved.config.loader in ("stock", "synthetic"):  # which have the pixels of `dali`, or none
        values["loader"] = "dali"
    config = TrainConfig(
        evaluate=True,
        eval_flip=options.eval_flip,
        device=options.device,
        given=frozenset(values),
        **values,
    )
    with sync_errors(env):
        config, _ = settings_of_checkpoint(config, saved.config, saved.path or "", env)
    settings = choose_common_loader_settings(config, env, saved, manifest)
    resolved = resolve(config, saved.record.classes, env, settings, saved, task=saved.config.task)
    check_shared_memory(resolved, len(manifest), env)
    return resolved
