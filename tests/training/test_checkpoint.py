"""What is on the disk is whole, also after a crash at the worst instant."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.conftest import TINY, assert_same, resolved
from tests.forked import launch_forked, launch_series, start_forked
from tests.harness import error_line, launch, read_checkpoint, read_metrics
from tests.training.checkpoints import RECORD, checkpoint_of, with_flipped_bit
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.options.resolved import ResolvedConfig
from utils.training.state import output
from utils.training.state.checkpoint import (
    EARLIER,
    FORMAT,
    LAST,
    best_is_missing,
    create_checkpoint,
    find_checkpoints,
    load,
    load_newest,
    save,
    write_checkpoint,
)
from utils.training.state.meter import Meter
from utils.training.state.output import lock_output
from utils.training.state.train_state import BestEpoch, TrainState

FLAGS = (*TINY, "--batch-size", "8", "--deterministic")


def test_best_is_not_written_over_after_a_crash_between_two_names(tmp_path: Path) -> None:
    """Killed after best.pt was linked and before last.pt was renamed: both names then mean one file."""
    best = tmp_path / "best.pt"
    best.write_bytes(b"the best so far")
    os.link(best, tmp_path / f".{LAST}.tmp")
    write_checkpoint({"step": 1}, tmp_path, is_best=False, keep=2)
    assert best.read_bytes() == b"the best so far"


def test_best_stays_where_the_rest_cannot_be_written(tmp_path: Path) -> None:
    """The last thing that takes room is what becomes last-1.pt: on a disk without hard links it is a copy."""
    for name in (LAST, "best.pt"):
        (tmp_path / name).write_bytes(b"before")
    (tmp_path / f".{EARLIER[0]}.tmp").mkdir()
    with pytest.raises(OSError, match="irectory"):
        write_checkpoint({"step": 1}, tmp_path, is_best=True, keep=2)
    assert (tmp_path / "best.pt").read_bytes() == (tmp_path / LAST).read_bytes() == b"before"


@pytest.mark.slow  # the files of a crash are quick
def test_a_run_goes_on_from_such_a_crash(data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path, "--lr", 1e-12)
    (first,) = launch_series((*flags, "--epochs", 1))
    assert first.status == 0, first.err
    os.link(tmp_path / "best.pt", tmp_path / f".{LAST}.tmp")
    (second,) = launch_series((*flags, "--epochs", 2))
    assert second.status == 0, second.err
    assert read_checkpoint(tmp_path, "last.pt")["epoch"] == 2
    best = read_checkpoint(tmp_path, "best.pt")
    assert best["best"]["top1"] == best["result"]["val/top1"]
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs of five steps."""
    folder = tmp_path_factory.mktemp("trained")
    (done,) = launch_series(("--data-dir", data, *FLAGS, "--epochs", 2, "--output-dir", folder))
    assert done.status == 0, done.err
    return folder


def test_the_last_three_are_kept(trained: Path) -> None:
    remaining = [read_checkpoint(trained, name) for name in (LAST, *EARLIER[:2])]
    assert [(saved["epoch"], saved["step"]) for saved in remaining] == [(2, 10), (1, 10), (1, 5)]


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if how == "a bit flipped":
        path.write_bytes(with_flipped_bit(path))
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "a bit flipped", "missing"])
def test_the_newest_whole_checkpoint_is_used(trained: Path, tmp_path: Path, how: str) -> None:
    for name in (LAST, *EARLIER[:2], "best.pt"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    config, steps = TrainConfig(output_dir=tmp_path), []
    for name in (LAST, *EARLIER[:2]):
        damage(tmp_path / name, how)
        saved, skipped = load_newest(find_checkpoints(config))
        assert saved is not None
        assert saved.path is not None
        steps.append((saved.path.name, saved.state.epoch))
        assert how == "missing" or f"{name}: damaged" in skipped[-1]
    best = read_checkpoint(trained, "best.pt")["epoch"]
    assert steps == [(EARLIER[0], 1), (EARLIER[1], 1), ("best.pt", best)]
    damage(tmp_path / "best.pt", how)
    if how == "missing":
        assert load_newest(find_checkpoints(config)) == (None, [])
    else:
        with pytest.raises(UserError, match=r"none of its 4 checkpoints is whole; start again: "):
            load_newest(find_checkpoints(config), config=config)


@pytest.mark.parametrize("bits", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_no_damage_goes_unnoticed(trained: Path, tmp_path: Path, bits: int) -> None:
    """Truncated at every 10 %, marked as a folder, and some bits flipped: what is used is whole, and the newest."""
    whole = (trained / LAST).read_bytes()
    contents = {name: read_checkpoint(trained, name) for name in (LAST, EARLIER[0])}
    for name in (LAST, *EARLIER[:2]):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    random = np.random.default_rng(0)
    damaged = [whole[: len(whole) * tenths // 10] for tenths in range(10)]
    as_folder = bytearray(whole)
    as_folder[whole.rindex(b"archive/data/0") - 8] ^= 0x10  # an attribute that has no checksum
    damaged.append(bytes(as_folder))
    for bit in random.integers(8 * len(whole), size=bits):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    outcomes = {LAST: 0, EARLIER[0]: 0}
    for content in damaged:
        (tmp_path / LAST).write_bytes(content)
        saved, skipped = load_newest(find_checkpoints(TrainConfig(output_dir=tmp_path)))
        assert saved is not None
        assert saved.path is not None
        assert_same(saved.to_dict(), contents[saved.path.name])
        assert bool(skipped) == (saved.path.name != LAST)
        outcomes[saved.path.name] += 1
    print(f"{len(damaged)} damaged files: {outcomes}")
    assert outcomes[EARLIER[0]] > 11 + 0.7 * bits, "few bits are between two records of the archive"


def test_a_resume_says_what_it_skips(data: Path, trained: Path, tmp_path: Path) -> None:
    for name in (LAST, EARLIER[0]):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    damage(tmp_path / LAST, "truncated")
    (done,) = launch_series(("--data-dir", data, *FLAGS, "--epochs", 2, "--output-dir", tmp_path))
    assert done.status == 0, done.err
    assert f"skipped: --resume {tmp_path / LAST}: damaged" in done.out
    assert read_checkpoint(tmp_path)["result"] == read_checkpoint(trained)["result"]


# As on a disk that is full: no file grows beyond 100 KB, which a checkpoint exceeds and no other file does.
FULL_DISK = """
import resource, sys, train
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_failed_save_is_logged_and_tried_again(data: Path, trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    flags = ("--data-dir", data, *FLAGS, "--output-dir", run, "--epochs", 3)
    before = {path.name: path.read_bytes() for path in run.glob("*.pt")}
    done = launch_forked(*flags, program=FULL_DISK)
    assert done.status == 1
    assert done.out.count("warning: no checkpoint at step 15 (File too large)") == 2
    assert "the checkpoint of step 15 could not be written (File too large)" in done.err
    assert "Traceback" not in done.err
    assert {path.name: path.read_bytes() for path in run.glob("*.pt")} == before
    assert not list(run.glob(".*.tmp"))
    assert [record["step"] for record in read_metrics(run) if "val/top1" in record] == [5, 10, 15]
    (resumed,) = launch_series(flags)
    assert resumed.status == 0, resumed.err
    assert read_checkpoint(run)["epoch"] == 3


# train.py on a disk that is full from step 6, in the second of twelve epochs, to the beginning of the last.
FULL_FOR_A_WHILE = """
import resource, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
import train
from utils.distributed.exit import MAX_WRITES, write_slots

steps = 0

def limit(optimizer, arguments, options):
    global steps
    steps += 1
    unlimited = resource.RLIM_INFINITY
    if steps in (6, 56):
        for change in (write_slots.acquire, write_slots.release):  # the saves of the epoch before are written
            for _ in range(MAX_WRITES):
                change()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if steps == 6 else unlimited, unlimited))

register_optimizer_step_post_hook(limit)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow  # a failed save is quick
def test_best_is_the_best_that_could_be_saved(data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *FLAGS, "--epochs", 12, "--lr", 2, "--output-dir", tmp_path / "run")
    done = launch_forked(*flags, program=FULL_FOR_A_WHILE)
    assert done.status == 0, done.err
    first, *lost, last = (record["val/top1"] for record in read_metrics(tmp_path / "run") if "val/top1" in record)
    assert first < last <= max(lost), "or this tests nothing"
    best = read_checkpoint(tmp_path / "run", "best.pt")
    assert (best["epoch"], best["result"]["val/top1"], best["best"]["top1"]) == (12, last, last)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_top1"] == last


def test_a_folder_is_one_runs(cpu: DistEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LOCK_SECONDS", 0.1)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        assert lock_output(tmp_path, cpu, first)
        with pytest.raises(UserError, match=f"--output-dir {tmp_path}: another run is writing there"):
            lock_output(tmp_path, cpu, second)
        first.close()
        assert lock_output(tmp_path, cpu, second)
        assert not lock_output(tmp_path / "none", cpu, second)


@pytest.mark.slow  # it waits ten seconds for the lock
def test_a_second_run_in_the_folder_is_refused(data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *FLAGS, "--output-dir", tmp_path, "--epochs")
    with start_forked(*flags, 1000) as first:
        first.wait_for(lambda: "first step" in first.out)
        (second,) = launch_series((*flags, 1000))
        assert second.status == 2
        assert f"--output-dir {tmp_path}: another run is writing there" in error_line(second)
        assert first.process.poll() is None


@pytest.mark.dist
@pytest.mark.slow  # weights that are not finite are not saved: tests/training/test_run.py
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(
    data: Path, trained: Path, tmp_path: Path, processes: int
) -> None:
    flags = ("--data-dir", data, *FLAGS, "--batch-size", 8 // processes, "--output-dir", tmp_path / "run")
    if processes == 1:
        shutil.copytree(trained, tmp_path / "run")
    else:
        assert launch(*flags, "--epochs", "2", processes=processes).status == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.pt")}
    wild = ("--epochs", "9", "--lr", "1e30", "--warmup-epochs", "0", "--checkpoint-steps", "3", "--max-bad-steps", "4")
    run = (*flags, *wild)
    done = launch_series(run)[0] if processes == 1 else launch(*run, processes=processes)
    assert done.status == 1
    assert "the loss has not been finite for 4 steps in a row; lower --lr" in error_line(done)
    assert "the loss is not finite; the one before is kept" in done.out
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.pt")} == before


def test_whether_there_is_a_best(tmp_path: Path) -> None:
    assert best_is_missing(tmp_path)
    (tmp_path / "best.pt").touch()
    assert not best_is_missing(tmp_path)
    assert not best_is_missing(tmp_path / ("far" * 100)), "it cannot be seen"


def save_at(
    folder: Path, env: DistEnv, step: int, best: BestEpoch | None, is_best: bool = False, keep: int = 2
) -> str | None:
    """A checkpoint of a network of one weight, whose value is the step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, step)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainState(model, optimizer, GradScaler("cpu", enabled=False), None, Meter(env), env)
    state.step, state.best = step, best
    checkpoint = create_checkpoint(state, {"at": step}, resolved(output_dir=folder, keep=keep), RECORD)
    assert checkpoint is not None
    return save(checkpoint, folder, is_best)


def steps_in(folder: Path) -> dict[str, int]:
    """Name -> step, of every file, each of which must be whole."""
    found = {path.name: load(path) for path in folder.iterdir()}
    for saved in found.values():
        weight = saved.state.networks["model"]["weight"].item()
        assert weight == saved.state.step == saved.ranks[0].loader["at"]
    return {name: saved.state.step for name, saved in found.items()}


def test_names_of_a_run_s_checkpoints(tmp_path: Path, cpu: DistEnv) -> None:
    """A top-1 of 0 percent is one too: best.pt is removed only before the first evaluation, as another run's."""
    torch.save("of another run", tmp_path / "best.pt")
    for step in (1, 2):
        assert save_at(tmp_path, cpu, step, best=None) is None
    assert steps_in(tmp_path) == {LAST: 2, EARLIER[0]: 1}
    assert save_at(tmp_path, cpu, 3, best=BestEpoch(1, 3, 0.0), is_best=True) is None
    assert steps_in(tmp_path) == {LAST: 3, EARLIER[0]: 2, EARLIER[1]: 1, "best.pt": 3}
    assert save_at(tmp_path, cpu, 4, best=BestEpoch(1, 3, 0.0)) is None
    assert steps_in(tmp_path) == {LAST: 4, EARLIER[0]: 3, EARLIER[1]: 2, "best.pt": 3}
    assert save_at(tmp_path, cpu, 5, best=BestEpoch(2, 5, 0.5), is_best=True) is None
    assert steps_in(tmp_path) == {LAST: 5, EARLIER[0]: 4, EARLIER[1]: 3, "best.pt": 5}


def test_spare_checkpoints_are_as_many_as_keep_says(tmp_path: Path, cpu: DistEnv) -> None:
    """Also since a resume with another number, or from an older version, whose config has none."""
    best = BestEpoch(1, 1, 50.0)
    save_at(tmp_path, cpu, 1, best, is_best=True)
    for step in range(2, 7):
        save_at(tmp_path, cpu, step, best, keep=3)
    assert steps_in(tmp_path) == {LAST: 6, EARLIER[0]: 5, EARLIER[1]: 4, EARLIER[2]: 3, "best.pt": 1}
    save_at(tmp_path, cpu, 7, best, keep=1)
    assert steps_in(tmp_path) == {LAST: 7, EARLIER[0]: 6, "best.pt": 1}
    for step in (8, 9):
        save_at(tmp_path, cpu, step, best, keep=0)
    assert steps_in(tmp_path) == {LAST: 9, "best.pt": 1}
    values = resolved().to_dict()
    del values["keep"]
    assert ResolvedConfig.from_dict(values).keep == 2


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / LAST
    whole = checkpoint_of(resolved()).to_dict()
    torch.save(whole, path)
    assert load(path).to_dict() == whole
    needed = whole.keys() - {"create_model"}  # which nothing here reads, and older ones lack
    lacking: list[Any] = [{name: whole[name] for name in whole if name != part} for part in needed]
    for content in ([whole], whole | {"format": FORMAT - 1}, *lacking):
        torch.save(content, path)
        with pytest.raises(UserError, match="not a checkpoint of this version of Brisk"):
            load_newest([path])
    damage(path, "truncated")
    with pytest.raises(UserError, match=r"last\.pt: damaged"):
        load_newest([path])


def test_why_a_checkpoint_could_not_be_written(tmp_path: Path, cpu: DistEnv) -> None:
    assert save_at(tmp_path / "gone", cpu, 1, best=None) == "No such file or directory"


ALL = (LAST, *EARLIER, "best.pt")


@pytest.mark.parametrize(
    ("there", "flags", "found"),
    [
        (ALL, {}, ALL),
        (("best.pt", EARLIER[1]), {}, (EARLIER[1], "best.pt")),
        ((), {}, ()),
        (ALL, {"pretrained": ""}, ALL),
        (ALL, {"resume": "none"}, ()),
        (ALL, {"resume": "none", "evaluate": True, "pretrained": ""}, ()),
        (ALL, {"resume": EARLIER[0]}, (EARLIER[0],)),
        (ALL, {"resume": EARLIER[0], "evaluate": True, "pretrained": ""}, (EARLIER[0],)),
        ((LAST,), {"resume": EARLIER[0]}, "no such checkpoint"),
        (ALL, {"evaluate": True}, ("best.pt", LAST, *EARLIER)),
        ((), {"evaluate": True}, "no checkpoint in --output-dir"),
        ((), {"evaluate": True, "pretrained": ""}, ()),
        (ALL, {"evaluate": True, "pretrained": "x.pt"}, "best.pt or --pretrained x.pt"),
    ],
)
def test_which_checkpoints_a_launch_takes(
    tmp_path: Path, there: tuple[str, ...], flags: dict[str, Any], found: tuple[str, ...] | str
) -> None:
    for name in there:
        (tmp_path / name).touch()
    if flags.get("resume", "none") != "none":
        flags = flags | {"resume": str(tmp_path / flags["resume"])}
    config = TrainConfig(output_dir=tmp_path, **flags)
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            find_checkpoints(config)
    else:
        assert find_checkpoints(config) == [tmp_path / name for name in found]
