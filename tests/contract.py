"""The contract with scripts that start and read Brisk: tests/contract.json, and what to compare with it.

contract.json lists every flag with its default, choices and help, the keys of every file, and the exit statuses. A
change of it is a change for users, and goes into CHANGELOG.md.
"""

import functools
import inspect
import json
import typing
from pathlib import Path
from typing import Any

from tests.harness import ROOT
from utils.options.cli import Program

CONTRACT: dict[str, Any] = json.loads((ROOT / "tests" / "contract.json").read_text())


def keys_of(value: Any) -> Any:
    """The keys of JSON: a sorted list, or a dict by key where some hold objects; None for no object."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [keys_of(value[0])]
    if not isinstance(value, dict):
        return None
    inner = {name: keys_of(each) for name, each in value.items()}
    return inner if any(inner.values()) else sorted(inner)


def assert_keys(file: str, value: Any, variant: str = "") -> None:
    """Hold the content of a file, or a line of it, to the contract.

    Args:
        file: its name, such as `summary.json`.
        value: its content.
        variant: which of its forms it has, for a file that has several.
    """
    expected, found = CONTRACT["files"][file], keys_of(value)
    expected = expected[variant] if variant else expected
    assert found == expected, (f"tests/contract.json, {file} {variant}", set(found) ^ set(expected))


def flags_of(program: Program[Any]) -> dict[str, dict[str, Any]]:
    """Every flag of a program: its default as `--help` shows it, its choices, and its help without them."""
    annotations = {name: each.annotation for name, each in inspect.signature(program.read_options).parameters.items()}
    found = {}
    for option in program.command().params:
        if option.name == "version":  # which every program has
            continue
        _, info, *_ = typing.get_args(annotations[option.name])
        choices = list(info.parser.args[0]) if isinstance(info.parser, functools.partial) else []
        name = "/".join([*option.opts, *option.secondary_opts])
        help = option.help.removesuffix(f" {', '.join(choices)}.") if choices else option.help
        found[name] = {"default": _default(option), "choices": choices, "help": help}
    return found


def _default(option: Any) -> Any:
    if isinstance(getattr(option, "show_default", None), str):
        return option.show_default
    if option.required:
        return "required"
    return str(option.default) if isinstance(option.default, Path) else option.default
