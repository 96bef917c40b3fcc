"""docs/internals/refusals.md is true: each of its data sets ends in exit status 2 and the line that the page shows."""

import gc
from collections.abc import Iterator

import pytest

import train
from tests.conftest import call_main
from tests.harness import assert_refused
from tests.refusals import CASES, HEAD, PAGE, row, written
from tests.refused_folders import Case


@pytest.fixture
def frozen() -> Iterator[None]:
    """No object of this process is looked at before each fork, which would take most of the time."""
    gc.freeze()
    yield
    gc.unfreeze()


def name_of(case: Case) -> str:
    return f"{case.form}, {case.what}"


def test_the_page_has_these_rows() -> None:
    page = PAGE.read_text()
    assert page.startswith(HEAD)
    expected = [(case.form, case.what, f"`{case.flags}`" if case.flags else "") for case in CASES]
    assert len(set(expected)) == len(expected)
    cells = [tuple(line.strip("| ").split(" | ")) for line in page.removeprefix(HEAD).splitlines()]
    assert [(each[0], each[1], each[2].strip()) for each in cells] == expected


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_row_is_true(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    with written(case) as folder:
        done = call_main(train.main, case.words(folder), capsys)
        expected = row(case, done, folder)
        assert_refused(done)
        assert not (folder / "run").exists(), "refused before the output folder is made"
    assert expected in PAGE.read_text().splitlines()
