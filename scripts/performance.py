#!/usr/bin/env python3
"""The runs behind docs/internals/performance.md, on one GPU with 16 cores: a series of benchmark.py.

    scripts/performance.py --data-dir DIR --output-dir OUT             # all runs, about half an hour
    scripts/performance.py --data-dir DIR --output-dir OUT --only resnet50,resnet18

Each run writes benchmark.json, benchmark.png and its log to OUT/NAME. A table at the end has all runs, of earlier calls
too. DIR holds class folders of photographs as they come from a camera or ImageNet, not resized ones. A run that takes
longer than --limit is ended with all its processes, as the current run is by Ctrl-C or SIGTERM.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from scripts.launcher import run_with_limit, stop_on_sigterm
from utils.benchmark.verdict import Rate, is_same
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.files import check_writable
from utils.options.cli import REQUIRED, Program, train_flag, with_train_flags
from utils.options.limits import ABOVE_0
from utils.options.readers import number_option
from utils.options.store_url import refuse_url

BENCHMARK = Path(__file__).with_name("benchmark.py")
DALI = "dali-full,dali-fused"
RUNS = {  # besides the decoding threads, eight read files, and mostly wait
    "resnet50": ("--arch", "resnet50", "--workers", "4", "--loaders", DALI),
    "resnet50-128": ("--arch", "resnet50", "--workers", "4", "--loaders", "dali-full", "--batch-size", "128"),
    "efficientnet_b0": ("--arch", "efficientnet_b0", "--workers", "4", "--loaders", DALI),
    "resnet18": ("--arch", "resnet18", "--workers", "4", "--loaders", DALI),
    "resnet18-8": ("--arch", "resnet18", "--workers", "8", "--loaders", DALI),
    "resnet18-15": ("--arch", "resnet18", "--workers", "15", "--loaders", DALI),
    "resnet18-timm-layers": ("--arch", "resnet18", "--workers", "4", "--loaders", DALI, "--no-fused-layers"),
    "resnet50-plain": (
        "--arch", "resnet50", "--workers", "4", "--loaders", DALI, "--no-fused-layers", "--no-cuda-graph",
    ),
    "loaders-4": ("--arch", "resnet50", "--workers", "4", "--loaders", "dali-full,torch"),
    "loaders-16": ("--arch", "resnet50", "--workers", "15"),
}  # fmt: skip


def run(name: str, data_dir: Path, output_dir: Path, window_seconds: float, limit: float) -> str:
    """Run one benchmark in a process of its own; returns how it ended."""
    folder = output_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.json").unlink(missing_ok=True)  # of an earlier run
    flags = ("--data-dir", data_dir, "--output-dir", folder, "--window-seconds", window_seconds)
    words = [sys.executable, BENCHMARK, *RUNS[name], *flags]
    with (folder / "log.txt").open("w") as log:
        status = run_with_limit(words, limit, log, log)
    if status is None:
        return f"cut off after {limit:.0f} s"
    return "done" if status == 0 else f"exit {status}, see {folder / 'log.txt'}"


def rows(output_dir: Path, names: Iterable[str]) -> Iterator[str]:
    """The head of a table in Markdown, and its lines for each run that has a result."""
    yield "| run | threads | batch | synthetic, images/s | fed, images/s | fed / synthetic | loader alone, images/s |"
    yield "|---|---|---|---|---|---|---|"
    for name in names:
        path = output_dir / name / "benchmark.json"
        if not path.is_file():
            continue
        found: dict[str, Any] = json.loads(path.read_text())
        synthetic = found["training"]["synthetic"]
        for loader, rate in found["training"].items():
            if loader == "synthetic":
                continue
            same = is_same(*(Rate(tuple(one["windows"])) for one in (rate, synthetic)))
            share = "no difference" if same else f"{rate['median'] / synthetic['median']:.3f}"
            rates = (shown(synthetic), shown(rate), share, shown(found["alone"][loader]))
            yield f"| {' | '.join((f'{name}, {loader}', str(found['workers']), str(found['batch_size']), *rates))} |"


def shown(rate: dict[str, Any]) -> str:
    """Median and range of the windows."""
    return str(Rate(tuple(rate["windows"])))


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    data_dir: Path
    output_dir: Path
    names: tuple[str, ...]
    window_seconds: float
    limit: float


@with_train_flags(
    train_flag("data_dir", default=REQUIRED, help="Folder of images."),
    train_flag("output_dir", default=REQUIRED, help="Where the results go."),
)
def read_options(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(RUNS)}.", show_default="all")] = ",".join(RUNS),
    window_seconds: Annotated[float, typer.Option(help="Length of a window.", **number_option(float))] = 1.0,
    limit: Annotated[float, typer.Option(help="Seconds after which a run is cut off.", **number_option(float))] = 400.0,
    **flags: Any,
) -> Options:
    """Run the benchmarks and print their table; status 1 if one of them failed."""
    options = Options(**flags, names=tuple(only.split(",")), window_seconds=window_seconds, limit=limit)
    for name in options.names:
        if name not in RUNS:
            raise UserError(f"--only {only}: {name!r} is not one of {', '.join(RUNS)}")
    ABOVE_0.check("--window-seconds", window_seconds)
    ABOVE_0.check("--limit", limit)
    refuse_url(options.data_dir, "--data-dir ")
    if not options.data_dir.is_dir():
        raise UserError(f"--data-dir {options.data_dir}: no such folder; give one that holds class folders of images")
    check_writable(options.output_dir)
    return options


def run_all(options: Options) -> int:
    """Run the series and print its table; returns the exit status."""
    stop_on_sigterm()
    status = EXIT_DONE
    for name in options.names:
        outcome = run(name, options.data_dir, options.output_dir, options.window_seconds, options.limit)
        if not outcome.startswith("done"):
            status = EXIT_FAILED
        _, _, *found = rows(options.output_dir, [name])
        print(f"{name}: {outcome}", *found, sep="\n    ", flush=True)  # a series that is cut off has told its results
    print("\n".join(rows(options.output_dir, RUNS)))
    return status


PROGRAM = Program("performance.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, run_all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
