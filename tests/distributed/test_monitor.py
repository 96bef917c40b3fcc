"""A rank that dies or hangs ends the group, which prints which rank it was and leaves nothing behind."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.conftest import TINY
from tests.harness import error_line, launch, read_checkpoint, start
from tests.processes import descendants, is_stopped
from utils.distributed import monitor as monitor_module
from utils.distributed.monitor import RankMonitor, _has_ended, _is_communication, _machine
from utils.distributed.store import BoundedStore, NoAnswer

CHECKPOINTS = ("last.pt", "last-1.pt", "last-2.pt", "best.pt")
TORCH_KILLS = 30  # seconds after which torchrun kills what ignores SIGTERM
pytestmark = pytest.mark.dist


class Run:
    """A run under torchrun that would train for hours; the test decides when and how it ends."""

    def __init__(self, data: Path, folder: Path, *flags: object, processes: int = 2) -> None:
        self.folder = folder / "run"
        self._shm_before = set(os.listdir("/dev/shm"))
        train_flags = ("--data-dir", data, *TINY, "--epochs", 100000, "--batch-size", 4, "--output-dir", self.folder)
        self.torchrun = start(*train_flags, *flags, processes=processes, torchrun=("--standalone",))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.torchrun.__exit__(*error)

    def train(self) -> dict[int, int]:
        """Wait until all ranks train; returns rank -> process id."""
        self.torchrun.wait_for(lambda: "first step done" in self.torchrun.out)
        return self.torchrun.ranks()

    def check_end(self, seconds: float) -> str:
        """The run ends within `seconds`, leaves nothing, and has printed one line, which is returned."""
        done = self.torchrun.end(seconds)
        self.check_nothing_left(10)  # torch's DataLoader workers look after their parent every 5 s
        return error_line(done)

    def check_nothing_left(self, seconds: float) -> None:
        self.torchrun.check_nothing_left(seconds)
        assert set(os.listdir("/dev/shm")) <= self._shm_before
        names = {path.name for path in self.folder.iterdir()}
        written = {"config.json", "metrics.jsonl", "events.jsonl", "listing.zip", *CHECKPOINTS}
        assert names <= written | {f".{name}.tmp" for name in written}  # a rank can be killed while it writes


@pytest.mark.slow  # in processes of this file's launcher; that a killed rank is named is in test_watchdog.py
@pytest.mark.parametrize(("rank", "loader"), [(0, "dali"), (1, "dali"), (0, "torch"), (1, "torch")])
def test_a_killed_rank_is_named(data: Path, tmp_path: Path, rank: int, loader: str) -> None:
    with Run(data, tmp_path, "--loader", loader) as run:
        pid = run.train()[rank]
        os.kill(pid, signal.SIGKILL)
        line = run.check_end(TORCH_KILLS)
        assert "Traceback" not in run.torchrun.err.partition("torch/distributed/elastic")[0]
    assert f"rank {rank} (process {pid} on {os.uname().nodename}) is gone: killed" in line
    assert "the same command goes on from the last checkpoint (with --resume auto, as by default)" in line


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_a_stopped_rank_is_named(data: Path, tmp_path: Path, rank: int, loader: str) -> None:
    with Run(data, tmp_path, "--loader", loader, "--timeout", 10) as run:
        pid = run.train()[rank]
        os.kill(pid, signal.SIGSTOP)
        line = run.check_end(10 + 10 + TORCH_KILLS + 10)
    assert f"rank {rank} (process {pid} on {os.uname().nodename}) is stopped" in line


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_named(data: Path, tmp_path: Path, rank: int) -> None:
    """Stopped while it still imports."""
    with Run(data, tmp_path, "--timeout", 10) as run:
        run.folder.mkdir()
        run.torchrun.wait_for(lambda: len(run.torchrun.ranks()) == 2)
        os.kill(run.torchrun.ranks()[rank], signal.SIGSTOP)
        line = run.check_end(60 + TORCH_KILLS)
    assert f"rank {rank} did not come within 10 s (--timeout)" in line


@pytest.mark.slow
def test_workers_end_with_their_launcher(data: Path, tmp_path: Path) -> None:
    """Killed, torchrun ends no worker. They save and stop, and the next launch waits for them and resumes."""
    with Run(data, tmp_path) as run:
        run.train()
        run.torchrun.process.kill()
        run.torchrun.process.wait()
        flags = ("--data-dir", data, *TINY, "--batch-size", 4, "--output-dir", run.folder)
        resumed = launch(*flags, "--epochs", 100000, "--time-limit", 0.1, processes=2)
        run.check_nothing_left(10)
        (stopped,) = re.findall(r"stopped by SIGTERM at step (\d+);", run.torchrun.out)
    assert f"step {stopped}, from" in resumed.out, resumed.out + resumed.err
    before, after = int(stopped), read_checkpoint(tmp_path / "run")["step"]
    assert after > before or (after == before and after % (41 // 8) == 0)  # at an epoch's end evaluation comes first


@pytest.mark.slow  # the signal of a dead launcher is in tests/distributed/test_ownership.py
def test_a_lone_worker_ends_with_its_launcher(data: Path, tmp_path: Path) -> None:
    with Run(data, tmp_path, processes=1) as run:
        run.train()
        run.torchrun.process.kill()
        run.check_nothing_left(30)
        assert "stopped by SIGTERM at step" in run.torchrun.out


def test_only_a_process_that_is_gone_has_ended() -> None:
    with subprocess.Popen(["true"]) as process:
        while not _has_ended(process.pid):  # a zombie until it is waited for
            time.sleep(0.01)
    assert _has_ended(process.pid)
    assert not _has_ended(os.getpid())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # not one file descriptor more
    try:
        ended = _has_ended(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not ended


@pytest.mark.slow
def test_the_last_error_is_named(data: Path, tmp_path: Path) -> None:
    """Rank 1 fails by itself, as a worker of its DataLoader is killed: rank 0 prints that, as does torchrun."""
    with Run(data, tmp_path, "--loader", "torch") as run:
        for child in descendants(run.train()[1]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        line = run.check_end(TORCH_KILLS)
        # Which error the death of a worker becomes depends on what the trainer was about to read from it.
        match = re.match(
            r"train\.py: rank 1 \(process \d+ on \S+\) failed: (RuntimeError|EOFError|Connection\w+):", line
        )
        assert match is not None, line
        cause = run.torchrun.err.partition("Root Cause")[2]
        assert re.search(r"rank +: 1 ", cause)
        assert match[1] in cause


class Group:
    """`count` ranks in one real store, all of them this process unless `set_address` says otherwise."""

    def __init__(self, count: int, timeout: float = 7.0) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True)
        self.store = BoundedStore(self.server.clone(), 30.0)
        self.ranks = [RankMonitor(self.store, rank, count, timeout) for rank in range(count)]

    def set_address(self, rank: int, pid: int, machine: str | None = None) -> None:
        self.store.set(f"monitor/address/{rank}", f"{machine or _machine()} {pid}")


@pytest.fixture
def gone() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.fixture
def stopped() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process.pid):
            time.sleep(0.01)
        yield process.pid
        process.kill()


def test_poll_ranks(monkeypatch: pytest.MonkeyPatch, gone: int, stopped: int) -> None:
    """What is known of each rank. One that failed or died explains why others do not answer."""
    monkeypatch.setattr(monitor_module, "POLL_TIMEOUT", 0.3)
    here, hung = os.uname().nodename, "does not answer; --timeout 7 is over: it hangs, or its machine or the network"
    group = Group(4)
    group.ranks[2].mark_finished()
    status = group.ranks[1]._poll_ranks()
    assert (list(status.lost), status.healthy) == ([0, 3], [1, 2])
    assert status.lost[3].startswith(f"(process {os.getpid()} on {here}) {hung}")
    group.set_address(3, gone, "elsewhere/1/2")  # whose processes are unknown here
    assert group.ranks[1]._poll_ranks().lost[3].startswith(f"(process {gone} on elsewhere) {hung}")
    group.set_address(3, stopped)
    assert group.ranks[1]._poll_ranks().lost == {3: f"(process {stopped} on {here}) is stopped (SIGSTOP)"}
    group.set_address(3, gone)
    lost = group.ranks[1]._poll_ranks().lost
    assert lost == {3: f"(process {gone} on {here}) is gone: killed (by the kernel, if memory ran out) or crashed"}
    with pytest.raises(MemoryError), group.ranks[0].guard(print):
        raise MemoryError("no room")
    status = group.ranks[1]._poll_ranks()
    assert status.lost == {0: f"(process {os.getpid()} on {here}) failed: MemoryError: no room"}
    assert status.healthy == [1, 2]


def test_poll_ranks_that_are_well() -> None:
    group = Group(2)
    group.ranks[1].mark_finished()
    status = group.ranks[0]._poll_ranks()
    assert (status.lost, status.healthy) == ({}, [0, 1])
    group.ranks[0].exit_if_lost(print)  # and this process goes on
    group.server.delete_key("monitor/address/1")
    group.server.delete_key("monitor/error/1")
    assert group.ranks[0]._address(1) == "never came and "


def test_a_rank_that_died_without_an_error_is_lost_to_all(gone: int) -> None:
    group = Group(3)
    group.set_address(1, gone, "elsewhere/1/2")
    group.set_address(2, gone)
    group.ranks[2].mark_finished()
    assert not group.ranks[0].has_lost_rank()  # rank 2 ended well; rank 1 is not of this machine
    group.server.delete_key("monitor/error/2")
    assert not group.store.check(["monitor/failed"])
    assert group.ranks[0].has_lost_rank()
    assert group.store.check(["monitor/failed"])  # where those of other machines look


def test_a_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Group(1, timeout=7.0).ranks[0]
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert not monitor.is_hung()
    monitor.heartbeat()
    now += 14.0
    assert not monitor.is_hung()
    now += 0.1
    assert monitor.is_hung()
    monitor.pause()
    assert not monitor.is_hung()


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (NoAnswer(5.0), True),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # of a worker of DataLoader
    ],
)
def test_errors_of_communication(error: Exception, is_one: bool) -> None:
    assert _is_communication(error) == is_one
