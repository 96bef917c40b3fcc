"""The end of a DataLoader's workers with their trainer, on real loaders."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import resolved
from tests.harness import ROOT
from utils.data.formats.folder import scan_splits
from utils.data.torch_loader import TorchImages

# A process of its own: a loader cannot be closed that has lost workers.
PROGRAM = """
import multiprocessing, os, signal, sys
from pathlib import Path
import torch
import pipelines
from utils.config import ResolvedConfig
from utils.data.formats.folder import scan_splits
from utils.distributed.group import DistEnv
from utils.distributed.exit import terminate_workers
from utils.data.sampler import Sampler

train, _ = scan_splits(Path(sys.argv[1]))
env = DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
config = resolved(
    loader=sys.argv[2], batch_size=8, image_size=32, val_resize=36, workers=2, decode="fused", prefetch=4
)
stream = pipelines.create_train_loader(config, train, Sampler(len(train), 8), env)
for _ in range(2):
    next(stream)  # one of each worker, which listens by then
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where torch would tell of the killed one
listening, deaf = multiprocessing.active_children()
os.kill(deaf.pid, signal.SIGSTOP)
terminate_workers()
deaf.join()
print(listening.exitcode, deaf.exitcode, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("loader", ["torch", "proxy"])
def test_workers_end_by_themselves_and_the_deaf_are_killed(data: Path, loader: str) -> None:
    """Not killed where they listen: that can leave a file in shared memory."""
    words = [sys.executable, "-c", PROGRAM, str(data), loader]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 -9\n", done.stderr


@pytest.mark.parametrize("train", [True, False])
def test_workers_share_nothing_but_tensors(data: Path, train: bool) -> None:
    """A batch of numbers becomes a shared tensor in a thread of the worker, which its end can cut off."""
    manifest = scan_splits(data)[0]
    config = resolved(loader="torch", image_size=32, val_resize=36, workers=1)
    last = len(manifest) - 1
    item = TorchImages(config, manifest, train)[last, 0]
    assert [type(part) for part in item] == [torch.Tensor, torch.Tensor]
    assert item[1] == manifest.labels[last] > 0
