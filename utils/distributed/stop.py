"""Stop request: a signal to one rank, or the end of the time limit, becomes one decision of all ranks between steps."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

from utils.distributed.collective import collective
from utils.distributed.group import DistEnv
from utils.distributed.launcher import seconds_since_start
from utils.distributed.monitor import RankMonitor
from utils.distributed.signals import REPEAT_SECONDS, SIGNALS, restore_defaults, stop_message
from utils.errors import EXIT_STOPPED


class StopRequest:
    """Whether the run must stop: by a signal (see `handling_signals`) or by its time limit.

    Until `enable`, a signal ends the process at once: compilation can take longer than a launcher waits, and nothing
    is lost. The other ranks, of which some may be enabled already, end too. Afterwards the ranks agree through a sum
    that is computed while the step runs and is read one step later, so that asking costs the device nothing.

    Args:
        time_limit: seconds since the launch, that of torchrun where it starts this process, after which to stop; 0 is
            off.
        monitor: of the ranks; None for one process.
    """

    SIGNALS = SIGNALS

    def __init__(self, time_limit: float = 0.0, monitor: RankMonitor | None = None) -> None:
        self._monitor = monitor
        self._env: DistEnv | None = None
        self._when = "before the first step"
        self._time_limit = time_limit
        self._reason: str | None = None
        self._received_at: float | None = None  # the first signal
        self._process = os.getpid()
        self._flag = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Meanwhile SIGTERM, SIGINT and SIGUSR1 are requests to stop; then they have their previous handlers again.

        One that comes seconds after the first gets its previous handler at once. To be called in the main thread.
        """
        self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        try:
            yield
        finally:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        restore_defaults()  # it is no longer before the first step

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker, before it has handlers of its own; its trainer ends it
            return
        if self._env is None:
            os.write(2, stop_message(number, self._when))
            if self._monitor is not None:
                self._monitor.announce_stop()
            os._exit(EXIT_STOPPED)
        if self._received_at is None:
            self._received_at = time.monotonic()
            self._reason = self._reason or signal.Signals(number).name
        elif time.monotonic() - self._received_at > REPEAT_SECONDS:
            self._restore_handlers()
            signal.raise_signal(number)

    def enable(self, env: DistEnv) -> None:
        """From now on there is something to lose, and a request waits for `should_stop`.

        To be called on all ranks at the same step.
        """
        self._env = env

    def disable(self, when: str = "before the first step") -> None:
        """Undo `enable`: what comes next can take minutes, and nothing is lost.

        To be called on all ranks at the same step.

        Args:
            when: for the line of a signal.
        """
        self._when = when
        if self._env is not None and self._env.monitor is not None:
            self._env.monitor.pause()
        self._env = None

    @property
    def reason(self) -> str:
        """The signal that this rank received, "the time limit", or "another rank"."""
        return self._reason or "another rank"

    @property
    def by_signal(self) -> bool:
        """Whether this rank has received a signal, as all have that torchrun passes it on to."""
        return self._received_at is not None

    @collective
    def should_stop(self) -> bool:
        """Whether any rank has been asked to stop, the same answer on all ranks. Once a step, only after `enable`."""
        assert self._env is not None, "enabled"
        if self._reason is None and 0 < self._time_limit <= seconds_since_start():
            self._reason = "the time limit"
        if self._env.world_size == 1:
            return self._reason is not None
        if self._env.monitor is not None:
            self._env.monitor.heartbeat()
        if self._pending is not None:
            self._pending.wait()
        if self._flag.item() > 0:
            return True
        self._flag.fill_(int(self._reason is not None))
        self._pending = dist.all_reduce(self._flag, async_op=True)
        return False
