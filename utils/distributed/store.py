"""The launcher's key-value store, asked with a time limit for every call; a process that is cut off from it notices.

A call of torch's TCPStore waits for its answer for ever. Over a network that is down none comes, and no error either.
So a thread makes the calls, and the callers wait for it as long as they like.
"""

import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

CALL_TIMEOUT = 5.0  # seconds for one call; below the 30 s that torchrun gives a process to end
POLL_INTERVAL = 1.0  # seconds between two looks at whether the store still answers
WAIT_INTERVAL = 0.01  # seconds between two looks for keys that another process is about to set
T = TypeVar("T")


class NoAnswer(RuntimeError):
    """The store has not answered in time. It still may."""

    def __init__(self, timeout: float) -> None:
        super().__init__(f"no answer for {timeout:g} s")


class BoundedStore:
    """A store each of whose calls ends within `timeout` seconds, with its answer, the store's error, or NoAnswer.

    Any thread may call. The calls go out one after the other, so that one which waits for an answer delays the others.
    None may wait for a key that another process has yet to set.

    Args:
        store: a TCPStore with a connection of its own.
        timeout: seconds to wait for an answer.

    Attributes:
        address: host and port of the store.
        prefix: of the keys.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        self.address = f"{getattr(store, 'host', 'an unknown host')}:{getattr(store, 'port', '?')}"
        self.prefix = ""
        self._timeout = timeout
        self._connection = _Connection(store)

    def with_prefix(self, name: str, timeout: float | None = None) -> "BoundedStore":
        """The same store for keys below `name`, as torch's PrefixStore has them; with another timeout if one is given.

        It shares the connection and its thread.
        """
        store = copy.copy(self)
        store.prefix = f"{self.prefix}{name}/"
        store._timeout = self._timeout if timeout is None else timeout
        return store

    def set(self, key: str, value: str) -> None:
        """When it returns, the store has the value."""

        def set_and_check(store: Store) -> None:
            store.set(self.prefix + key, value)  # TCPStore's does not wait for an answer
            store.check([self.prefix + key])

        self._connection.call(set_and_check, self._timeout)

    def get(self, key: str) -> bytes:
        """The value of a key that has been set."""
        return self._connection.call(lambda store: store.get(self.prefix + key), self._timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` have been set."""
        return self._connection.call(lambda store: store.check([self.prefix + key for key in keys]), self._timeout)

    def wait(self, keys: Sequence[str], timeout: float) -> bool:
        """Whether all `keys` are set within `timeout` seconds. Other threads can call meanwhile."""
        deadline = time.monotonic() + timeout
        while not self.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(WAIT_INTERVAL)
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; returns the sum."""
        return self._connection.call(lambda store: store.add(self.prefix + key, amount), self._timeout)

    @contextlib.contextmanager
    def watch(self, timeout: float, on_cut_off: Callable[[], None]) -> Iterator[None]:
        """Meanwhile call `on_cut_off`, in another thread, once the store has answered no call for `timeout` seconds."""
        done = threading.Event()
        arguments = (self._connection, timeout, on_cut_off, done)
        threading.Thread(target=_watch, args=arguments, name="store watch", daemon=True).start()
        try:
            yield
        finally:
            done.set()


class _Connection:
    """One connection and the thread that makes its calls.

    Attributes:
        answers: calls that the store has answered.
    """

    def __init__(self, store: Store) -> None:
        self.answers = 0
        self._store = store
        # Its `put` may be called from a signal handler, whatever the thread was at.
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="store", daemon=True).start()

    def call(self, function: Callable[[Store], T], timeout: float) -> T:
        future: Future[T] = Future()
        self._calls.put((future, lambda: function(self._store)))
        return _wait(future, timeout)

    def _serve(self) -> None:
        while True:
            future, function = self._calls.get()
            if _fulfill(future, function):
                self.answers += 1


def call_with_timeout(function: Callable[[], T], timeout: float) -> T:
    """The result of `function`, or its exception.

    Raises:
        NoAnswer: it takes longer than `timeout` seconds. Its thread, which does not keep the process from ending, goes
            on.
    """
    future: Future[T] = Future()
    threading.Thread(target=_fulfill, args=(future, function), daemon=True).start()
    return _wait(future, timeout)


def _fulfill(future: Future[T], function: Callable[[], T]) -> bool:
    """Whether `function` had a result. It is not called if the caller has stopped waiting."""
    if not future.set_running_or_notify_cancel():
        return False
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
        return False
    return True


def _wait(future: Future[T], timeout: float) -> T:
    try:
        return future.result(timeout)
    except TimeoutError:
        future.cancel()
        raise NoAnswer(timeout) from None


def _watch(connection: _Connection, timeout: float, on_cut_off: Callable[[], None], done: threading.Event) -> None:
    silence, polled_at, answers = 0.0, time.monotonic(), connection.answers
    while not done.wait(POLL_INTERVAL):
        answers_before = answers
        with contextlib.suppress(RuntimeError):  # the process that holds the store may have ended, and all be well
            connection.call(lambda store: store.check(["any"]), POLL_INTERVAL)
        now, answers = time.monotonic(), connection.answers
        # Any answer counts, also a late one. Time in which this process was suspended does not.
        silence = 0.0 if answers > answers_before else silence + min(now - polled_at, 2 * POLL_INTERVAL)
        polled_at = now
        if silence >= timeout and not done.is_set():
            on_cut_off()
            return
