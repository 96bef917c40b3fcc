"""StopRequest: a signal to one rank becomes one decision of all ranks at a step's boundary."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from utils.distributed import DistEnv


class StopRequest:
    """Collects SIGTERM and SIGINT; a second signal ends the process at once, as without this class.

    The ranks agree through a sum that travels while the step runs and is read one step later, so that asking costs
    the device nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, env: DistEnv) -> None:
        self._env = env
        self._received = False
        self._flag = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None
        self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        self.close()

    def agreed(self) -> bool:
        """Whether any rank has been asked to stop; the same answer on all ranks. A collective, once a step."""
        if self._env.world_size == 1:
            return self._received
        if self._pending is not None:
            self._pending.wait()
        if self._flag.item() > 0:
            return True
        self._flag.fill_(int(self._received))
        self._pending = dist.all_reduce(self._flag, async_op=True)
        return False

    def close(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
