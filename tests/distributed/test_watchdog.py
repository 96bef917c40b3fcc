"""A bad file or a lost rank ends all ranks at once, with one line, whatever the others wait for."""

import itertools
import json
import signal
import time
from pathlib import Path

import pytest

from tests import damage
from tests.conftest import NUMBERED, TINY, write_data, write_numbered
from tests.forked import launch_ranks, run_train
from tests.harness import ROOT, Finished, error_line, launch, read_checkpoint
from utils.data.formats.folder import scan
from utils.data.loaders.sampler import RandomSampler

WORKER = """
import os, sys, time
import torch, torch.distributed as dist
from utils.distributed.watchdog import watchdog
from utils.distributed.group import process_group
from utils.errors import BadFile
from utils.distributed.exit import write_slots
from utils.distributed.stop import StopRequest
case, folder = sys.argv[1:]
stop = StopRequest()
with stop.handling_signals(), process_group(torch.device("cpu"), 300, print) as env, watchdog(env, print):
    has_bad_file = {"rank 0": env.rank == 0, "rank 2": env.rank == 2, "all": True, "saving": env.rank == 1}[case]
    stop.enable(env)  # torchrun signals the others as soon as one has ended
    dist.barrier()
    if has_bad_file:
        raise BadFile("/data/one.jpg", "damaged", env.rank)
    if case == "saving" and env.is_main:
        with write_slots:
            time.sleep(4)  # a checkpoint of some size
            open(os.path.join(folder, "complete"), "w").close()
    dist.all_reduce(torch.zeros(3))  # without the others it waits for 300 s
    sys.stderr.write("got through")
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    "case", ["saving", *(pytest.param(case, marks=pytest.mark.slow) for case in ("rank 0", "rank 2", "all"))]
)
def test_all_ranks_end(tmp_path: Path, case: str) -> None:
    ranks = launch_ranks(case, tmp_path, program=WORKER, processes=3)
    lines = [line for done in ranks for line in done.err.splitlines()]
    (line,) = (line for line in lines if "/data/one.jpg: damaged" in line)
    assert line.startswith("train.py: rank ")
    assert not [line for line in lines if "got through" in line or '"<string>"' in line], lines
    assert 2 in [done.status for done in ranks]
    assert (tmp_path / "complete").exists() == (case == "saving")


def assert_ended_by(done: Finished, processes: int, path: str) -> None:
    """One line names file and rank, and there is no other line of ours; torchrun adds its own."""
    line = error_line(done)
    assert line.startswith("train.py: rank ")
    assert f": {path}: " in line
    assert "--bad-files skip" in line
    if processes == 1:
        assert done.status == 2
    else:
        assert "exitcode  : 2" in done.err


def bad_file_run(folder: Path, split: str, kind: str) -> tuple[str, tuple[str | Path, ...]]:
    """A data set with one bad file: its name as a terminal shows it, and flags that save at every step."""
    root = write_data(folder / "data", train=(60, 60, 60), val=(20, 20, 20))
    path = root / split / "green" / "bad\none.jpg"
    path.write_bytes(damage.CONTENTS[kind])
    flags = ("--epochs", "3", "--batch-size", "4", "--checkpoint-steps", "1", "--output-dir", folder / "out")
    return str(path).replace("\n", "\\n"), (*TINY, "--data-dir", root, *flags)


@pytest.mark.dist
def test_a_bad_file_in_training(tmp_path: Path) -> None:
    shown_path, flags = bad_file_run(tmp_path, "train", "cut in the middle")
    ranks = launch_ranks(*flags)
    assert 2 in [done.status for done in ranks]
    lines = [line for done in ranks for line in done.err.splitlines()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("train.py: rank ")
    assert f": {shown_path}: " in lines[0]
    assert "--bad-files skip" in lines[0]
    assert read_checkpoint(tmp_path / "out")["step"] >= 1


@pytest.mark.slow
def test_a_run_that_met_a_bad_file_resumes_without_it(tmp_path: Path) -> None:
    """At the step where it ended, in the same order; another image of its class replaces the bad one."""
    root, records = write_numbered(tmp_path / "data"), tmp_path / "records"
    records.mkdir()
    manifest = scan(root, "train")
    index = RandomSampler(NUMBERED, 5, 1, 0, 1, seed=0).indices(20)[2]  # of step 20 of 25
    path = root / "train" / manifest.name(index)
    path.write_bytes(b"?" * path.stat().st_size)
    flags = [records, *TINY, "--data-dir", root, "--output-dir", tmp_path / "out", "--batch-size", 5, "--epochs", 1]
    flags += ["--seed", 0, "--checkpoint-steps", 1]
    recorder = ROOT / "tests" / "recorder.py"
    ended = launch(*flags, program=recorder)
    assert_ended_by(ended, 1, str(path))
    reached = read_checkpoint(tmp_path / "out")["step"]
    assert 1 <= reached <= 20

    done = launch(*flags, "--bad-files", "skip", program=recorder)
    assert f"resumed at epoch 1, step {reached}" in done.out, done.err
    continued = launch(*flags, "--bad-files", "skip", "--epochs", 2, program=recorder)  # last.pt is one of the new ones
    assert (done.status, continued.status) == (0, 0), continued.err
    replacement = scan(root, "train").with_replacements({manifest.name(index): "bad"}).name(index)
    for launched in (done, continued):
        assert f"({replacement} for {manifest.name(index)}, ...)" in launched.out

    lines = [json.loads(line) for file in records.glob("*.jsonl") for line in file.read_text().splitlines()]
    steps = {line["step"]: line["images"] for line in lines}
    assert sorted(steps) == list(range(50))
    number, replaced_by = int(path.stem), int(Path(replacement).stem)
    wanted = [replaced_by if image == number else image for image in range(NUMBERED)]
    for epoch in range(2):
        seen = itertools.chain.from_iterable(steps[25 * epoch + at] for at in range(25))
        assert sorted(seen) == sorted(wanted)


@pytest.mark.slow  # a bad file of DALI's loader is quick
def test_a_bad_file_under_the_torch_loader(tmp_path: Path) -> None:
    """Its workers ignore the signal with which an interpreter ends them, and must not keep it from ending."""
    shown_path, flags = bad_file_run(tmp_path, "val", "text")
    assert_ended_by(run_train(*flags, "--loader", "torch"), 1, shown_path)
    assert read_checkpoint(tmp_path / "out")["epoch"] == 0  # trained, not evaluated


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("loader", ["dali", "dali --cache host", "torch", "proxy"])
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ["text", "cut in the middle"])
def test_every_loader_ends_in_time(tmp_path: Path, processes: int, loader: str, split: str, kind: str) -> None:
    shown_path, flags = bad_file_run(tmp_path, split, kind)
    done = launch(*flags, "--loader", *loader.split(), processes=processes)
    ended = time.time()
    assert_ended_by(done, processes, shown_path)
    if split == "val" or "host" not in loader:
        # The last step but for those of the batches that were read ahead.
        assert read_checkpoint(tmp_path / "out")["step"] >= 1
        assert ended - (tmp_path / "out" / "last.pt").stat().st_mtime < 200, "--timeout is 600 s"


HANGS = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from utils.distributed.watchdog import watchdog
from utils.distributed.group import process_group
from utils.distributed.stop import StopRequest
case, folder = sys.argv[1], Path(sys.argv[2])
(folder / os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < 3:  # one that has imported late is not late for the others
    time.sleep(0.01)
def print_error(line):
    print(f"train.py: {line}", file=sys.stderr, flush=True)
timeout = 3 if case in ("stopped", "all") else 300
stop = StopRequest()
with (
    stop.handling_signals(),
    process_group(torch.device("cpu"), timeout, print_error) as env,
    env.guard(print_error),
    watchdog(env, print_error),
):
    stop.enable(env)
    stop.should_stop()
    dist.barrier()
    if env.rank == 1 and case == "failed":
        raise MemoryError("no room")
    if env.rank == 1 and case != "all":
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[case])
    # In C, as for a device that will never be done: no signal handler of Python's runs, no collective fails.
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("killed", "is gone: killed"),
        pytest.param("stopped", "is stopped (SIGSTOP)", marks=pytest.mark.slow),
        pytest.param("failed", "failed: MemoryError: no room", marks=pytest.mark.slow),
        pytest.param("all", "no step has ended for 6 s", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_wait_for_a_device_end_too(tmp_path: Path, case: str, what: str) -> None:
    if case == "killed":
        first, killed, other = launch_ranks(case, tmp_path, program=HANGS, processes=3)
        assert (first.status, killed.status) == (1, -signal.SIGKILL)
        assert other.status in (1, -signal.SIGTERM)
        done = first
    else:
        done = launch(case, tmp_path, program=HANGS, processes=3, timeout=250)
        assert "0 (local_rank: 0)\n  exitcode  : 1" in done.err, done.err
    line = error_line(done)
    assert line.startswith("train.py: rank 1 (process ") or case == "all"
    assert what in line
    assert "goes on from the last checkpoint" in line


NOT_ENABLED = """
import contextlib, ctypes, os, signal, sys
import torch, torch.distributed as dist
from utils.distributed.watchdog import watchdog
from utils.distributed.group import process_group
from utils.distributed.stop import StopRequest
def print_error(line):
    print(f"train.py: {line}", file=sys.stderr, flush=True)
with contextlib.ExitStack() as stack:
    env = stack.enter_context(process_group(torch.device("cpu"), 300, print_error))
    stop = StopRequest(monitor=env.monitor)
    stack.enter_context(stop.handling_signals())
    stack.enter_context(env.guard(print_error))
    stack.enter_context(watchdog(env, print_error))
    if env.rank != 1:
        stop.enable(env)
    dist.barrier()
    if env.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if env.rank == 2:
        mutex = ctypes.create_string_buffer(64)  # in C, as above
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
    dist.all_reduce(torch.zeros(3))
"""


@pytest.mark.dist
def test_a_rank_that_is_stopped_before_its_first_step_stops_the_others() -> None:
    """Also those that have just done theirs: none of them takes it for a loss."""
    ranks = launch_ranks(program=NOT_ENABLED, processes=3)
    errors = "".join(done.err for done in ranks)
    assert [done.status for done in ranks] == [143] * 3, errors
    assert errors.count("stopped by SIGTERM before the first step") == 1
    assert "train.py: rank" not in errors


EARLY = """
import sys, time
import torch
from utils.distributed.watchdog import MAIN_THREAD_SECONDS, watchdog
from utils.distributed.group import process_group
def print_error(line):
    print(line, file=sys.stderr)
with process_group(torch.device("cpu"), 300, print_error) as env, watchdog(env, print_error):
    torch.distributed.barrier()  # gloo's connections are made on both sides
    time.sleep(0 if env.rank else MAIN_THREAD_SECONDS + 6)
print("done", env.rank, flush=True)
"""


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_ends_well_is_not_lost() -> None:
    done = launch(program=EARLY, processes=2, timeout=250)
    assert done.status == 0, done.err
    assert sorted(done.out.split()) == ["0", "1", "done", "done"]
    assert "is gone" not in done.err
