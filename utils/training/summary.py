"""What is printed about a run at its start and end, and summary.json."""

import torch

from utils.config import TrainConfig, flag
from utils.data import manifest as dataset
from utils.data.cache import CACHED
from utils.data.dali import DALI_VERSION
from utils.data.splits import Splits, describe_exclusions
from utils.errors import RunFailed
from utils.files import write_json
from utils.training import checkpoint
from utils.training.autotune import LoaderSettings
from utils.training.optim import describe_ema, scaled_lr
from utils.training.output import SUMMARY
from utils.training.run import Run
from utils.training.state import TrainState

DATA_WAIT_WARNING = 0.02  # data wait above which the user is told what to do


def log_run_summary(run: Run, splits: Splits, feed: LoaderSettings) -> None:
    """The start-up block: what will run, on what, and from where."""
    config, env, state = run.config, run.env, run.state
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    lr = scaled_lr(config.lr, run.sampler.global_batch_size)
    where = torch.cuda.get_device_name(env.device) if env.device.type == "cuda" else "CPU"
    loader: str = config.loader
    if config.loader in ("dali", "proxy"):
        how = f"kept decoded ({config.cache})" if config.cache in CACHED else f"{config.decode} decode"
        loader = f"{loader}, DALI {DALI_VERSION}, {how}, {config.prefetch} batches ahead"
    ways = {"compiled": config.compile, "fused layers": config.fused_layers, "as a CUDA graph": config.cuda_graph}
    compiled = "".join(f", {way}" for way, used in ways.items() if used)
    moments = {"ddp": "beside the backward pass (ddp)", "flat": "after the backward pass (flat)"}
    exchange = f"; gradients are exchanged {moments[config.grad_exchange]}" if env.world_size > 1 else ""
    start = run.origin
    is_done = state.epoch >= config.epochs
    if state.step:
        position = f"after all {state.epoch} epochs" if is_done else f"at epoch {state.epoch + 1}"
        start = f"resumed {position}, step {state.step}, {run.origin}"
        if config.loader == "proxy" and state.step % run.sampler.steps_per_epoch:
            start += "; images continue in order, but the proxy loader resumes its random draws at epochs only"
        if run.shared_before is not None:
            start += f"; saved by {run.shared_before}: every image still comes once, random draws begin anew"
    facts = {
        "model": f"{config.arch}, {parameters / 1e6:.2f} M parameters, {config.num_classes} classes{compiled}",
        "images": f"{len(splits['train']):,} train, {len(splits['val']):,} val, {config.image_size} px",
        "batch": f"{run.sampler.global_batch_size} = {config.batch_size} images x {env.world_size} processes"
        f" x {config.grad_accum_steps}; {run.sampler.steps_per_epoch} steps per epoch",
        "lr": f"{lr:g} = {config.lr:g} x {run.sampler.global_batch_size} / 256, {config.optimizer}",
        "device": f"{where}, {config.amp if config.amp != 'none' else 'float32'}{exchange}",
        "loader": f"{loader}, {config.workers} CPU threads per process",
        "output": f"{config.output_dir}",
        "start": start,
    }
    if state.ema is not None:
        facts["ema"] = describe_ema(state.ema, config.epochs * run.sampler.steps_per_epoch)
    if feed.reasons and config.loader != "synthetic":
        chosen = (f"{flag(name)} {getattr(config, name)}: {reason}" for name, reason in feed.reasons.items())
        facts["chosen"] = "; ".join(chosen)
    if skipped := describe_exclusions(config, splits):
        facts["skipped"] = skipped
    ignored = {split: dataset.describe_ignored(manifest) for split, manifest in splits.items()}
    if told := "; ".join(f"in {split}/ {what}" for split, what in ignored.items() if what):
        facts["ignored"] = told
    if run.changes:
        facts["changed"] = ", ".join(run.changes)
    for name, fact in facts.items():
        run.log.say(f"{name:>8}  {fact}")
    for line in run.warnings:
        run.log.say(f"warning: {line}")
    if is_done:
        run.log.say(
            f"All {config.epochs} epochs are done. To train on, start a new run from its weights: --pretrained "
            f"{config.output_dir / checkpoint.BEST} --output-dir NEW"
        )


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
