"""The store behind a network that loses everything: a real TCPStore, and a real connection that goes nowhere."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.forked import start_forked
from tests.harness import Started, error_line
from tests.processes import alive, free_port, identify
from utils.distributed import monitor as monitor_module
from utils.distributed import store as store_module
from utils.distributed.monitor import RankMonitor
from utils.distributed.store import BoundedStore, NoAnswer, call_with_timeout


class Proxy:
    """Between clients and a store: passes bytes on, late if asked to, until it is cut or its `budget` is used up.

    Then it keeps them, and every connection stays open, as over a network that is down.
    """

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.passes = threading.Event()
        self.passes.set()
        self.delay = 0.0
        self.budget: float = float("inf")
        self.passed = 0
        self._sockets = [self._server]
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed, on either side
            while True:
                client = self._server.accept()[0]
                self._sockets.append(client)
                self._sockets.append(server := socket.create_connection(("127.0.0.1", self._upstream)))
                self._start(self._pass_on, client, server)
                self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.passed + len(data) > self.budget:
                    self.passes.clear()
                time.sleep(self.delay)
                self.passes.wait()
                target.sendall(data)
                self.passed += len(data)
        _shut(target)

    def close(self) -> None:
        for connection in self._sockets:
            _shut(connection)
            connection.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # unlike close, it wakes the thread that waits for it


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def proxy(server: TCPStore) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def test_a_call_ends_whether_or_not_an_answer_comes(server: TCPStore, proxy: Proxy) -> None:
    store = BoundedStore(TCPStore("127.0.0.1", proxy.port), 30.0)
    inner = store.with_prefix("one").with_prefix("two")
    inner.set("key", "value")
    assert server.get("one/two/key") == inner.get("key") == b"value"
    assert (inner.prefix, inner.address) == ("one/two/", f"127.0.0.1:{proxy.port}")
    assert (inner.check(["key"]), inner.check(["key", "other"]), store.check(["key"])) == (True, False, False)
    assert (inner.add("count", 2), inner.add("count", 3)) == (2, 5)
    proxy.passes.clear()
    inner = store.with_prefix("one").with_prefix("two", 0.2)
    for _ in range(2):  # with the thread free, and with it waiting
        for call in (
            lambda: inner.set("late", ""),
            lambda: inner.get("key"),
            lambda: inner.check(["key"]),
            lambda: inner.add("count", 1),
        ):
            with pytest.raises(NoAnswer, match=r"no answer for 0\.2 s"):
                call()
    proxy.passes.set()
    assert store.check(["one/two/late"])  # the call that was under way arrives
    assert store.get("one/two/count") == b"5"  # the calls after it were dropped, as their callers had stopped waiting


def test_an_error_of_the_store_is_the_callers(server: TCPStore, proxy: Proxy) -> None:
    store = BoundedStore(TCPStore("127.0.0.1", proxy.port), 30.0)
    proxy.close()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            store.set("key", "value")
        assert not isinstance(caught.value, NoAnswer)


def test_call_with_timeout() -> None:
    def fail() -> None:
        raise KeyError("reason")

    assert call_with_timeout(lambda: 3, 30.0) == 3
    with pytest.raises(KeyError, match="reason"):
        call_with_timeout(fail, 30.0)
    with pytest.raises(NoAnswer):
        call_with_timeout(threading.Event().wait, 0.1)


def test_late_answers_count_and_silence_is_noticed(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes longer than one poll waits for it."""
    monkeypatch.setattr(store_module, "POLL_INTERVAL", 0.05)
    store = BoundedStore(TCPStore("127.0.0.1", proxy.port), 30.0)
    proxy.delay = 0.2
    cut_off = threading.Event()
    with store.watch(1.5, cut_off.set):
        while store._connection.answers < 8 and not cut_off.is_set():
            time.sleep(0.01)
        assert not cut_off.is_set(), "8 answers take 1.6 s"
        proxy.passes.clear()
        assert cut_off.wait(100.0)


def test_time_in_which_the_process_was_suspended_does_not_count(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "POLL_INTERVAL", 0.05)
    clock, ahead = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead)
    store = BoundedStore(TCPStore("127.0.0.1", proxy.port), 30.0)
    cut_off = threading.Event()
    with store.watch(60.0, cut_off.set):
        proxy.passes.clear()  # an answer is on its way
        time.sleep(0.2)
        ahead = 3600.0
        assert not cut_off.wait(0.5)


def test_the_watch_ends_with_its_context(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "POLL_INTERVAL", 0.05)
    store = BoundedStore(TCPStore("127.0.0.1", proxy.port), 30.0)
    cut_off = threading.Event()
    with store.watch(0.5, cut_off.set):
        pass
    proxy.passes.clear()
    assert not cut_off.wait(1.0)


def test_a_monitor_that_is_cut_off_waits_for_nothing(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "CALL_TIMEOUT", 0.2)
    monitor = RankMonitor(BoundedStore(TCPStore("127.0.0.1", proxy.port), 30.0), 1, 2, timeout=30.0)
    assert monitor.request_abort()
    assert not monitor.request_abort()
    proxy.passes.clear()
    monitor.announce_stop()
    monitor.mark_finished()
    assert monitor.request_abort()  # no other rank may print what is wrong
    for question in (monitor.abort_requested, monitor.has_lost_rank):
        with pytest.raises(NoAnswer):
            question()


# Rank 1's store is behind the proxy; the collectives are not. It waits in C, as for a device, with a child that gets no
# signals, as a DataLoader's worker.
WORKER = """
import ctypes, multiprocessing, sys, time
import torch
from utils.distributed.watchdog import watchdog
from utils.distributed.group import process_group
from utils.errors import BadFile, RunFailed
def print_error(line):
    print(f"train.py: {line}", file=sys.stderr, flush=True)
def wait():
    time.sleep(200)
try:
    with (
        process_group(torch.device("cpu"), float(sys.argv[1]), print_error) as env,
        env.guard(print_error),
        watchdog(env, print_error),
    ):
        if env.rank == 1:
            child = multiprocessing.get_context("fork").Process(target=wait)
            child.start()
            print(child.pid, flush=True)
            mutex = ctypes.create_string_buffer(64)
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
        elif sys.argv[2] == "wait":
            wait()
        else:
            raise BadFile("/data/one.jpg", "damaged", env.rank)
except RunFailed as failure:
    print_error(failure)
    sys.exit(1)
"""


StartRank = Callable[..., Started]


@pytest.fixture
def start_rank() -> Iterator[StartRank]:
    """Start a rank of two, with the store at a port of this machine: `start_rank(0, port, TIMEOUT, CASE)`."""
    with contextlib.ExitStack() as stack:

        def start_rank(rank: int, port: int, *arguments: object) -> Started:
            env: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            return stack.enter_context(start_forked(*arguments, program=WORKER, env=env))

        yield start_rank


@pytest.mark.dist
@pytest.mark.slow
def test_a_process_that_is_cut_off_prints_it_and_ends_with_its_workers(start_rank: StartRank) -> None:
    port = free_port()
    proxy = Proxy(port)
    start_rank(0, port, 60, "wait")
    wait_for_server(port)
    rank = start_rank(1, proxy.port, 10, "wait")
    rank.wait_for(lambda: rank.out.endswith("\n"))
    child = identify([int(rank.out)])
    proxy.passes.clear()
    done = rank.end()
    line = error_line(done)
    assert (done.status, len(child), alive(child)) == (1, 1, [])
    assert f"rank 1: the store of the process group at 127.0.0.1:{proxy.port} has not answered for 10 s" in line
    assert "the network or the machine of rank 0 is down" in line
    assert "the same command goes on from the last checkpoint" in line
    proxy.close()


@pytest.mark.slow
@pytest.mark.dist
def test_a_bad_file_of_the_rank_that_holds_the_store_ends_the_other(start_rank: StartRank) -> None:
    """As under Slurm, where no launcher holds it: that rank has to wait until the other has read that it must end."""
    port = free_port()
    ranks = [start_rank(rank, port, 60, "bad file") for rank in (0, 1)]
    done = [rank.end() for rank in ranks]
    assert error_line(done[0]).startswith("train.py: rank 0: /data/one.jpg: damaged;")
    assert "train.py: " not in done[1].err
    assert [rank.status for rank in done] == [2, 2]


def wait_for_server(port: int) -> None:
    """Before the server listens, a proxy's connection would be refused, and closed."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return


@pytest.mark.dist
@pytest.mark.parametrize(
    "budget", [0, *(pytest.param(budget, marks=pytest.mark.slow) for budget in range(150, 2100, 150))]
)
def test_a_process_that_is_cut_off_while_it_starts_prints_it(start_rank: StartRank, budget: int) -> None:
    """After any number of bytes; if these are more than the start needs, at a later poll."""
    timeout = 5 if budget else 1
    port = free_port()
    proxy = Proxy(port)
    proxy.budget = budget
    start_rank(0, port, 60, "wait")
    wait_for_server(port)
    done = start_rank(1, proxy.port, timeout, "wait").end()
    line = error_line(done)
    assert done.status == 1
    where = rf"127\.0\.0\.1:{proxy.port}"
    met = (
        rf"the store of the process group at {where} (does not answer|has not answered for {timeout} s \(--timeout\)): "
    )
    unmet = rf"cannot meet rank 0 or its launcher at {where} \(no answer for [0-9]+ s\); --timeout is {timeout} s$"
    assert re.match(rf"train\.py: rank 1: ({met}|{unmet})", line), line
    proxy.close()
