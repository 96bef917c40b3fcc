"""The import rules of the house (CONTRIBUTING.md); importing does nothing."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Who may import whom; a room may always import its own. `base` is what lies in utils/ itself.
BASE = {"base"}
DISTRIBUTED = BASE | {"distributed"}
PIPELINES, MODELS = DISTRIBUTED | {"data"}, DISTRIBUTED | {"network"}
TRAINING = PIPELINES | MODELS | {"training", "pipelines", "models"}
BENCHMARK = TRAINING | {"benchmark"}
ARROWS: dict[str, set[str]] = {
    "base": BASE,
    "distributed": DISTRIBUTED,
    "data": DISTRIBUTED | {"data"},
    "network": DISTRIBUTED | {"network"},
    "pipelines": PIPELINES | {"pipelines"},
    "models": MODELS | {"models"},
    "training": TRAINING,
    "benchmark": BENCHMARK,
    "train": BENCHMARK | {"train"},
    "scripts": BENCHMARK | {"train", "scripts"},
}
FILES = [
    *(ROOT / f"{name}.py" for name in ("train", "pipelines", "models")),
    *sorted((ROOT / "utils").rglob("*.py")),
    *sorted((ROOT / "scripts").rglob("*.py")),
]


def room_of(module: str) -> str:
    """`utils.data.sampler` -> data; `utils.config` -> base; what is not ours -> ""."""
    first, *rest = module.split(".")
    if first == "utils":
        return rest[0] if rest and rest[0] in ARROWS else "base"
    return first if first in ARROWS else ""


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imported(tree: ast.AST, module: str) -> Iterator[str]:
    """Full names of all that a module imports anywhere, also within functions and under conditions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield ast.literal_eval(node.args[0])


def offences(source: str, module: str) -> list[str]:
    """Imports of `module` that the house does not allow."""
    room = room_of(module)
    found = []
    for name in imported(ast.parse(source), module):
        target = room_of(name)
        if name.split(".")[0] == "tests" or (target and target not in ARROWS[room]):
            found.append(f"{module} imports {name}")
        if name.split(".")[0] == "nvidia" and room not in ("pipelines", "data"):
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_follow_the_arrows(file: Path) -> None:
    assert offences(file.read_text(), name_of(file)) == []


def test_every_room_is_checked() -> None:
    checked = {name_of(file) for file in FILES}
    assert {path.stem for path in ROOT.glob("*.py")} <= checked  # a new file at the top needs its arrow
    folders = {path.name for path in (ROOT / "utils").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= set(ARROWS)
    assert {room_of(module) for module in checked} == set(ARROWS)
    assert any("nvidia.dali.fn" in set(imported(ast.parse(file.read_text()), name_of(file))) for file in FILES)


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("import utils.distributed.group", "utils.log", 1),
        ("from utils.distributed import group", "utils.config", 1),
        ("from utils.data.sampler import Sampler", "utils.distributed.group", 1),
        ("from utils.network.augment import Normalize", "utils.data.batch", 1),
        ("from utils.data.batch import Batch", "utils.network.gradients", 1),
        ("from utils.benchmark.verdict import diagnose", "utils.training.run", 1),
        ("from utils.training.state import TrainState", "pipelines", 1),
        ("from utils.data.manifest import Manifest", "models", 1),
        ("from train import main", "utils.benchmark.measure", 1),
        ("import scripts.benchmark", "train", 1),
        ("from tests.conftest import ROOT", "scripts.benchmark", 1),
        ("import train", "utils.log", 1),
        ("from train import main", "pipelines", 1),
        ("def f():\n    import pipelines", "models", 1),
        ("if x:\n    from models import create_model", "pipelines", 1),
        ("import importlib\nimportlib.import_module('train')", "utils.log", 1),
        ("import nvidia.dali as dali", "train", 1),
        ("from nvidia.dali import fn", "utils.network.augment", 1),
        ("from nvidia.dali import fn", "pipelines", 0),
        ("from nvidia.dali import fn", "utils.data.formats.folder", 0),
        ("import models, pipelines", "utils.training.build", 0),
        ("import train, utils.config", "scripts.benchmark", 0),
        ("from . import config", "utils.log", 0),
        ("from .config import flag", "utils.log", 0),
        ("import trainer, modelsx, torch", "utils.log", 0),
    ],
)
def test_a_wrong_import_is_found(source: str, module: str, count: int) -> None:
    assert len(offences(source, module)) == count


@pytest.mark.parametrize("file", [file for file in FILES if name_of(file).startswith("utils.")], ids=name_of)
def test_only_log_speaks(file: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    spoken = {ast.unparse(call.func) for call in calls} & {
        "print",
        "sys.stdout.write",
        "sys.stderr.write",
        "tqdm.write",
    }
    assert not spoken or name_of(file) == "utils.log"


SILENT_IMPORT = """
import json, random, signal, sys, threading
import numpy, torch
def seen():
    return [repr(random.getstate()), repr(numpy.random.get_state()), torch.get_rng_state().tolist(),
            torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
            [repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)], sys.argv]
before = seen()
import train
found = {
    "changed": [number for number, (old, new) in enumerate(zip(before, seen())) if old != new],
    "cuda": torch.cuda.is_initialized() or "nvidia.nvimgcodec" in sys.modules,  # whose import starts CUDA
    "distributed": torch.distributed.is_initialized(),
    "threads": [thread.name for thread in threading.enumerate()],
}
json.dump(found, sys.stdout)
"""


def test_importing_train_does_nothing(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SILENT_IMPORT],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"changed": [], "cuda": False, "distributed": False, "threads": ["MainThread"]}
    assert list(tmp_path.iterdir()) == []  # neither in the working folder nor at home
