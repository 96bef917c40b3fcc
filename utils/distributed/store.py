"""Store: what the launcher keeps for all processes, asked in bounded time; who is cut off from it notices.

A call of torch's TCPStore waits for its answer for ever. Over a network that is down none comes, and no error either.
So a thread makes the calls, and those who asked wait for it as long as they like.
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

ANSWER_SECONDS = 5.0  # for one call; below the 30 s that torchrun gives a process to end
POLL_SECONDS = 1.0
T = TypeVar("T")


class NoAnswer(RuntimeError):
    """The store has not answered in time. It still may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")


class BoundedStore:
    """A store each of whose calls ends within `seconds`, with its answer, the store's error, or NoAnswer.

    Any thread may call. The calls go out one after the other, so that one which waits for an answer holds up the others
    until then; none may wait for a key that another process has yet to set.

    Args:
        store: a TCPStore with a connection of its own.
        seconds: to wait for an answer.

    Attributes:
        where: host and port of the store.
        prefix: of the keys.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self.where = f"{getattr(store, 'host', 'an unknown host')}:{getattr(store, 'port', '?')}"
        self.prefix = ""
        self._seconds = seconds
        self._line = _Line(store)

    def part(self, name: str, seconds: float | None = None) -> "BoundedStore":
        """The same store for keys below `name`, as torch's PrefixStore has them, and with another patience if given."""
        part = copy.copy(self)
        part.prefix = f"{self.prefix}{name}/"
        part._seconds = self._seconds if seconds is None else seconds
        return part

    def set(self, key: str, value: str) -> None:
        """When it returns, the store has the value."""

        def set_and_ask(store: Store) -> None:
            store.set(self.prefix + key, value)  # TCPStore's does not wait for an answer
            store.check([self.prefix + key])

        self._line.call(set_and_ask, self._seconds)

    def get(self, key: str) -> bytes:
        """Of a key that has been set."""
        return self._line.call(lambda store: store.get(self.prefix + key), self._seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` have been set."""
        return self._line.call(lambda store: store.check([self.prefix + key for key in keys]), self._seconds)

    def add(self, key: str, amount: int) -> int:
        return self._line.call(lambda store: store.add(self.prefix + key, amount), self._seconds)

    @contextlib.contextmanager
    def looked_after(self, timeout: float, cut_off: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `cut_off` is called, in another thread, once the store has not answered anybody for `timeout` s."""
        over = threading.Event()
        words = (self._line, timeout, cut_off, over)
        threading.Thread(target=_look_after, args=words, name="store is there", daemon=True).start()
        try:
            yield
        finally:
            over.set()


class _Line:
    """One connection and the thread that makes its calls."""

    def __init__(self, store: Store) -> None:
        self.answers = 0
        self._store = store
        # Its `put` may be called from a signal handler, whatever the thread was at.
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="store", daemon=True).start()

    def call(self, what: Callable[[Store], T], seconds: float) -> T:
        answer: Future[T] = Future()
        self._calls.put((answer, lambda: what(self._store)))
        return _wait(answer, seconds)

    def _serve(self) -> None:
        while True:
            answer, what = self._calls.get()
            if _answer(answer, what):
                self.answers += 1


def in_time(what: Callable[[], T], seconds: float) -> T:
    """The result of `what`, or its exception.

    Raises:
        NoAnswer: it takes longer than `seconds`; its thread, which does not keep the process from ending, goes on.
    """
    answer: Future[T] = Future()
    threading.Thread(target=_answer, args=(answer, what), daemon=True).start()
    return _wait(answer, seconds)


def _answer(answer: Future[T], what: Callable[[], T]) -> bool:
    """Whether `what` had a result. It is not called if nobody waits any more."""
    if not answer.set_running_or_notify_cancel():
        return False
    try:
        answer.set_result(what())
    except Exception as error:
        answer.set_exception(error)
        return False
    return True


def _wait(answer: Future[T], seconds: float) -> T:
    try:
        return answer.result(seconds)
    except TimeoutError:
        answer.cancel()
        raise NoAnswer(seconds) from None


def _look_after(line: _Line, timeout: float, cut_off: Callable[[], None], over: threading.Event) -> None:
    silence, at, answers = 0.0, time.monotonic(), line.answers
    while not over.wait(POLL_SECONDS):
        before = answers
        with contextlib.suppress(RuntimeError):  # the process that holds the store may have ended, and all be well
            line.call(lambda store: store.check(["any"]), POLL_SECONDS)
        now, answers = time.monotonic(), line.answers
        # Any answer counts, also a late one. Time in which this process was suspended does not.
        silence = 0.0 if answers > before else silence + min(now - at, 2 * POLL_SECONDS)
        at = now
        if silence >= timeout and not over.is_set():
            cut_off()
            return
