"""Log: metrics.jsonl holds the steps of one run without gaps or repeats, also after lost steps and on a full disk."""

import contextlib
import json
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from utils.log import Log, emit, print_error
from utils.progress import start_status


def test_truncate_after_drops_later_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"epoch": 1, "step": step, "train/loss": 1.0} for step in (1, 2)]
    records += [{"epoch": 1, "step": 2, "val/top1": 50.0}, {"epoch": 2, "step": 3, "train/loss": 1.0}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"epoch": 2, "st')
    log = Log(tmp_path, True, epochs=2, steps_per_epoch=2, tensorboard=False)
    log.truncate_after(epoch=1, step=3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == records
    log.truncate_after(epoch=0, step=2)  # trained to the epoch's end, not evaluated
    assert [json.loads(line) for line in path.read_text().splitlines()] == records[:2]


@contextlib.contextmanager
def limited_to(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes, as on a disk that is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_truncate_after_on_a_full_disk(tmp_path: Path) -> None:
    """Nothing is written if there is nothing to drop; a file that cannot be written keeps its content."""
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps({"epoch": 1, "step": step}) + "\n" for step in range(100))
    path.write_text(text)
    log = Log(tmp_path, True, epochs=1, steps_per_epoch=100, tensorboard=False)
    with limited_to(100):
        log.truncate_after(epoch=0, step=100)
        with pytest.raises(OSError, match="File too large"):
            log.truncate_after(epoch=0, step=50)
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
def test_events_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, True, epochs=1, steps_per_epoch=100, tensorboard=True)
    with limited_to(400):
        step, deadline = 0, time.monotonic() + 100
        while log._events is not None:  # until TensorBoard's thread has failed
            log.record({"epoch": 1, "step": step, "train/loss": 1.0})
            step += 1
            time.sleep(0.02)
            assert time.monotonic() < deadline
    log.record({"epoch": 1, "step": step, "train/loss": 1.0})
    log.close()
    assert capsys.readouterr().out.count("TensorBoard's events are no longer written") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step + 1


def test_events_of_lost_steps_are_dropped(tmp_path: Path) -> None:
    for launch, first in (1.0, 1), (2.0, 4):  # the second resumes after step 3
        log = Log(tmp_path, True, epochs=1, steps_per_epoch=9, tensorboard=True, step=first - 1)
        for step in range(first, first + 5):
            log.record({"epoch": 1, "step": step, "train/loss": launch})
        log.close()
        time.sleep(1.1)  # TensorBoard names files by the second
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(s, 1.0 if s < 4 else 2.0) for s in range(1, 9)]


def test_a_folder_that_cannot_be_reached_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(
        tmp_path / ("far" * 100), True, epochs=1, steps_per_epoch=1, tensorboard=False
    )  # no system has such names
    log.record({"epoch": 1, "step": 1, "train/loss": 1.0})
    log.close()
    assert "metrics.jsonl: not written (File name too long)" in capsys.readouterr().out


def test_only_rank_0_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, False, epochs=1, steps_per_epoch=1, tensorboard=True)
    log.info("hello")
    log.record({"step": 1})
    log.truncate_after(0, 0)
    log.close()
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_utf8_and_a_closed_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emit("warning: \udcff\udcfe.jpg")
    assert capsys.readouterr().out == "warning: \\udcff\\udcfe.jpg\n"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)  # as Python has it after `>&- 2>&-`
    emit("nobody reads this")
    print_error("train.py", "nor this")
    assert not start_status("nor that")
