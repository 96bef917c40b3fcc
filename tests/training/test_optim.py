"""Parameter groups, the optimizer, its usual settings, and the moving average."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.conftest import resolved
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.network.gradients import ForwardBackward, GraphedForwardBackward, capture_stream
from utils.options.config import TrainConfig
from utils.options.resolved import ResolvedConfig
from utils.training.optimization.optim import (
    check_optimizer,
    create_ema,
    create_optimizer,
    describe_ema,
    describe_lr,
    describe_optimizer,
    has_fused,
    peak_lr,
    resolve_optimizer,
)
from utils.training.state.meter import Meter
from utils.training.state.train_state import TrainState


def test_optimizers_give_no_warning_of_their_own() -> None:
    create_optimizer(resolved(optimizer="kron"), torch.nn.Linear(2, 2), 256)


@pytest.mark.parametrize(
    ("values", "expected", "text"),
    [
        ({"optimizer": "sgd", "lr": 0.1}, 0.4, "0.4 = 0.1 x 1024 / 256"),
        ({"optimizer": "adamw", "lr": 0.1}, 0.2, "0.2 = 0.1 x sqrt(1024 / 256)"),
        ({"optimizer": "lion", "lr": 0.1}, 0.2, "0.2 = 0.1 x sqrt(1024 / 256)"),
        ({"optimizer": "adan", "lr": 0.1}, 0.2, "0.2 = 0.1 x sqrt(1024 / 256)"),  # none is usual: timm's rule
        ({"optimizer": "muon", "lr": 0.1}, 0.4, "0.4 = 0.1 x 1024 / 256"),
        ({"optimizer": "adamw", "lr": 0.1, "lr_scaling": "linear"}, 0.4, "0.4 = 0.1 x 1024 / 256"),
        ({"optimizer": "sgd", "lr": 0.1, "lr_scaling": "none"}, 0.1, "0.1"),
    ],
)
def test_lr_is_for_256_images(values: dict[str, Any], expected: float, text: str) -> None:
    config = resolved(**values | resolve_optimizer(TrainConfig(**values)))
    optimizer = create_optimizer(config, nn.Linear(2, 2), 1024)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
    assert peak_lr(config, 1024) == pytest.approx(expected)
    assert describe_lr(config.lr, config.lr_scaling, 1024) == text


def test_a_resume_keeps_its_rate_and_the_rule() -> None:
    """Checkpoints that do not name it were trained with the linear one."""
    old = resolved(optimizer="adamw", lr=0.001).to_dict()
    del old["lr_scaling"]
    saved = ResolvedConfig.from_dict(old)
    given: list[dict[str, Any]] = [{}, {"lr_scaling": "sqrt"}, {"lr": 0.1}]
    found = [resolve_optimizer(TrainConfig(optimizer="adamw", **values), saved) for values in given]
    assert [(each["lr"], each["lr_scaling"]) for each in found] == [(0.001, "linear"), (0.001, "sqrt"), (0.1, "linear")]
    other = resolve_optimizer(TrainConfig(optimizer="sgd"), saved)
    assert (other["lr"], other["lr_scaling"]) == (0.256, "linear")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", (0.256, 0.875, 1 / 32768)),
        ("momentum", (0.256, 0.875, 1 / 32768)),
        ("adamw", (5e-4, 0.9, 0.05)),
        ("adam", (1e-3, 0.9, 0.0)),
        ("lamb", (0.0028, 0.9, 0.02)),
        ("lion", (1e-4, 0.9, 0.5)),
        ("rmsproptf", (0.016, 0.9, 1e-5)),
        ("bnbadamw8bit", (5e-4, 0.9, 0.05)),  # timm knows these by name where their package is absent
        ("fusedlamb", (0.0028, 0.9, 0.02)),
    ],
)
def test_settings_that_are_not_given_are_those_usual_for_the_optimizer(
    name: str, expected: tuple[float, float, float]
) -> None:
    found = resolve_optimizer(TrainConfig(optimizer=name))
    assert (found["lr"], found["momentum"], found["weight_decay"]) == expected
    given = TrainConfig(optimizer=name, lr=0.5, momentum=0.0, weight_decay=0.0)
    settings = resolve_optimizer(given)
    assert [settings[key] for key in ("lr", "momentum", "weight_decay")] == [0.5, 0.0, 0.0]


def test_an_optimizer_without_a_usual_rate_needs_one() -> None:
    with pytest.raises(UserError, match=r"^--optimizer kron: has no usual learning rate; give --lr$"):
        resolve_optimizer(TrainConfig(optimizer="kron"))
    assert resolve_optimizer(TrainConfig(optimizer="kron", lr=0.1)) == {
        "lr": 0.1, "lr_scaling": "linear", "momentum": 0.9, "weight_decay": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "images", "warning"),
    [
        ({}, 2048, ""),
        ({"lr": 0.5}, 256, ""),
        ({"lr": 0.77}, 256, "--lr 0.77 is 3.01 times the usual 0.256 of sgd for 256 images"),
        (
            {"lr": 0.5},
            2048,
            "--lr 0.5 is for 256 images, and 4 for the 2,048 of a step: 1.95 times the usual 2.05 of sgd; if 0.5 "
            "is the rate of a step, as in timm's and torchvision's commands, add --lr-scaling none",
        ),
        ({"lr": 0.5, "lr_scaling": "linear"}, 2048, ""),
        ({"lr": 0.5, "lr_scaling": "none"}, 2048, ""),
        ({"lr": 7.0, "lr_scaling": "none"}, 2048, "--lr 7 is 3.42 times the usual 2.05 of sgd for 2,048 images"),
        ({"lr": 0.35}, 2048, ""),
        ({"lr": 0.001}, 256, "--lr 0.001 is 1/256 of the usual 0.256 of sgd for 256 images"),
        ({"lr": 0.001, "pretrained": "timm"}, 256, ""),
        ({"optimizer": "kron", "lr": 100.0}, 2048, ""),
    ],
    ids=str,
)
def test_unusual_rates_are_told(values: dict[str, Any], images: int, warning: str) -> None:
    given = frozenset(values) & {"lr", "lr_scaling"}
    config = resolved(**values | resolve_optimizer(TrainConfig(**values)), given=given)
    assert describe_optimizer(config, images)[1] == warning


def test_where_settings_are_from() -> None:
    assert (
        describe_optimizer(resolved(), 256)[0] == "--lr, --momentum, --weight-decay for sgd: NVIDIA's ResNet-50 recipe"
    )
    given = resolved(lr=0.5, given=frozenset({"lr"}))
    assert describe_optimizer(given, 256)[0] == "--momentum, --weight-decay for sgd: NVIDIA's ResNet-50 recipe"
    assert describe_optimizer(resolved(optimizer="kron"), 256)[0] == ""


def test_no_decay_on_biases_and_norms() -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    optimizer = create_optimizer(resolved(weight_decay=0.01, momentum=0.8), model, 256)
    for group in optimizer.param_groups:
        decayed = {parameter.ndim > 1 for parameter in group["params"]}
        assert decayed == {group["weight_decay"] > 0}
        assert group["momentum"] == 0.8
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_other_optimizers() -> None:
    config = resolved(optimizer="adamw")
    assert isinstance(create_optimizer(config, torch.nn.Linear(2, 2), 256), torch.optim.AdamW)
    with pytest.raises(UserError, match="--optimizer adamv: unknown to timm; the closest are adam"):
        check_optimizer("adamv")


def test_which_optimizers_have_one_kernel_for_all_weights() -> None:
    names = ("sgd", "momentum", "nesterov", "adam", "adamw", "lamb", "rmsprop", "adafactor")
    assert [has_fused(name) for name in names] == [True] * 5 + [False] * 3
    assert not create_optimizer(resolved(), torch.nn.Linear(2, 2), 256).defaults["fused"], "on the CPU"


def test_moving_average_reaches_its_decay() -> None:
    ema = create_ema(torch.nn.Linear(2, 2), 0.9999)
    assert [ema.get_decay(step) for step in (0, 1)] == [0.0, 0.0], "a copy"
    assert [ema.get_decay(3 + n - 1) for n in (0, 5, 1000)] == pytest.approx([1 / 10, 6 / 15, 1001 / 1010])
    assert ema.get_decay(89_990) < 0.9999
    assert ema.get_decay(89_992) == 0.9999
    assert describe_ema(ema, 100_000) == "decay grows to 0.9999 in the first 89,992 steps"
    assert describe_ema(ema, 50_040) == "decay grows to 0.99982 in the 50,040 steps of the run, too few for 0.9999"
    short, long = (describe_ema(create_ema(torch.nn.Linear(2, 2), 0.9), steps) for steps in (83, 82))
    assert "grows to 0.9 in the first 82" in short
    assert "too few for 0.9" in long


def test_optimizers_take_the_same_step_in_every_process() -> None:
    """Or several processes refuse them: their random numbers differ."""
    known = timm.optim.list_optimizers()
    tried, refused = 0, []
    for name in known:
        try:
            check_optimizer(name, world_size=2)
            results = [train_a_little(name, seed) for seed in (0, 1)]
        except UserError:
            refused.append(name)
            continue
        tried += 1
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), name
    assert {"kron", "kronc", "kronw"} <= set(refused)
    assert tried > len(known) / 2
    with pytest.raises(UserError, match="draws random numbers, so that the weights of 2 processes would part"):
        check_optimizer("kron", world_size=2)
    check_optimizer("kron", world_size=1)


def train_a_little(name: str, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model, images = torch.nn.Linear(4, 3), torch.rand(2, 4)
    optimizer = create_optimizer(resolved(optimizer=name, lr=0.1), model, 256)
    torch.manual_seed(seed)
    for _ in range(3):
        model(images).square().sum().backward()
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]


FUSED = ("sgd", "momentum", "adam", "adamw")  # on a GPU
OPTIMIZERS = [(name, True) for name in FUSED] + [(name, False) for name in ("sgd", "momentum", "adamw", "lamb")]
GOOD_SCALE, BAD_SCALE = 2.0**10, 2.0**24  # of the loss in fp16, for the network below


@contextlib.contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """What torch makes of uninitialized memory with --deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def fp16_state(env: DistEnv, name: str, fused: bool, scale: float) -> TrainState:
    """The same small network each time; a scale that overflows becomes one that does not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten())
    net.append(nn.Linear(72, 10)).to(memory_format=torch.channels_last).to(env.device)
    config = resolved(optimizer=name, lr=0.05 if name in ("sgd", "momentum") else 0.005, weight_decay=0.01)
    scaler = GradScaler(env.device.type, init_scale=scale, backoff_factor=GOOD_SCALE / BAD_SCALE)
    return TrainState(net, create_optimizer(config, net, 256, fused), scaler, ema=None, meter=Meter(env), env=env)


def fp16_losses(state: TrainState, first: int = 0, graph: bool = False) -> list[float]:
    """Losses of the steps `first` to 5, each on a batch of its own; `graph` records the step as a CUDA graph."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(6, 8, 3, 10, 10, generator=random).half().to(state.env.device)
    targets = torch.randint(0, 10, (6, 8), generator=random).to(state.env.device)
    grads = ForwardBackward(state.model, nn.CrossEntropyLoss(), state.scaler, torch.float16, accum_steps=1)
    step = GraphedForwardBackward(grads, capture_stream(state.env.device)) if graph else grads
    losses = []
    for batch, target in zip(images[first:], targets[first:], strict=True):
        loss = step(batch.contiguous(memory_format=torch.channels_last), target, 0)
        losses.append(loss.item())
        state.meter.update(loss, len(target))
        state.meter.end_step()
        with memory_full_of_nan():
            state.optimizer_step(clip_grad=0.0)
    step.close()
    return losses


def check_skipped_first_step(env: DistEnv, name: str, fused: bool, graph: bool = False) -> list[float]:
    """Gradients of the first step overflow: what follows is, bit for bit, what it is without that step. The losses."""
    state, without = fp16_state(env, name, fused, BAD_SCALE), fp16_state(env, name, fused, GOOD_SCALE)
    losses = fp16_losses(state, 0, graph)
    assert losses[1:] == fp16_losses(without, 1, graph)
    assert state.meter.read().skipped_steps == 1
    assert state.scaler.get_scale() == without.scaler.get_scale() == GOOD_SCALE
    for weight, other in zip(state.model.parameters(), without.model.parameters(), strict=True):
        assert weight.isfinite().all()
        assert torch.equal(weight, other)
    return losses


@pytest.mark.parametrize(("name", "fused"), OPTIMIZERS)
def test_a_first_step_that_overflows_leaves_no_trace(cpu: DistEnv, name: str, fused: bool) -> None:
    losses = check_skipped_first_step(cpu, name, fused)
    assert losses == pytest.approx(fp16_losses(fp16_state(cpu, name, False, BAD_SCALE)), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "momentum"), [("sgd", 0.9), ("momentum", 0.9), ("momentum", 0.0), ("adam", 0.9), ("adamw", 0.9)]
)
def test_fused_steps_are_torchs(name: str, momentum: float) -> None:
    """Bit for bit those of an optimizer that torch gives its first state, and nearly the ones that are not fused."""
    config = resolved(optimizer=name, lr=0.1, momentum=momentum, weight_decay=0.01)
    results = []
    for fused, ours in ((True, True), (True, False), (False, True)):
        torch.manual_seed(7)
        model, images = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 9)), torch.rand(5, 8, 40)
        optimizer = create_optimizer(config, model, 256, fused)
        assert {group["fused"] for group in optimizer.param_groups} == {True if fused else None}
        if not ours:
            optimizer.state.clear()
        for batch in images:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        results.append([weight.detach() for weight in model.parameters()])
    for ours, torchs, plain in zip(*results, strict=True):
        assert torch.equal(ours, torchs)
        torch.testing.assert_close(ours, plain)


def test_dampening_leaves_the_first_step_as_torchs() -> None:
    config = resolved(optimizer="momentum", lr=0.1, momentum=0.9, weight_decay=0.0, optimizer_args="dampening=0.5")
    weights, expected = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    model = nn.Linear(2, 2, bias=False)
    model.weight = weights
    ours = create_optimizer(config, model, 256, fused=True)
    torchs = torch.optim.SGD([expected], lr=0.1, momentum=0.9, dampening=0.5)
    for gradient in (1.0, 2.0, -1.0):
        for weight, optimizer in ((weights, ours), (expected, torchs)):
            weight.grad = torch.full((2, 2), gradient)
            optimizer.step()
        assert torch.equal(weights, expected)


@pytest.mark.parametrize("momentum_state", ["nothing", "None"])
def test_resume_of_an_optimizer_that_never_stepped(cpu: DistEnv, momentum_state: str) -> None:
    """Its state has no momentum, and the first step after the resume overflows."""
    never, state = fp16_state(cpu, "sgd", True, BAD_SCALE), fp16_state(cpu, "sgd", True, BAD_SCALE)
    saved = never.replicated_state()
    numbers = range(len(list(never.model.parameters())))
    saved.optimizer["state"] = (
        {} if momentum_state == "nothing" else {key: {"momentum_buffer": None} for key in numbers}
    )
    state.load(saved, never.rank_state({}))
    assert fp16_losses(state) == fp16_losses(never)


def test_weight_decay_is_timms() -> None:
    """docs/internals/decisions/0014: a scale that is no vector decays, what a network exempts does not."""
    decayed: dict[str, set[bool]] = {"temperature": set(), "pos_embed": set(), "cls_token": set()}
    for arch in ("edgenext_xx_small", "test_vit"):
        with torch.device("meta"):
            model = timm.create_model(arch)
        names = {parameter: name.split(".")[-1] for name, parameter in model.named_parameters()}
        for group in create_optimizer(resolved(weight_decay=0.01), model, 256).param_groups:
            for parameter in group["params"]:
                decayed.get(names[parameter], set()).add(group["weight_decay"] > 0)
    assert decayed == {"temperature": {True}, "pos_embed": {False}, "cls_token": {False}}


def groups_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, tuple[float, float]]:
    """Weight decay and factor of the rate by the name of each weight."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("layer_decay", [None, 0.65, 1.0])
@pytest.mark.parametrize("arch", ["test_vit", "test_resnet", "convnext_atto"])
def test_parameter_groups_are_timms(arch: str, layer_decay: float | None) -> None:
    with torch.device("meta"):
        model = timm.create_model(arch, num_classes=3)
    config = resolved(optimizer="adamw", weight_decay=0.05, layer_decay=layer_decay)
    found = create_optimizer(config, model, 256)
    expected = timm.optim.create_optimizer_v2(model, "adamw", lr=0.1, weight_decay=0.05, layer_decay=layer_decay)
    assert groups_of(found, model) == groups_of(expected, model)
    assert [group["params"] for group in found.param_groups] == [group["params"] for group in expected.param_groups]
    scales = {scale for _, scale in groups_of(found, model).values()}
    assert (len(scales) > 4) == (layer_decay == 0.65)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_a_rate_of_its_own_for_the_head(layer_decay: float | None) -> None:
    model = timm.create_model("test_vit", num_classes=3)
    plain = resolved(weight_decay=0.05, layer_decay=layer_decay)
    before = groups_of(create_optimizer(plain, model, 256), model)
    scaled = create_optimizer(dataclasses.replace(plain, head_lr_scale=10.0), model, 256)
    after = groups_of(scaled, model)
    assert after.keys() == before.keys()
    for name, (decay, scale) in before.items():
        assert after[name] == (decay, scale * 10 if name.startswith("head.") else scale)
    assert sum(len(group["params"]) for group in scaled.param_groups) == len(before), "each weight once"
    with pytest.raises(UserError, match=r"^--head-lr-scale: timm names no head of this architecture"):
        create_optimizer(resolved(head_lr_scale=2.0), nn.Linear(2, 2), 256)


def test_arguments_reach_the_optimizer() -> None:
    config = resolved(optimizer="adamw", optimizer_args="betas=[0.8,0.95],eps=1e-6,amsgrad=true")
    for group in create_optimizer(config, nn.Linear(2, 2), 256).param_groups:
        assert (group["betas"], group["eps"], group["amsgrad"]) == ((0.8, 0.95), 1e-6, True)
    assert not create_optimizer(resolved(optimizer_args="nesterov=false"), nn.Linear(2, 2), 256).defaults["nesterov"]


@pytest.mark.parametrize(
    ("optimizer", "text", "message"),
    [
        ("sgd", "betas=[0.9,0.99]", "--optimizer-args betas=[0.9,0.99]: sgd does not take betas; it takes dampening, "),
        ("lion", "eps=1e-6", "--optimizer-args eps=1e-6: lion does not take eps; it takes betas, "),
        ("adamw", "beta1=0.9", "--optimizer-args beta1=0.9: adamw does not take beta1; it takes amsgrad, betas, "),
        ("adamw", "lr=0.1", "--optimizer-args lr=0.1: lr has a flag of its own; give --lr"),
        ("adamw", "betas=[2,0.9]", "--optimizer-args betas=[2,0.9]: adamw cannot be made with it (Invalid beta "),
    ],
)  # fmt: skip
def test_arguments_that_an_optimizer_does_not_take(optimizer: str, text: str, message: str) -> None:
    config = resolved(optimizer=optimizer, optimizer_args=text)
    with pytest.raises(UserError) as caught:
        make_optimizer(config)
    assert str(caught.value).startswith(message)


def make_optimizer(config: ResolvedConfig) -> torch.optim.Optimizer:
    """As a run does, which checks the arguments first."""
    resolve_optimizer(config)
    return create_optimizer(config, nn.Linear(2, 2), 256)
