"""Sizes of files and functions, what a file's first line says, and that tests mirror the code."""

import ast
from collections.abc import Iterator

from tests.harness import ROOT, offences, tracked_files

MAX_FILE_LINES, MAX_TRAIN_LINES, MAX_FUNCTION_LINES = 400, 250, 50
PYTHON = tracked_files("*.py")
MODULES = [path for path in PYTHON if path.parent == ROOT or ROOT / "utils" in path.parents]


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PYTHON}
    limits = {path: MAX_TRAIN_LINES if path == ROOT / "train.py" else MAX_FILE_LINES for path in PYTHON}
    assert {path: length for path, length in lengths.items() if length > limits[path]} == {}


def long_functions(source: str) -> Iterator[str]:
    """Name and length of the functions over the limit, from `def` to the last line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{node.name}: {length} lines"


def test_functions_are_short() -> None:
    assert offences(PYTHON, lambda source: list(long_functions(source))) == {}


def test_a_long_function_is_found() -> None:
    body = "        x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert list(long_functions(f"class A:\n    @cached\n    def f(self):\n{body}")) == []
    assert list(long_functions(f"class A:\n    def f(self):\n{body}        y = 1\n")) == ["f: 51 lines"]
    assert list(long_functions(f"if x:\n    async def f():\n{body}        y = 1\n")) == ["f: 51 lines"]


def has_first_line(source: str) -> bool:
    """Whether a module is empty or begins with a docstring whose first line is a sentence."""
    first, _, rest = (ast.get_docstring(ast.parse(source), clean=False) or "").partition("\n")
    return source == "" or (first.endswith(".") and (rest == "" or rest.startswith("\n")))


def test_the_first_line_says_what_a_file_is_for() -> None:
    assert [path for path in MODULES if not has_first_line(path.read_text())] == []


def test_a_wrong_first_line_is_found() -> None:
    assert has_first_line('"""One sentence."""\nx = 1\n')
    assert has_first_line('"""One sentence.\n\nMore.\n"""\n')
    for source in ("x = 1\n", '"""No sentence"""\n', '"""\nLater.\n"""\n', '"""One that goes\non.\n"""\n'):
        assert not has_first_line(source)


def test_tests_mirror_utils() -> None:
    """Besides whole runs and scripts."""
    rooms = {path.parent.name for path in tracked_files("utils/*/__init__.py") if path.parent.parent == ROOT / "utils"}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in tracked_files("tests/*/*.py")}
    assert folders - {"runs", "scripts"} == rooms
    assert rooms >= {"data", "distributed", "network", "report", "training", "benchmark"}
