"""The folder that keeps compiled networks, and what makes torch compile again."""

import itertools
import logging
import os
from pathlib import Path

import pytest
import timm
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.amp.grad_scaler import GradScaler

from tests.conftest import assert_same, resolved
from tests.harness import ROOT, launch
from utils.distributed.group import DistEnv
from utils.network.compiler import compile_network, enable_compile_cache
from utils.network.folding import FoldNorms
from utils.network.loss import create_criterion
from utils.network.parallel import create_forward_backward


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is restored after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return monkeypatch


@pytest.mark.slow  # compiles
def test_compiled_kernels_land_in_the_users_cache(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables.setenv("XDG_CACHE_HOME", str(tmp_path))
    enable_compile_cache()
    torch.compile(lambda images: images.sin() + images.cos())(torch.ones(7))
    assert list((tmp_path / "brisk").glob("compiled/**/*.py")), "no generated code"


def test_a_toolkit_without_a_gpu_is_not_logged() -> None:
    compile_network(torch.nn.Linear(2, 2))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addHandler(handler)
    logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
    logger.warning("another")
    logger.removeHandler(handler)
    assert records == ["another"]


FRESH_PROCESS = """
import sys
import torch
from torch import nn
from torch._dynamo.utils import counters
from utils.network import fused_ops
from utils.network.fused_layers import swap_fused_layers
from utils.network.compiler import compile_network, enable_compile_cache

enable_compile_cache()
fused_ops.__file__ = sys.argv[1]
network = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=8)
)
assert all(type(layer).__module__ == "utils.network.fused_layers" for layer in swap_fused_layers(network)[1:])
compile_network(network)(torch.ones(2, 3, 8, 8)).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_the_next_launch_finds_a_network_with_fused_layers(tmp_path: Path) -> None:
    """But not if the source of the layers has changed in between."""
    # None, as torch sets TORCHINDUCTOR_CACHE_DIR once it has compiled.
    env = {"XDG_CACHE_HOME": tmp_path, "TORCHINDUCTOR_CACHE_DIR": None}
    original, changed = ROOT / "utils" / "network" / "fused_ops.py", tmp_path / "fused_ops.py"
    changed.write_text(original.read_text() + "# changed\n")
    done = [launch(source, program=FRESH_PROCESS, env=env) for source in (original, original, changed)]
    hits = [process.out.split() for process in done]
    assert hits == [["0", "0"], ["1", "2"], ["0", "0"]], "forward and backward graph"


def test_a_compiled_step_is_kept_for_one_precision() -> None:
    """The key of torch 2.11 says only whether there is autocast."""
    keys = [FoldNorms().uuid()]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(FoldNorms().uuid())
    assert all(one != other for one, other in itertools.combinations(keys, 2))


def test_the_folder_that_the_user_has_set_stays(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    variables.setenv("XDG_CACHE_HOME", str(tmp_path))
    enable_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


def test_torchs_default_is_replaced(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables.setenv("XDG_CACHE_HOME", str(tmp_path))
    variables.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    enable_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))


def test_unwritable_home_leaves_torchs_default(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    variables.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    enable_compile_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.slow  # compiles for three sizes
@pytest.mark.parametrize(("epoch", "compiled"), [(0, 2), (1, 1), (2, 0)])
def test_later_sizes_are_compiled_before_they_come(cpu: DistEnv, epoch: int, compiled: int) -> None:
    """Each once, and a pass of such a size then compiles nothing; nothing that a checkpoint holds changes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3, drop_path_rate=0.2)
    config = resolved(compile=True, batch_size=2, image_size=40, resize_schedule="0:32,1:40,2:48", epochs=3)
    before, generator = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()

    def count() -> int:
        return counters["stats"]["unique_graphs"]

    start = count()
    step = create_forward_backward(
        config,
        compile_network(model),
        model,
        create_criterion(config, cpu.device),
        GradScaler("cpu", enabled=False),
        cpu,
        None,
        epoch,
    )
    assert count() - start == compiled
    assert_same(dict(model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())
    start = count()
    for size in (32, 40, 48)[epoch + 1 :]:
        images = torch.rand(2, 3, size, size).contiguous(memory_format=torch.channels_last)
        step(images, torch.tensor([0, 1]), 0)
    assert count() == start
