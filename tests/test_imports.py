"""Which part of the project may import which (CONTRIBUTING.md), and that importing has no side effects."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import launch_forked
from tests.harness import ROOT, Finished, launch

# The rooms from the bottom of the house to its top, by their paths in utils/; "base" is what lies in utils/ itself.
# A room may import those that come before it in this list, and its own. So there is no circle.
ORDER = (
    "base", "options", "distributed", "report", "report.tracking",
    "data.images", "data", "data.formats", "data.augmentation", "data.staging", "data.reading", "data.conversion",
    "data.splits", "data.loaders", "data.feed",
    "network.kernels", "network", "pipelines", "models",
    "training.optimization", "training.state", "training.settings", "training.resume", "training",
    "inference", "inference.export", "benchmark", "train", "scripts",
)  # fmt: skip
# A room, with those inside it -> rooms that it does not know, though they lie below it.
APART = {
    "report": {"distributed"},
    "data": {"report"},
    "network": {"report", "data"},
    "pipelines": {"report", "network"},
    "models": {"report", "data", "pipelines"},
    "benchmark": {"report", "inference", "data.conversion", "data.feed"},
    "inference.export": {"report"},
    "train": {"benchmark"},
}


def _within(room: str, other: str) -> bool:
    return room == other or room.startswith(f"{other}.")


def allowed(room: str) -> set[str]:
    """The rooms that `room` may import."""
    apart = {each for name, names in APART.items() if _within(room, name) for each in names}
    below = ORDER[: ORDER.index(room) + 1]
    return {name for name in below if not any(_within(name, each) for each in apart)}


FILES = [
    *(ROOT / f"{name}.py" for name in ("train", "pipelines", "models")),
    *sorted((ROOT / "utils").rglob("*.py")),
    *sorted((ROOT / "scripts").rglob("*.py")),
]


def room_of(module: str) -> str:
    """`utils.data.loaders.sampler` -> data.loaders; `utils.log` -> base; what is not ours -> ""."""
    first, *rest = module.split(".")
    if first != "utils":
        return first if first in ORDER else ""
    paths = (".".join(rest[:length]) for length in range(len(rest), 0, -1))
    return next((path for path in paths if path in ORDER), "base")


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
            yield ast.unparse(node.args[0]).lstrip("f").strip("'")  # f"scripts.bench.{name}" as it is


def offences(source: str, module: str) -> list[str]:
    """Imports of `module` that the rules do not allow."""
    room = room_of(module)
    found = []
    for name in imported(ast.parse(source), module):
        target = room_of(name)
        if name.split(".")[0] == "tests" or (target and target not in allowed(room)):
            found.append(f"{module} imports {name}")
        if name.split(".")[0] == "nvidia" and room.partition(".")[0] not in ("pipelines", "data"):
            found.append(f"{module} imports {name}")
    return found


def test_imports_follow_the_arrows() -> None:
    assert [offence for file in FILES for offence in offences(file.read_text(), name_of(file))] == []


def test_every_room_is_checked() -> None:
    checked = {name_of(file) for file in FILES}
    assert {path.stem for path in ROOT.glob("*.py")} <= checked  # a new file at the top needs its arrow
    folders = {name_of(path.parent).removeprefix("utils.") for path in (ROOT / "utils").glob("*/**/*.py")}
    assert folders <= set(ORDER)
    assert {room_of(module) for module in checked} == set(ORDER)
    assert any("nvidia.dali.fn" in set(imported(ast.parse(file.read_text()), name_of(file))) for file in FILES)


WRONG = [
    ("import utils.distributed.group", "utils.log"),
    ("from utils.distributed import group", "utils.options.config"),
    ("from utils.training.run import Run", "utils.report.page"),
    ("from utils.data.loaders.sampler import RandomSampler", "utils.distributed.group"),
    ("from utils.network.augment import Normalize", "utils.data.images.batch"),
    ("from utils.data.images.batch import Batch", "utils.network.gradients"),
    ("from utils.benchmark.verdict import diagnose", "utils.training.run"),
    ("from utils.training.state.train_state import TrainState", "pipelines"),
    ("from utils.data.images.manifest import Manifest", "models"),
    ("from train import main", "utils.benchmark.measure"),
    ("from utils.benchmark.verdict import diagnose", "utils.inference.export.trained"),
    ("import scripts.benchmark", "train"),
    ("from tests.conftest import ROOT", "scripts.benchmark"),
    ("import train", "utils.log"),
    ("from train import main", "pipelines"),
    ("def f():\n    import pipelines", "models"),
    ("if x:\n    from models import create_model", "pipelines"),
    ("import importlib\nimportlib.import_module('train')", "utils.log"),
    ("import nvidia.dali as dali", "train"),
    ("from nvidia.dali import fn", "utils.network.augment"),
]
RIGHT = [
    ("from nvidia.dali import fn", "pipelines"),
    ("from nvidia.dali import fn", "utils.data.formats.folder"),
    ("import models, pipelines", "utils.training.build"),
    ("import train, utils.options.config", "scripts.benchmark"),
    ("from . import config", "utils.log"),
    ("from .config import flag", "utils.log"),
    ("import trainer, modelsx, torch", "utils.log"),
]


@pytest.mark.parametrize(("source", "module"), WRONG)
def test_a_wrong_import_is_found(source: str, module: str) -> None:
    assert len(offences(source, module)) == 1


def test_a_wrong_import_is_found_in_every_room() -> None:
    assert {room_of(module).partition(".")[0] for _, module in WRONG} == {room.partition(".")[0] for room in ORDER}


@pytest.mark.parametrize(("source", "module"), RIGHT)
def test_a_right_import_is_allowed(source: str, module: str) -> None:
    assert offences(source, module) == []


PRINTS = {"print", "sys.stdout.write", "sys.stderr.write", "tqdm.write"}


def test_only_log_prints() -> None:
    calls = [
        (name_of(file), ast.unparse(node.func))
        for file in FILES
        if name_of(file).startswith("utils.")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert {module for module, called in calls if called in PRINTS} == {"utils.log"}


def test_importing_train_does_nothing() -> None:
    """In the process from which tests fork: a fresh one takes ten seconds."""
    done = launch_forked(program="import json, tests.preloaded; print(json.dumps(tests.preloaded.FOUND))")
    assert (done.status, done.err) == (0, "")
    found = {
        "changed": [],
        "cuda": False,
        "nvimgcodec": False,
        "distributed": False,
        "hooks": [],
        "threads": 0,
        "files": [],
    }
    assert json.loads(done.out) == found


@pytest.mark.slow  # ten seconds
def test_importing_train_writes_nothing_at_home(tmp_path: Path) -> None:
    env = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": tmp_path}
    assert launch(program="import train", cwd=tmp_path, env=env) == Finished(0, "", "")
    assert list(tmp_path.iterdir()) == []
