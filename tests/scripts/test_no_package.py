"""`pip install .` says that there is no package."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT


@pytest.mark.parametrize(
    "words",
    [
        ["wheel", "."],
        pytest.param(["wheel", "--no-build-isolation", "."], marks=pytest.mark.slow),
        pytest.param(["install", "-e", "."], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_pip_ends_with_our_line(tmp_path: Path, words: list[str]) -> None:
    """In a copy, as pip builds where the project is; --target keeps it from the packages of this interpreter."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/no_package.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    target = ["--target", tmp_path / "out"] if words[0] == "install" else ["--wheel-dir", tmp_path / "out"]
    command = [sys.executable, "-m", "pip", *words, "--no-deps", "--no-index", *map(str, target)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Brisk is a checkout, not a package: pip install -r requirements.txt" in done.stdout + done.stderr
    assert list(tmp_path.rglob("*.whl")) == []
