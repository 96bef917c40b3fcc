"""What a program takes over of its process; in a notebook, Brisk takes over nothing."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.forked import launch_forked

# As the user's process might notice a change: by its environment, signals, hooks and switches, and by its end.
PROCESS_STATE = """
import atexit, contextlib, ctypes, gc, json, os, signal, sys, time
import torch, torch._inductor.config  # the latter writes its cache folder into the environment

hooks = []

def record_hook(function, *arguments, register=atexit.register, **options):
    hooks.append(str(function.__module__))
    return register(function, *arguments, **options)

atexit.register = record_hook

def process_state():
    death_signal = ctypes.c_int()
    PR_GET_PDEATHSIG = 2
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death_signal))
    signals = signal.valid_signals() - {signal.SIGCHLD}  # torch's DataLoader handles SIGCHLD and keeps to it
    return {
        **os.environ,
        **{f"signal {int(number)}": repr(signal.getsignal(number)) for number in sorted(signals)},
        "death signal": death_signal.value,
        "collects garbage": gc.isenabled(),
        "leaves modules out": gc.get_freeze_count() > 100_000,
        "benchmark": torch.backends.cudnn.benchmark,
        "TF32": torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }

before = process_state()

def changes():
    after = process_state()
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}
"""

NOTEBOOK = """
from pathlib import Path
import models, pipelines, train
from tests.conftest import resolved
from utils.data.formats.folder import scan_splits
from utils.data.loaders.sampler import RandomSampler
from utils.distributed.device import choose_device
from utils.distributed.group import process_group
from utils.distributed.launcher import read_launch
from utils.distributed.stop import StopRequest
from utils.network.augment import BatchAugment, Normalize
from utils.network.compiler import compile_network
from utils.network.gradients import ForwardBackward
from utils.targets import Targets

def is_interrupted():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        return True
    return False

manifest, _ = scan_splits(Path(sys.argv[1]))
model = models.create_model("test_resnet", num_classes=3)
normalize = Normalize(*models.normalization(model), torch.float32, torch.device("cpu"))
scaler = torch.amp.GradScaler("cpu", enabled=False)
compute = ForwardBackward(model, torch.nn.CrossEntropyLoss(), scaler, torch.float32, 1)
compile_network(model)
losses, interrupts = [], []
with process_group(choose_device("cpu", read_launch()), timeout=60) as env:
    StopRequest().enable(env)
    for loader in ("dali", "torch"):
        config = resolved(loader=loader, image_size=32, val_resize=36)
        batches = pipelines.create_train_loader(config, manifest, RandomSampler(len(manifest), 8), env)
        with contextlib.closing(batches):
            images, targets = BatchAugment(config, normalize, Targets(3), env.device)(*next(batches))
            losses.append(compute(images, targets, 0).item())
            interrupts.append(is_interrupted())
        for images, targets in pipelines.create_val_loader(config, manifest, env):
            pass
interrupts.append(is_interrupted())
result = {"losses": losses, "interrupts": interrupts, "changes": changes(), "hooks": sorted(set(hooks))}
print(json.dumps(result), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
"""

OWNER = """
import sys
from utils.distributed import launcher
from utils.distributed.ownership import own_process
from utils.distributed.startup import start_imports

launcher._PARENT = os.getppid()  # that of this process, which was forked
gc.unfreeze()
start_imports("cpu")
assert not gc.isenabled()
device = own_process("cpu", *json.loads(sys.argv[1]))
print(json.dumps([str(device), changes()]))
"""


OF_TESTS: dict[str, object] = {
    "CUDA_DEVICE_MAX_CONNECTIONS": None,
    "CUBLAS_WORKSPACE_CONFIG": None,
    "GOMP_SPINCOUNT": None,
    "OMP_WAIT_POLICY": None,
}  # set by another test, maybe


@pytest.mark.parametrize(
    "launcher", [{}, pytest.param({"TORCHELASTIC_RUN_ID": "1"}, marks=pytest.mark.slow)], ids=["notebook", "torchrun"]
)
def test_a_notebook_keeps_its_process(data: Path, tmp_path: Path, launcher: dict[str, str]) -> None:
    """Loaders, network and process group are opened, used and closed; under torchrun, too, nothing more happens.

    What an import changes is seen by `tests/test_imports.py`.
    """
    caches = {"XDG_CACHE_HOME": tmp_path, "TORCHINDUCTOR_CACHE_DIR": tmp_path}  # torch sets the latter where it is not
    done = launch_forked(data, program=PROCESS_STATE + NOTEBOOK, env=OF_TESTS | caches | launcher)
    assert done.status == -signal.SIGTERM, done.err
    result = json.loads(done.out)
    assert result["changes"] == {}
    assert result["interrupts"] == [True, True, True], "KeyboardInterrupt, while loaders are open and after"
    assert [name for name in result["hooks"] if name.partition(".")[0] in ("utils", "models", "pipelines")] == []
    assert all(0 < loss < 10 for loss in result["losses"])
    assert list(tmp_path.iterdir()) == [], "no cache folder"


OF_USER = {"CUDA_DEVICE_MAX_CONNECTIONS": "4", "OMP_WAIT_POLICY": "ACTIVE", "TORCHELASTIC_RUN_ID": "1"}
OURS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "GOMP_SPINCOUNT": "1000"}


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ([], OF_USER, {"death signal": signal.SIGTERM}),  # what the user has set stays
        ([False], {}, OURS | {"benchmark": True}),
        ([True], {}, OURS | {"deterministic": True, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    ],
    ids=["torchrun", "fast", "deterministic"],
)
def test_own_process(arguments: list[bool], variables: dict[str, str], expected: dict[str, Any]) -> None:
    done = launch_forked(json.dumps(arguments), program=PROCESS_STATE + OWNER, env=OF_TESTS | variables)
    assert done.status == 0, done.err
    assert json.loads(done.out.splitlines()[-1]) == ["cpu", expected | {"leaves modules out": True, "TF32": False}]
    assert done.err == ""
