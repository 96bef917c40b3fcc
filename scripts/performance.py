#!/usr/bin/env python3
"""The runs behind docs/performance.md, on one GPU with 16 cores: a series of benchmark.py and starts, then their table.

    scripts/performance.py --data-dir DIR --output-dir OUT             # all runs, about half an hour
    scripts/performance.py --data-dir DIR --output-dir OUT --only resnet50,resnet18

Each run leaves its benchmark.json, benchmark.png and log in OUT/NAME; runs of earlier calls are in the table too. DIR
holds class folders of photographs as they come from a camera or ImageNet, not resized ones. A run that takes longer
than --limit is ended with all its processes, as the run under way is by Ctrl-C or SIGTERM.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.errors import EXIT_STOPPED, EXIT_USER_ERROR, escape_control_chars

BENCHMARK = Path(__file__).with_name("benchmark.py")
TRAIN = Path(__file__).resolve().parent.parent / "train.py"
STARTS, START_COUNT = "starts", 4  # launches of train.py; the first may compile
END_SECONDS = 30  # for a run to end by itself, once it was asked to
DALI = "dali-full,dali-fused"
RUNS = {  # besides the decoding threads, eight read files, and mostly wait
    "resnet50": ("--arch", "resnet50", "--workers", "4", "--loaders", DALI),
    "resnet50-128": ("--arch", "resnet50", "--workers", "4", "--loaders", "dali-full", "--batch-size", "128"),
    "efficientnet_b0": ("--arch", "efficientnet_b0", "--workers", "4", "--loaders", DALI),
    "resnet18": ("--arch", "resnet18", "--workers", "4", "--loaders", DALI),
    "resnet18-15": ("--arch", "resnet18", "--workers", "15", "--loaders", DALI),
    "resnet18-timm-layers": ("--arch", "resnet18", "--workers", "4", "--loaders", DALI, "--no-fused-layers"),
    "resnet50-plain": (
        "--arch", "resnet50", "--workers", "4", "--loaders", DALI, "--no-fused-layers", "--no-cuda-graph",
    ),
    "loaders-4": ("--arch", "resnet50", "--workers", "4", "--loaders", "dali-full,torch"),
    "loaders-16": ("--arch", "resnet50", "--workers", "15"),
}  # fmt: skip
NAMES = (*RUNS, STARTS)


def launch(words: Sequence[object], limit: float, out: IO[str], err: IO[str]) -> int | None:
    """Exit status of a command, None if it was cut off. Neither processes nor temporary files of it are left."""
    with tempfile.TemporaryDirectory(prefix="performance-", ignore_cleanup_errors=True) as temporary:
        process = subprocess.Popen(
            list(map(str, words)), stdout=out, stderr=err, env=os.environ | {"TMPDIR": temporary},
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, then kill what is left of its group: its workers do not end with it if it is killed."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
    finally:  # a second signal may have cut the wait short
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for _ in range(20):  # the others need a moment to be gone, and what they hold
                time.sleep(0.1)
                os.killpg(process.pid, 0)


def run(name: str, data_dir: Path, output_dir: Path, window_seconds: float, limit: float) -> str:
    """One benchmark, in a process of its own; returns how it ended."""
    folder = output_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.json").unlink(missing_ok=True)  # of an earlier run
    flags = ("--data-dir", data_dir, "--output-dir", folder, "--window-seconds", window_seconds)
    words = [sys.executable, BENCHMARK, *RUNS[name], *flags]
    with (folder / "log.txt").open("w") as log:
        status = launch(words, limit, log, log)
    if status is None:
        return f"cut off after {limit:.0f} s"
    return "done" if status == 0 else f"exit {status}, see {folder / 'log.txt'}"


def time_starts(output_dir: Path, limit: float, flags: Sequence[str] = (), count: int = START_COUNT) -> str:
    """Launch train.py on synthetic data until its first step, several times; returns how it ended, with seconds."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="starts-", dir=output_dir) as folder:  # the checkpoints are of no use
        words = [sys.executable, TRAIN, "--loader", "synthetic", "--time-limit", 0.001]
        words += ["--output-dir", Path(folder, "run"), "--resume", "none", "--overwrite", *flags]
        log, errors = Path(folder, "log.txt"), Path(folder, "errors.txt")
        for _ in range(count):
            with log.open("w") as out, errors.open("w") as err:
                status = launch(words, limit, out, err)
            if status is None:
                return f"cut off after {limit:.0f} s"
            found = re.search(r"first step done ([\d.]+) s after the launch", log.read_text())
            if found is None or status != EXIT_STOPPED:
                return f"exit {status}: {errors.read_text().strip()}"
            seconds.append(found[1])
    return f"done; launch to first step: {', '.join(seconds)} s"


def rows(output_dir: Path) -> Iterator[str]:
    """A line of Markdown for each run that is there."""
    yield "| run | threads | batch | synthetic, images/s | fed, images/s | fed / synthetic | loader alone, images/s |"
    yield "|---|---|---|---|---|---|---|"
    for name in RUNS:
        path = output_dir / name / "benchmark.json"
        if not path.is_file():
            continue
        found: dict[str, Any] = json.loads(path.read_text())
        synthetic = found["training"]["synthetic"]
        for loader, rate in found["training"].items():
            if loader == "synthetic":
                continue
            share = f"{rate['median'] / synthetic['median']:.3f}"
            rates = (shown(synthetic), shown(rate), share, shown(found["alone"][loader]))
            yield f"| {' | '.join((f'{name}, {loader}', str(found['workers']), str(found['batch_size']), *rates))} |"


def shown(rate: dict[str, Any]) -> str:
    """Median and range of the windows."""
    return f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})"


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder of images.")],
    output_dir: Annotated[Path, typer.Option(help="Where the results go.")],
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}.", show_default="all")] = ",".join(NAMES),
    window_seconds: Annotated[float, typer.Option(help="Length of a window.")] = 1.0,
    limit: Annotated[float, typer.Option(help="Seconds after which a run is cut off.")] = 400.0,
) -> None:
    """Run the benchmarks and print their table; status 1 if one of them failed."""
    for name in only.split(","):
        if name not in NAMES:
            raise refused(f"--only {only}: {name!r} is not one of {', '.join(NAMES)}")
    if not data_dir.is_dir():
        raise refused(f"--data-dir {data_dir}: no such folder; give one that holds class folders of images")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output_dir).close()
    except OSError as error:
        raise refused(f"--output-dir {output_dir}: cannot be written ({error.strerror}); give another folder") from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))  # so that the run under way is ended, too
    failed = False
    for name in only.split(","):
        if name == STARTS:
            ended = time_starts(output_dir, limit)
        else:
            ended = run(name, data_dir, output_dir, window_seconds, limit)
        failed |= not ended.startswith("done")
        print(f"{name}: {ended}", flush=True)
    print("\n".join(rows(output_dir)))
    raise typer.Exit(int(failed))


def refused(text: str) -> typer.Exit:
    """What to raise for a mistake of the user's, which is told here."""
    print(f"performance.py: {escape_control_chars(text)}", file=sys.stderr, flush=True)
    return typer.Exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    typer.run(main)
