"""On a real GPU: whole runs, their exact resume, and how they end. Run by scripts/gpu_check.sh."""

import itertools
import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests import damage
from tests.conftest import TINY, assert_same, write_data
from tests.contract import assert_keys
from tests.forked import launch_forked
from tests.harness import Finished, error_line, launch, read_checkpoint, read_losses, read_metrics
from tests.held import hold_and_end
from utils.distributed.machine import nvlink_between

pytestmark = pytest.mark.gpu

FLAGS = tuple(word if word != "cpu" else "cuda" for word in TINY)
REPEATED = ("--repeated-augmentation", "3")
BCE = ("--bce-loss", "--bce-target-thresh", "0.2")
ENGINES = ("--hw-decoder-load", "0.9")  # of JPEGs; not used for small images by default


def train(*flags: object) -> Finished:
    """Run train.py to its end, without the seconds of its imports."""
    return launch_forked(*flags, program="import sys, train\nsys.exit(train.main(sys.argv[1:]))")


STARTS_CUDA = """
import ctypes, json, os, sys
import train
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
before = driver.cuDeviceGetCount(ctypes.byref(count))
from utils.distributed.group import process_group
from utils.distributed.ownership import own_process
with process_group(own_process("cuda"), 60):
    after = driver.cuDeviceGetCount(ctypes.byref(count))
    json.dump([before, after, os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]], sys.stdout)
"""


def test_cuda_starts_with_the_queues_that_the_loader_needs() -> None:
    done = launch(program=STARTS_CUDA, env={"CUDA_DEVICE_MAX_CONNECTIONS": None})
    assert done.status == 0, done.err
    not_initialized, success = 3, 0  # CUDA_ERROR_NOT_INITIALIZED: an import that starts CUDA keeps it at 8 queues
    assert json.loads(done.out) == [not_initialized, success, "32"]


def test_gpus_are_joined_by_nvlink_as_nvidia_smi_says() -> None:
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    assert nvlink_between(uuids[:1]), "the driver's library knows this GPU"
    assert not nvlink_between([uuids[0], "00000000-0000-0000-0000-000000000000"])
    matrix = subprocess.run(["nvidia-smi", "topo", "-p2p", "n"], capture_output=True, text=True, check=True).stdout
    joined = [line.split()[1:] for line in matrix.splitlines() if re.match(r"\s*GPU\d.*\bX\b", line)]
    for one, other in itertools.combinations(range(len(uuids)), 2):
        assert nvlink_between([uuids[one], uuids[other]]) == (joined[one][other] == "OK")


def test_float32_is_that_of_the_cpu(data: Path, tmp_path: Path) -> None:
    """TF32, which torch allows cuDNN by default, changes this loss by 5e-5 of it."""
    flags = ("--data-dir", data, "--output-dir", tmp_path, "--amp", "none", "--batch-size", 8, "--loader", "torch")
    done = train(*FLAGS, "--arch", "resnet18", "--epochs", 2, "--image-size", 64, "--val-resize", 64, *flags)
    assert done.status == 0, done.err
    losses = []
    for device in ("cuda", "cpu"):
        done = launch(*flags, "--evaluate", "--device", device, "--workers", 1)
        assert done.status == 0, done.err
        losses.append(json.loads((tmp_path / "evaluation.json").read_text())["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=5e-6)


WAITS_FOR_THE_DEVICE = """
import sys, timm, train

def wait(module, images):
    images[0].sum().item()

@timm.models.register_model
def waiting_net(**options):
    net = timm.create_model("test_resnet", **options)
    net.register_forward_pre_hook(wait)
    return net

sys.exit(train.main(sys.argv[1:]))
"""


def test_network_that_cannot_be_captured_is_refused_with_the_remedy(data: Path, tmp_path: Path) -> None:
    """In a process of its own, as torch's random number generator is not usable after a capture that failed."""
    flags = [*FLAGS, "--data-dir", data, "--output-dir", tmp_path / "out", "--arch", "waiting_net", "--no-compile"]
    flags += ["--epochs", 1, "--batch-size", 8]
    done = launch(*flags, "--cuda-graph", program=WAITS_FOR_THE_DEVICE)
    assert done.status == 2, done.err
    assert re.search(r"--cuda-graph: .* use --no-cuda-graph", error_line(done))
    assert launch(*flags, "--no-cuda-graph", program=WAITS_FOR_THE_DEVICE).status == 0


@pytest.mark.parametrize(
    ("number", "extra"),
    [
        (signal.SIGKILL, ("--no-compile",)),
        (signal.SIGTERM, ("--no-compile", "--amp", "fp16", "--augment", "trivialaugment", "--mixup", "0.2")),
        (signal.SIGTERM, ("--compile", "--clip-grad", "1", "--ema-decay", "0.9", "--cache", "gpu")),
        (signal.SIGTERM, ("--no-compile", "--drop-path", "0.3", "--drop-rate", "0.2", "--mixup", "0.2", *BCE)),
        (signal.SIGTERM, ("--no-compile", "--augment", "three-augment", "--color-jitter", "0.3", *REPEATED)),
        (signal.SIGTERM, ("--compile", "--grad-checkpointing", "--drop-path", "0.3", *BCE)),
        (signal.SIGTERM, ("--no-compile", "--freeze-epochs", "1", "--head-lr-scale", "5")),
        (signal.SIGKILL, ("--compile", "--freeze-epochs", "2")),
        (signal.SIGTERM, ("--no-compile", "--optimizer", "muon", "--lr", "0.1", "--resize-schedule", "0:32,1:48,2:32")),
        (signal.SIGKILL, ("--no-compile", "--optimizer", "muon", "--lr", "0.1", "--freeze-epochs", "1")),
    ],
    ids=[
        "killed-bf16",
        "stopped-fp16",
        "stopped-compiled",
        "dropout",
        "repeated",
        "checkpointing",
        "frozen",
        "frozen-compiled",
        "muon",
        "muon-frozen",
    ],
)
def test_resume_in_mid_epoch_is_exact(data: Path, tmp_path: Path, extra: tuple[str, ...], number: int) -> None:
    flags = ("--data-dir", data, *FLAGS, "--deterministic", "--batch-size", "4", "--epochs", "3", *extra)
    if "--freeze-epochs" in extra:
        weights = ("--data-dir", data, *FLAGS, "--batch-size", "4", "--epochs", "1", "--no-compile")
        assert train(*weights, "--output-dir", tmp_path / "weights").status == 0
        flags += ("--pretrained", str(tmp_path / "weights" / "last.pt"), "--pretrained-head", "new")
    assert train(*flags, "--output-dir", tmp_path / "whole").status == 0
    cut = tmp_path / "cut"
    hold_and_end(*flags, "--output-dir", cut, "--checkpoint-steps", "3", at=13, number=number)
    done = train(*flags, "--output-dir", cut)
    assert done.status == 0, done.err
    assert "resumed at epoch 2" in done.out
    whole, resumed = read_checkpoint(tmp_path / "whole"), read_checkpoint(cut)
    for name in ("model", "optimizer", "scaler", "step"):
        assert_same(whole[name], resumed[name], name)
    assert read_losses(tmp_path / "whole") == read_losses(cut)
    kind = ", fp16" if "fp16" in extra else ", clipped" if "--clip-grad" in extra else ""
    assert_keys("metrics.jsonl", read_metrics(cut)[0], f"train{kind}, GPU")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("test_convnext", r"at step \d+, lr .*: fp16 gradients overflow at any scale of the loss; use --amp bf16"),
        ("test_resnet", r"at step 5: running statistics are not finite, as activations overflowed; use --amp bf16"),
    ],
)
def test_fp16_that_overflows_without_end_ends_the_run(data: Path, tmp_path: Path, arch: str, message: str) -> None:
    flags = ("--amp", "fp16", "--lr", 1e6, "--max-bad-steps", 1000, "--epochs", 20, "--batch-size", 8, "--no-compile")
    done = train("--data-dir", data, *FLAGS, "--arch", arch, *flags, "--output-dir", tmp_path)
    assert done.status == 1, done.err
    assert re.search(message, error_line(done))


@pytest.mark.parametrize(
    "extra", [("--decode", "fused"), ("--decode", "full", *ENGINES), ("--cache", "gpu", *ENGINES)], ids=" ".join
)
@pytest.mark.parametrize("kind", ["text", "cut in the middle"])
def test_a_bad_file_is_named_or_skipped(tmp_path: Path, kind: str, extra: tuple[str, ...]) -> None:
    root = write_data(tmp_path / "data")
    path = root / "train" / "green" / "spoiled.jpg"
    path.write_bytes(damage.CONTENTS[kind])
    flags = ("--data-dir", root, *FLAGS, "--batch-size", "4", "--epochs", "2", *extra)
    done = train(*flags, "--output-dir", tmp_path / "error")
    assert done.status == 2, done.err
    at_the_start = kind == "text"  # the look at a sample reads no JPEG
    assert error_line(done).startswith(f"train.py: {'' if at_the_start else 'rank 0: '}{path}: ")
    done = train(*flags, "--output-dir", tmp_path / "skip", "--bad-files", "skip")
    assert done.status == 0, done.err
    assert "1 of 42 train files (green 1)" in done.out
    assert "as a CUDA graph, not compiled: that takes longer than it saves in a run of so few images" in done.out


def test_the_faster_precision_is_chosen_and_kept(data: Path, tmp_path: Path) -> None:
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    flags = ("--data-dir", data, "--output-dir", tmp_path, "--arch", "resnet18", "--compile", "--batch-size", 8)
    for epochs, amp, expected in ((1, (), "fp16"), (2, (), "fp16"), (3, ("--amp", "bf16"), "bf16"), (4, (), "bf16")):
        done = train(*FLAGS, *flags, "--epochs", epochs, *amp)
        assert done.status == 0, done.err
        chosen = json.loads((tmp_path / "config.json").read_text())["amp"]
        assert chosen == (expected if is_hopper else "bf16")
        assert ("trains faster than in bf16" in done.out) == (is_hopper and expected == "fp16")
