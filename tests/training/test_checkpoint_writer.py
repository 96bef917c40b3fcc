"""Checkpoints are written beside the training as within it, one after the other, and to their ends."""

import copy
import dataclasses
import io
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.conftest import assert_same, resolved
from tests.forked import launch_forked
from tests.training.checkpoints import RECORD, checkpoint_of
from utils.distributed.group import DistEnv
from utils.log import Log
from utils.text import data_size
from utils.training.state.checkpoint import BEST, EARLIER, LAST, Checkpoint, create_checkpoint, load
from utils.training.state.checkpoint_writer import CheckpointWriter, copy_to_host, describe_room, may_queue
from utils.training.state.meter import Meter
from utils.training.state.train_state import TrainState


class Held:
    """A writer whose thread has something else to do until `release`."""

    def __init__(self, folder: Path, env: DistEnv) -> None:
        self.writer = CheckpointWriter(folder, env, Log(folder, env.is_main, 1, 1, tensorboard=False))
        self._released = threading.Event()
        assert self.writer._thread is not None
        self.writer._thread.submit(self._released.wait)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def held(tmp_path: Path, cpu: DistEnv) -> Iterator[Held]:
    found = Held(tmp_path, cpu)
    with found.writer:
        yield found
        found.release()


def trained(env: DistEnv) -> TrainState:
    """A network with a norm, a channels_last weight and two layers with one weight, after a step, and its average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[4].weight = model[3].weight
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    state = TrainState(model, optimizer, GradScaler("cpu", enabled=False), ModelEmaV3(model), Meter(env), env)
    step(state)
    return state


def step(state: TrainState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(8, 3, 3, 3)).square().mean().backward()
    state.optimizer_step(clip_grad=1.0)
    state.step += 1


def checkpoint(state: TrainState, folder: Path) -> Checkpoint:
    found = create_checkpoint(state, {"at": b"state"}, resolved(output_dir=folder), RECORD)
    assert found is not None
    return found


def test_the_file_has_the_bits_of_the_moment_of_the_save(held: Held, tmp_path: Path, cpu: DistEnv) -> None:
    """As torch.save would have written them at once, with tied weights once; steps since then change nothing in it."""
    state = trained(cpu)
    taken, expected = checkpoint(state, tmp_path), io.BytesIO()
    torch.save(taken.to_dict(), expected)
    held.writer.start(taken)
    assert not (tmp_path / LAST).exists()
    step(state)
    later = io.BytesIO()
    torch.save(taken.to_dict(), later)
    assert later.getvalue() != expected.getvalue(), "or this tests nothing"
    held.release()
    assert held.writer.wait() is None
    assert (tmp_path / LAST).read_bytes() == expected.getvalue()


def test_a_copy_shares_nothing_with_the_original(cpu: DistEnv, tmp_path: Path) -> None:
    original = checkpoint(trained(cpu), tmp_path).state
    copied = copy_to_host(original)
    assert_same(dataclasses.asdict(copied), dataclasses.asdict(original))
    for name, weights in original.networks.items():
        for key, tensor in weights.items():
            assert copied.networks[name][key].data_ptr() != tensor.data_ptr() != 0
            assert copied.networks[name][key].stride() == tensor.stride()
    model = copied.networks["model"]
    assert model["3.weight"].data_ptr() == model["4.weight"].data_ptr()


def test_what_torch_copies_shares_storages_in_the_same_way(cpu: DistEnv, tmp_path: Path) -> None:
    """Views of one tensor, an empty tensor, a tensor twice: the copy is what `copy.deepcopy` makes on the CPU."""
    whole = torch.arange(12.0)
    value = {"whole": whole, "part": whole[3:9:2], "list": [torch.empty(0), whole], "twice": (whole, 1, "text")}
    written = []
    for copied in (copy_to_host(value), copy.deepcopy(value)):
        buffer = io.BytesIO()
        torch.save(copied, buffer)
        written.append(buffer.getvalue())
    assert written[0] == written[1]


def test_two_checkpoints_are_written_in_their_order(held: Held, tmp_path: Path) -> None:
    saved = checkpoint_of(resolved())
    for step in (5, 6):
        held.writer.start(dataclasses.replace(saved, state=dataclasses.replace(saved.state, step=step)))
    with pytest.raises(AssertionError, match="wait for the writes before"):
        held.writer.start(saved)
    held.release()
    assert held.writer.wait() is None
    assert held.writer.num_pending == 0
    assert held.writer.wait() is None, "at once"
    assert [load(tmp_path / name).state.step for name in (LAST, EARLIER[0])] == [6, 5]
    held.writer.start(saved, is_best=True)
    assert held.writer.wait() is None
    assert {path.name for path in tmp_path.iterdir()} == {LAST, *EARLIER[:2]}, "without a best epoch no best.pt"


def test_weights_of_more_than_512_mb_are_not_queued() -> None:
    small, large = (nn.Linear(2**13, 2**14, bias=bias, device="meta") for bias in (False, True))
    assert (may_queue(small), may_queue(large)) == (True, False)


def test_the_end_of_the_block_waits_for_the_write(tmp_path: Path, cpu: DistEnv) -> None:
    held = Held(tmp_path, cpu)
    with held.writer:
        held.writer.start(checkpoint_of(resolved()))
        assert not (tmp_path / LAST).exists()
        threading.Timer(0.2, held.release).start()
    assert load(tmp_path / LAST).state.step == 0


def test_the_room_that_checkpoints_need_is_said(tmp_path: Path) -> None:
    """Where it is more than a tenth of what is free, without what is there already."""
    free = shutil.disk_usage(tmp_path).free
    assert describe_room(tmp_path, free // 60, keep=2) == ""
    size = free // 40
    said = describe_room(tmp_path, size, keep=2)
    assert said.startswith(f"checkpoints will need {data_size(5 * size)}, and ")
    assert f"({data_size(size)} each: last.pt, best.pt, 2 spare, and one that is being written); --keep 0 keeps" in said
    assert describe_room(tmp_path, size, keep=0) == ""
    assert describe_room(tmp_path, 2 * size, keep=0).endswith(f"written); make room in {tmp_path}")
    for name in (LAST, *EARLIER[:2]):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)  # without content
    os.link(tmp_path / LAST, tmp_path / BEST)
    assert describe_room(tmp_path, size, keep=2) == ""


def test_a_network_without_room_is_a_warning(tmp_path: Path, cpu: DistEnv, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand terabytes, without memory for one."""
    state = trained(cpu)
    with CheckpointWriter(tmp_path, cpu, Log(tmp_path, True, 1, 1, tensorboard=False)) as writer:
        writer.warn_of_size(state, RECORD, keep=2)
        assert capsys.readouterr().out == ""
        huge = nn.Parameter(torch.empty(2**24, 2**24, device="meta"))
        state.model.get_submodule("3").weight = state.model.get_submodule("4").weight = huge
        writer.warn_of_size(state, RECORD, keep=1)
    size = 4 * 2**48
    assert f"warning: checkpoints will need {data_size(4 * size)[:4]}" in capsys.readouterr().out


def test_a_write_that_fails_is_logged_at_once(tmp_path: Path, cpu: DistEnv, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gone"
    with CheckpointWriter(folder, cpu, Log(folder, True, 1, 1, tensorboard=False)) as writer:
        writer.start(checkpoint_of(resolved()))
    reason = "No such file or directory"
    assert capsys.readouterr().out == (
        f"warning: no checkpoint at step 0 ({reason}); make room in {folder}: the next save tries again\n"
    )
    assert writer.wait() == reason


# What an exit meets: two checkpoints that have been copied, but whose thread has not begun to write them.
EXIT = """
import sys, time
from pathlib import Path
import torch
from tests.conftest import resolved
from tests.training.checkpoints import checkpoint_of
from utils.distributed.exit import hard_exit
from utils.distributed.group import DistEnv
from utils.log import Log
from utils.training.state.checkpoint_writer import CheckpointWriter

folder = Path(sys.argv[1])
writer = CheckpointWriter(folder, DistEnv.single(torch.device("cpu")), Log(folder, True, 1, 1, False))
writer._thread.submit(time.sleep, 1)
writer.start(checkpoint_of(resolved()))
writer.start(checkpoint_of(resolved()))
hard_exit(7)
"""


def test_an_immediate_exit_waits_for_both_writes(tmp_path: Path) -> None:
    done = launch_forked(tmp_path, program=EXIT)
    assert done.status == 7, done.err
    assert {path.name for path in tmp_path.iterdir()} == {LAST, EARLIER[0]}
    load(tmp_path / LAST)


# No more memory than for the network and a part of its copy.
NO_MEMORY = """
import resource, sys
from pathlib import Path
import torch
from tests.conftest import resolved
from tests.training.checkpoints import RECORD
from utils.distributed.group import DistEnv
from utils.log import Log
from utils.training.state.checkpoint import create_checkpoint
from utils.training.state.checkpoint_writer import CheckpointWriter
from utils.training.state.meter import Meter
from utils.training.state.train_state import TrainState

folder, env = Path(sys.argv[1]), DistEnv.single(torch.device("cpu"))
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(2)))  # 134 MB
optimizer = torch.optim.SGD(model.parameters(), 0.1)
state = TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), None, Meter(env), env)
taken = create_checkpoint(state, {}, resolved(output_dir=folder), RECORD)
with CheckpointWriter(folder, env, Log(folder, True, 1, 1, False)) as writer:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000, resource.RLIM_INFINITY))
    writer.start(taken)
    print("written" if writer._newest.done() else "under way", flush=True)
    print(writer.wait(), flush=True)
"""


def test_without_memory_for_a_copy_training_waits(tmp_path: Path) -> None:
    done = launch_forked(tmp_path, program=NO_MEMORY)
    assert (done.status, done.out) == (0, "written\nNone\n"), done.err
    assert load(tmp_path / LAST).state.networks["model"]["0.weight"].shape == (4096, 4096)
    assert not (tmp_path / BEST).exists()


@pytest.mark.gpu
def test_from_a_gpu(tmp_path: Path) -> None:
    """The copy is page-locked, has the bits of the moment of the save, and torch keeps its memory for the next one."""
    env = DistEnv.single(torch.device("cuda", 0))
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 1024)).cuda()
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    state = TrainState(model, optimizer, GradScaler("cuda", enabled=False), ModelEmaV3(model), Meter(env), env)

    def train() -> None:
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        state.optimizer_step(clip_grad=0.0)

    train()
    held = Held(tmp_path, env)
    with held.writer:
        taken = checkpoint(state, tmp_path)
        expected = {name: weights.cpu().clone() for name, weights in taken.state.networks["model"].items()}
        held.writer.start(taken)
        for _ in range(10):
            train()
        torch.cuda.synchronize()
        held.release()
        assert held.writer.wait() is None
    assert_same(load(tmp_path / LAST).state.networks["model"], type(taken.state.networks["model"])(expected))
    allocations = torch.cuda.host_memory_stats()["num_host_alloc"]
    momentum = copy_to_host(taken.state).optimizer["state"][0]["momentum_buffer"]
    assert momentum.is_pinned()
    assert momentum.device.type == "cpu"
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == allocations
