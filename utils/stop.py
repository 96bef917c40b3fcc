"""StopRequest: a signal to one rank becomes one decision of all ranks at a step's boundary."""

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from utils.distributed import DistEnv

REPEAT_SECONDS = 3.0  # launchers send the same signal to a process twice: to its group, and to itself


class StopRequest:
    """Collects SIGTERM and SIGINT; one that comes seconds after the first ends the process at once.

    The ranks agree through a sum that travels while the step runs and is read one step later, so that asking costs
    the device nothing.

    Attributes:
        number: the signal that this rank received; SIGTERM on a rank that learnt of it from another.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, env: DistEnv) -> None:
        self.number: int = signal.SIGTERM
        self._env = env
        self._received_at: float | None = None
        self._flag = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None
        self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received_at is None:
            self.number, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > REPEAT_SECONDS:
            self.close()
            signal.raise_signal(number)

    def agreed(self) -> bool:
        """Whether any rank has been asked to stop; the same answer on all ranks. A collective, once a step."""
        received = self._received_at is not None
        if self._env.world_size == 1:
            return received
        if self._pending is not None:
            self._pending.wait()
        if self._flag.item() > 0:
            return True
        self._flag.fill_(int(received))
        self._pending = dist.all_reduce(self._flag, async_op=True)
        return False

    def close(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
