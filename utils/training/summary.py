"""What is printed about a run at its start and at its end, and summary.json."""

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import timm
import torch

from utils import __version__
from utils.data.dali import DALI_VERSION
from utils.data.formats.shards import ShardTable
from utils.data.images.manifest import Manifest, describe_counts
from utils.data.loaders.cache import CACHED
from utils.data.loaders.settings import BY_DALI, LoaderSettings, feeds_from_memory
from utils.data.splits.holdout import describe_shares
from utils.data.splits.oddities import class_sizes, describe_oddities
from utils.data.splits.selection import Splits, describe_exclusions, unused_validation
from utils.errors import RunFailed
from utils.figures import better_value, describe_figure, describe_figures, figure, figures_of
from utils.files import write_json
from utils.log import SUMMARY
from utils.network.folding import sums_in_cudnn
from utils.network.fused_layers import BatchNorm2d
from utils.options.flags import flag
from utils.options.remedies import from_weights
from utils.options.resolved import ResolvedConfig
from utils.report.output_folder import is_input_late, read_run
from utils.report.terminal import epoch_table
from utils.text import count
from utils.training.optimization.lr_schedule import describe_schedule
from utils.training.optimization.optim import describe_ema, describe_lr, describe_optimizer
from utils.training.resume.compatibility import changed_flags, format_change
from utils.training.run import Run
from utils.training.settings.autotune import gains_by_fp16
from utils.training.settings.batch_layout import layout_of, saved_layout
from utils.training.settings.class_weights import class_weights
from utils.training.settings.run_length import describe_length
from utils.training.state.checkpoint import BEST, Checkpoint
from utils.training.state.train_state import TrainState


def log_run_summary(run: Run, splits: Splits, settings: LoaderSettings, saved: Checkpoint | None) -> dict[str, str]:
    """The start-up block: what will run, on what, and from where. Prints it, and returns its names and texts.

    Args:
        run: about to start.
        splits: the images.
        settings: of the loaders, with the reasons of what was chosen.
        saved: the checkpoint that the run goes on from.
    """
    config, env, state, images = run.config, run.env, run.state, run.sampler.global_batch_size
    facts = {
        "brisk": f"{__version__}, torch {torch.__version__}, DALI {DALI_VERSION}, timm {timm.__version__}",
        "model": _describe_model(run),
        "data": _describe_data(splits),
        "images": f"{_describe_train(splits)}, {_describe_val(splits)}, {_describe_sizes(config)}",
        "classes": _describe_classes(run, splits["train"]),
        "pixels": _describe_pixels(run, "the checkpoint" if saved else settings.reasons.get("pretrained", "")),
        "batch": f"{images} = {count(config.batch_size, 'image')} x {count(env.world_size, 'process')}"
        f" x {config.grad_accum_steps}; {count(run.sampler.steps_per_epoch, 'step')} per epoch",
        "lr": f"{describe_lr(config.lr, config.lr_scaling, images)}, {_describe_optimizer(run)}",
        "device": _describe_device(run),
        "loader": _describe_loader(config),
        "output": str(config.output_dir),
        "start": _describe_start(run, saved) if saved else run.origin,
    }
    if schedule := describe_schedule(config, images):
        facts["schedule"] = schedule
    facts |= {"teacher": run.teacher} if run.teacher else {}
    if state.ema is not None:
        facts["ema"] = describe_ema(state.ema, config.epochs * run.sampler.steps_per_epoch)
    usual, unusual = describe_optimizer(config, images)
    length = () if saved else describe_length(config, len(splits["train"]), run.sampler.steps_per_epoch)
    if chosen := [*([usual] if usual else []), *length, *_describe_choices(config, settings)]:
        facts["chosen"] = "; ".join(chosen)
    if repeated := describe_recipe(config):
        facts["recipe"] = repeated
    if skipped := describe_exclusions(splits, config.output_dir):
        facts["skipped"] = skipped
    if ignored := _describe_ignored(run, splits):
        facts["ignored"] = ignored
    if changes := changed_flags(saved.config, config, env.world_size) if saved else []:
        facts["changed"] = ", ".join(changes)
    for name, fact in facts.items():
        run.log.info(f"{name:>8}  {fact}", indent=10)
    odd = [] if saved or not env.is_main else describe_oddities(splits, run.sampler.steps_per_epoch, config.balance)
    for line in [*([unusual] if unusual else []), *odd, *run.warnings]:
        run.log.info(f"warning: {line}")
    if run.is_done:
        run.log.info(_describe_early_end(run) if run.ends_early else _describe_end(run))
    return facts


def _describe_ignored(run: Run, splits: Splits) -> str:
    """What is no image, and validation images that are not used; "" for nothing."""
    ignored = {manifest.title: describe_counts(manifest.ignored) for manifest in splits.values()}
    parts = [f"in {title} {what}" for title, what in ignored.items() if what]
    if left_out := unused_validation(run.config) if run.env.is_main else "":
        parts.append(f"{left_out}, as {run.config.held_out_by} holds out images of {splits['train'].title}")
    return "; ".join(parts)


def _describe_choices(config: ResolvedConfig, settings: LoaderSettings) -> Iterator[str]:
    """Flags of the data that were chosen for one reason, and the reason."""
    if config.val_fraction and "val_fraction" not in config.given:
        yield f"--val-fraction {config.val_fraction:g}: there is no train/ and no val/"
    if config.loader == "synthetic":
        return
    reasons = [(name, reason) for name, reason in settings.reasons.items() if name != "pretrained"]
    for reason, group in itertools.groupby(reasons, operator.itemgetter(1)):
        yield f"{', '.join(f'{flag(name)} {getattr(config, name)}' for name, _ in group)}: {reason}"


def describe_recipe(config: ResolvedConfig) -> str:
    """What was chosen in the run whose config.json is the recipe, and is chosen otherwise here; "" for nothing.

    Of a config.json that does not say what was chosen, what is kept.
    """
    now = config.to_dict()
    then = {name: value for name, value in config.recipe_chosen.items() if name != "output_dir"}
    parts = []
    if others := [name for name in then if name not in config.given and then[name] != now[name]]:
        changes = ", ".join(f"{flag(name)} {format_change(then[name], now[name])}" for name in others)
        parts.append(f"chosen otherwise than in the run of {config.config}: {changes}; a flag that is given is kept")
    if unsure := [name for name in then if name in config.given]:
        values = ", ".join(f"{flag(name)} {now[name]}" for name in unsure)
        parts.append(f"{config.config} does not say what was given and what was chosen; kept: {values}")
    return "; ".join(parts)


def _describe_data(splits: Splits) -> str:
    """Format, shards and classes."""
    train, val = splits["train"], splits["val"]
    tables = [each.images for each in (train, val) if isinstance(each.images, ShardTable)]
    numbers = [len(table.shards) for table in (tables[:1] if val.held_out else tables)]
    counts = [*(f"{number:,}" for number in numbers[:-1]), *(count(number, "shard") for number in numbers[-1:])]
    shards = f", {' + '.join(counts)}" if counts else ""
    return f"{train.source}{shards}, {count(len(train.classes), 'class')}"


def _describe_classes(run: Run, train: Manifest) -> str:
    """How many, their images, how many an image has, and their weights."""
    shown = f"{len(train.classes):,}, {class_sizes(train)}"
    if train.label_sets is not None:
        numbers = train.label_sets.sum(axis=1)[train.labels]
        shown += f"; {numbers.min()} to {numbers.max()} an image, {numbers.mean():.3g} on average"
    factors = class_weights(run.config, train)
    return shown + (f"; weights in the loss {min(factors):.3g} to {max(factors):.3g}" if factors else "")


def _describe_train(splits: Splits) -> str:
    train = splits["train"]
    is_unusual = train.source == "class folders" and train.title != "train/"
    return f"{len(train):,} train" + (f" ({train.title})" if is_unusual else "")


def _describe_val(splits: Splits) -> str:
    val = splits["val"]
    if val.held_out:
        return f"{len(val):,} val ({val.title}, {describe_shares(splits['train'], val)})"
    return f"{len(val):,} val" + (f" ({val.title})" if val.title not in ("", "val/") else "")


def _describe_optimizer(run: Run) -> str:
    """Name and settings, as the optimizer has them."""
    group = run.state.optimizer.param_groups[0]
    named = {"momentum": group.get("momentum"), "betas": group.get("betas"), "weight decay": run.config.weight_decay}
    named |= {"layer decay": run.config.layer_decay, "head lr scale": run.config.head_lr_scale}
    shown = (f"{name} {f'{value:g}' if isinstance(value, float) else value}" for name, value in named.items() if value)
    return ", ".join([run.config.optimizer, *shown])


def _describe_sizes(config: ResolvedConfig) -> str:
    schedules = {name: getattr(config, name) for name in ("resize_schedule", "augment_schedule")}
    return f"{config.image_size} px" + "".join(f", {flag(name)} {text}" for name, text in schedules.items() if text)


def _describe_pixels(run: Run, source: str) -> str:
    """Interpolation, the geometry of the evaluation, and normalization; `source` is of the latter, "" for timm's."""
    config = run.config
    source = source or f"timm's {config.arch}"
    whole = {"random": "", "center": "; trained on centers", "squash": "; trained on squashed images"}
    whole |= {"pad": "; trained on padded images"}
    fitted = {"center": "", "squash": ", squashed", "pad": ", padded"}
    mean, std = (" ".join(f"{value:.4g}" for value in values) for values in run.record.normalization)
    return (
        f"{config.interpolation}{whole[config.train_crop]}; evaluated {config.val_interpolation} at "
        f"{config.val_image_size} px of {config.val_resize}{fitted[config.val_crop]}; mean {mean}, std {std} of "
        f"{source}"
    )


def _describe_model(run: Run) -> str:
    config = run.config
    parameters = sum(parameter.numel() for parameter in run.state.model.parameters())
    ways = {
        "gradient checkpointing": config.grad_checkpointing,
        "compiled": config.compile,
        "fused layers": config.fused_layers,
        "batch norm's sums in cuDNN's convolutions": _folds(run),
        "as a CUDA graph": config.cuda_graph,
    }
    compiled = "".join(f", {way}" for way, used in ways.items() if used)
    if config.device == "cuda" and not config.compile and "compile" not in config.given:
        compiled += ", not compiled: that takes longer than it saves in a run of so few images"
    epochs = f"{config.freeze_epochs} epochs" if config.freeze_epochs > 1 else "epoch"
    head = f", only the head in the first {epochs}" if config.freeze_epochs else ""
    return f"{config.arch}, {parameters / 1e6:.2f} M parameters, {count(config.num_classes, 'class')}{head}{compiled}"


def _folds(run: Run) -> bool:
    config = run.config
    has_norms = any(isinstance(module, BatchNorm2d) for module in run.state.model.modules())
    return config.compile and has_norms and sums_in_cudnn(run.amp_dtype, run.env.device)


def _describe_device(run: Run) -> str:
    config, env = run.config, run.env
    device = torch.cuda.get_device_name(env.device) if env.device.type == "cuda" else "CPU"
    precision: str = config.amp if config.amp != "none" else "float32"
    step = {name: getattr(config, name) for name in ("compile", "fused_layers")}
    if "amp" not in config.given and gains_by_fp16(config, step) and _folds(run):
        precision += ", in which this network trains faster than in bf16"
    moments = {"ddp": "beside the backward pass (ddp)", "flat": "after the backward pass (flat)"}
    exchange = f"; gradients are exchanged {moments[config.grad_exchange]}" if env.world_size > 1 else ""
    return f"{device}, {precision}{exchange}"


def _describe_loader(config: ResolvedConfig) -> str:
    loader: str = config.loader
    if feeds_from_memory(config):
        loader = f"{loader}, images cached (gpu), a kernel makes each batch of them"
    elif config.loader in BY_DALI:
        how = f"images cached ({config.cache})" if config.cache in CACHED else f"{config.decode} decode"
        loader = f"{loader}, {how}, {count(config.prefetch, 'batch')} ahead"
    return f"{loader}, {count(config.workers, 'CPU thread')} per process"


def _describe_start(run: Run, saved: Checkpoint) -> str:
    config, state = run.config, run.state
    all_epochs = f"all {state.epoch} epochs" if state.epoch > 1 else "the epoch"
    position = f"after {all_epochs}" if state.epoch >= config.epochs else f"at epoch {state.epoch + 1}"
    start = f"resumed {position}, step {state.step}, from {saved.path}"
    if config.loader == "proxy" and state.step % run.sampler.steps_per_epoch:
        start += "; images continue in order, but the proxy loader resumes its random draws at epochs only"
    before = saved_layout(saved)
    now = layout_of(config, run.env.world_size)
    if before != now:
        start += f"; saved by {before}"
        if before.global_batch_size == now.global_batch_size:
            start += ": every image still comes once, random draws begin again"
    return start


def _describe_end(run: Run) -> str:
    """What trains on a run whose epochs are done."""
    best = f", best {figure(run.state.best.by).title} {run.state.best.shown}" if run.state.best else ""
    epochs = f"All {run.config.epochs} epochs are" if run.config.epochs > 1 else "The epoch is"
    return (
        f"{epochs} done{best}. To train on, start a new run from its weights: "
        f"{from_weights(run.config, run.config.output_dir / BEST)}"
    )


def _describe_early_end(run: Run) -> str:
    """Why `--patience` ends a run, and what trains on."""
    state, given = run.state, run.config.patience
    than = f" than the {state.best.shown} of epoch {state.best.epoch}" if state.best else ""
    number = state.evaluations_since_best
    evaluations = f"{number} evaluations" if number > 1 else "evaluation"
    return (
        f"ended after epoch {state.epoch} of {run.config.epochs}: the last {evaluations} brought no better "
        f"{figure(run.config.best_by).title}{than} "
        f"(--patience {given}); a higher --patience, or 0, trains on"
    )


def write_summary(run: Run, cpu_threads: int, of_best: Mapping[str, Any]) -> None:
    """summary.json and the closing lines.

    Args:
        run: at its end.
        cpu_threads: this process's share of the machine's.
        of_best: more figures, of best.pt.

    Raises:
        RunFailed: on rank 0, if the file cannot be written.
    """
    state, config = run.state, run.config
    if run.ends_early:
        run.log.info(_describe_early_end(run))
    totals = state.meter.totals
    figures = {name: value for name, value in figures_of(state.result).items() if name != "loss"}
    summary = figures | {
        "best_top1": state.best.top1 if state.best else better_value(state.result, "top1"),
        "best_by": config.best_by,
        "best_value": state.best.value if state.best else better_value(state.result, config.best_by),
        "epochs": state.epoch,
        "images_per_second": round(totals.images_per_second, 1),
        "data_wait": round(totals.data_wait, 4),
        "timed_steps": totals.steps,
        "seconds": round(state.seconds, 2),
        "world_size": run.env.world_size,
        "arch": config.arch,
        **of_best,
    }
    if state.ema is not None:
        summary |= {f"ema_{name}": state.result[f"val/ema_{name}"] for name in figures}
    if run.env.is_main:
        try:
            write_json(config.output_dir / SUMMARY, summary)
            run.log.event(
                "finished", state.step, state.seconds, checkpoint_seconds=round(state.meter.checkpoint_seconds, 3)
            )
        except OSError as error:
            raise RunFailed(
                f"--output-dir {config.output_dir}: {SUMMARY} could not be written ({error.strerror}); "
                f"{run.resume_hint} tries again"
            ) from error
    if run.env.is_main and (found := read_run(config.output_dir)) and len(found.evaluations) > 1:
        run.log.info("\n".join(epoch_table(found)))
    _print_end(run, summary, cpu_threads)


def _print_end(run: Run, summary: dict[str, Any], cpu_threads: int) -> None:
    """The closing lines, of the content of summary.json."""
    state, config, by, totals = run.state, run.config, run.config.best_by, run.state.meter.totals
    shown = describe_figures(state.result, by, config.num_classes, without=("loss",))
    shown += [f"best {describe_figure(by, summary['best_value'])}"] if summary["best_value"] is not None else []
    run.log.info(
        f"{'  '.join(shown)}  {state.seconds:.0f} s  {totals.images_per_second:,.0f} images/s  "
        f"data wait {totals.data_wait:.1%}\n"
        f"{describe_wait(totals.data_wait, state.seconds, config, cpu_threads)}"
        f"{describe_timed(totals.steps, state.step)}"
        f"{describe_overflows(state)}"
        f"{config.output_dir}: {SUMMARY}, metrics.jsonl, best.pt, last.pt"
    )


def describe_wait(data_wait: float, seconds: float, config: ResolvedConfig, cpu_threads: int) -> str:
    """A line of advice on late input; nothing where it is not worth it.

    More workers are advised only where `cpu_threads`, the process's share, leaves room for them.

    Args:
        data_wait: share of the time, 0 to 1, in which the device had nothing to do.
        seconds: of the run.
    """
    if not is_input_late(data_wait, seconds) or config.loader == "synthetic" or feeds_from_memory(config):
        return ""
    sentence = f"data wait {data_wait:.1%}: the device had nothing to do for that share of the time, as input was late"
    where = f"scripts/benchmark.py --data-dir {config.data_dir} --arch {config.arch}"
    idle = f"; --workers {config.workers} can be raised to {cpu_threads}, this process's share of the CPU threads"
    return f"{sentence}; {where} finds what limits it{idle if cpu_threads > config.workers else ''}\n"


def describe_timed(timed: int, steps: int) -> str:
    """A line on how many of the run's steps images/s and data wait cover; nothing if all."""
    if timed == steps:
        return ""
    covered = f"images/s and data wait cover {timed:,} of {count(steps, 'step')}"
    return f"{covered}: without the first of each launch, in which buffers grow\n"


def describe_overflows(state: TrainState) -> str:
    """A line on the steps that fp16 skipped; nothing if there were none."""
    skipped = state.meter.skipped_steps
    return f"fp16 skipped {skipped:,} of {count(state.step, 'step')}, whose gradients overflowed\n" if skipped else ""
