"""Settings that the user left open, chosen from the machine, the data and the checkpoint: given -> resolved config."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from utils.data.images.manifest import Manifest
from utils.data.loaders.cache import mean_decoded_bytes
from utils.data.loaders.settings import (
    BY_DALI,
    LoaderSettings,
    check_cache_fits,
    choose_loader_settings,
    resolve_pixels,
)
from utils.data.loaders.workers import check_sockets
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, raise_on_all_ranks, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.machine import all_pairs_nvlink, inspect_machine
from utils.errors import UserError
from utils.figures import Task
from utils.network.folding import sums_in_cudnn
from utils.options.config import TrainConfig
from utils.options.remedies import start_again
from utils.options.resolved import ResolvedConfig
from utils.options.schedules import most_epochs
from utils.options.sizes import sides_of
from utils.text import count
from utils.training.optimization.optim import has_fused, resolve_optimizer
from utils.training.settings.batch_layout import Layout, choose_batch_size
from utils.training.settings.run_length import fit_epochs
from utils.training.settings.task import resolve_task
from utils.training.state.checkpoint import Checkpoint

MIN_COMPILE_IMAGES = 250_000  # of 224 px, a process; fewer train faster than they compile (decision 32)
# timm's ResNets and ResNeXts with batch norm and without attention. Others were not measured.
FOLDED = re.compile(r"(wide_)?resne(t|xt)\d+[cdst]?(_\d+x\d+d|_2)?")
BY_WORKERS = ("proxy", "torch")  # loaders that run torch's DataLoader


@collective
def choose_common_loader_settings(
    config: TrainConfig, env: DistEnv, saved: Checkpoint | None, manifest: Manifest
) -> LoaderSettings:
    """`choose_loader_settings` with the same pixels on all ranks: as in the checkpoint `saved`, else as on rank 0.

    The decode path and the cache decide pixels, so that all ranks, and a resume on another machine, must use the same.

    Raises:
        UserError: on all ranks, if the cache does not fit on one of them, or DataLoader would hang.
    """
    with sync_errors(env):
        if config.loader in BY_WORKERS:
            check_sockets(f"workers of --loader {config.loader}")
    machine = inspect_machine(env)
    keeps = config.loader == "dali" and config.cache != "none" and not config.evaluate
    mean = mean_decoded_bytes(manifest) if config.loader in BY_DALI and not config.evaluate else 0.0
    decoded = round(len(manifest) * mean) if keeps else 0
    choice = choose_loader_settings(config, machine, decoded, mean)
    pixels, reasons = all_gather_object(({"decode": choice.decode, "cache": choice.cache}, choice.reasons), env)[0]
    if saved and not config.evaluate:
        pixels = {name: getattr(saved.config, name) for name in pixels}
        if config.train_crop != "random":  # also where the checkpoint's was
            pixels["decode"] = "full"
        reasons = dict.fromkeys(pixels, "as in the checkpoint")
    open_names = [name for name in pixels if getattr(config, name) == "auto"]
    choice = choose_loader_settings(
        dataclasses.replace(config, **{name: pixels[name] for name in open_names}),  # type: ignore[arg-type]
        machine,
        decoded,
        mean,
    )
    remedy = "use --cache none"
    if saved and "cache" in open_names:
        remedy = f"its checkpoint was trained so: resume where they fit, or {start_again(config)}"
    raise_on_all_ranks(check_cache_fits(choice.cache, machine, decoded, remedy), env)
    shown = {name: reasons[name] for name in open_names if name in reasons and config.loader in BY_DALI}
    return dataclasses.replace(choice, reasons=choice.reasons | shown)


@collective
def resolve(
    config: TrainConfig,
    classes: Sequence[str],
    env: DistEnv,
    settings: LoaderSettings,
    saved: Checkpoint | None = None,
    num_train: int | None = None,
    task: Task = "multiclass",
) -> ResolvedConfig:
    """Replace every "auto" and every absent value by what fits this machine, the data and the checkpoint.

    Args:
        config: as the user gave it.
        classes: names of the data's classes.
        saved: the checkpoint that the run goes on from, if there is one.
        num_train: training images, with those that are held out, where a run trains on them.
        task: of the data.

    Raises:
        UserError: on all ranks, for what does not fit the machine, the data or the checkpoint.
    """
    on_cuda = env.device.type == "cuda"
    grad_exchange = config.grad_exchange
    if grad_exchange == "auto" and env.world_size > 1:
        grad_exchange = "flat" if all_pairs_nvlink(env) else "ddp"
    length = resolve_length(config, env, saved, num_train)
    config = dataclasses.replace(config, epochs=length["epochs"])
    step = _choose_step(config, on_cuda, num_train, env.world_size)
    resolved: dict[str, Any] = {
        "val_fraction": config.val_fraction or 0.0,
        **length,
        "workers": settings.workers,
        "processes": env.world_size,
        "amp": resolve_amp(config, step, env, saved),
        "grad_exchange": grad_exchange,
        "decode": settings.decode,
        "hw_decoder_load": settings.hw_decoder_load,
        "cache": settings.cache,
        "prefetch": settings.prefetch,
        "device": "cuda" if on_cuda else "cpu",
        "num_classes": config.num_classes or len(classes),
        **resolve_pixels(config),
        **step,
        "warmup_epochs": resolve_warmup(config, saved),
        **resolve_optimizer(config, saved.config if saved else None),
    }
    resolved |= resolve_task(config, task)
    _check_fits(config, len(classes), on_cuda, saved)
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return ResolvedConfig(**(given | resolved))


def _choose_step(config: TrainConfig, on_cuda: bool, num_train: int | None, world_size: int) -> dict[str, bool]:
    """How the step is computed where that was left open.

    A run of few images ends before a compiled step has gained what the compiler takes. Without a compiler what lies
    between the fused layers is not fused, which costs more than they gain. torch's own checkpointing saves random
    state, which is not possible in a capture; the compiler has another way.
    """
    is_long = num_train is None
    if num_train is not None:
        images = most_epochs(config) * num_train / world_size
        is_long = images * math.prod(sides_of(config.image_size)) / 224**2 >= MIN_COMPILE_IMAGES
    compiled = on_cuda and is_long if config.compile is None else config.compile
    fused = on_cuda and compiled and not config.sync_bn
    graph = on_cuda and config.grad_accum_steps == 1 and (compiled or not config.grad_checkpointing)
    return {
        "compile": compiled,
        "fused_layers": fused if config.fused_layers is None else config.fused_layers,
        "cuda_graph": graph if config.cuda_graph is None else config.cuda_graph,
    }


def _check_fits(config: TrainConfig, num_classes: int, on_cuda: bool, saved: Checkpoint | None) -> None:
    if config.freeze_epochs and config.pretrained is None and saved is None and not config.evaluate:
        raise UserError(
            f"--freeze-epochs {config.freeze_epochs} without --pretrained: random layers would be frozen; give "
            "--pretrained",
            on_all_ranks=True,
        )
    if config.cuda_graph and not on_cuda:
        raise UserError(
            "--cuda-graph without a GPU: there is none to launch it on; use --no-cuda-graph", on_all_ranks=True
        )
    if config.sync_bn and not on_cuda:
        raise UserError("--sync-bn without a GPU: torch has it only on GPUs; leave it out", on_all_ranks=True)
    if config.num_classes is not None and config.num_classes < num_classes:
        raise UserError(
            f"--num-classes {config.num_classes}: fewer than the {count(num_classes, 'class folder')}; leave it out "
            "or raise it",
            on_all_ranks=True,
        )


@collective
def resolve_amp(config: TrainConfig, step: Mapping[str, bool], env: DistEnv, saved: Checkpoint | None = None) -> str:
    """`--amp`; auto is none on the CPU, and on GPUs the faster of bf16 and fp16.

    A run that goes on keeps its precision, where all ranks' GPUs compute in it.

    Args:
        step: see `_choose_step`.

    Raises:
        UserError: on all ranks: fp16 on the CPU.
    """
    on_cuda = env.device.type == "cuda"
    if config.amp == "fp16" and not on_cuda:
        raise UserError(
            "--amp fp16 without a GPU: the CPU has no fast float16; use --amp none or bf16", on_all_ranks=True
        )
    if config.amp != "auto":
        return config.amp
    if not on_cuda:
        return "none"
    has_sums = gains_by_fp16(config, step) and sums_in_cudnn(torch.float16, env.device)
    with_bf16, with_sums = zip(
        *all_gather_object((torch.cuda.is_bf16_supported(including_emulation=False), has_sums), env), strict=True
    )
    if not all(with_bf16):
        return "fp16"
    if saved and saved.config.device == "cuda":
        return saved.config.amp
    return "fp16" if all(with_sums) else "bf16"


def gains_by_fp16(config: TrainConfig, step: Mapping[str, bool]) -> bool:
    """Whether cuDNN can take the sums of most batch norms within its convolutions, which it does in fp16 (decision 38).

    Other optimizers wait in each step for whether fp16 skips it.

    Args:
        step: see `_choose_step`.
    """
    is_folded = step["compile"] and step["fused_layers"] and not (config.grad_checkpointing or config.deterministic)
    is_of_kind = FOLDED.fullmatch(config.arch.partition(".")[0]) is not None
    return is_folded and is_of_kind and not config.evaluate and has_fused(config.optimizer)


def resolve_length(
    config: TrainConfig, env: DistEnv, saved: Checkpoint | None, num_train: int | None
) -> dict[str, int]:
    """`--batch-size` and `--epochs`, else the checkpoint's, else by the images, the device and the first weights.

    Args:
        num_train: as in `resolve`.

    Raises:
        UserError: on all ranks, as `choose_batch_size`.
    """
    num_left = None if num_train is None else round(num_train * (1 - config.held_out))
    batch_size = choose_batch_size(config, env, saved, num_left)
    epochs = saved.config.epochs if saved and config.epochs is None else config.epochs
    if epochs is None:
        images = Layout(env.world_size, batch_size, config.grad_accum_steps).global_batch_size
        epochs = fit_epochs(config, num_left, (num_left or 0) // images, env.device.type == "cuda")
    return {"batch_size": batch_size, "epochs": epochs}


def resolve_warmup(config: TrainConfig, saved: Checkpoint | None) -> float:
    """`--warmup-epochs`, else that of the checkpoint, else a tenth of the epochs before the cooldown, at most 5."""
    if config.warmup_epochs is not None:
        return config.warmup_epochs
    return saved.config.warmup_epochs if saved else min(5, (most_epochs(config) - config.cooldown_epochs) / 10)
