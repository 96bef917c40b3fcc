"""What a program does before its slow imports: help, version, mistakes, and the first line."""

import json
from pathlib import Path

import pytest

from tests.contract import CONTRACT
from tests.forked import launch_forked
from tests.harness import ROOT, Finished, assert_refused, launch
from utils import __version__

# Runs a program as `python PROGRAM FLAGS` does, and then writes the exit status and which of the slow packages it has
# imported to the file RESULT.
PROGRAM = """
import json, os, runpy, sys
result, sys.argv = sys.argv[1], sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    slow = {"torch", "torchvision", "timm", "nvidia.dali", "sklearn", "matplotlib"} & set(sys.modules)
    with open(result, "w") as file:
        json.dump([ended.code, sorted(slow)], file)
"""


def run(name: str, tmp_path: Path, *flags: object) -> tuple[int, list[str], Finished]:
    """Exit status, slow packages that were imported, and the output."""
    program, *words = name.split()  # `bench NAME`
    path = (ROOT if name == "train.py" else ROOT / "scripts") / program
    done = launch(tmp_path / "result", path, *words, *flags, program=PROGRAM, cwd=tmp_path)
    status, imported = json.loads((tmp_path / "result").read_text())
    return status, imported, done


# A slow import at the top of a program shows with any flag, and one of bench with any of its commands.
ROWS = [
    pytest.param(
        name,
        flag,
        marks=[] if name == "train.py" or (flag == "--xyzzy" and not name.startswith("bench ")) else pytest.mark.slow,
    )
    for name in CONTRACT["flags"]
    for flag in ("--help", "--version", "--xyzzy")
]


@pytest.mark.parametrize(("name", "flag"), ROWS)
def test_help_version_and_mistakes_import_nothing_slow(name: str, flag: str, tmp_path: Path) -> None:
    status, imported, done = run(name, tmp_path, flag)
    assert imported == []
    if flag == "--xyzzy":
        assert (status, done.out) == (2, "")
        assert done.err == f"{name}: No such option: --xyzzy; {name} --help lists all flags\n"
        return
    assert (status, done.err) == (0, "")
    assert (f"{name} of Brisk {__version__}\n" if flag == "--version" else f"Usage: {name}") in done.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data-dir", "nowhere"), "--data-dir nowhere: no such folder; give the one that holds train/ and val/"),
        (("--data-dir", "."), "--data-dir .: has no train/ folder; it must hold train/ and val/"),
        (("--loader", "synthetic", "--pretrained", "x.pt"), "--pretrained x.pt: no such file; give a weights file"),
        (("--loader", "synthetic", "--lr", 0), "--lr 0.0: must be more than 0 and finite"),
        (("--config", "recipe.yaml"), "--config recipe.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_mistakes_of_values_import_nothing_slow(flags: tuple[object, ...], message: str, tmp_path: Path) -> None:
    status, imported, done = run("train.py", tmp_path, *flags)
    assert (status, imported, done.out) == (2, [], "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_without_a_terminal_the_first_line_comes_once(tmp_path: Path) -> None:
    flags = ("--loader", "synthetic", "--arch", "no_such_network", "--output-dir", tmp_path / "run")
    program = f"import runpy; runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    done = launch_forked(*flags, program=program)
    assert done.out == "loading torch, DALI and timm\n"
    assert_refused(done, "--arch no_such_network: ")
