"""Two machines and the network between them: two namespaces, and a link that loses or delays packets, or is cut.

    scripts/test.sh -m network -n 0

Needs root, `ip` and /dev/net/tun. Every torchrun has a network, a host name and a temporary folder of its own.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.conftest import TINY, assert_same_run, write_data
from tests.harness import Started, launch, read_checkpoint
from tests.processes import alive, identify

pytestmark = [pytest.mark.network, pytest.mark.dist, pytest.mark.timeout(900)]

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # <linux/if_tun.h>
HOSTS = ("10.77.0.1", "10.77.0.2")
TIMEOUT, JOIN_SECONDS = 15, 45
EPOCHS = 12
FLAGS = (*TINY, "--batch-size", "4", "--deterministic", "--augment", "trivialaugment", "--mixup", "0.2")
RESUME_HINT = "the same command goes on from the last checkpoint (with --resume auto, as by default)"


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Wire:
    """Two namespaces whose only link is a pair of TUN devices; a thread carries the packets from one to the other.

    Attributes:
        names: of the namespaces, of the devices in them, and of the machines.
        cut: whether no packet arrives.
        delay: seconds, each way.
        loss: share of the packets, each way.
    """

    def __init__(self) -> None:
        self.names = [f"brisk{os.getpid()}{side}" for side in "ab"]
        self.cut, self.delay, self.loss = False, 0.0, 0.0
        self._random = random.Random(1)
        self._done = threading.Event()
        self._devices: list[int] = []
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> "Wire":
        for name, host in zip(self.names, HOSTS, strict=True):
            self._devices.append(device := os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
            ip("netns", "add", name)
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{host}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            self.link(HOSTS.index(host), "up")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in ip("netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        for device in self._devices:
            os.close(device)
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def link(self, side: int, state: str) -> None:
        """The device of one machine `up` or `down`."""
        ip("-n", self.names[side], "link", "set", self.names[side], state)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._done.is_set():
            wait = min(0.1, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.1
            for device in select.select(self._devices, [], [], wait)[0]:
                with contextlib.suppress(OSError):  # the device is down
                    packet = os.read(device, 1 << 16)
                    if not self.cut and self._random.random() >= self.loss:
                        number += 1
                        other = self._devices[1 - self._devices.index(device)]
                        heapq.heappush(under_way, (time.monotonic() + self.delay, number, other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(under_way)
                if not self.cut:
                    with contextlib.suppress(OSError):
                        os.write(device, packet)


class Run:
    """The same command on both machines, by a torchrun each."""

    def __init__(
        self, wire: Wire, folder: Path, data: Path, *flags: object, rendezvous: str = "c10d", restarts: int = 0
    ) -> None:
        self.wire, self.folder, self.data = wire, folder, data
        self._rendezvous, self._restarts = rendezvous, restarts
        self._flags = ("--data-dir", data, *FLAGS, "--output-dir", folder / "run", *flags)
        (folder / "run").mkdir(parents=True, exist_ok=True)
        self.torchruns = [self._start(side) for side in (0, 1)]

    def _start(self, side: int) -> Started:
        name = self.wire.names[side]
        (temporary := self.folder / name).mkdir(exist_ok=True)
        machine = ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name)
        rendezvous: tuple[str, ...] = (f"--node_rank={side}", f"--master_addr={HOSTS[0]}", "--master_port=29400")
        if self._rendezvous == "c10d":
            rendezvous = ("--rdzv_backend=c10d", f"--rdzv_endpoint={HOSTS[0]}:29400", f"--local_addr={HOSTS[side]}")
            is_host = "true" if side == 0 else "false"
            rendezvous += (f"--rdzv_conf=is_host={is_host},join_timeout={JOIN_SECONDS}",)
        return harness.start(
            *self._flags, torchrun=("--nnodes=2", *rendezvous, f"--max-restarts={self._restarts}"), prefix=machine,
            env={"GLOO_SOCKET_IFNAME": name, "TMPDIR": temporary},
        )  # fmt: skip

    @property
    def out(self) -> str:
        return self.torchruns[0].out

    def lines(self, side: int) -> list[str]:
        """The lines that a machine's process has printed for the user."""
        text = self.torchruns[side].err
        assert "Traceback" not in text.partition("torch/distributed/elastic")[0].partition("E1")[0], text
        return [line for line in text.splitlines() if line.startswith("train.py: ")]

    def wait_for(self, when: Callable[[], bool]) -> None:
        for torchrun in self.torchruns:
            torchrun.wait_for(when)

    def trains(self) -> bool:
        return "step 3/5" in self.out.partition("epoch 2/")[2]

    def finish(self, seconds: float = 300) -> None:
        """Wait for its end, which must be a success."""
        for torchrun in self.torchruns:
            assert torchrun.end(seconds).status == 0, self.lines(0) + self.lines(1)

    def ends_cut_off(self) -> tuple[str, str]:
        """Each machine's processes end, then its torchrun, and leave nothing; returns the line of each machine."""
        began = time.monotonic()
        processes = [identify(torchrun.descendants()) for torchrun in self.torchruns]  # without torchrun itself
        seconds: dict[int, float] = {}
        while len(seconds) < 2:
            for side in {0, 1} - seconds.keys():
                if not alive(processes[side]):
                    seconds[side] = time.monotonic() - began
            assert time.monotonic() < began + 200, [processes, self.lines(0), self.lines(1)]
            time.sleep(0.05)
        print(f"rank 0 ended after {seconds[0]:.1f} s, rank 1 after {seconds[1]:.1f} s")
        (first,), (second,) = self.lines(0), self.lines(1)
        print(first, second, sep="\n")
        self.end()
        return first, second

    def end(self) -> None:
        """Both torchruns end, with a failure. The one that waits for the other machine is killed."""
        statuses = [torchrun.end(200).status for torchrun in self.torchruns]
        print("torchrun:", statuses)
        assert statuses[0] == 1
        assert statuses[1] in (1, -signal.SIGKILL)
        for torchrun in self.torchruns:
            torchrun.check_nothing_left()

    def kill(self) -> None:
        for torchrun in self.torchruns:
            torchrun.kill()


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire() as wire:
        yield wire


Starter = Callable[..., Run]


@pytest.fixture
def start(wire: Wire, tmp_path: Path, data: Path) -> Iterator[Starter]:
    """Start a run on both machines: `start("--loader", "torch", data=FOLDER)`."""
    shm_before = set(os.listdir("/dev/shm"))
    with contextlib.ExitStack() as stack:

        def start(*flags: object, data: Path = data, epochs: int = EPOCHS, timeout: int = TIMEOUT, **how: Any) -> Run:
            run = Run(wire, tmp_path, data, "--epochs", epochs, "--timeout", timeout, *flags, **how)
            for torchrun in run.torchruns:
                stack.enter_context(torchrun)
            return run

        yield start
    assert set(os.listdir("/dev/shm")) <= shm_before


def cut(wire: Wire, how: str) -> None:
    if how == "wire":
        wire.cut = True
    else:
        wire.link(int(how[-1]), "down")


def mend(wire: Wire) -> None:
    wire.cut = False
    for side in (0, 1):
        wire.link(side, "up")


def assert_named(lines: tuple[str, str], names: list[str]) -> None:
    """The machine that holds the store names the other rank; the other names the store."""
    assert "rank 1 (process " in lines[0]
    assert f" on {names[1]}) does not answer; --timeout {TIMEOUT} is over" in lines[0]
    assert f"rank 1: the store of the process group at {HOSTS[0]}:" in lines[1]
    assert f"has not answered for {TIMEOUT} s (--timeout): the network or the machine of rank 0 is down" in lines[1]
    assert all(line.endswith(RESUME_HINT) for line in lines)


def assert_resumes(start: Starter, run: Run, *flags: object) -> None:
    """The link is up again: the same command resumes, to the same bits as a run of two processes on one machine."""
    mend(run.wire)
    run.kill()
    resumed = start(*flags, data=run.data)
    resumed.finish()
    assert "resumed at epoch" in resumed.out
    assert_same_as_on_one_machine(resumed, EPOCHS, *flags)


def assert_same_as_on_one_machine(run: Run, epochs: int, *flags: object) -> None:
    uninterrupted = run.folder / "uninterrupted"
    flags = ("--data-dir", run.data, *FLAGS, "--epochs", epochs, "--output-dir", uninterrupted, *flags)
    done = launch(*flags, processes=2)
    assert done.status == 0, done.err
    assert_same_run(uninterrupted, run.folder / "run")


@pytest.mark.parametrize(
    ("how", "loader"), [("wire", "dali"), ("link 0", "dali"), ("link 1", "dali"), ("wire", "torch")]
)
def test_cut_in_mid_epoch(start: Starter, wire: Wire, how: str, loader: str) -> None:
    run = start("--loader", loader)
    run.wait_for(run.trains)
    cut(wire, how)
    assert_named(run.ends_cut_off(), wire.names)
    assert_resumes(start, run, "--loader", loader)


def test_cut_under_a_static_rendezvous(start: Starter, wire: Wire) -> None:
    run = start(rendezvous="static")
    run.wait_for(run.trains)
    cut(wire, "wire")
    assert_named(run.ends_cut_off(), wire.names)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_restarts_end_where_the_network_stays_cut(start: Starter, wire: Wire, rendezvous: str) -> None:
    run = start(rendezvous=rendezvous, restarts=2)
    run.wait_for(run.trains)
    cut(wire, "wire")
    run.end()


def test_a_restart_goes_on_where_the_network_comes_back(start: Starter, wire: Wire) -> None:
    """After the processes have ended, and before torchrun gives up."""
    run = start(restarts=2)
    run.wait_for(run.trains)
    processes = identify(pid for torchrun in run.torchruns for pid in torchrun.ranks().values())
    assert len(processes) == 2
    cut(wire, "wire")
    run.wait_for(lambda: not alive(processes))
    mend(wire)
    run.finish()
    assert "resumed at epoch" in run.out
    assert_same_as_on_one_machine(run, EPOCHS)


def test_a_torchrun_that_is_asked_to_end_while_it_is_cut_off(start: Starter, wire: Wire) -> None:
    """It may wait for a store of its own; its process ends nevertheless, and prints why."""
    run = start()
    run.wait_for(run.trains)
    cut(wire, "wire")
    time.sleep(1)  # until every rank waits for the other
    run.torchruns[1].send(signal.SIGTERM, run.torchruns[1].pid)
    assert_named(run.ends_cut_off(), wire.names)


def test_cut_at_the_start(start: Starter, wire: Wire) -> None:
    """The torchruns have met, the processes are about to."""
    run = start()
    run.wait_for(lambda: all(torchrun.ranks() for torchrun in run.torchruns))
    cut(wire, "wire")
    first, second = run.ends_cut_off()
    assert f"rank 1 did not come within {TIMEOUT} s (--timeout)" in first
    assert f"rank 1: cannot meet rank 0 or its launcher at {HOSTS[0]}:" in second
    mend(wire)
    run.kill()
    start(epochs=1).finish()


def test_cut_in_an_evaluation(start: Starter, wire: Wire, tmp_path: Path) -> None:
    run = start(data=write_data(tmp_path / "data", val=(200, 200, 200)))
    last = run.folder / "run" / "last.pt"
    run.wait_for(lambda: "step 5/5" in run.out and last.exists())
    cut(wire, "wire")
    assert_named(run.ends_cut_off(), wire.names)
    saved = read_checkpoint(run.folder / "run")
    assert (saved["epoch"], saved["step"]) == (0, 5)
    assert_resumes(start, run)


def test_cut_within_a_save(start: Starter, wire: Wire) -> None:
    run = start("--checkpoint-steps", 1)
    run.wait_for(run.trains)
    run.wait_for((run.folder / "run" / ".last.pt.tmp").exists)
    cut(wire, "wire")
    assert_named(run.ends_cut_off(), wire.names)
    assert_resumes(start, run, "--checkpoint-steps", 1)


def test_a_network_that_comes_back_within_the_timeout(start: Starter, wire: Wire) -> None:
    run = start(epochs=6, timeout=120)
    run.wait_for(run.trains)
    wire.cut = True
    time.sleep(20)
    wire.cut = False
    run.finish()
    assert run.lines(0) + run.lines(1) == []
    assert_same_as_on_one_machine(run, 6)


def test_a_bad_network_is_only_slow(start: Starter, wire: Wire, tmp_path: Path) -> None:
    wire.loss, wire.delay = 0.2, 0.2
    run = start(data=write_data(tmp_path / "data", train=(6, 5, 5), val=(3, 3, 3)), epochs=1, timeout=120)
    run.finish(800)
    assert run.lines(0) + run.lines(1) == []
    assert_same_as_on_one_machine(run, 1)
