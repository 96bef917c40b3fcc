"""A small /dev/shm, as a container has: one line, at the start where that is possible, and never a traceback."""

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import TINY, resolved
from tests.forked import launch_forked
from utils.distributed.group import DistEnv
from utils.distributed.shared_memory import batches_bytes

# In a mount namespace of its own, with 1 MB in /dev/shm. Prints an exit status or an error for each use of it.
PROGRAM = """
import ctypes, sys

def system(name, *arguments):
    assert getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == 0, ctypes.get_errno()

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
system("unshare", CLONE_NEWNS)
system("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
system("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m")

from pathlib import Path
import pipelines, train
import scripts.check_dataset, scripts.predict
from tests.conftest import resolved
from utils.data.formats.folder import scan
from utils.data.loaders.sampler import create_sampler
from utils.distributed.group import DistEnv
from utils.errors import UserError
import torch

data, run, out = sys.argv[1:4]
flags = ["--data-dir", data, "--output-dir", run, *sys.argv[4:], "--loader", "torch"]
large = ["--image-size", "224", "--val-resize", "256", "--batch-size", "16"]
print("= train", train.main([*flags, *large]), Path(run).exists())
print("= train", train.main([*flags, "--batch-size", "2"]), Path(run, "best.pt").exists())
words = [run, data + "/val", "--output-dir", out, "--device", "cpu"]
print("= predict", scripts.predict.main([*words, "--batch-size", "41", "--workers", "30"]), Path(out).exists())
env = DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
config = resolved(loader="torch", batch_size=16, image_size=224)
manifest = scan(Path(data), "train")
loader = pipelines.create_train_loader(config, manifest, create_sampler(config, manifest, env), env)
try:
    next(loader)
except UserError as error:  # as where another process fills it
    print("= loader", error)
loader.close()
with open("/dev/shm/full", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
print("= check", scripts.check_dataset.main([data, "--output-dir", out]), Path(out, "manifest.json").exists())
"""


def can_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return (
        os.geteuid() == 0 and shutil.which("unshare") is not None and not subprocess.run(probe, check=False).returncode
    )


@pytest.mark.skipif(not can_mount(), reason="needs root, to mount another /dev/shm")
def test_one_line(data: Path, tmp_path: Path) -> None:
    done = launch_forked(data, tmp_path / "run", tmp_path / "out", *TINY, "--epochs", 1, program=PROGRAM)
    assert done.status == 0, done
    found = [line for line in done.out.splitlines() if line.startswith("= ")]
    assert found[:3] == ["= train 2 False", "= train 0 True", "= predict 2 False"]
    assert found[3] == (
        "= loader --loader torch: /dev/shm is full, which --workers 1 with --batch-size 16 use; give the container "
        "more (docker run --shm-size=16g, or --ipc=host), or lower --workers or --batch-size; --loader dali needs none"
    )
    assert found[4] == "= check 2 False"
    start = "train.py: --loader torch: /dev/shm has 1.05 MB free, and --workers 1 and --batch-size 16 need"
    lines = done.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["train.py", "predict.py", "check_dataset.py"], done.err
    assert lines[0].startswith(start)
    assert "predict.py: --loader torch: /dev/shm has" in lines[1]
    assert "/dev/shm: processes cannot make semaphores there (No space left on device); give the container" in lines[2]


def test_what_the_workers_need(cpu: DistEnv) -> None:
    config = resolved(loader="torch", batch_size=8, image_size=100, val_image_size=200, workers=3)
    fixed = 3 * 64 * 1024
    assert batches_bytes(config, 1000, cpu) == fixed + 3 * (6 * 8 * 100**2 + 3 * 8 * 200**2)
    assert batches_bytes(config, 10, cpu) == fixed + 3 * (6 * 8 * 100**2 + 10 * 200**2), "no more than there are"
    grows = dataclasses.replace(config, resize_schedule="0:100,1:300")
    assert batches_bytes(grows, 0, cpu) == fixed + 3 * 6 * 8 * 300**2, "of the largest size"
    assert batches_bytes(dataclasses.replace(config, evaluate=True), 10, cpu) == fixed + 3 * 10 * 200**2
    four = dataclasses.replace(cpu, world_size=8, local_world_size=4)
    assert batches_bytes(config, 80, four) == 4 * batches_bytes(config, 10, cpu)
    assert batches_bytes(dataclasses.replace(config, loader="proxy"), 1000, cpu) == fixed
