"""A run goes on with another number of processes: every image of the epoch still comes once."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.conftest import NUMBERED, TINY, assert_same, resolved, write_numbered
from tests.forked import launch_ranks
from tests.harness import ROOT, read_metrics
from tests.training.checkpoints import checkpoint_of
from utils.data.loaders.sampler import permutation
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.options.data_flags import BATCH_SIZE
from utils.training.settings.batch_layout import Layout, choose_batch_size, saved_layout
from utils.training.state.checkpoint import Checkpoint, load
from utils.training.state.meter import Meter
from utils.training.state.train_state import TrainState, float_buffers, mean_buffers, reshard


def env_of(world_size: int, rank: int = 0) -> DistEnv:
    return DistEnv(rank, rank, world_size, world_size, torch.device("cpu"))


def saved_by(world_size: int, batch_size: int, grad_accum_steps: int = 1) -> Checkpoint:
    return checkpoint_of(resolved(batch_size=batch_size, grad_accum_steps=grad_accum_steps), world_size)


def chosen(saved: Checkpoint | None, world_size: int, batch_size: int | None = None, **more: Any) -> int:
    config = TrainConfig(**more) if batch_size is None else TrainConfig(batch_size=batch_size, **more)
    return choose_batch_size(config, env_of(world_size), saved)


def test_batch_size_of_a_new_run() -> None:
    assert chosen(None, 2) == BATCH_SIZE == 256
    assert chosen(None, 2, 7) == 7
    assert chosen(saved_by(2, 32), 4, evaluate=True) == BATCH_SIZE


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_size_left_open_keeps_the_global_batch(world_size: int, accumulated: int) -> None:
    if 128 % (world_size * accumulated) == 0:
        found = chosen(saved_by(2, 32, 2), world_size, grad_accum_steps=accumulated)
        assert found * world_size * accumulated == 128
        assert chosen(saved_by(2, 32, 2), world_size, found, grad_accum_steps=accumulated) == found


@pytest.mark.parametrize(
    ("world_size", "given", "words"),
    [
        (4, 32, "--batch-size 32: the checkpoint was saved by 2 processes x 32 images, a global batch of 64; on 4 "
                "processes give --batch-size 16 or leave it out"),
        (1, 32, "--batch-size 32: .* on 1 process give --batch-size 64"),
        (3, None, "3 processes: cannot share a step evenly, the checkpoint was saved by 2 processes x 32 images, a "
                  "global batch of 64; start 2 processes"),
        (65, None, "65 processes: cannot share .* start 64 processes"),
    ],
)  # fmt: skip
def test_another_global_batch_is_refused_with_the_arithmetic(world_size: int, given: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        chosen(saved_by(2, 32), world_size, given)
    assert refusal.value.on_all_ranks


@pytest.mark.parametrize(
    ("world_size", "given", "accumulated", "words"),
    [
        (1, None, 1, "1 process x 32 images: --loader stock goes on only as its checkpoint was saved, by 2 processes x "
                     "32 images; start the same, go on with another loader by --loader dali .*--accept-changes"),
        (4, 16, 1, "4 processes x 16 images: --loader stock"),
        (2, 16, 2, "2 processes x 16 images x 2 batches: --loader stock"),
        (2, None, 2, "x 2 batches: --loader stock"),
    ],
)  # fmt: skip
def test_dalis_own_reader_goes_on_in_the_same_layout_only(
    world_size: int, given: int | None, accumulated: int, words: str
) -> None:
    saved = checkpoint_of(resolved(batch_size=32, loader="stock"), 2)
    with pytest.raises(UserError, match=words) as refusal:
        chosen(saved, world_size, given, grad_accum_steps=accumulated, loader="stock")
    assert refusal.value.on_all_ranks
    assert chosen(saved, 2, loader="stock") == 32
    assert chosen(saved, 4, loader="dali") == 16  # refused as another loader, or accepted


def create_state(env: DistEnv) -> TrainState:
    torch.manual_seed(env.rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainState(model, optimizer, GradScaler("cpu", enabled=False), ModelEmaV3(model), Meter(env), env)
    state.meter.update(torch.tensor(1.5 + env.rank), 4)
    return state


def test_the_state_of_each_rank_is_resharded() -> None:
    states = [create_state(env_of(2, rank)) for rank in range(2)]
    ranks = [state.rank_state({}) for state in states]
    replicated = states[0].replicated_state()
    means = {name: mean_buffers([rank.buffers[name] for rank in ranks]) for name in states[0].networks()}
    networks = {name: weights | means[name] for name, weights in replicated.networks.items()}
    replicated = dataclasses.replace(replicated, networks=networks)
    assert not torch.equal(ranks[0].buffers["model"]["1.running_mean"], ranks[1].buffers["model"]["1.running_mean"])
    others = [create_state(env_of(4, rank)) for rank in range(4)]
    for state in others:
        state.load(replicated, reshard(ranks, state.env.rank))
        for name, module in state.networks().items():
            assert_same(float_buffers(module), means[name])
    intervals = [state.meter.state_dict()["metrics"]["train/loss"] for state in others]
    assert intervals == [(4 * 1.5 + 4 * 2.5, 8), (0, 0), (0, 0), (0, 0)]


CHAIN = (2, 1, 2, 4, 2)
MODES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "dali": (("--augment", "none"), (2, 1)),
    "dali, all steps": (("--hflip", "0.5", "--mixup", "0.2", "--ema-decay", "0.9"), CHAIN),
    "accumulated": (("--grad-accum-steps", "1"), CHAIN),
    "torch": (("--loader", "torch"), CHAIN),
    "proxy": (("--loader", "proxy"), CHAIN),
    "cached": (("--cache", "host"), CHAIN),
}


@pytest.mark.dist
@pytest.mark.parametrize("mode", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dali")) for name in MODES])
def test_every_image_of_the_epoch_comes_once(tmp_path: Path, mode: str) -> None:
    """Stopped in mid-epoch again and again, and resumed by other numbers of processes."""
    data, records = write_numbered(tmp_path / "data"), tmp_path / "records"
    records.mkdir()
    extra, chain = MODES[mode]
    flags = [records, "--data-dir", data, *TINY, "--output-dir", tmp_path / "run", "--epochs", 2, *extra]
    recorder = f"import runpy; runpy.run_path({str(ROOT / 'tests' / 'recorder.py')!r}, run_name='__main__')"
    before: Checkpoint | None = None
    for launches, processes in enumerate(chain):
        layout: list[Any] = ["--batch-size", 8 // processes] if launches == 0 else []
        if mode == "accumulated" and launches:  # the other ways to make up 8 images
            layout = ["--grad-accum-steps", 2 if processes < 4 else 1]
        if launches < len(chain) - 1:
            layout += ["--time-limit", 0.1]  # over when the first step is done
        ranks = launch_ranks(*flags, *layout, processes=processes, program=recorder)
        assert "train.py: " not in "".join(done.err for done in ranks), ranks
        done = ranks[0]
        if before:
            assert f"saved by {saved_layout(before)}: every image still comes once" in done.out
            found = done.out.index("every image still comes once"), done.out.index("first step done")
            assert found[0] < found[1]
        before = load(tmp_path / "run" / "last.pt")
    assert done.status == 0, done.err

    lines = [json.loads(line) for path in records.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert {line["world_size"] for line in lines if line["epoch"] == 0} == set(chain)
    steps: dict[int, list[int]] = {}
    for line in lines:
        steps.setdefault(line["step"], []).extend(line["images"])
    per_epoch = NUMBERED // 8
    assert sorted(steps) == list(range(2 * per_epoch))
    for step, images in steps.items():
        epoch, at = divmod(step, per_epoch)
        assert sorted(images) == sorted(permuted(epoch)[8 * at : 8 * at + 8])
    for epoch in range(2):
        seen = list(itertools.chain.from_iterable(steps[epoch * per_epoch + at] for at in range(per_epoch)))
        assert len(seen) == len(set(seen)) == 8 * per_epoch
    logged = [record["step"] for record in read_metrics(tmp_path / "run") if "train/loss" in record]
    assert logged == list(range(1, 2 * per_epoch + 1))


def permuted(epoch: int) -> list[int]:
    """Numbers of the images of an epoch in the sampler's order; files are in the order of class, then name."""
    names = [*range(0, NUMBERED, 2), *range(1, NUMBERED, 2)]
    return [names[index] for index in permutation(NUMBERED, 0, epoch)]


@pytest.mark.parametrize(
    ("world_size", "accumulated", "words"),
    [
        (
            3,
            2,
            "3 processes x --grad-accum-steps 2: cannot share .* start 2 processes, go on with it",
        ),
        (3, 64, "3 processes x --grad-accum-steps 64: cannot share .*; start 1 process, go on with it"),
        (33, 2, "33 processes x --grad-accum-steps 2: cannot share .*; start 32 processes, go on with it"),
        (3, 3, "3 processes x --grad-accum-steps 3: cannot share .*; lower --grad-accum-steps, go on with it"),
        (1, 128, "1 process x --grad-accum-steps 128: cannot share .*; lower --grad-accum-steps, go on with it"),
    ],
)
def test_the_remedy_has_a_batch_that_is_shared_evenly(world_size: int, accumulated: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        chosen(saved_by(2, 32), world_size, grad_accum_steps=accumulated)


def test_layout_in_words() -> None:
    assert str(Layout(2, 32, 2)) == "2 processes x 32 images x 2 batches"
    assert str(Layout(2, 32, 1)) == "2 processes x 32 images"
    assert str(Layout(1, 32, 4)) == "1 process x 32 images x 4 batches"
