"""Train some recipes with some seeds each: do their accuracies differ by more than the seed does?

    python scripts/bench recipes --data-dir DIR --seeds 3 --flags "--config configs/imagenette_5epochs.yaml" \\
        "DALI" "torchvision: --loader torch"

A recipe is NAME, or NAME: and more flags of train.py. Seeds are 0, 1, 2, ...; seeds come before recipes in the order of
the runs, so that all recipes have as many. The folder of a run is OUT/NAME-SEED, without its checkpoints once it is
done. The same command again goes on where it was stopped; a folder whose config.json has other flags is refused. The
top-1 of a run is that of its model or of its moving average, whichever is better. Writes recipes.json after every run.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.bench.launch import TRAIN, launched, stop_on_sigterm
from scripts.bench.table import markdown
from utils.errors import EXIT_DONE, RunFailed, UserError
from utils.files import check_writable, write_json
from utils.log import SUMMARY
from utils.options.cli import REQUIRED, Program, parse, train_flag, with_train_flags
from utils.options.config import TrainConfig, flags_with
from utils.options.data_flags import BATCH_SIZE, PREFETCH
from utils.options.flags import flag, split_flags
from utils.options.limits import MIN_1
from utils.options.readers import number_option
from utils.options.resolved import CHOSEN
from utils.report.output_folder import read_object

POLL_SECONDS = 0.2
# Flags that are chosen where they were not given, and had these values before.
CHOSEN_SINCE: dict[str, Any] = {"task": None, "loss": "cross-entropy", "label_smoothing": 0.1, "best_by": "top1"}
OWN = ("--data-dir", "--output-dir", "--name", "--seed", "--resume")  # flags of train.py that this program gives
Results = Mapping[str, Sequence[Mapping[str, Any]]]  # by recipe: summary.json of each seed


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; `recipes` are flags by name, and `configs` what they mean, but for the folder and the seed."""

    recipes: dict[str, list[str]]
    configs: dict[str, TrainConfig]
    data_dir: Path
    output_dir: Path
    seeds: int
    jobs: int


@with_train_flags(
    train_flag("data_dir", default=REQUIRED, help="Data set of the runs."),
    train_flag("output_dir", default=REQUIRED, shown=False, help="Where recipes.json and the runs go."),
)
def read_options(
    recipes: Annotated[list[str], typer.Argument(metavar="NAME[: FLAGS]...", help="Recipes; compared with the first.")],
    flags: Annotated[str, typer.Option(help="Flags of train.py for all.", show_default="none")] = "",
    seeds: Annotated[int, typer.Option(help="Runs of each.", **number_option(int))] = 3,
    jobs: Annotated[int, typer.Option(help="Runs at the same time.", **number_option(int))] = 1,
    **given: Any,
) -> Options:
    """Compare recipes over several seeds."""
    MIN_1.check("--seeds", seeds)
    MIN_1.check("--jobs", jobs)
    found: dict[str, list[str]] = {}
    configs: dict[str, TrainConfig] = {}
    for text in recipes:
        name, _, more = text.partition(":")
        words = split_flags(f"--flags {flags}", flags) + split_flags(text, more)
        if not name or "/" in name or name in found:
            raise UserError(f"{text}: a recipe needs a name of its own, without a slash; write NAME: FLAGS")
        for word in words:
            if word.partition("=")[0] in OWN:
                raise UserError(f"{text}: {word} is this program's to give; leave it out")
        found[name] = words
        try:
            configs[name] = parse(["--data-dir", str(given["data_dir"]), *words])
        except UserError as error:
            raise UserError(f"{text}: {error}") from None
    return Options(found, configs, given["data_dir"], given["output_dir"], seeds, jobs)


def run(options: Options) -> None:
    """Train all runs that are left, print their table, and write recipes.json.

    Raises:
        UserError: the output folder cannot be written, or holds runs of other flags.
        RunFailed: a run failed.
        Stopped: a signal came; the runs under way resume.
    """
    left = list(itertools.product(range(options.seeds), options.recipes))
    for seed, name in left:
        _check_flags(_folder(options, name, seed), dataclasses.replace(options.configs[name], seed=seed))
    check_writable(options.output_dir)
    stop_on_sigterm()
    running: dict[tuple[int, str], tuple[subprocess.Popen[bytes], contextlib.ExitStack]] = {}
    with contextlib.ExitStack() as stack:  # ends what is running
        while left or running:
            while left and len(running) < options.jobs:
                seed, name = left.pop(0)
                if (_folder(options, name, seed) / SUMMARY).is_file():
                    _finish(options, name, seed, EXIT_DONE)
                else:
                    one_run = stack.enter_context(contextlib.ExitStack())
                    running[seed, name] = one_run.enter_context(_launched(options, name, seed)), one_run
            for (seed, name), (process, one_run) in list(running.items()):
                if process.poll() is not None:
                    one_run.close()
                    del running[seed, name]
                    _finish(options, name, seed, process.returncode)
            time.sleep(POLL_SECONDS if running else 0)
    print(table(read_results(options)))


def _check_flags(folder: Path, config: TrainConfig) -> None:
    """Raise UserError where a folder holds a run of other flags than `config`, which is as given."""
    before = read_object(folder / "config.json")
    if not before:
        if (folder / SUMMARY).is_file():
            PROGRAM.print_error(f"{folder}: has no config.json, so that the flags of its result are not known")
        return
    if changes := list(_changed_flags(before, config)):
        raise UserError(
            f"{folder}: holds a run of other flags ({', '.join(changes)}); name the recipe or --output-dir otherwise, "
            "or remove the folder"
        )


def _changed_flags(before: Mapping[str, Any], config: TrainConfig) -> Iterator[str]:
    """What differs from the config.json of a run. A value that is left open now must not have been given then."""
    choices: Any = before.get(CHOSEN)
    now: dict[str, Any] = {"batch_size": BATCH_SIZE, "prefetch": PREFETCH}
    now |= {name: value for name, value in config.to_dict().items() if value is not None or name not in now}
    for name in (name for name in now if name != "output_dir"):
        then, value = before.get(name), now[name]
        if name in flags_with(chosen=True) and name not in config.given:
            is_same = choices is None or name in choices or (name, then) in CHOSEN_SINCE.items()
            value = "not given"
        elif name == "data_dir":
            is_same = then == value or os.path.realpath(str(then)) == os.path.realpath(str(value))
        else:
            is_same = then == value or value == "auto"  # of --processes
        if not is_same:
            yield f"{flag(name)}: {then} then, {value} now"


def top1_of(summary: Mapping[str, Any]) -> float:
    """Percent at the end of a run, of its model or of its moving average, whichever is better."""
    return float(max(summary["top1"], summary.get("ema_top1", 0.0)))


def _folder(options: Options, name: str, seed: int) -> Path:
    return options.output_dir / f"{name}-{seed}"


@contextlib.contextmanager
def _launched(options: Options, name: str, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    folder = _folder(options, name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, TRAIN, "--data-dir", options.data_dir, "--output-dir", folder, "--seed", seed]
    with (folder / "log.txt").open("a") as log, launched([*words, *options.recipes[name]], log, log) as process:
        yield process


def _finish(options: Options, name: str, seed: int, status: int) -> None:
    folder = _folder(options, name, seed)
    if status != EXIT_DONE:
        raise RunFailed(f"{name}, seed {seed}: exit {status}, see {folder / 'log.txt'}")
    for path in folder.glob("*.pt"):
        path.unlink()
    write_json(options.output_dir / "recipes.json", read_results(options))
    result = json.loads((folder / SUMMARY).read_text())
    print(f"{name}, seed {seed}: top-1 {top1_of(result):.2f} %, {result['seconds']:.1f} s", flush=True)


def read_results(options: Options) -> Results:
    """summary.json of the runs that are done, by recipe, in the order of the seeds."""
    found = {}
    for name in options.recipes:
        paths = [_folder(options, name, seed) / SUMMARY for seed in range(options.seeds)]
        found[name] = [json.loads(path.read_text()) for path in paths if path.is_file()]
    return found


def table(results: Results) -> str:
    """Each recipe, and its difference to the first with the standard error, which a single seed does not have.

    images/s is that of the training steps, the median of the seeds.
    """
    rows = [["recipe", "top-1 of the seeds, %", "mean", "difference", "ranges overlap", "seconds, median", "images/s"]]
    first = next(iter(results.values()))
    for name, runs in results.items():
        top1, other = ([top1_of(run) for run in each] for each in (runs, first))
        cells = [name, ", ".join(f"{value:.2f}" for value in top1), f"{statistics.mean(top1):.2f}"]
        if runs is first:
            cells += ["", ""]
        else:
            error = f" ± {_variance_of_mean(top1, other) ** 0.5:.2f}" if min(len(top1), len(other)) > 1 else ""
            overlap = max(min(top1), min(other)) <= min(max(top1), max(other))
            cells += [f"{statistics.mean(top1) - statistics.mean(other):+.2f}{error}", "yes" if overlap else "no"]
        seconds, rate = (statistics.median(run[name] for run in runs) for name in ("seconds", "images_per_second"))
        rows.append([*cells, f"{seconds:.1f}", f"{rate:,.0f}"])
    return markdown(*rows)


def _variance_of_mean(*samples: Sequence[float]) -> float:
    return sum(statistics.variance(sample) / len(sample) for sample in samples)


PROGRAM = Program("bench recipes", read_options)
