"""The end of a DataLoader's workers with their trainer, on real loaders."""

from pathlib import Path

import pytest
import torch

from tests.conftest import resolved
from tests.forked import launch_forked
from utils.data.formats.folder import scan_splits
from utils.data.loaders.torch_loader import TorchImages

# In a process of its own, as a loader that has lost workers cannot be closed.
PROGRAM = """
import multiprocessing, os, signal, sys
from pathlib import Path
import torch
import pipelines
from tests.conftest import resolved
from utils.data.formats.folder import scan_splits
from utils.data.loaders.sampler import RandomSampler
import utils.distributed.exit as ending
from utils.distributed.group import DistEnv

train, _ = scan_splits(Path(sys.argv[1]))
env = DistEnv.single(torch.device("cpu"))
config = resolved(
    loader=sys.argv[2], batch_size=8, image_size=32, val_resize=36, workers=2, decode="fused", prefetch=4
)
stream = pipelines.create_train_loader(config, train, RandomSampler(len(train), 8), env)
for _ in range(2):
    next(stream)  # one of each worker, whose handler is installed by then
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # with which torch would raise an error for the killed one
running, stopped = multiprocessing.active_children()
os.kill(stopped.pid, signal.SIGSTOP)
ending.WORKER_EXIT_TIMEOUT = 5.0  # on a busy machine
ending.terminate_workers()
stopped.join()
print(running.exitcode, stopped.exitcode, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("loader", ["torch", pytest.param("proxy", marks=pytest.mark.slow)])
def test_workers_end_by_themselves_and_a_stopped_one_is_killed(data: Path, loader: str) -> None:
    """Only the one that does not react is killed: that can leave a file in shared memory."""
    done = launch_forked(data, loader, program=PROGRAM)
    assert done.out == "0 -9\n", done.err


@pytest.mark.parametrize("train", [True, False])
def test_workers_share_nothing_but_tensors(data: Path, train: bool) -> None:
    """A batch of numbers becomes a shared tensor in a thread of the worker, which may end before that is done."""
    manifest = scan_splits(data)[0]
    config = resolved(loader="torch", image_size=32, val_resize=36, workers=1)
    last = len(manifest) - 1
    item = TorchImages(config, manifest, train)[last, 0]
    assert [type(part) for part in item] == [torch.Tensor, torch.Tensor]
    assert item[1] == manifest.labels[last] > 0
