"""scripts/runs.py: what a folder of runs holds, and the events from which it knows."""

import json
import signal
from pathlib import Path

import pytest

from scripts import runs
from tests.conftest import TINY
from tests.contract import assert_keys
from tests.forked import launch_series, start_forked


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Name of a run -> its cells."""
    assert runs.main([str(folder)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "arch", "epochs", "best", "images/s", "time", "data"]
    return {Path(row.split()[0]).name: row.split() for row in rows}


def events(folder: Path) -> list[tuple[str, int]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in found:
        assert_keys("events.jsonl", event, event["event"])
    return [(event["event"], event["step"]) for event in found]


def test_runs_are_listed_with_their_state(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2)
    stopped = (*flags, "--output-dir", tmp_path / "stopped", "--time-limit", 0.001)
    finished = (*flags, "--output-dir", tmp_path / "finished")
    done = launch_series(stopped, finished, finished, (*finished, "--epochs", 3))
    assert [each.status for each in done] == [143, 0, 0, 0]
    (tmp_path / "no run").mkdir()
    with start_forked(*flags[:-1], 100000, "--output-dir", tmp_path / "died") as started:
        started.wait_for((tmp_path / "died" / "last.pt").exists)
        running = listed(tmp_path, capsys)
        started.send(signal.SIGKILL, started.pid)
        started.end()
    died = listed(tmp_path, capsys)
    assert {name: cells[1] for name, cells in running.items()} == {
        "died": "running", "stopped": "stopped", "finished": "finished",
    }  # fmt: skip
    assert {name: cells[1] for name, cells in died.items()} == running_to_died(running)
    summary = json.loads((tmp_path / "finished" / "summary.json").read_text())
    minutes, seconds = divmod(int(summary["seconds"]), 60)
    assert died["finished"][7:9] == [f"{summary['images_per_second']:,.0f}", f"{minutes:02}:{seconds:02}"]
    assert died["finished"][2:7] == ["test_resnet", "3/3", "top-1", f"{summary['best_top1']:.2f}", "%"]
    assert died["finished"][-1] == str(data)
    assert died["stopped"][2:4] == ["test_resnet", "0/2"]
    assert events(tmp_path / "stopped") == [("started", 1), ("stopped", 1)]
    launches = [("started", 1), ("finished", 10), ("started", 11), ("finished", 15)]
    assert events(tmp_path / "finished") == launches, "a launch that finds all done is none"
    (overwritten,) = launch_series((*finished, "--resume", "none", "--overwrite"))
    assert overwritten.status == 0
    assert events(tmp_path / "finished") == launches[:2]


def running_to_died(running: dict[str, list[str]]) -> dict[str, str]:
    return {name: {"running": "died"}.get(cells[1], cells[1]) for name, cells in running.items()}


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs.main([]) == 0
    assert capsys.readouterr().out == "no runs in runs\n"
    assert runs.main(["nowhere"]) == 2
    assert capsys.readouterr().err.startswith("runs.py: nowhere: cannot be read (No such file or directory)")


def test_it_reads_what_other_programs_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('["no run"]')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"arch": "resnet18", "epochs": 3}')
    (tmp_path / "b" / "metrics.jsonl").write_text('{"epoch": 3, "step": 15, "images_per_second": 12.5}\n{"epo')
    found = listed(tmp_path, capsys)
    assert list(found) == ["b"]
    assert found["b"][1:] == ["unknown", "resnet18", "2/3", "12", "00:00", "synthetic"]
