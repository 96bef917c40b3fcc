"""Proves on a data set of class folders that every format gives the same run; prints a row for each.

    python -m tests.format_table --data-dir DIR --output-dir OUT

DIR has train/CLASS/IMAGE and val/CLASS/IMAGE, or images in folders of any kind: those become ten classes, in which
every fifth image is one of val. OUT must not exist. The validation images get ImageNet's names, as some formats need
them, then the folder is written in every format. Each format and loader has three runs of train.py on the CPU, of three
epochs:

- two processes: its weights, optimizer, losses and evaluations are compared with those of the run on the folder;
- two processes that SIGTERM stops in mid-epoch, and the same command again: compared with the first run;
- one process, stopped in mid-epoch, then two, stopped likewise, then one: compared with the same on the folder. The
  images of each epoch are those of the sampler's log: no image twice, and all but the rest that makes no step. Each has
  the label of its class folder and the pixels of the folder's run.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import train
from tests.conftest import TINY, assert_same, assert_same_run
from tests.forked import launch_forked
from tests.harness import Finished, read_checkpoint
from tests.shards import (
    with_imagenet_names,
    write_arrow,
    write_arrow_cache,
    write_flat_csv,
    write_flat_devkit,
    write_ilsvrc,
    write_kaggle,
    write_lmdb,
    write_recordio,
    write_tfrecord,
    write_webdataset,
)
from utils.data.images.batch import Batch, TrainLoader
from utils.data.images.codecs import is_image
from utils.training.build import build
from utils.training.run import Run

EPOCHS = 3
STEPS = 12  # of an epoch, about
NUM_CLASSES, VAL_SHARE = 10, 5  # of a data set that is not split: classes, and one image of so many
WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "class folders": lambda folder, _: folder,
    "flat val/ with val.csv": write_flat_csv,
    "flat val/ with the devkit": write_flat_devkit,
    "Kaggle's tree": write_kaggle,
    "ILSVRC downloads": write_ilsvrc,
    "WebDataset tars": lambda folder, target: write_webdataset(folder, target, per_shard=100),
    "TFRecord": write_tfrecord,
    "RecordIO": write_recordio,
    "LMDB": write_lmdb,
    "Arrow, cache of `datasets`": write_arrow_cache,
    "Arrow, `save_to_disk`": write_arrow,
}
HEADER = ("format", "loader", "images found", "bits of the folder", "stopped and resumed", "1, 2, 1 processes")
RANK_PROGRAM = "import sys; from tests.format_table import run_rank; sys.exit(run_rank(sys.argv[1:]))"


# ---------------------------------------------------------------------------------------------------------------------
# In the processes of train.py


class LoggingLoader:
    """The loader of a run. Writes a line for each batch: which images the sampler names, their labels and pixels.

    Args:
        run: whose loader it is.
        log: folder of the lines.
        stop_after: batches of this process after which it gets SIGTERM; 0 for none.
    """

    def __init__(self, run: Run, log: Path, stop_after: int) -> None:
        self._loader: TrainLoader = run.train_loader
        self._run, self._log, self._left = run, log, stop_after
        if run.env.is_main:
            (log / "found.json").write_text(json.dumps([run.sampler.num_images, run.num_val]))

    def __next__(self) -> Batch:
        batch, run = next(self._loader), self._run
        line = {
            "step": run.state.step,
            "rank": run.env.rank,
            "processes": run.env.world_size,
            "images": run.sampler.indices(run.state.step).tolist(),
            "labels": batch.targets.tolist(),
            "pixels": [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest() for image in batch.images],
        }
        with (self._log / f"{run.env.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    def state(self) -> dict[str, Any]:
        return self._loader.state()

    def close(self) -> None:
        self._loader.close()


def run_rank(argv: Sequence[str]) -> int:
    """train.py in this process with a `LoggingLoader`; argv: folder of the log, `stop_after`, then train.py's flags."""
    log, stop_after = Path(argv[0]), int(argv[1])

    def logged_run(*parts: Any) -> Run:
        run = build(*parts)
        run.train_loader = LoggingLoader(run, log, stop_after)
        return run

    setattr(train, "build", logged_run)  # noqa: B010 -- of another type
    return train.main(argv[2:])


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def launch_ranks(log: Path, processes: int, flags: Sequence[object], stop_after: int = 0) -> list[Finished]:
    """Run train.py on so many processes, of which rank 0 gets SIGTERM after `stop_after` batches; one result a rank."""
    log.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}

    def launch(rank: int) -> Finished:
        env = group | {"RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
        stop = stop_after if rank == 0 else 0
        return launch_forked(log, stop, *flags, program=RANK_PROGRAM, env=env)

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(launch, range(processes)))


def assert_ended(ranks: list[Finished], status: int = 0) -> None:
    assert {done.status for done in ranks} == {status}, [done.err for done in ranks]


class Case(NamedTuple):
    """The runs of a format and a loader.

    Attributes:
        flags: of all of them.
        folder: of their outputs and logs.
        num_train: images.
    """

    flags: tuple[object, ...]
    folder: Path
    num_train: int

    @property
    def global_batch(self) -> int:
        """Images per step, a multiple of 4: a process has 2 or more, as batch norm needs them."""
        return 4 * max(1, self.num_train // STEPS // 4)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_train // self.global_batch

    def launch(self, name: str, processes: int, batch_size: int = 0, stop_after: int = 0) -> None:
        """A launch of the run `name`, which ends as it must, in mid-epoch if it is stopped."""
        output = self.folder / name
        batch = ("--batch-size", batch_size) if batch_size else ()
        flags = (*self.flags, *batch, "--output-dir", output)
        ranks = launch_ranks(self.folder / f"{name}-log", processes, flags, stop_after)
        assert_ended(ranks, 143 if stop_after else 0)
        done = read_checkpoint(output, "last.pt")["step"]
        if stop_after:
            assert done % self.steps_per_epoch != 0, "stopped in mid-epoch"
        else:
            assert done == EPOCHS * self.steps_per_epoch

    def run_all(self) -> None:
        """The three runs."""
        half = self.steps_per_epoch // 2
        self.launch("whole", 2, self.global_batch // 2)
        self.launch("resumed", 2, self.global_batch // 2, stop_after=self.steps_per_epoch + half)
        self.launch("resumed", 2, self.global_batch // 2)
        self.launch("processes", 1, self.global_batch, stop_after=half)
        self.launch("processes", 2, stop_after=self.steps_per_epoch)
        self.launch("processes", 1)

    def log(self, name: str) -> dict[int, list[dict[str, Any]]]:
        """Step -> the lines of its ranks."""
        steps: dict[int, list[dict[str, Any]]] = {}
        for path in sorted((self.folder / f"{name}-log").glob("*.jsonl")):
            for text in path.read_text().splitlines():
                line = json.loads(text)
                steps.setdefault(line["step"], []).append(line)
        return steps

    def assert_once_per_epoch(self, labels: Sequence[int]) -> None:
        """The images of each epoch of the run on 1, 2 and 1 processes come once, with their labels."""
        steps = self.log("processes")
        assert sorted(steps) == list(range(EPOCHS * self.steps_per_epoch))
        assert {line["processes"] for lines in steps.values() for line in lines} == {1, 2}
        for epoch in range(EPOCHS):
            first = epoch * self.steps_per_epoch
            lines = [line for step in range(first, first + self.steps_per_epoch) for line in steps[step]]
            images = [image for line in lines for image in line["images"]]
            assert len(images) == len(set(images)) == self.steps_per_epoch * self.global_batch
            assert [label for line in lines for label in line["labels"]] == [labels[image] for image in images]


# ---------------------------------------------------------------------------------------------------------------------
# The table


def arrange(data_dir: Path, folder: Path) -> Path:
    """Class folders train/ and val/ of the images in `data_dir`, with ImageNet's names of validation images."""
    if (data_dir / "train").is_dir():
        for split in ("train", "val"):
            shutil.copytree(data_dir / split, folder / split)
        return with_imagenet_names(folder)
    images = sorted(path for path in data_dir.rglob("*") if is_image(path.name))
    size = len(images) // NUM_CLASSES
    for number, path in enumerate(images[: size * NUM_CLASSES]):
        split = "val" if number % VAL_SHARE == 0 else "train"
        name = f"{images[number // size * size].parent.name}"  # of the first one of the class
        (folder / split / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / split / name / path.name)
    return with_imagenet_names(folder)


def is_done(case: Case) -> bool:
    """Run a case; False if a launch has not ended as it must."""
    return outcome(case.run_all) == "yes"


def outcome(check: Callable[[], None]) -> str:
    """yes or no; why not goes to standard error."""
    try:
        check()
    except AssertionError:
        traceback.print_exc()
        return "NO"
    return "yes"


def row(name: str, loader: str, case: Case, folder: Case, counts: tuple[int, int], labels: list[int]) -> list[str]:
    """A row of the table, of runs that are done."""
    found = json.loads((case.folder / "whole-log" / "found.json").read_text())
    # The files' times of change, and the names of images where the format keeps none.
    without = ["files", *(["fingerprint"] if name == "RecordIO" else [])]

    def compare_processes() -> None:
        case.assert_once_per_epoch(labels)
        assert_same(folder.log("processes"), case.log("processes"))
        assert_same_run(folder.folder / "processes", case.folder / "processes", without=without)

    return [
        name,
        loader,
        f"{sum(found):,} of {sum(counts):,}" if tuple(found) == counts else f"NO: {found}",
        outcome(lambda: assert_same_run(folder.folder / "whole", case.folder / "whole", without=without)),
        outcome(lambda: assert_same_run(case.folder / "whole", case.folder / "resumed")),
        outcome(compare_processes),
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("tests.format_table", description="Runs on a data set in every format.")
    parser.add_argument("--data-dir", type=Path, required=True, help="class folders, or images in any folders")
    parser.add_argument("--output-dir", type=Path, required=True, help="a new folder for the formats and the runs")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names of formats, besides class folders")
    parser.add_argument("--loaders", nargs="*", default=["dali", "torch"], help="which of them")
    options = parser.parse_args(argv)
    options.output_dir.mkdir(parents=True)
    torch.set_num_threads(1)
    folder = arrange(options.data_dir, options.output_dir / "folder")
    classes = sorted(path.name for path in (folder / "train").iterdir())
    labels = [classes.index(path.parent.name) for path in sorted((folder / "train").glob("*/*"))]
    counts = (len(labels), len(list((folder / "val").glob("*/*"))))
    rows: list[list[str]] = []
    on_folder: dict[str, Case] = {}
    for name, write in WRITERS.items():
        if write is not WRITERS["class folders"] and not any(part in name for part in options.only):
            continue
        source = write(folder, options.output_dir / "formats" / str(len(rows)))
        names = ("--class-names", source / "names.txt") if (source / "names.txt").exists() else ()
        for loader in options.loaders:
            flags = (*TINY, "--epochs", EPOCHS, "--data-dir", source, *names, "--loader", loader)
            case = Case(flags, options.output_dir / "runs" / str(len(rows)), counts[0])
            folder_case = on_folder.setdefault(loader, case)
            done = is_done(case)
            rows.append(row(name, loader, case, folder_case, counts, labels) if done else [name, loader, *["NO"] * 4])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    for cells in (HEADER, ["---"] * len(HEADER), *rows):
        print(f"| {' | '.join(cells)} |")
    return int(any(cell.startswith("NO") for cells in rows for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
