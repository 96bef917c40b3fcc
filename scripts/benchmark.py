#!/usr/bin/env python3
"""Measure what limits training on your images with this machine, and what DALI gains or costs.

    scripts/benchmark.py --data-dir DIR --arch resnet50 --output-dir runs/benchmark

Prints its progress, a table and a verdict; writes benchmark.json and benchmark.png to --output-dir. DIR holds
train/CLASS/*.jpg or CLASS/*.jpg; without it, images are generated. Empty files are excluded and named; one that cannot
be decoded ends the benchmark when a loader meets it.

The benchmark measures every loader alone, the step of train.py on one synthetic batch, the same step with every loader,
and reading the files without decoding them, from the page cache if they have been read before.
utils/benchmark/measure.py describes how, verdict.py the rules of the verdict, report.py the keys of benchmark.json.
"""

import contextlib
import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from scripts.bench.comparison import MIN_WINDOWS, Comparison, Seconds, Windows
from utils.benchmark.verdict import CACHED, TITLES, diagnose
from utils.distributed.launcher import read_launch
from utils.distributed.startup import let_threads_sleep
from utils.errors import BadFile, UserError, escape_control_chars
from utils.files import write_json
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.options.policies import POLICIES
from utils.options.store_url import require_store, store_url
from utils.options.validation import require_teacher
from utils.progress import end_status, start_status


@dataclasses.dataclass(frozen=True)
class Options(Comparison):
    """The command line; `data_dir` and `output_dir` of its `config` are those of the benchmark.

    Attributes:
        loaders: keys of `TITLES`; none for all, with `CACHED` where train.py would keep the images decoded.
    """

    loaders: tuple[str, ...]


@with_train_flags(
    train_flag("data_dir", help="Folder of images; without it, images are generated."),
    train_flag("stage_dir"),
    train_flag("arch"),
    train_flag("output_dir", default=Path("runs/benchmark"), help="Where the results go."),
    train_flag("batch_size", help="Images per step.", shown="256, 32 on the CPU"),
    train_flag("image_size"),
    train_flag("augment", help="Policy after crop and flip."),
    train_flag("workers", help="CPU threads per loader.", shown="the cores"),
    train_flag("amp"),
    train_flag("optimizer"),
    train_flag("teacher", help="Network that the step distills."),
    train_flag("compile", help="torch.compile the step.", shown="on CUDA"),
    train_flag("fused_layers", help="Brisk's own kernels.", shown="where compiled"),
    train_flag("cuda_graph", help="Launch the step as one CUDA graph."),
    train_flag("device"),
)
def read_options(
    loaders: Annotated[
        list[str] | None, typer.Option(help=f"Which of {', '.join(TITLES)}.", show_default="all")
    ] = None,
    windows: Windows = MIN_WINDOWS,
    window_seconds: Seconds = 2.0,
    **train_flags: Any,
) -> Options:
    """Measure loaders and training on your images, and find what limits.

    Exit status: 0 done, 1 failed, 2 wrong usage, 143 stopped by SIGTERM.
    """
    given = tuple(dict.fromkeys(name for word in loaders or () for name in word.split(",")))
    for name in given:
        if name not in TITLES:
            raise UserError(f"--loaders {name}: not one of {', '.join(TITLES)}; separate them by commas")
    config = TrainConfig(loader="synthetic", resume="none", **train_flags)
    if "timm" in (given or TITLES) and POLICIES[config.augment].timm_name is None:
        others = ",".join(name for name in TITLES if name != "timm")
        raise UserError(
            f"--augment {config.augment} with --loaders timm: timm has no such policy; add --loaders {others}"
        )
    if read_launch().world_size > 1:
        raise UserError("started as several processes: the benchmark measures one; start it without torchrun")
    require_teacher(config, resumes=False)
    options = Options(config, windows, window_seconds, given)
    if config.data_dir is not None and store_url(config.data_dir):
        require_store(config.data_dir, config.stage_dir)
    return options


def benchmark(options: Options, argv: Sequence[str]) -> None:
    """Run the benchmark, from the flags to the files.

    Raises:
        UserError: flags or data do not fit; nothing was written.
        Stopped: a signal came; nothing was written.
    """
    start_status("loading torch, DALI and timm")

    import models  # what takes seconds comes after the checks of the command line
    from train import train_step
    from utils.benchmark.images import generate_images, read_images
    from utils.benchmark.loaders import open_loaders
    from utils.benchmark.report import benchmark_json, draw_chart, format_verdict, introduction, table
    from utils.benchmark.run import collect, describe, open_run
    from utils.data.images.manifest import describe as describe_bad
    from utils.data.loaders.workers import check_sockets
    from utils.distributed.group import process_group
    from utils.distributed.ownership import own_process
    from utils.training.build import build
    from utils.training.state.output import prepare_output

    end_status()
    config = options.config
    models.check_arch(config.arch)
    check_sockets("workers of torch's DataLoader")
    device = own_process(config.device, deterministic=False)
    with process_group(device, config.timeout) as env, contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        if config.data_dir is None:
            generate_images(work)
        images = read_images(config.data_dir or work, config.output_dir, env, config.stage_dir)
        batch_size = config.batch_size or (256 if env.device.type == "cuda" else 32)
        run, repeated = open_run(
            dataclasses.replace(config, batch_size=batch_size), images, env, work / "run", stack, build
        )
        prepare_output(config.output_dir, env)
        facts = {"command": shlex.join(["scripts/benchmark.py", *argv])}
        facts |= describe(run, images, config.data_dir is None, options.windows, options.window_seconds)
        excluded = f"\nexcluded: {escape_control_chars(describe_bad(images.bad))}" if images.bad else ""
        print(f"{introduction(facts)}{excluded}\n", flush=True)
        names = options.loaders or tuple(name for name in TITLES if name != CACHED or facts["kept"])
        loaders, files = open_loaders(names, run, images, repeated, stack)
        measurements = collect(facts, run, train_step, loaders, files)
    verdict = diagnose(measurements)
    write_json(config.output_dir / "benchmark.json", benchmark_json(facts, measurements, verdict))
    draw_chart(config.output_dir / "benchmark.png", facts, measurements)
    print(f"\n{table(measurements)}\n\n{format_verdict(verdict)}\n\n{config.output_dir}: benchmark.json, benchmark.png")


PROGRAM = Program("benchmark.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""

    def work(options: Options) -> None:
        try:
            benchmark(options, argv)
        except BadFile as error:
            # Its own message has train.py's remedy, a flag that this command does not have.
            check = "scripts/check_dataset.py DIR --output-dir OUT"
            raise UserError(f"{error.path}: {error.reason}; remove it, and what else {check} finds") from error

    return PROGRAM.run(argv, work)


if __name__ == "__main__":
    let_threads_sleep()  # as train.py
    sys.exit(main(sys.argv[1:]))
