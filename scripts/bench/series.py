"""The runs behind docs/internals/performance.md, a series of benchmark.py on one GPU with 16 cores.

    python scripts/bench series --data-dir DIR --output-dir OUT             # all runs, about half an hour
    python scripts/bench series --data-dir DIR --output-dir OUT --only resnet50,resnet18

Each run writes benchmark.json, benchmark.png and its log to OUT/NAME. A table at the end has all runs, of earlier calls
too. DIR holds class folders of photographs as they come from a camera or ImageNet, not resized ones. A run that takes
longer than --limit is ended with all its processes, as the current run is by Ctrl-C or SIGTERM.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.bench.launch import LIMIT, Limit, run_with_limit, stop_on_sigterm
from scripts.bench.table import markdown
from utils.benchmark.verdict import Rate, is_same
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.files import check_writable
from utils.options.cli import REQUIRED, Program, train_flag, with_train_flags
from utils.options.limits import ABOVE_0
from utils.options.readers import number_option
from utils.options.validation import require_folder

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmark.py"
DONE = "done"
DALI = "dali-full,dali-fused"
RUNS = {  # flags of benchmark.py; besides the decoding threads, eight read files, and mostly wait
    "resnet50": f"--arch resnet50 --workers 4 --loaders {DALI}",
    "resnet50-128": "--arch resnet50 --workers 4 --loaders dali-full --batch-size 128",
    "efficientnet_b0": f"--arch efficientnet_b0 --workers 4 --loaders {DALI}",
    "resnet18": f"--arch resnet18 --workers 4 --loaders {DALI}",
    "resnet18-8": f"--arch resnet18 --workers 8 --loaders {DALI}",
    "resnet18-15": f"--arch resnet18 --workers 15 --loaders {DALI}",
    "resnet18-timm-layers": f"--arch resnet18 --workers 4 --loaders {DALI} --no-fused-layers",
    "resnet50-plain": f"--arch resnet50 --workers 4 --loaders {DALI} --no-fused-layers --no-cuda-graph",
    "loaders-4": "--arch resnet50 --workers 4 --loaders dali-full,torch",
    "loaders-16": "--arch resnet50 --workers 15",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    data_dir: Path
    output_dir: Path
    names: tuple[str, ...]
    window_seconds: float
    limit: float


def run_benchmark(name: str, options: Options) -> str:
    """Run one benchmark in a process of its own; returns how it ended."""
    folder = options.output_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.json").unlink(missing_ok=True)  # of an earlier run
    words = [sys.executable, BENCHMARK, *RUNS[name].split(), "--data-dir", options.data_dir]
    words += ["--output-dir", folder, "--window-seconds", options.window_seconds]
    with (folder / "log.txt").open("w") as log:
        status = run_with_limit(words, options.limit, log, log)
    if status is None:
        return f"cut off after {options.limit:.0f} s"
    return DONE if status == EXIT_DONE else f"exit {status}, see {folder / 'log.txt'}"


def table(output_dir: Path, names: Iterable[str]) -> str:
    """A line for each loader of each run that has a result."""
    rows = [("run", "threads", "batch", "synthetic, images/s", "fed, images/s", "fed / synthetic", "alone, images/s")]
    for name in names:
        path = output_dir / name / "benchmark.json"
        if not path.is_file():
            continue
        found: dict[str, Any] = json.loads(path.read_text())
        synthetic = found["training"].pop("synthetic")
        for loader, rate in found["training"].items():
            same = is_same(*(Rate(tuple(one["windows"])) for one in (rate, synthetic)))
            share = "no difference" if same else f"{rate['median'] / synthetic['median']:.3f}"
            rates = (shown(synthetic), shown(rate), share, shown(found["alone"][loader]))
            rows.append((f"{name}, {loader}", str(found["workers"]), str(found["batch_size"]), *rates))
    return markdown(*rows)


def shown(rate: dict[str, Any]) -> str:
    """Median and range of the windows."""
    return str(Rate(tuple(rate["windows"])))


@with_train_flags(
    train_flag("data_dir", default=REQUIRED, help="Folder of images."),
    train_flag("output_dir", default=REQUIRED, shown=False, help="Where the results go."),
)
def read_options(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(RUNS)}.", show_default="all")] = ",".join(RUNS),
    window_seconds: Annotated[float, typer.Option(help="Length of a window.", **number_option(float))] = 1.0,
    limit: Limit = LIMIT,
    **flags: Any,
) -> Options:
    """Run the benchmarks and print their table; status 1 if one of them failed."""
    options = Options(**flags, names=tuple(only.split(",")), window_seconds=window_seconds, limit=limit)
    for name in options.names:
        if name not in RUNS:
            raise UserError(f"--only {only}: {name!r} is not one of {', '.join(RUNS)}")
    ABOVE_0.check("--window-seconds", window_seconds)
    ABOVE_0.check("--limit", limit)
    require_folder(options.data_dir)
    check_writable(options.output_dir)
    return options


def run(options: Options) -> int:
    """Run the series and print its table; returns the exit status."""
    stop_on_sigterm()
    status = EXIT_DONE
    for name in options.names:
        outcome = run_benchmark(name, options)
        if outcome != DONE:
            status = EXIT_FAILED
        _, _, *rows = table(options.output_dir, [name]).splitlines()
        print(f"{name}: {outcome}", *rows, sep="\n    ", flush=True)  # a series that is cut off has told its results
    print(table(options.output_dir, RUNS))
    return status


PROGRAM = Program("bench series", read_options)
