"""How training scales over the GPUs of this machine: train.py on 1 and on more of them, interleaved.

    python scripts/bench scaling --data-dir DIR --output-dir OUT --processes 1,2,4,8 --loaders dali,torch
    python scripts/bench scaling --data-dir DIR --output-dir OUT --processes 1,2 --cpus 8      # on 8 CPU threads in all

DIR holds train/CLASS/*.jpg and val/CLASS/*.jpg. The files are linked as often as it takes to fill an epoch. They are
not kept decoded, as a large data set could not be. Smaller runs use other GPUs in each round, of those that
CUDA_VISIBLE_DEVICES names if it is set: the GPUs of one machine need not be equally fast, and together they wait for
the slowest. A run is ended by a signal when its windows are measured. Its first log intervals, in which it warms up, do
not count. Prints a table and writes scaling.json, scaling.png and the logs of the runs to --output-dir; scaling.json
after every run.
"""

import dataclasses
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.bench.launch import TRAIN, launched, stop_on_sigterm
from scripts.bench.table import markdown
from utils.benchmark.verdict import Rate
from utils.data.images.codecs import is_image
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.files import check_writable, write_json
from utils.options.cli import REQUIRED, Program, train_flag, with_train_flags
from utils.options.config import choices
from utils.options.flags import split_flags
from utils.options.limits import MIN_1
from utils.options.readers import number_option
from utils.options.store_url import refuse_url

LOADERS = choices("loader")
WARMUP = 6  # log intervals: on an H200 the first 100 steps wait for data 1 to 8 % of the time
SPARE = 2  # log intervals, in which the signal arrives
END_SECONDS = 60  # for a run to save and end
WHOLE = number_option(int)


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; `flags` are as a shell reads them, and a window has `log_steps` steps."""

    processes: tuple[int, ...]
    loaders: tuple[str, ...]
    flags: str
    cpus: int | None
    windows: int
    rounds: int
    data_dir: Path
    output_dir: Path
    batch_size: int
    log_steps: int


@dataclasses.dataclass
class Point:
    """One loader on one number of processes; the lists have a value for each window."""

    loader: str
    processes: int
    rates: list[float] = dataclasses.field(default_factory=list)  # images/s, of all processes
    waits: list[float] = dataclasses.field(default_factory=list)  # data wait, 0 to 1

    @property
    def rate(self) -> Rate:
        """Images/s of all processes."""
        return Rate(tuple(self.rates))


def link_images(data_dir: Path, folder: Path, min_train: int) -> None:
    """Fill `folder` with train/ and val/ of links to the images of `data_dir`, train/ with at least `min_train`.

    Raises:
        UserError: there are none.
    """
    for split, min_images in (("train", min_train), ("val", 0)):
        # What train.py lists: the name of a link does not begin with the dot of a hidden file.
        found = (path for path in (data_dir / split).glob("[!.]*/[!.]*") if is_image(path.name) and path.is_file())
        files = sorted(path.absolute() for path in found)
        if not files:
            raise UserError(f"--data-dir {data_dir}: {split}/ holds no CLASS/IMAGE; give a folder with train/ and val/")
        for path in files:
            (folder / split / path.parent.name).mkdir(parents=True, exist_ok=True)
        for number in range(max(len(files), min_images)):
            copy, index = divmod(number, len(files))
            path = files[index]
            (folder / split / path.parent.name / f"{copy:06}-{path.name}").symlink_to(path)


def gpus_of_round(round_number: int, processes: int, num_gpus: int, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a run in a round, counted from 0: each of `num_gpus` GPUs is used equally often.

    They are the first of those that the variable names already (`visible`), as under Slurm. A run that needs more gets
    them all.
    """
    gpus = [str(number) for number in range(num_gpus)] if visible is None else visible.split(",")[:num_gpus]
    return ",".join(gpus[(round_number * processes + rank) % len(gpus)] for rank in range(min(processes, len(gpus))))


def measure(point: Point, data_dir: Path, gpus: str, options: Options) -> None:
    """One run of train.py with these CUDA_VISIBLE_DEVICES; adds its windows to `point`.

    The run reads `data_dir`, the temporary folder of `link_images`, and writes there, too.

    Raises:
        RuntimeError: the run ended before its windows were measured, or did not end when it was asked to.
    """
    output_dir = data_dir / "runs" / f"{point.loader}-{point.processes}"
    words: list[object] = [sys.executable]
    if point.processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={point.processes}"]
    words += [TRAIN, "--data-dir", data_dir, "--output-dir", output_dir]
    # So many epochs that the step is that of a long run; it is stopped in the first.
    words += ["--loader", point.loader, "--epochs", "1000", "--cache", "none", "--resume", "none", "--overwrite"]
    words += split_flags("--flags", options.flags)
    words += ["--batch-size", options.batch_size, "--log-steps", options.log_steps]
    log = options.output_dir / f"{point.loader}-{point.processes}.log"
    metrics = output_dir / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # of the round before
    needed = WARMUP + options.windows
    with (
        log.open("a") as out,
        launched(words, out, out, {"CUDA_VISIBLE_DEVICES": gpus}, options.cpus, END_SECONDS) as process,
    ):
        while len(lines := metrics.read_text().splitlines() if metrics.exists() else []) < needed:
            if process.poll() is not None:
                raise RuntimeError(f"ended too early, see {log}")
            time.sleep(0.1)
    if process.returncode == -signal.SIGKILL:
        raise RuntimeError(f"did not end, see {log}")
    for line in lines[WARMUP:needed]:
        record: dict[str, Any] = json.loads(line)
        point.rates.append(record["images_per_second"])
        point.waits.append(record["data_wait"])


def table(points: Sequence[Point]) -> str:
    """Efficiency is against the same loader on the fewest processes, times their number."""
    rows = [("loader", "processes", "images/s", "efficiency", "data wait")]
    for point in points:
        efficient, wait = efficiency(point, points), statistics.median(point.waits)
        rows.append((point.loader, str(point.processes), str(point.rate), f"{efficient:.3f}", f"{wait:.1%}"))
    return markdown(*rows)


def efficiency(point: Point, points: Sequence[Point]) -> float:
    """Rate per process over that of the same loader's smallest run."""
    smallest = min((other for other in points if other.loader == point.loader), key=lambda other: other.processes)
    return point.rate.median / point.processes / (smallest.rate.median / smallest.processes)


def draw(path: Path, points: Sequence[Point], title: str) -> None:
    """Images/s over processes, a line for each loader and a dashed one for DALI's perfect scaling."""
    from matplotlib.figure import Figure  # slow to import

    from utils.benchmark.report import write_png

    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for loader in dict.fromkeys(point.loader for point in points):
        line = [point for point in points if point.loader == loader]
        numbers, rates = [point.processes for point in line], [point.rate.median for point in line]
        axes.plot(numbers, rates, marker="o", label=loader)
        if loader == points[0].loader:
            axes.plot(
                numbers, [number * rates[0] / numbers[0] for number in numbers], "--", color="#888888", label="linear"
            )
        for number, rate in zip(numbers, rates, strict=True):
            axes.annotate(f"{rate:,.0f}", (number, rate), textcoords="offset points", xytext=(0, 7), fontsize=8)
    axes.set_xticks(sorted({point.processes for point in points}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("processes")
    axes.set_ylabel("images/s")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    write_png(path, figure)


@with_train_flags(
    train_flag("data_dir", default=REQUIRED, help="Folder with train/ and val/."),
    train_flag("output_dir", default=REQUIRED, shown=False, help="Where the results go."),
    train_flag("batch_size", default=256, shown=True),
    train_flag("log_steps", default=20, help="Steps of a window."),
)
def read_options(
    processes: Annotated[str, typer.Option(help="Numbers of processes, one GPU each, ascending.")] = "1,2",
    loaders: Annotated[str, typer.Option(help="Values of train.py's --loader.")] = "dali",
    flags: Annotated[str, typer.Option(help="More flags of train.py.")] = "--arch resnet50",
    cpus: Annotated[int | None, typer.Option(help="CPU threads for all together.", show_default="all", **WHOLE)] = None,
    windows: Annotated[int, typer.Option(help="Windows per run.", **WHOLE)] = 5,
    rounds: Annotated[int, typer.Option(help="Runs of each.", **WHOLE)] = 2,
    **train_flags: Any,
) -> Options:
    """Train on more and more GPUs and print how well it scales; status 1 if a run failed."""
    if not all(word.isdigit() and int(word) > 0 for word in processes.split(",")):
        raise UserError(f"--processes {processes}: must be whole numbers, such as 1,2,4")
    for loader in loaders.split(","):
        if loader not in LOADERS:
            raise UserError(f"--loaders {loaders}: {loader!r} is not one of {', '.join(LOADERS)}")
    for name, value in (("--cpus", cpus), ("--windows", windows), ("--rounds", rounds)):
        MIN_1.check(name, value)
    split_flags(f"--flags {flags}", flags)
    numbers = tuple(sorted(int(word) for word in processes.split(",")))
    refuse_url(train_flags["data_dir"], "--data-dir ")
    check_writable(train_flags["output_dir"])
    return Options(numbers, tuple(loaders.split(",")), flags, cpus, windows, rounds, **train_flags)


def run(options: Options) -> int:
    """Measure all points, write the results and print their table; returns the exit status."""
    stop_on_sigterm()
    points = [Point(loader, number) for loader in options.loaders for number in options.processes]
    measured: list[Point] = []
    num_gpus, status = max(options.processes), EXIT_DONE
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        steps = (WARMUP + options.windows + SPARE) * options.log_steps
        link_images(options.data_dir, Path(folder), steps * options.batch_size * num_gpus)
        for round_number, point in itertools.product(range(options.rounds), points):
            gpus = gpus_of_round(round_number, point.processes, num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
            title = f"round {round_number + 1}: {point.loader} on {point.processes}"
            try:
                measure(point, Path(folder), gpus, options)
            except RuntimeError as error:
                print(f"{title}: {error}", file=sys.stderr, flush=True)
                status = EXIT_FAILED
                continue
            print(f"{title}: {point.rate.median:,.0f} images/s", flush=True)
            measured = [point for point in points if point.rates]
            found = [dataclasses.asdict(point) | {"efficiency": efficiency(point, measured)} for point in measured]
            results = {"flags": options.flags, "cpus": options.cpus, "points": found}
            write_json(options.output_dir / "scaling.json", results)
    if measured:
        draw(options.output_dir / "scaling.png", measured, f"train.py {options.flags}")
        print(table(measured))
    return status


PROGRAM = Program("bench scaling", read_options)
