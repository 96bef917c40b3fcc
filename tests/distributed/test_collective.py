"""Functions that every rank must call are marked, as are their callers, and no rank decides alone whether to call."""

import ast
import functools
from collections.abc import Iterator

import pytest

from tests.test_imports import FILES, name_of

# What differs between ranks: a call must not depend on it.
OF_A_RANK = {"is_main", "rank", "local_rank"}
# torch's own, which only `utils.distributed` calls.
TORCHS = {
    "dist.all_reduce", "dist.all_gather_object", "dist.broadcast_object_list", "dist.gather_object", "dist.barrier",
    "dist.broadcast", "dist.new_group",
}  # fmt: skip
RUNS = ("run", "built")  # names of a `Run` outside it
# Every rank runs all of train.py. The others are programs of a single process.
UNMARKED = ("train", "utils.benchmark", "utils.data.feed", "utils.inference.export", "scripts")

Function = ast.FunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions, and methods as CLASS.METHOD."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def is_marked(node: Function) -> bool:
    return any(ast.unparse(each) == "collective" for each in node.decorator_list)


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name_of(file): ast.parse(file.read_text()) for file in FILES}


@functools.cache
def marked() -> set[str]:
    return {f"{module}.{name}" for module, tree in trees().items() for name, node in functions(tree) if is_marked(node)}


RUN = "utils.training.run.Run"


def imports(tree: ast.Module) -> dict[str, str]:
    """Name in a module -> full name of what it imports."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def calls(name: str, node: Function, module: str, names: dict[str, str]) -> Iterator[tuple[ast.Call, str]]:
    """Calls of collective functions within the function `name`, and the name of each.

    Of methods only those of the same object, and of a run.
    """
    for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
        text = ast.unparse(call.func)
        first, _, rest = text.partition(".")
        owner = f"{module}.{name.partition('.')[0]}" if first == "self" else RUN if first in RUNS else ""
        full = f"{owner}.{rest}" if owner else names.get(first, f"{module}.{first}") + (f".{rest}" if rest else "")
        if text in TORCHS or full in marked():
            yield call, text


def conditions(node: Function, call: ast.Call) -> Iterator[ast.expr]:
    """What decides whether a call in a function happens."""
    for each in ast.walk(node):
        if isinstance(each, ast.If | ast.IfExp | ast.While):
            parts = [*each.body, *each.orelse] if isinstance(each, ast.If | ast.While) else [each.body, each.orelse]
            if any(call in ast.walk(part) for part in parts):
                yield each.test
        elif isinstance(each, ast.BoolOp) and any(call in ast.walk(part) for part in each.values[1:]):
            yield from each.values[:-1]


def offences(module: str, tree: ast.Module) -> list[str]:
    found, names = [], imports(tree)
    exempt = module.startswith(UNMARKED)
    for name, node in functions(tree):
        for call, called in calls(name, node, module, names):
            here = f"{module}.{name}"
            if not (is_marked(node) or exempt):
                found.append(f"{here} calls {called} and is not marked")
            words = {
                each.attr if isinstance(each, ast.Attribute) else each.id
                for test in conditions(node, call)
                for each in ast.walk(test)
                if isinstance(each, ast.Attribute | ast.Name)
            }
            if words & OF_A_RANK:
                found.append(f"{here} calls {called} by {', '.join(words & OF_A_RANK)}")
    return sorted(set(found))


def test_callers_are_marked_and_no_rank_decides() -> None:
    assert [offence for module, tree in trees().items() for offence in offences(module, tree)] == []


WRONG = {
    "a caller that is not marked": "def f(env):\n    return broadcast(1, env)",
    "one rank": "@collective\ndef f(env):\n    if env.is_main:\n        broadcast(1, env)",
    "all ranks but one": "@collective\ndef f(env):\n    return None if env.rank == 0 else broadcast(1, env)",
    "one rank in a condition": "@collective\ndef f(env):\n    return env.is_main and broadcast(1, env)",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_call_is_found(kind: str) -> None:
    source = f"from utils.distributed.collectives import broadcast\n{WRONG[kind]}"
    assert len(offences("utils.training.run", ast.parse(source))) == 1


def test_a_right_call_is_allowed() -> None:
    source = (
        "from utils.distributed.collectives import broadcast\n@collective\ndef f(env):\n    return broadcast(1, env)"
    )
    assert offences("utils.training.run", ast.parse(source)) == []
    assert "utils.distributed.collectives.broadcast" in marked()
