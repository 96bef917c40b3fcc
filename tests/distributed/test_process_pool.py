"""Processes that are forked from this one: what they inherit is not collected in them."""

import gc
import os

import torch.utils.data

from utils.distributed.process_pool import process_pool, safe_fork


class _Cycle:
    """Garbage that only a collection finds; then it writes to a pipe."""

    def __init__(self, end: int) -> None:
        self.itself, self.end = self, end

    def __del__(self) -> None:
        os.write(self.end, b"x")


def _collect(_: int = 0) -> bool:
    gc.collect()
    return gc.isenabled()


class _Collects(torch.utils.data.Dataset[bool]):
    def __getitem__(self, index: int) -> bool:
        return _collect()

    def __len__(self) -> int:
        return 2


def test_what_a_process_inherits_is_not_collected_in_it() -> None:
    source, end = os.pipe()
    gc.disable()
    try:
        _Cycle(end)
        with process_pool(1) as pool:
            assert pool.submit(_collect).result() is False, "as in this process"
        gc.enable()
        with process_pool(1) as pool:
            assert pool.submit(_collect).result() is True
        loader = torch.utils.data.DataLoader(_Collects(), num_workers=1)
        with safe_fork():
            batches = iter(loader)
        assert [bool(batch) for batch in batches] == [True, True]
        assert gc.isenabled()
        os.set_blocking(source, False)
        assert _is_empty(source)
    finally:
        gc.enable()
        gc.collect()
    assert os.read(source, 9) == b"x", "here it is"
    os.close(source)
    os.close(end)


def _is_empty(source: int) -> bool:
    try:
        os.read(source, 1)
    except BlockingIOError:
        return True
    return False


def test_a_fork_elsewhere_is_left_alone() -> None:
    with safe_fork():
        pass
    made, before = [[number] for number in range(10_000)], gc.get_freeze_count()
    child = os.fork()
    if child == 0:
        os._exit(gc.get_freeze_count() - before > len(made) / 2 or not gc.isenabled())
    assert os.waitpid(child, 0)[1] == 0
