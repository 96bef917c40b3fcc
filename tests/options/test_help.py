"""`train.py --help`: every flag once, in 100 columns, the first run first."""

import re

import pytest

from tests.harness import launch
from utils.options.config import flag_fields
from utils.options.flags import FIRST, flag

FIELDS = flag_fields()


@pytest.fixture(scope="module")
def help_text() -> str:
    """What --help prints on a terminal of 100 columns."""
    code = "from utils.options.cli import parse; parse(['--help'])"
    env = dict.fromkeys(("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "TERMINAL_WIDTH"))  # what typer would obey
    done = launch(program=code, env=env | {"COLUMNS": 100, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "error"})
    assert (done.status, done.err) == (0, "")
    return done.out


def listed_flags(text: str) -> list[str]:
    return re.findall(r"^│ (--[a-z][a-z0-9-]*) ", text, re.MULTILINE)


def test_help_lists_every_flag_once(help_text: str) -> None:
    assert sorted(listed_flags(help_text)) == sorted(["--help", "--version", *(flag(field.name) for field in FIELDS)])


def test_help_fits_the_terminal(help_text: str) -> None:
    lines = help_text.splitlines()
    assert len(lines) <= 272
    assert max(map(len, lines)) <= 100
    assert "…" not in help_text  # nothing is cut off


def test_help_begins_with_the_first_run(help_text: str) -> None:
    panels = re.split(r"^╭─ (.+?) ─+╮$", help_text, flags=re.MULTILINE)
    names, bodies = panels[1::2], panels[2::2]
    assert names[:2] == ["Options", FIRST]  # Options holds what every program has
    assert listed_flags(bodies[0]) == ["--version", "--help"]
    assert listed_flags(bodies[1]) == [
        "--data-dir",
        "--output-dir",
        "--name",
        "--arch",
        "--epochs",
        "--batch-size",
        "--lr",
    ]


def test_help_states_defaults_choices_and_exit_statuses(help_text: str) -> None:
    text = " ".join(help_text.replace("│", " ").split())
    for fragment in ("[default: resnet50]", "0.256 for sgd", "auto, bf16, fp16, none.", "torchrun", "2 wrong usage"):
        assert fragment in text
