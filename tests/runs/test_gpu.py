"""On a real GPU: what the loaders hand over, and exact resume. Run by scripts/gpu_check.sh."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import pipelines
from tests import damage
from tests.conftest import ROOT, TINY, Finished, assert_same, read_checkpoint, read_metrics, resolved, write_data
from tests.contract import assert_keys
from tests.training.test_optim import BAD_SCALE, OPTIMIZERS, check_skipped_first_step, fp16_losses, fp16_state
from utils.config import ResolvedConfig
from utils.data.formats.folder import scan_splits
from utils.data.manifest import synthetic
from utils.data.sampler import Sampler
from utils.distributed.group import DistEnv
from utils.network.augment import BatchAugment, Normalize
from utils.network.gradients import ForwardBackward, GraphedForwardBackward, capture_stream, on_stream
from utils.network.parallel import FlatAllReduce
from utils.training.machine import nvlink_between

pytestmark = pytest.mark.gpu

POLICIES = ("none", "autoaugment", "randaugment", "trivialaugment")
FLAGS = tuple(word if word != "cpu" else "cuda" for word in TINY)


@pytest.fixture
def gpu() -> DistEnv:
    return DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cuda", 0))


def config_for(loader: str, **values: object) -> ResolvedConfig:
    base = resolved(
        batch_size=8, image_size=32, val_resize=36, workers=2, decode="fused", hw_decoder_load=0.65, prefetch=4
    )
    return dataclasses.replace(base, **({"loader": loader} | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loader", "decode", "augment"),
    [("dali", decode, augment) for decode in ("fused", "full") for augment in POLICIES]
    + [("torch", "fused", "none"), ("proxy", "fused", "none"), ("synthetic", "fused", "none")],
)
def test_first_batch_is_on_the_gpu_in_channels_last(
    data: Path, gpu: DistEnv, loader: str, decode: str, augment: str
) -> None:
    config = config_for(loader, decode=decode, augment=augment)
    train, _ = scan_splits(data)
    sampler = Sampler(len(train), config.batch_size)
    stream = pipelines.create_train_loader(config, train, sampler, gpu)
    images, targets = next(stream)
    assert images.shape == (8, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert images.device == gpu.device
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.dtype == torch.int64
    assert targets.device == gpu.device
    if loader != "synthetic":
        assert targets.tolist() == train.labels[sampler.indices(0)].tolist()
    assert images.float().std() > 10, "a picture, not a blank"
    stream.close()


def test_a_batch_lives_until_the_device_has_read_it(data: Path, gpu: DistEnv) -> None:
    """The host drops each batch while the kernels that read it still wait; DALI must not write over it."""
    train, _ = scan_splits(data)
    config, sampler = config_for("dali"), Sampler(len(train), 8)
    sums = []
    for lag in (0, 20_000_000):  # cycles, about 10 ms
        stream = pipelines.create_train_loader(config, train, sampler, gpu)
        found = torch.zeros(100, dtype=torch.int64, device=gpu.device)
        for step in range(100):
            batch = next(stream)
            torch.cuda._sleep(lag)  # type: ignore[no-untyped-call]
            found[step] = batch.images.long().sum()
            del batch
            if lag == 0:
                torch.cuda.synchronize()
        sums.append(found.tolist())
    assert sums[0] == sums[1]


CUDA_STARTS = """
import ctypes, json, os, sys
import train
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
before = driver.cuDeviceGetCount(ctypes.byref(count))
from utils.distributed.group import process_group
with process_group("cuda", 60):
    after = driver.cuDeviceGetCount(ctypes.byref(count))
    json.dump([before, after, os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]], sys.stdout)
"""


def test_cuda_starts_with_the_queues_that_the_feed_needs() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    done = subprocess.run(
        [sys.executable, "-c", CUDA_STARTS], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    not_initialized, success = 3, 0  # CUDA_ERROR_NOT_INITIALIZED: an import that starts CUDA keeps it at 8 queues
    assert json.loads(done.stdout) == [not_initialized, success, "32"]


@pytest.mark.parametrize("mix", [{"mixup": 0.2}, {"cutmix": 1.0}])
def test_mixed_batches_stay_in_channels_last(gpu: DistEnv, mix: dict[str, float]) -> None:
    config = config_for("synthetic", **mix)
    normalize = Normalize((0.5,) * 3, (0.5,) * 3, torch.bfloat16, gpu.device)
    batch = next(pipelines.create_train_loader(config, synthetic(64, 10), Sampler(64, 8), gpu))
    images, targets = BatchAugment(config, normalize, 10, gpu.device)(*batch)
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.shape == (8, 10)


@pytest.mark.parametrize(("decode", "cache"), [("fused", "none"), ("full", "none"), ("full", "gpu"), ("full", "host")])
@pytest.mark.parametrize("augment", POLICIES)
def test_dali_continues_bit_for_bit(data: Path, gpu: DistEnv, decode: str, cache: str, augment: str) -> None:
    config = config_for("dali", decode=decode, cache=cache, augment=augment)
    train, _ = scan_splits(data)
    sampler = Sampler(len(train), config.batch_size)
    stream = pipelines.create_train_loader(config, train, sampler, gpu)
    for _ in range(3):
        next(stream)
    state = stream.state()
    expected = [next(stream).images.cpu() for _ in range(6)]  # across the end of an epoch of 5 batches
    resumed = pipelines.create_train_loader(config, train, sampler, gpu, 3, state)
    for index, images in enumerate(expected):
        assert torch.equal(next(resumed).images.cpu(), images), index


def test_kept_images_are_those_of_the_files(data: Path, gpu: DistEnv) -> None:
    train, _ = scan_splits(data)
    files, on_gpu, on_host = (
        pipelines.create_train_loader(
            config_for("dali", decode="full", cache=cache), train, Sampler(len(train), 8), gpu
        )
        for cache in ("none", "gpu", "host")
    )
    for _ in range(11):  # two epochs
        (images, targets), kept, other = next(files), next(on_gpu), next(on_host)
        assert torch.equal(kept.images, other.images)
        assert targets.tolist() == kept.targets.tolist() == other.targets.tolist()
        # Which decoder takes an image depends on its batch, and they round differently.
        assert (images.int() - kept.images.int()).abs().float().mean() < 1


def test_validation_images_are_torchvisions(data: Path, gpu: DistEnv) -> None:
    _, val = scan_splits(data)
    ours, theirs = (
        torch.cat([batch.images.cpu() for batch in pipelines.create_val_loader(config_for(name), val, gpu)])
        for name in ("dali", "torch")
    )
    assert len(ours) == len(theirs) == len(val)
    difference = (ours.int() - theirs.int()).abs().float()
    assert difference.mean() < 1.5  # GPU decoders round differently; another crop would be tens off


def network(dropout: float) -> nn.Sequential:
    """The same weights each time; batch norm, which a graph's warm-up would change if it were not undone."""
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 10)]
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), *head)
    return net.to(memory_format=torch.channels_last).to("cuda")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """NCCL with this process alone."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "flat"])
def test_exchange_of_gradients_is_captured(group: None, how: str) -> None:
    stream, disabled = capture_stream(torch.device("cuda", 0)), torch.amp.GradScaler("cuda", enabled=False)
    plain, inner = network(dropout=0), network(dropout=0)
    captured: nn.Module = inner
    exchange = FlatAllReduce(inner.parameters(), torch.bfloat16) if how == "flat" else None
    if how == "ddp":
        with on_stream(stream):
            captured = DistributedDataParallel(inner, device_ids=[0], gradient_as_bucket_view=True)
        captured.register_comm_hook(None, bf16_compress_hook)
    steps: dict[nn.Module, ForwardBackward | GraphedForwardBackward] = {
        plain: ForwardBackward(plain, nn.CrossEntropyLoss(), disabled, torch.float32, 1),
        inner: GraphedForwardBackward(
            ForwardBackward(captured, nn.CrossEntropyLoss(), disabled, torch.float32, 1, exchange), stream
        ),
    }
    images, targets = torch.randn(4, 8, 3, 24, 24, device="cuda"), torch.randint(0, 10, (4, 8), device="cuda")
    for batch, target in zip(images, targets, strict=True):
        for step in steps.values():
            step(batch, target, 0)
        for ours, theirs in zip(inner.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            # Of bf16's precision, which only the exchange, within the graph, can have caused.
            assert torch.equal(ours.grad, ours.grad.bfloat16().float())
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=1e-4)


def test_replayed_step_that_overflows_is_skipped() -> None:
    net, scaler = network(dropout=0), torch.amp.GradScaler("cuda", init_scale=256.0)
    gradients = ForwardBackward(net, nn.CrossEntropyLoss(), scaler, torch.float16, accum_steps=1)
    step = GraphedForwardBackward(gradients, capture_stream(torch.device("cuda", 0)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    images, targets = torch.randn(8, 3, 24, 24, device="cuda").half(), torch.randint(0, 10, (8,), device="cuda")
    for factor, scale, moves in ((1, 256.0, True), (torch.inf, 128.0, False), (1, 128.0, True)):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        step(images * factor, targets, 0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert all(map(torch.equal, before, net.parameters())) != moves


@pytest.mark.parametrize("amp", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_training_is_the_plain_one(amp: torch.dtype) -> None:
    plain, captured = network(dropout=0), network(dropout=0)
    images = torch.randn(5, 8, 3, 24, 24, device="cuda", dtype=amp)
    targets = torch.randint(0, 10, (5, 8), device="cuda")
    losses: list[list[float]] = []
    for net, graph in ((plain, False), (captured, True)):
        scaler = torch.amp.GradScaler("cuda", enabled=amp == torch.float16)
        gradients = ForwardBackward(net, nn.CrossEntropyLoss(), scaler, amp, accum_steps=1)
        step = GraphedForwardBackward(gradients, capture_stream(torch.device("cuda", 0))) if graph else gradients
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        losses.append([])
        for batch, target in zip(images, targets, strict=True):
            loss = step(batch.contiguous(memory_format=torch.channels_last), target, 0)
            scaler.step(optimizer)
            scaler.update()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert len(set(losses[0])) == 5
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(captured.state_dict()[name], value, rtol=1e-2, atol=1e-3, msg=name)
    counted = captured.state_dict()["1.num_batches_tracked"]
    assert counted == 5, "the warm-up's batches must not count"


def test_capture_draws_no_random_numbers_and_replays_draw_new_ones() -> None:
    net = network(dropout=0.5)
    gradients = ForwardBackward(
        net, nn.CrossEntropyLoss(), torch.amp.GradScaler("cuda", enabled=False), torch.float32, 1
    )
    step = GraphedForwardBackward(gradients, capture_stream(torch.device("cuda", 0)))
    images, targets = torch.randn(8, 3, 24, 24, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    torch.manual_seed(1)
    first = [step(images, targets, 0).item() for _ in range(4)]
    torch.manual_seed(1)
    again = [step(images, targets, 0).item() for _ in range(4)]
    assert len(set(first)) == 4
    assert first == again


def test_the_driver_tells_which_gpus_nvlink_joins() -> None:
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    assert nvlink_between(uuids[:1]), "the driver's library knows this GPU"
    assert not nvlink_between([uuids[0], "00000000-0000-0000-0000-000000000000"])
    matrix = subprocess.run(["nvidia-smi", "topo", "-p2p", "n"], capture_output=True, text=True, check=True).stdout
    joined = [line.split()[1:] for line in matrix.splitlines() if re.match(r"\s*GPU\d.*\bX\b", line)]
    for one, other in itertools.combinations(range(len(uuids)), 2):
        assert nvlink_between([uuids[one], uuids[other]]) == (joined[one][other] == "OK")


def test_signals_are_heard_while_a_recording_waits_for_the_device() -> None:
    stream = capture_stream(torch.device("cuda", 0))
    busy: dict[str, list[bool]] = {"at a pass": [], "at the signal": []}

    class Watched(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if not torch.cuda.is_current_stream_capturing():
                busy["at a pass"].append(not stream.query())
            return super().forward(images)

    def exchange() -> None:  # of a rank whose peers come two seconds later
        if len(busy["at a pass"]) == 1:
            torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    before = signal.signal(signal.SIGALRM, lambda number, frame: busy["at the signal"].append(not stream.query()))
    try:
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        gradients = ForwardBackward(Watched(8, 3).cuda(), nn.CrossEntropyLoss(), scaler, torch.float32, 1, exchange)
        targets = torch.zeros(4, dtype=torch.int64, device="cuda")
        GraphedForwardBackward(gradients, stream)(torch.rand(4, 8, device="cuda"), targets, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert busy["at a pass"][1:] == [False, False], "each pass waits for the one before"
    assert busy["at the signal"] == [True]


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


def test_network_that_cannot_be_captured_is_refused_with_the_remedy(
    data: Path, tmp_path: Path, launch: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as torch's random numbers are of no use after a recording that failed."""
    program = tmp_path / "train_waiting.py"
    program.write_text(WAITS_FOR_THE_DEVICE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    flags = [*FLAGS, "--data-dir", data, "--output-dir", tmp_path / "out", "--arch", "waiting_net", "--no-compile"]
    done = launch(*flags, "--epochs", 1, "--batch-size", 8, "--cuda-graph", program=program)
    assert done.status == 2, done.err
    assert re.search(r"--cuda-graph: .* use --no-cuda-graph", done.err.splitlines()[-1])
    assert launch(*flags, "--epochs", 1, "--batch-size", 8, "--no-cuda-graph", program=program).status == 0


@pytest.mark.parametrize(
    ("number", "extra"),
    [
        (signal.SIGKILL, ("--no-compile",)),
        (signal.SIGTERM, ("--no-compile", "--amp", "fp16", "--augment", "trivialaugment", "--mixup", "0.2")),
        (signal.SIGTERM, ("--compile", "--clip-grad", "1", "--ema-decay", "0.9", "--cache", "gpu")),
    ],
    ids=["killed-bf16", "stopped-fp16", "stopped-compiled"],
)
def test_resume_in_mid_epoch_is_exact(
    data: Path,
    tmp_path: Path,
    launch: Callable[..., Finished],
    launch_and_end: Callable[..., int],
    extra: tuple[str, ...],
    number: int,
) -> None:
    flags = (
        "--data-dir",
        data,
        *FLAGS,
        "--deterministic",
        "--batch-size",
        "4",
        "--epochs",
        "3",
        *extra,
    )
    assert launch(*flags, "--output-dir", tmp_path / "whole").status == 0
    cut = tmp_path / "cut"
    when = lambda: (cut / "metrics.jsonl").exists() and len(read_metrics(cut)) >= 14  # noqa: E731
    launch_and_end(*flags, "--output-dir", cut, "--checkpoint-steps", "3", when=when, number=number)
    done = launch(*flags, "--output-dir", cut)
    assert done.status == 0, done.err
    assert "resumed at epoch 2" in done.out
    whole, resumed = read_checkpoint(tmp_path / "whole"), read_checkpoint(cut)
    for name in ("model", "optimizer", "scaler", "step"):
        assert_same(whole[name], resumed[name], name)
    assert_keys("metrics.jsonl", read_metrics(cut)[0], "train, fp16" if "fp16" in extra else "train")
    losses = [[record.get("train/loss") for record in read_metrics(folder)] for folder in (tmp_path / "whole", cut)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("test_convnext", r"at step \d+, lr .*: fp16 gradients overflow at any scale of the loss; use --amp bf16"),
        ("test_resnet", r"at step 5: running statistics are not finite, as activations overflowed; use --amp bf16"),
    ],
)
def test_fp16_that_overflows_without_end_ends_the_run(
    data: Path, tmp_path: Path, launch: Callable[..., Finished], arch: str, said: str
) -> None:
    flags = ("--amp", "fp16", "--lr", 1e6, "--max-bad-steps", 1000, "--epochs", 20, "--batch-size", 8, "--no-compile")
    done = launch("--data-dir", data, *FLAGS, "--arch", arch, *flags, "--output-dir", tmp_path)
    assert done.status == 1, done.err
    assert re.search(said, done.err)


@pytest.mark.parametrize("extra", [("--decode", "fused"), ("--decode", "full"), ("--cache", "gpu")], ids=" ".join)
@pytest.mark.parametrize("kind", ["text", "cut in the middle"])
def test_a_bad_file_is_named_or_left_out(
    tmp_path: Path, launch: Callable[..., Finished], kind: str, extra: tuple[str, ...]
) -> None:
    root = write_data(tmp_path / "data")
    path = root / "train" / "green" / "spoiled.jpg"
    path.write_bytes(damage.CONTENTS[kind])
    flags = ("--data-dir", root, *FLAGS, "--no-compile", "--batch-size", "4", "--epochs", "2", *extra)
    done = launch(*flags, "--output-dir", tmp_path / "error")
    assert done.status == 2, done.err
    assert f"train.py: rank 0: {path}: " in done.err
    done = launch(*flags, "--output-dir", tmp_path / "skip", "--bad-files", "skip")
    assert done.status == 0, done.err
    assert "1 of 42 train files (green 1)" in done.out


@pytest.mark.parametrize(("name", "fused"), OPTIMIZERS)
def test_a_first_step_that_overflows_leaves_no_trace(
    gpu: DistEnv, monkeypatch: pytest.MonkeyPatch, name: str, fused: bool
) -> None:
    """A step that is replayed gives the same bits. An update that is not fused may round otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    losses = check_skipped_first_step(gpu, name, fused)
    assert losses == check_skipped_first_step(gpu, name, fused, graph=True)
    assert losses == pytest.approx(fp16_losses(fp16_state(gpu, name, False, BAD_SCALE)), rel=1e-2)
