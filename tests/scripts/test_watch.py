"""scripts/watch.py: a run in a terminal and without one, until it ends."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import watch
from tests.conftest import TINY
from tests.harness import ROOT, environment, start


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The files of a run."""
    records = [
        {"epoch": 1, "step": 5, "train/loss": 2.0, "lr": 0.1, "images_per_second": 9.0, "data_wait": 0.5},
        {"epoch": 1, "step": 5, "val/top1": 50.0, "val/loss": 1.5},
    ]
    events = [{"event": name, "time": 1.0, "step": 5, "seconds": 3.0} for name in ("started", "finished")]
    (tmp_path / "config.json").write_text('{"arch": "resnet50", "epochs": 1}')
    (tmp_path / "summary.json").write_text('{"seconds": 3.0}')
    for name, lines in (("metrics", records), ("events", events)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_without_a_terminal_each_record_is_a_line(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main([str(finished)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1  step 5  train loss 2.0000  lr 0.1  images/s 9  data wait 50.0%",
        "epoch 1  step 5  val loss 1.5000  val top-1 50.00 %",
        f"finished  {finished}",
        "1/1 epochs  00:03  best top-1 50.00 %  step 5",
    ]


@pytest.mark.slow
def test_a_run_is_shown_in_a_terminal_until_it_ends(data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 60, "--output-dir", tmp_path)
    with start(*flags) as run:
        run.wait_for((tmp_path / "config.json").exists)
        screen, terminal = pty.openpty()
        words = [sys.executable, str(ROOT / "scripts" / "watch.py"), str(tmp_path), "--interval", "0.2"]
        watching = subprocess.Popen(words, stdout=terminal, stderr=terminal, env=environment({"COLUMNS": 80}))
        os.close(terminal)
        shown = b""
        try:
            while chunk := os.read(screen, 1 << 16):
                shown += chunk
        except OSError:  # the terminal's other end is closed
            pass
        assert watching.wait(60) == 0
        assert run.end().status == 0
    text = shown.decode()
    assert text.count("running  /") > 1
    assert text.rpartition("\x1b[J")[2].splitlines()[0] == f"finished  {tmp_path}"[:79]
    assert "█" in text


@pytest.mark.slow
def test_ctrl_c_ends_the_display_in_silence(data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 100000, "--output-dir", tmp_path)
    with start(*flags) as run:
        run.wait_for((tmp_path / "last.pt").exists)
        with start(tmp_path, program=ROOT / "scripts" / "watch.py") as watching:
            watching.wait_for(lambda: "train loss" in watching.out)
            watching.send(2, watching.pid)
            done = watching.end()
        assert (done.status, done.err) == (130, "")
        assert run.reaches(lambda: True)
