"""The steps that `bench networks` compares, measured interleaved in one process."""

import contextlib
import dataclasses
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

import models
from scripts.bench.networks import Networks
from scripts.bench.table import markdown
from train import train_step
from utils.benchmark.images import read_images
from utils.benchmark.loaders import open_loader
from utils.benchmark.measure import Case, measure, synchronize
from utils.benchmark.run import MIN_BATCHES, open_run
from utils.benchmark.verdict import Rate
from utils.data.images.manifest import synthetic
from utils.distributed.group import DistEnv, process_group
from utils.distributed.ownership import own_process
from utils.files import write_json
from utils.network.gradients import AMP_DTYPES
from utils.options.config import TrainConfig
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import sides_of
from utils.training.build import build
from utils.training.state.output import prepare_output

NUM_CLASSES = 1000  # of random images
TRIED_STEPS = 3  # before a peak is read
BRISK, FED, TIMM = "Brisk", "Brisk, fed by DALI", "timm"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one step; `peak` in bytes, weights and optimizer included; 0 on the CPU."""

    rate: Rate
    peak: int


def compare_networks(options: Networks) -> None:
    """Measure all networks, print their table, and write networks.json.

    Raises:
        UserError: an unknown network, or flags do not fit it.
        Stopped: a signal came.
    """
    config = options.config
    for arch in options.archs:
        models.check_arch(arch)
    device = own_process(config.device, deterministic=False)
    batch_size = config.batch_size or (256 if device.type == "cuda" else 32)
    found: dict[str, dict[str, Measured]] = {}
    with process_group(device, config.timeout) as env:
        prepare_output(config.output_dir, env)
        for arch in options.archs:
            found[arch] = _measure(options, dataclasses.replace(config, arch=arch, batch_size=batch_size), env)
            _release(device)
            write_json(config.output_dir / "networks.json", to_json(batch_size, found))
    print(table(batch_size, found))


def _measure(options: Networks, config: TrainConfig, env: DistEnv) -> dict[str, Measured]:
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="networks-")))
        if config.data_dir is None:
            images = synthetic(MIN_BATCHES * (config.batch_size or 1), NUM_CLASSES)
        else:
            images = read_images(config.data_dir, work, env)
        with _peak(env.device) as peak:
            run, repeated = open_run(config, images, env, work / "run", stack, build)
            run.state.model.train()
            _try(lambda: train_step(run), env.device)
        cases, peaks = {BRISK: Case(BRISK, lambda: train_step(run), meter=run.state.meter)}, {BRISK: peak}
        if config.data_dir is not None:
            loader = open_loader(f"dali-{run.config.decode}", run, repeated)
            stack.callback(loader.stream.close)
            cases[FED], peaks[FED] = loader.training(run, train_step), peak
        with _peak(env.device) as peak:
            step = stack.enter_context(open_timm_step(run.config, env.device))
            _try(step, env.device)
        cases[TIMM], peaks[TIMM] = Case(TIMM, step), peak
        named = [dataclasses.replace(case, name=f"{config.arch}, {name}") for name, case in cases.items()]
        windows = measure(named, run, options.windows, options.window_seconds)
        rates = [Rate(tuple(window.rate(run.config.batch_size) for window in each)) for each in windows]
        return {name: Measured(rate, peaks[name][0]) for name, rate in zip(cases, rates, strict=True)}


@contextlib.contextmanager
def open_timm_step(config: ResolvedConfig, device: torch.device) -> Iterator[Callable[[], None]]:
    """A training step as in timm's benchmark.py, on a batch of random images."""
    arguments = models.create_model_arguments(config.arch, config.num_classes, config.image_size, {})
    model: nn.Module = timm.create_model(**arguments)
    model = model.to(device).to(memory_format=torch.channels_last).train()
    optimizer = create_optimizer_v2(model, opt=config.optimizer, lr=1e-4)
    net: Any = torch.compile(model, backend="inductor") if config.compile else model
    images = torch.randn(config.batch_size, 3, *sides_of(config.image_size), device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(config.num_classes, (config.batch_size,), device=device)
    dtype = AMP_DTYPES[config.amp]

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = net(images)
        nn.functional.cross_entropy(logits, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    # torch 2.11's own key is the same for bf16 and fp16.
    with torch.compiler.config.patch(cache_key_tag=config.amp):  # type: ignore[attr-defined]
        yield step
    torch.compiler.reset()  # which keeps the network otherwise


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[list[int]]:
    """A list that gets, at the end of the block, the most bytes that it held beside what was there."""
    found: list[int] = []
    if device.type != "cuda":
        yield found
        found.append(0)
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    found.append(torch.cuda.max_memory_allocated(device) - before)


def _try(step: Callable[[], object], device: torch.device) -> None:
    for _ in range(TRIED_STEPS):
        step()
    synchronize(device)


def _release(device: torch.device) -> None:
    """Memory that nothing holds."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def to_json(batch_size: int, found: dict[str, dict[str, Measured]]) -> dict[str, Any]:
    """networks.json."""
    networks = {
        arch: {name: {"images_per_second": each.rate.windows, "peak_bytes": each.peak} for name, each in steps.items()}
        for arch, steps in found.items()
    }
    return {"batch_size": batch_size, "networks": networks}


def table(batch_size: int, found: dict[str, dict[str, Measured]]) -> str:
    """Images/s, median and range; Brisk's speed as a part of timm's; GiB."""
    is_fed = any(FED in steps for steps in found.values())
    head = [f"network, batch {batch_size}", BRISK, *([FED, "of Brisk's"] if is_fed else []), TIMM, "Brisk / timm"]
    rows = [[*head, "GiB", "GiB, timm"]]
    for arch, steps in found.items():
        ours, theirs = steps[BRISK], steps[TIMM]
        fed = [str(steps[FED].rate), f"{steps[FED].rate.median / ours.rate.median:.3f}"] if is_fed else []
        ratio = f"{ours.rate.median / theirs.rate.median:.2f}"
        peaks = [f"{each.peak / 2**30:.1f}" for each in (ours, theirs)]
        rows.append([arch, str(ours.rate), *fed, str(theirs.rate), ratio, *peaks])
    return markdown(*rows)
