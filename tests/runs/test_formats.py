"""Runs on shards: the same bits as on the folder of the same files, over resumes and other numbers of processes."""

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import format_table, index_table
from tests.conftest import TINY, assert_same_run
from tests.forked import launch_ranks, launch_series
from tests.harness import assert_refused, read_checkpoint, read_metrics
from tests.shards import write_arrow, write_lmdb, write_recordio, write_tfrecord, write_webdataset

WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "webdataset": write_webdataset,
    "tfrecord": write_tfrecord,
    "recordio": write_recordio,
    "lmdb": write_lmdb,
    "arrow": write_arrow,
}
NUMBERED = ("recordio",)  # whose keys are numbers, not the names of the files
QUICK = ("webdataset",)
FLAGS = (*TINY, "--batch-size", "8", "--epochs", "2", "--checkpoint-steps", "3")


@pytest.fixture(scope="module")
def shards(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the data set `data` in a format."""
    return functools.cache(lambda name: WRITERS[name](data, tmp_path_factory.mktemp(name) / "data"))


@pytest.fixture(scope="module")
def on_folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output of a run on class folders, by loader."""
    folders = {loader: tmp_path_factory.mktemp("folder") / loader for loader in ("dali", "torch")}
    for done in launch_series(
        *(("--data-dir", data, *FLAGS, "--loader", loader, "--output-dir", run) for loader, run in folders.items())
    ):
        assert done.status == 0, done.err
    return folders


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        *(pytest.param("dali", name, marks=[] if name in QUICK else pytest.mark.slow) for name in WRITERS),
        *(pytest.param("torch", name, marks=pytest.mark.slow) for name in WRITERS),
    ],
)
def test_the_same_bits_over_a_stop_in_mid_epoch(
    shards: Callable[[str], Path], on_folder: dict[str, Path], tmp_path: Path, name: str, loader: str
) -> None:
    names_file = shards(name) / "names.txt"
    names = ("--class-names", names_file) if names_file.exists() else ()
    flags = ("--data-dir", shards(name), *names, *FLAGS, "--loader", loader, "--output-dir", tmp_path)
    stopped, resumed = launch_series((*flags, "--time-limit", 0.001), flags)
    assert stopped.status == 143, stopped.err
    assert read_checkpoint(tmp_path, "last.pt")["step"] == 10
    assert resumed.status == 0, resumed.err
    assert "resumed at epoch 1, step 1," in resumed.out
    without = ["files", *(["fingerprint"] if name in NUMBERED else [])]  # times of change, and names
    assert_same_run(on_folder[loader], tmp_path, without=without)


@pytest.mark.slow  # a resume of shards and two ranks that read them are quick
@pytest.mark.dist
def test_two_processes_index_together(data: Path, tmp_path: Path) -> None:
    root = write_webdataset(data, tmp_path / "data", per_shard=7)
    ranks = launch_ranks("--data-dir", root, *TINY, "--output-dir", tmp_path / "run", "--epochs", 1, "--batch-size", 4)
    assert [done.status for done in ranks] == [0, 0], ranks
    assert "WebDataset tars, 6 + 6 shards, 3 classes" in ranks[0].out
    assert read_metrics(tmp_path / "run")[-1]["val/count"] == 41
    assert (root / "train.index.npz").is_file()


@pytest.mark.slow  # twelve launches for each loader
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_the_table_of_formats(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same bits, over stops in mid-epoch and on 1, 2 and 1 processes; each image once per epoch."""
    flags = ("--data-dir", data, "--output-dir", tmp_path / "out", "--only", "WebDataset", "ILSVRC")
    assert format_table.main(list(map(str, flags))) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 3 * 2
    assert all(row.endswith("| 82 of 82 | yes | yes | yes |") for row in rows)


@pytest.mark.parametrize("change", ["none", "a repeated image", "a wrong label", "a missing step"])
def test_the_table_sees_what_is_wrong_with_an_epoch(tmp_path: Path, change: str) -> None:
    case = format_table.Case((), tmp_path, num_train=9)
    lines = []
    for step in range(format_table.EPOCHS * case.steps_per_epoch):
        first = step % case.steps_per_epoch * 4
        images = list(range(first, first + 4))
        lines.append({"step": step, "processes": 1 + step % 2, "images": images, "labels": [at % 3 for at in images]})
    if change == "a repeated image":
        lines[1] |= {"images": [0, 5, 6, 7], "labels": [0, 2, 0, 1]}
    elif change == "a wrong label":
        lines[3]["labels"] = [0, 0, 0, 0]
    elif change == "a missing step":
        del lines[-1]
    (tmp_path / "processes-log").mkdir()
    (tmp_path / "processes-log" / "0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with contextlib.nullcontext() if change == "none" else pytest.raises(AssertionError):
        case.assert_once_per_epoch([number % 3 for number in range(9)])


@pytest.mark.slow  # three processes for each format
@pytest.mark.timeout(900)
def test_the_table_of_listings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each format that the program writes is read with as many images."""
    assert index_table.main(["--output-dir", str(tmp_path / "out"), "--records", "2000"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(index_table.FORMATS)
    assert not (tmp_path / "out").exists()


@pytest.mark.dist
def test_a_shard_that_only_one_rank_can_read_ends_all(data: Path, tmp_path: Path) -> None:
    root = write_webdataset(data, tmp_path / "data")
    cut = root / "train-0001.tar"
    os.truncate(cut, cut.stat().st_size // 2)
    first, _ = launch_ranks("--data-dir", root, *TINY, "--output-dir", tmp_path / "run", "--batch-size", 4)
    assert_refused(first, f"{cut}: cut off in the member at byte ", "; copy or write it again")


def test_a_bad_record_is_named_or_excluded(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(data, folder)
    bad = sorted((folder / "train" / "green").iterdir())[3]
    bad.write_bytes(bad.read_bytes()[:300])
    root = write_webdataset(folder, tmp_path / "data")
    flags = ("--data-dir", root, *TINY, "--batch-size", 8, "--epochs", 1)
    named, excluded = launch_series(
        (*flags, "--output-dir", tmp_path / "named"),
        (*flags, "--output-dir", tmp_path / "excluded", "--bad-files", "skip"),
    )
    assert named.status == 2
    assert f"train-0001.tar:{bad.name}: " in named.err
    assert excluded.status == 0, excluded.err
    assert "1 of 41 train files (green 1)" in excluded.out
    assert f"train/green/{bad.name}" in (tmp_path / "excluded" / "bad_files.json").read_text()


@pytest.mark.slow  # the same bits of both are quick
def test_a_run_goes_on_from_folder_to_shards(
    data: Path, shards: Callable[[str], Path], on_folder: dict[str, Path], tmp_path: Path
) -> None:
    """The names and sizes of the images are the same, so their order is, too."""
    run = tmp_path / "run"
    flags = (*FLAGS, "--output-dir", run)
    stopped, resumed = launch_series(
        ("--data-dir", data, *flags, "--time-limit", 0.001), ("--data-dir", shards("webdataset"), *flags)
    )
    assert [stopped.status, resumed.status] == [143, 0], resumed.err
    assert_same_run(on_folder["dali"], run, without=["files"])
