"""Each tracker has what metrics.jsonl has, by its own package, in an environment of requirements-track.txt."""

import importlib.util
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, assert_same_run
from tests.harness import ROOT, launch, read_metrics
from utils.report.output_folder import read_object
from utils.report.tracking.sender import TRACKING

FLAGS = (*TINY, "--batch-size", "8", "--epochs", "2", "--log-steps", "2")


def metrics_of_trackio(folder: Path, runs: int) -> list[dict[str, Any]]:
    (database,) = (folder / "trackio").glob("brisk*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, *_ in rows}) == runs
    return [{"step": step} | json.loads(text) for name, step, text in rows if name == rows[-1][0]]


def metrics_of_mlflow(folder: Path, runs: int) -> list[dict[str, Any]]:
    with sqlite3.connect(folder / "mlflow.db") as connection:
        rows = connection.execute("SELECT run_uuid, step, key, value FROM metrics ORDER BY timestamp").fetchall()
    assert len({run for run, *_ in rows}) == runs
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for run, step, key, value in rows:
        if run == rows[-1][0]:
            found.setdefault((step, key.startswith("val/")), {"step": step})[key] = value
    return list(found.values())


def metrics_of_wandb(folder: Path, runs: int) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    files = sorted((folder / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.stem for file in files}) == runs
    run_id = read_object(folder / "run" / TRACKING)["wandb"]["run_id"]
    for content in records_of_wandb([file for file in files if file.stem == f"run-{run_id}"]):
        record = Record()
        record.ParseFromString(content)
        if (kind := record.WhichOneof("record_type")) == "history":
            line = getattr(record, kind)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in line.item}
            found.append({"step": line.step.num} | {name: json.loads(text) for name, text in items.items()})
    return found


def records_of_wandb(files: Sequence[Path]) -> Iterator[bytes]:
    """The records of files in LevelDB's log format with a header of 7 bytes."""
    for file in files:
        data, at, record = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32_768 - at % 32_768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                yield record
                record = b""


# What the last of some tracked runs has got.
TRACKED: dict[str, Callable[[Path, int], list[dict[str, Any]]]] = {
    "trackio": metrics_of_trackio,
    "wandb": metrics_of_wandb,
    "mlflow": metrics_of_mlflow,
}


@pytest.mark.slow  # the trackers' packages take 1.3 GB: requirements-track.txt
@pytest.mark.parametrize("tracker", TRACKED)
def test_a_run_that_was_stopped_and_resumed_is_one_tracked_run(data: Path, tmp_path: Path, tracker: str) -> None:
    assert importlib.util.find_spec(tracker), f"{tracker} is missing: pip install -r requirements-track.txt"
    env = {
        "TRACKIO_DIR": tmp_path / "trackio",
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "MLFLOW_ARTIFACT_ROOT": tmp_path,
    }
    flags = ("--data-dir", data, *FLAGS, "--output-dir", tmp_path / "run", "--track", tracker)
    assert launch(*flags, "--time-limit", 0.001, env=env, cwd=tmp_path).status == 143
    done = launch(*flags, env=env, cwd=tmp_path)
    assert done.status == 0, done.err
    # What was left; waits for the processes of the two launches.
    done = launch(tmp_path / "run", "--track", tracker, program=ROOT / "scripts" / "track.py", env=env, cwd=tmp_path)
    assert done.status == 0, done.err
    assert launch("--data-dir", data, *FLAGS, "--output-dir", tmp_path / "untracked").status == 0
    assert_same_run(tmp_path / "run", tmp_path / "untracked")
    assert_tracked(tmp_path, tracker, runs=1)
    # The last epoch again, with other values: no tracker can take back what it has.
    done = launch(*flags, "--resume", tmp_path / "run/last-2.pt", "--overwrite", "--lr", 0.1, env=env, cwd=tmp_path)
    assert done.status == 0, done.err
    done = launch(tmp_path / "run", "--track", tracker, program=ROOT / "scripts" / "track.py", env=env, cwd=tmp_path)
    assert done.status == 0, done.err
    assert_tracked(tmp_path, tracker, runs=2)


def assert_tracked(folder: Path, tracker: str, runs: int) -> None:
    """The last of the tracked runs has what metrics.jsonl has."""
    found, expected = (
        {
            (record["step"], name): value
            for record in records for name, value in record.items() if name in ("train/loss", "lr", "val/top1")
        }
        for records in (TRACKED[tracker](folder, runs), read_metrics(folder / "run"))
    )  # fmt: skip
    assert found == expected


@pytest.mark.slow  # mlflow, see above
def test_a_tracker_that_is_down_changes_nothing(data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *FLAGS)
    env = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    done = launch(*flags, "--output-dir", tmp_path / "run", "--track", "mlflow", env=env)
    assert done.status == 0, done.err
    assert "scripts/track.py" in done.out + done.err
    assert launch(*flags, "--output-dir", tmp_path / "untracked").status == 0
    assert_same_run(tmp_path / "run", tmp_path / "untracked")
    assert not (tmp_path / "run" / TRACKING).exists()
