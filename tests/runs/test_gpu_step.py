"""On a real GPU: the captured training step, and the exchange of gradients. Run by scripts/gpu_check.sh."""

import copy
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import CLASSES, resolved
from tests.inference.exported import MEAN, STD, write_checkpoint
from tests.training.test_optim import BAD_SCALE, OPTIMIZERS, check_skipped_first_step, fp16_losses, fp16_state
from utils.distributed.group import DistEnv
from utils.network.distillation import Teacher
from utils.network.gradients import ForwardBackward, GraphedForwardBackward, capture_stream, on_stream
from utils.network.loss import create_criterion
from utils.network.parallel import FlatAllReduce, create_forward_backward
from utils.training.settings.teacher import create_teacher, read_teacher
from utils.training.state.train_state import create_state

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize(("amp", "focal"), [(torch.float32, 0.0), (torch.bfloat16, 2.0), (torch.float16, 2.0)])
def test_captured_training_is_the_plain_one(gpu: DistEnv, amp: torch.dtype, focal: float) -> None:
    criterion = create_criterion(resolved(focal=focal), gpu.device, [0.5 + label / 10 for label in range(10)])
    plain, captured = network(dropout=0), network(dropout=0)
    images = torch.randn(5, 8, 3, 24, 24, device="cuda", dtype=amp)
    targets = torch.randint(0, 10, (5, 8), device="cuda")
    losses: list[list[float]] = []
    for net, graph in ((plain, False), (captured, True)):
        scaler = torch.amp.GradScaler("cuda", enabled=amp == torch.float16)
        gradients = ForwardBackward(net, criterion, scaler, amp, accum_steps=1)
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


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's compiler uses it
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # float32 is to be exact here
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("amp", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_training_with_a_teacher_is_the_plain_one(gpu: DistEnv, amp: torch.dtype, compiled: bool) -> None:
    """Of another normalization and another order of classes; the replays answer for their own images."""
    criterion = create_criterion(resolved(teacher="any", num_classes=10, teacher_temperature=2.0), gpu.device)
    own, given, order = ((0.5,) * 3, (0.5,) * 3), ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3)), [*range(9, -1, -1)]
    teaching = network(dropout=0.5).eval().requires_grad_(False)
    before = copy.deepcopy(teaching.state_dict())
    images = torch.randn(5, 8, 3, 24, 24, device="cuda", dtype=amp)
    targets = torch.randint(0, 10, (5, 8), device="cuda")
    losses: list[list[float]] = []
    for graph in (False, True):
        torch.manual_seed(0)
        net = network(dropout=0)
        scaler = torch.amp.GradScaler("cuda", enabled=amp == torch.float16)
        teacher = Teacher(teaching, order, own, given, gpu.device, compiled and graph)
        gradients = ForwardBackward(net, criterion, scaler, amp, accum_steps=1, teacher=teacher)
        step = GraphedForwardBackward(gradients, capture_stream(torch.device("cuda", 0))) if graph else gradients
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        losses.append([])
        for batch, target in zip(images, targets, strict=True):
            losses[-1].append(step(batch.contiguous(memory_format=torch.channels_last), target, 0).item())
            scaler.step(optimizer)
            scaler.update()
    assert losses[0] == pytest.approx(losses[1], rel=2e-2 if compiled or amp != torch.float32 else 1e-3)
    assert len(set(losses[1])) == 5
    for name, value in teaching.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's compiler uses it
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # float32 is to be exact here
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_timing_a_teacher_as_a_graph_changes_nothing(gpu: DistEnv, tmp_path: Path, amp: str, compiled: bool) -> None:
    best = write_checkpoint(tmp_path / "best.pt")
    config = resolved(teacher=str(best), image_size=32, val_resize=36, amp=amp, compile=compiled)
    trained = read_teacher(config, CLASSES, gpu)
    assert trained is not None
    before, state = torch.cuda.get_rng_state(), copy.deepcopy(trained.network.state_dict())
    teacher, line = create_teacher(trained, config, (MEAN, STD), gpu, capture_stream(gpu.device))
    assert teacher is not None
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert re.search(r"; a pass takes [\d.]+ ms for 8 images of 32 px$", line)
    images = torch.randn(8, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(teacher(images), trained.network(images), rtol=1e-3, atol=1e-3)
    for name, value in trained.network.state_dict().items():
        assert torch.equal(value.cpu(), state[name]), name


def test_another_image_size_is_captured_anew() -> None:
    """As `--resize-schedule` gives it, there and back; the training is that without a graph."""
    plain, captured = network(dropout=0), network(dropout=0)
    targets = torch.randint(0, 10, (8,), device="cuda")
    batches = [torch.randn(8, 3, size, size, device="cuda") for size in (24, 24, 32, 32, 24)]
    losses: list[list[float]] = []
    for net, graph in ((plain, False), (captured, True)):
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        gradients = ForwardBackward(net, nn.CrossEntropyLoss(), scaler, torch.float32, accum_steps=1)
        step = GraphedForwardBackward(gradients, capture_stream(torch.device("cuda", 0))) if graph else gradients
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        losses.append([])
        for images in batches:
            losses[-1].append(step(images.contiguous(memory_format=torch.channels_last), targets, 0).item())
            optimizer.step()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(captured.state_dict()[name], value, rtol=1e-2, atol=1e-3, msg=name)
    assert captured.state_dict()["1.num_batches_tracked"] == 5


def test_layers_that_join_later_are_captured_anew(gpu: DistEnv) -> None:
    """As `--freeze-epochs` has them; the training is that without a graph."""
    batches = torch.randn(4, 8, 3, 32, 32, device="cuda")
    targets = torch.randint(0, 10, (8,), device="cuda")
    losses: list[list[float]] = []
    models = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=10).to(memory_format=torch.channels_last).to("cuda")
        config = resolved(freeze_epochs=1, device="cuda")
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        step = create_forward_backward(
            config,
            model,
            model,
            create_criterion(config, gpu.device),
            scaler,
            gpu,
            capture_stream(gpu.device) if graph else None,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses.append([])
        for epoch in range(2):
            model.train()
            step.start_epoch(epoch)
            for images in batches:
                losses[-1].append(step(images.contiguous(memory_format=torch.channels_last), targets, 0).item())
                optimizer.step()
        step.close()
        models.append(model)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("name", ["muon", "nmuon", "adamuon", "nadamuon"])
def test_captured_optimizer_is_the_plain_one(gpu: DistEnv, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With other rates each step, gradients that move, a layer that joins later, and a checkpoint on the way."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        config = resolved(optimizer=name, lr=0.01, momentum=0.9, weight_decay=0.05, cuda_graph=graph, device="cuda")
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(gpu.device)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        state = create_state(config, net, gpu, 256)
        assert (state.graphed_step is not None) == graph
        images, targets = torch.randn(10, 8, 3, 8, 8, device="cuda"), torch.randint(0, 10, (10, 8), device="cuda")
        net[0].requires_grad_(requires_grad=False)
        for number, (batch, target) in enumerate(zip(images, targets, strict=True)):
            if number == 3:
                net[0].requires_grad_()
            for group in state.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + number)
            net.zero_grad(set_to_none=number in (0, 5))
            torch.autograd.backward(nn.functional.cross_entropy(net(batch), target))
            if number == 7:
                saved = copy.deepcopy(state.optimizer.state_dict())
                assert all(isinstance(group["lr"], float) for group in saved["param_groups"])
                assert not any(group["capturable"] for group in saved["param_groups"])
                state = create_state(config, net, gpu, 256)
                state.optimizer.load_state_dict(saved)
            state.optimizer_step(clip_grad=1.0)
            state.step += 1
        results.append([after.detach() - old for after, old in zip(net.parameters(), before, strict=True)])
    for plain, captured in zip(*results, strict=True):
        difference = ((captured - plain).norm() / plain.norm()).item()
        assert difference < 0.05  # rates are rounded to the update's bf16; a rate of another step would be far beyond


def test_a_captured_optimizer_is_launched_once(gpu: DistEnv) -> None:
    config = resolved(optimizer="muon", lr=0.01, cuda_graph=True, device="cuda")
    net = nn.Linear(32, 16).to(gpu.device)
    state = create_state(config, net, gpu, 256)
    images, targets = torch.rand(4, 32, device="cuda"), torch.arange(4, device="cuda")
    torch.autograd.backward(nn.functional.cross_entropy(net(images), targets))
    calls: list[int] = []
    state.optimizer.register_step_post_hook(lambda *_: calls.append(state.step))
    for state.step in range(4):
        weight = net.weight.detach().clone()
        state.optimizer_step(clip_grad=0.0)
        assert not torch.equal(net.weight, weight)
    assert calls == [0, 1, 1], "a plain step, the capture of two parts, and nothing but replays"


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
    repeated = [step(images, targets, 0).item() for _ in range(4)]
    assert len(set(first)) == 4
    assert first == repeated


def test_signals_are_handled_while_a_capture_waits_for_the_device() -> None:
    stream = capture_stream(torch.device("cuda", 0))
    busy: dict[str, list[bool]] = {"at a pass": [], "at the signal": []}

    class Observed(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if not torch.cuda.is_current_stream_capturing():
                busy["at a pass"].append(not stream.query())
            return super().forward(images)

    def exchange() -> None:  # as on a rank that waits two seconds for the others
        if len(busy["at a pass"]) == 1:
            torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    before = signal.signal(signal.SIGALRM, lambda number, frame: busy["at the signal"].append(not stream.query()))
    try:
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        gradients = ForwardBackward(Observed(8, 3).cuda(), nn.CrossEntropyLoss(), scaler, torch.float32, 1, exchange)
        targets = torch.zeros(4, dtype=torch.int64, device="cuda")
        GraphedForwardBackward(gradients, stream)(torch.rand(4, 8, device="cuda"), targets, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert busy["at a pass"][1:] == [False, False], "each pass waits for the one before"
    assert busy["at the signal"] == [True]


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
