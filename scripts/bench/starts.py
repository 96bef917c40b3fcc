"""Where the time from a launch of train.py to its first step goes, compiled before and not.

    python scripts/bench starts --data-dir /data/imagenet --arch resnet50,efficientnet_b0

Each network is launched once to compile it, then --launches times with the results of that in the user's cache. With
--cold each of --launches has a cache of its own, empty at first, and is followed by one with its results. Launches of
the networks are interleaved. The table has the median of each part, and of the whole with its range. Parts are those of
the status line; the first batch is a part of the first step. A run that is too short to be compiled by default is not,
unless --flags has --compile.
"""

import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.bench.launch import LIMIT, TRAIN, Limit, run_with_limit, stop_on_sigterm
from scripts.bench.table import markdown
from utils.errors import EXIT_STOPPED, RunFailed
from utils.files import check_writable, write_json
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.flags import flag, split_flags
from utils.options.limits import ABOVE_0, MIN_1
from utils.options.readers import number_option
from utils.options.validation import require_folder

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
WARM, COLD = "compiled before", "nothing compiled"
FIRST_BATCH, WHOLE = "of the first step: first batch", "launch to first step"
Starts = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]  # by network, by WARM or COLD: seconds by part


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; `flags` are train.py's."""

    networks: tuple[str, ...]
    flags: tuple[str, ...]
    data_dir: Path | None
    output_dir: Path
    launches: int
    cold: bool
    limit: float


@with_train_flags(
    train_flag("data_dir", help="Folder of images.", shown="synthetic"),
    train_flag("output_dir", default=Path("runs/starts"), shown=True, help="Where starts.json goes."),
    train_flag("batch_size", help="Images per step.", shown="256"),
    train_flag("image_size"),
    train_flag("device"),
)
def read_options(
    arch: Annotated[str, typer.Option(help="Networks, separated by commas.", metavar="NAME,...")] = "resnet50",
    flags: Annotated[str, typer.Option(help="More flags of train.py.", show_default="none")] = "",
    launches: Annotated[int, typer.Option(help="Launches of each.", **number_option(int))] = 5,
    cold: Annotated[bool, typer.Option(help="Also with an empty cache.")] = False,
    limit: Limit = LIMIT,
    **given: Any,
) -> Options:
    """Time the parts of a start, from the launch to the first step."""
    MIN_1.check("--launches", launches)
    ABOVE_0.check("--limit", limit)
    output_dir, data_dir = given.pop("output_dir"), given["data_dir"]
    words = split_flags(f"--flags {flags}", flags)
    words += [word for name, value in given.items() if value is not None for word in (flag(name), str(value))]
    words += [] if data_dir is not None else ["--loader", "synthetic"]
    return Options(tuple(arch.split(",")), tuple(words), data_dir, output_dir, launches, cold, limit)


def time_start(network: str, options: Options, cache: Path | None) -> dict[str, float]:
    """Launch train.py until its first step; returns the seconds of each part, of the first batch, and of all.

    Compiled results are kept in `cache`, or in the user's folder.

    Raises:
        RunFailed: the launch failed, or took longer than `--limit`.
    """
    environment = {name: str(cache / name) for name in CACHES} if cache else {}
    with tempfile.TemporaryDirectory(prefix="starts-", dir=options.output_dir) as folder:
        output, errors = Path(folder, "run"), Path(folder, "errors.txt")
        words = [sys.executable, TRAIN, "--arch", network, *options.flags]
        words += ["--output-dir", output, "--time-limit", 0.001]
        with Path(folder, "log.txt").open("w") as out, errors.open("w") as err:
            status = run_with_limit(words, options.limit, out, err, environment)
        if status is None:
            raise RunFailed(f"--limit {options.limit:g}: {network} had not done its first step; raise it")
        if status != EXIT_STOPPED:
            raise RunFailed(f"{network}: exit {status}: {errors.read_text().strip()}")
        started = json.loads((output / "events.jsonl").read_text().splitlines()[0])
    parts: dict[str, float] = dict(started["startup_parts"])
    return parts | {FIRST_BATCH: started["first_batch_seconds"], WHOLE: started["startup_seconds"]}


def run(options: Options) -> None:
    """Time all starts, print their table, and write starts.json after each.

    Raises:
        UserError: a folder cannot be used.
        RunFailed: a launch failed.
        Stopped: a signal came.
    """
    if options.data_dir is not None:
        require_folder(options.data_dir)
    check_writable(options.output_dir)
    stop_on_sigterm()
    starts: dict[str, dict[str, list[dict[str, float]]]] = {}
    if not options.cold:
        for network in options.networks:
            time_start(network, options, None)
    for launch, network in itertools.product(range(options.launches), options.networks):
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="compiled-")) if options.cold else None
            for kind in (COLD, WARM) if options.cold else (WARM,):
                found = time_start(network, options, Path(folder) if folder else None)
                starts.setdefault(network, {}).setdefault(kind, []).append(found)
                write_json(options.output_dir / "starts.json", starts)
                print(f"{launch + 1}/{options.launches}  {network}, {kind}: {found[WHOLE]:.1f} s", flush=True)
    print(table(starts))


def table(starts: Starts) -> str:
    """Medians in seconds, and of the whole also the range."""
    columns = {f"{network}, {kind}": each for network, kinds in starts.items() for kind, each in kinds.items()}
    parts = dict.fromkeys(part for launches in columns.values() for launch in launches for part in launch)
    rows = [["seconds", *columns]]
    for part in [*(part for part in parts if part != WHOLE), WHOLE]:
        cells = [[launch.get(part, 0.0) for launch in launches] for launches in columns.values()]
        medians = [f"{statistics.median(cell):.1f}" for cell in cells]
        if part == WHOLE:
            medians = [f"{m} ({min(c):.1f} to {max(c):.1f})" for m, c in zip(medians, cells, strict=True)]
        rows.append([part, *medians])
    return markdown(*rows)


PROGRAM = Program("bench starts", read_options)
