"""The arrows of the house: scripts -> train -> run -> {pipelines, models} -> utils; importing does nothing."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Who may import whom, by the first part of the module's name; a room may always import its own.
ARROWS: dict[str, set[str]] = {
    "scripts": {"scripts", "train", "run", "pipelines", "models", "utils"},
    "train": {"run", "pipelines", "models", "utils"},
    "run": {"pipelines", "models", "utils"},
    "pipelines": {"utils"},
    "models": {"utils"},
    "utils": {"utils"},
}
FILES = [
    *(ROOT / f"{name}.py" for name in ("train", "run", "pipelines", "models")),
    *sorted((ROOT / "utils").rglob("*.py")),
    *sorted((ROOT / "scripts").rglob("*.py")),
]


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imported(tree: ast.AST, module: str) -> Iterator[str]:
    """Full names of all modules that a module imports anywhere, also within functions and under conditions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            yield ".".join([*package, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield ast.literal_eval(node.args[0])


def offences(source: str, module: str) -> list[str]:
    """Imports of `module` that the house does not allow."""
    room = module.split(".")[0]
    found = []
    for name in imported(ast.parse(source), module):
        target = name.split(".")[0]
        if target == "tests" or (target in ARROWS and target not in ARROWS[room]):
            found.append(f"{module} imports {name}")
        if target == "nvidia" and module not in ("pipelines", "utils.policies"):
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_follow_the_arrows(file: Path) -> None:
    assert offences(file.read_text(), name_of(file)) == []


def test_every_room_is_watched() -> None:
    watched = {name_of(file) for file in FILES}
    assert {path.stem for path in ROOT.glob("*.py")} <= watched  # a new file at the top needs its arrow
    assert {"train", "run", "pipelines", "models", "utils.config", "utils.log"} <= watched
    assert any("nvidia.dali" in set(imported(ast.parse(file.read_text()), name_of(file))) for file in FILES)


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("import train", "utils.log", 1),
        ("from train import main", "pipelines", 1),
        ("def f():\n    import pipelines", "models", 1),
        ("if x:\n    from models import create_model", "pipelines", 1),
        ("from utils import config, dataset", "models", 0),
        ("import scripts.env", "train", 1),
        ("import train, utils.config", "scripts.benchmark", 0),
        ("from . import config", "utils.log", 0),
        ("from .config import flag", "utils.log", 0),
        ("import importlib\nimportlib.import_module('train')", "utils.log", 1),
        ("import nvidia.dali as dali", "train", 1),
        ("from nvidia.dali import fn", "scripts.benchmark", 1),
        ("from nvidia.dali import fn", "pipelines", 0),
        ("from nvidia.dali import fn", "utils.policies", 0),
        ("from nvidia.dali import fn", "utils.augment", 1),
        ("from tests.conftest import ROOT", "utils.log", 1),
        ("import trainer, modelsx, torch", "utils.log", 0),
    ],
)
def test_the_watchman_himself(source: str, module: str, count: int) -> None:
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
