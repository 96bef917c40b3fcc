#!/usr/bin/env python3
"""Measure how training scales over the GPUs of this machine: train.py itself, on 1 and on more of them, in turns.

    scripts/scaling.py --data-dir DIR --output-dir OUT --processes 1,2,4,8 --loaders dali,torch
    scripts/scaling.py --data-dir DIR --output-dir OUT --processes 1,2 --cpus 8      # on 8 CPU threads in all

DIR holds train/CLASS/*.jpg and val/CLASS/*.jpg. The files are linked as often as it takes to fill an epoch, and are
not kept decoded, as a large data set could not be. Smaller runs take other GPUs in each round, of those that
CUDA_VISIBLE_DEVICES names if it is set: the GPUs of one machine need not be equally fast, and together they wait for
the slowest. A run is ended by a signal when its windows are measured; its first log intervals, in which it warms up, do
not count. Prints a table and writes scaling.json, scaling.png and the logs of the runs to --output-dir; scaling.json
after every run.
"""

import dataclasses
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from matplotlib.figure import Figure

from utils.data.codecs import is_image
from utils.errors import EXIT_USER_ERROR, UserError, escape_control_chars

LOADERS = ("dali", "proxy", "torch", "synthetic")
ROOT = Path(__file__).resolve().parent.parent
WARMUP = 6  # log intervals: on an H200 the first 100 steps wait for data 1 to 8 % of the time
SPARE = 2  # log intervals in which the signal arrives
END_SECONDS = 60  # for a run to save and end


@dataclasses.dataclass
class Point:
    """One loader on one number of processes; the lists have a value for each window."""

    loader: str
    processes: int
    rates: list[float] = dataclasses.field(default_factory=list)  # images/s, of all processes
    waits: list[float] = dataclasses.field(default_factory=list)  # data wait, 0 to 1

    @property
    def rate(self) -> float:
        """Median images/s of all processes."""
        return statistics.median(self.rates)


def link_images(data_dir: Path, folder: Path, least: int) -> None:
    """Fill `folder` with train/ and val/ of links to the images of `data_dir`, train/ with at least `least`.

    Raises:
        UserError: there are none.
    """
    for split, wanted in (("train", least), ("val", 0)):
        # What train.py lists: the name of a link does not begin with the dot of a hidden file.
        found = (path for path in (data_dir / split).glob("[!.]*/[!.]*") if is_image(path.name) and path.is_file())
        files = sorted(path.absolute() for path in found)
        if not files:
            raise UserError(f"--data-dir {data_dir}: {split}/ holds no CLASS/IMAGE; give a folder with train/ and val/")
        for path in files:
            (folder / split / path.parent.name).mkdir(parents=True, exist_ok=True)
        for number in range(max(len(files), wanted)):
            turn, index = divmod(number, len(files))
            path = files[index]
            (folder / split / path.parent.name / f"{turn:06}-{path.name}").symlink_to(path)


def gpus_of_round(turn: int, processes: int, most: int, visible: str | None) -> str:
    """GPUs for a run in round `turn`, from 0: each of `most` in turn, as CUDA_VISIBLE_DEVICES has them.

    They are the first of those that it names already (`visible`), as under Slurm; a run that needs more gets them all.
    """
    gpus = [str(number) for number in range(most)] if visible is None else visible.split(",")[:most]
    return ",".join(gpus[(turn * processes + number) % len(gpus)] for number in range(min(processes, len(gpus))))


def measure(
    point: Point, data_dir: Path, work: Path, flags: Sequence[str], cpus: int | None, windows: int, gpus: str
) -> None:
    """One run of train.py on these GPUs, if there are any; adds its windows to `point`.

    Raises:
        RuntimeError: the run ended by itself.
    """
    output_dir = data_dir / "runs" / f"{point.loader}-{point.processes}"
    launcher = [sys.executable]
    if point.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={point.processes}"]
    words = [*launcher, ROOT / "train.py", "--data-dir", data_dir, "--output-dir", output_dir]
    words += ["--loader", point.loader, "--epochs", "1", "--cache", "none", "--resume", "none", "--overwrite"]
    threads = sorted(os.sched_getaffinity(0))[:cpus]
    log = work / f"{point.loader}-{point.processes}.log"
    metrics = output_dir / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # of the round before
    with log.open("a") as out:
        process = subprocess.Popen(
            [*map(str, words), *flags],
            stdout=out, stderr=out, preexec_fn=lambda: os.sched_setaffinity(0, threads),
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
        )  # fmt: skip
        try:
            while len(lines := metrics.read_text().splitlines() if metrics.exists() else []) < WARMUP + windows:
                if process.poll() is not None:
                    raise RuntimeError(f"{point.loader} on {point.processes}: ended too early, see {log}")
                time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError(f"{point.loader} on {point.processes}: did not end, see {log}") from None
    for line in lines[WARMUP : WARMUP + windows]:
        record: dict[str, Any] = json.loads(line)
        point.rates.append(record["images_per_second"])
        point.waits.append(record["data_wait"])


def table(points: Sequence[Point]) -> str:
    """A Markdown table; efficiency is against the same loader on the fewest processes, times their number."""
    lines = ["| loader | processes | images/s | efficiency | data wait |", "|---|---|---|---|---|"]
    for point in points:
        spread = f"({min(point.rates):,.0f} to {max(point.rates):,.0f})"
        lines.append(
            f"| {point.loader} | {point.processes} | {point.rate:,.0f} {spread} | {efficiency(point, points):.3f} "
            f"| {statistics.median(point.waits):.1%} |"
        )
    return "\n".join(lines)


def efficiency(point: Point, points: Sequence[Point]) -> float:
    """Rate per process over that of the same loader's smallest run."""
    least = min((other for other in points if other.loader == point.loader), key=lambda other: other.processes)
    return point.rate / point.processes / (least.rate / least.processes)


def draw(path: Path, points: Sequence[Point], title: str) -> None:
    """Images/s over processes, a line for each loader and a dashed one for DALI's perfect scaling."""
    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for loader in dict.fromkeys(point.loader for point in points):
        own = [point for point in points if point.loader == loader]
        numbers, rates = [point.processes for point in own], [point.rate for point in own]
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
    figure.savefig(path, format="png")


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder with train/ and val/.")],
    output_dir: Annotated[Path, typer.Option(help="Where the results go.")],
    processes: Annotated[str, typer.Option(help="Numbers of processes, one GPU each, ascending.")] = "1,2",
    loaders: Annotated[str, typer.Option(help="Values of train.py's --loader.")] = "dali",
    batch_size: Annotated[int, typer.Option(help="Images per process and step.", min=1)] = 256,
    flags: Annotated[str, typer.Option(help="More flags of train.py.")] = "--arch resnet50",
    cpus: Annotated[int | None, typer.Option(help="CPU threads for all together.", show_default="all", min=1)] = None,
    log_steps: Annotated[int, typer.Option(help="Steps of a window.", min=1)] = 20,
    windows: Annotated[int, typer.Option(help="Windows per run.", min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="Runs of each.", min=1)] = 2,
) -> None:
    """Train on more and more GPUs and say how well it scales; status 1 if a run failed."""
    if not all(word.isdigit() and int(word) > 0 for word in processes.split(",")):
        raise refused(f"--processes {processes}: must be whole numbers, such as 1,2,4")
    for loader in loaders.split(","):
        if loader not in LOADERS:
            raise refused(f"--loaders {loaders}: {loader!r} is not one of {', '.join(LOADERS)}")
    try:
        more_flags = shlex.split(flags)
    except ValueError as error:
        raise refused(
            f"--flags {flags}: {str(error).lower()}; quote the whole, and close what is quoted in it"
        ) from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way is ended, too
    numbers = sorted(int(word) for word in processes.split(","))
    points = [Point(loader, number) for loader in loaders.split(",") for number in numbers]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output_dir).close()
    except OSError as error:
        raise refused(f"--output-dir {output_dir}: cannot be written ({error.strerror}); give another folder") from None
    failed = False
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        try:
            link_images(data_dir, Path(folder), (WARMUP + windows + SPARE) * log_steps * batch_size * max(numbers))
        except UserError as error:
            raise refused(str(error)) from None
        for turn in range(rounds):
            for point in points:
                words = [*more_flags, "--batch-size", str(batch_size), "--log-steps", str(log_steps)]
                gpus = gpus_of_round(turn, point.processes, max(numbers), os.environ.get("CUDA_VISIBLE_DEVICES"))
                try:
                    measure(point, Path(folder), output_dir, words, cpus, windows, gpus)
                except RuntimeError as error:
                    print(f"round {turn + 1}: {error}", file=sys.stderr, flush=True)
                    failed = True
                    continue
                print(f"round {turn + 1}: {point.loader} on {point.processes}: {point.rate:,.0f} images/s", flush=True)
                measured = [point for point in points if point.rates]
                found = [dataclasses.asdict(point) | {"efficiency": efficiency(point, measured)} for point in measured]
                results = {"flags": flags, "cpus": cpus, "points": found}
                (output_dir / "scaling.json").write_text(json.dumps(results, indent=2))
    measured = [point for point in points if point.rates]
    if measured:
        draw(output_dir / "scaling.png", measured, f"train.py {flags}")
        print(table(measured))
    raise typer.Exit(int(failed))


def refused(text: str) -> typer.Exit:
    """What to raise for a mistake of the user's, which is told here."""
    print(f"scaling.py: {escape_control_chars(text)}", file=sys.stderr, flush=True)
    return typer.Exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    typer.run(main)
