"""docs/internals/refusals.md is true: each of its rows ends in exit status 2 and the line that the page shows."""

from pathlib import Path

import pytest

import train
from tests.conftest import call_main
from tests.harness import assert_refused
from tests.refusals import CASES, COMMANDS_HEAD, HEAD, PAGE, command_row, row, written
from tests.refused_commands import COMMANDS, Command, prepare
from tests.refused_folders import Case


def name_of(case: Case) -> str:
    return f"{case.form}, {case.what}"


def test_the_page_has_these_rows() -> None:
    data_sets, _, commands = PAGE.read_text().partition(COMMANDS_HEAD)
    assert data_sets.startswith(HEAD)
    expected = [(case.form, case.what, f"`{case.flags}`" if case.flags else "") for case in CASES]
    assert len(set(expected)) == len(expected)
    cells = [tuple(line.strip("| ").split(" | ")) for line in data_sets.removeprefix(HEAD).splitlines()]
    assert [(each[0], each[1], each[2].strip()) for each in cells] == expected
    lines = [line.split(" | ")[1].strip("`") for line in commands.splitlines()]
    assert lines == [command.line for command in COMMANDS]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_row_is_true(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    with written(case) as folder:
        done = call_main(train.main, case.words(folder), capsys)
        expected = row(case, done, folder)
        assert_refused(done)
        assert not (folder / "run").exists(), "refused before the output folder is made"
    assert expected in PAGE.read_text().splitlines()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    prepare(folder)
    return folder


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All that lies in a folder; None is no file."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line)
def test_a_command_is_refused(
    command: Command, prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prepared)
    before = contents(prepared)
    done = call_main(command.program, command.words, capsys)
    assert_refused(done, program=command.line.split()[0])
    assert command_row(command, done) in PAGE.read_text().splitlines()
    assert contents(prepared) == before
