"""Flags, defaults, help and exit statuses are those of tests/contract.json.

The keys of files are compared with it where tests write those files: `assert_keys` of tests/contract.py.
"""

import importlib
from typing import Any

import pytest

from scripts.bench.__main__ import NAMES
from tests.contract import CONTRACT, flags_of
from utils import errors
from utils.errors import RunFailed, Stopped, UserError
from utils.options.cli import TRAIN, Program

MODULES = (
    "bench.__main__", *(f"bench.{name}" for name in NAMES), "benchmark", "check_dataset", "convert_dataset", "download",
    "export", "find_label_errors", "make_digits", "predict", "probe", "report", "runs", "track", "watch",
)  # fmt: skip
PROGRAMS: tuple[Program[Any], ...] = (
    TRAIN,
    *(importlib.import_module(f"scripts.{name}").PROGRAM for name in MODULES),
)
by_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.name))


def test_every_program_is_in_the_contract() -> None:
    assert [program.name for program in PROGRAMS] == list(CONTRACT["flags"])


@by_program
def test_flags(program: Program[Any]) -> None:
    assert flags_of(program) == CONTRACT["flags"][program.name]


@by_program
def test_help_ends_with_0(program: Program[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(["--help"], pytest.fail) == 0
    out, err = capsys.readouterr()
    assert f"Usage: {program.name}" in out
    assert err == ""


@by_program
def test_wrong_usage_ends_with_2_and_one_line(program: Program[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(["--unlike-any"], pytest.fail) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{program.name}: No such option: --unlike-any; {program.name} --help lists all flags\n"


@pytest.mark.parametrize(
    ("error", "name", "printed"),
    [
        (None, "done", ""),
        (RunFailed("the loss\nis nan"), "failed", "train.py: the loss\\nis nan\n"),
        (UserError("--lr 0: must not be"), "wrong usage", "train.py: --lr 0: must not be\n"),
        (Stopped(), "stopped", ""),
        (Stopped("stopped by Ctrl-C"), "stopped", "train.py: stopped by Ctrl-C\n"),
        (KeyboardInterrupt(), "interrupted", ""),
    ],
    ids=["done", "failed", "wrong usage", "stopped", "stopped with a message", "interrupted"],
)
def test_exit_statuses(
    error: BaseException | None, name: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(config: object) -> None:
        if error is not None:
            raise error

    assert TRAIN.run(["--data-dir", "images"], work) == CONTRACT["exit_statuses"][name]
    assert capsys.readouterr() == ("", printed)


def test_every_exit_status_is_in_the_contract() -> None:
    statuses = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert statuses == set(CONTRACT["exit_statuses"].values())
