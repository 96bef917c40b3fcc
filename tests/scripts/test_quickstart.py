"""scripts/quickstart.sh DIR where DIR/run exists; .ci/run runs the complete quickstart."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment, kill_tree

ENVIRONMENT = environment() | {"BRISK_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
QUICKSTART = str(ROOT / "scripts" / "quickstart.sh")


@pytest.mark.parametrize(
    "config", [None, "no JSON", "[]", "{}", json.dumps({"data_dir": None}), json.dumps({"data_dir": "/data/imagenet"})]
)
def test_another_run_is_not_deleted(tmp_path: Path, config: str | None) -> None:
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    (output_dir / "last.pt").write_text("weeks of work")
    if config is not None:
        (output_dir / "config.json").write_text(config)
    done = subprocess.run([QUICKSTART, tmp_path], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"quickstart.sh: {output_dir} exists and is not from a quickstart")
    assert done.stderr.count("\n") == 1
    assert (output_dir / "last.pt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.dist
@pytest.mark.parametrize("to_repository", [False, True])
def test_a_quickstart_run_is_replaced(tmp_path: Path, to_repository: bool) -> None:
    data_dir = tmp_path / "digits"
    old = tmp_path / "run" / "last.pt"
    old.parent.mkdir()
    old.write_text("an earlier quickstart")
    # The default folder is written down as it is seen from the repository.
    written = os.path.relpath(data_dir, ROOT) if to_repository else str(data_dir)
    (old.parent / "config.json").write_text(json.dumps({"data_dir": written}))
    process = subprocess.Popen([QUICKSTART, tmp_path], env=ENVIRONMENT)
    try:
        while old.exists():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        kill_tree(process.pid)
        process.wait()


@pytest.mark.dist
def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    process = subprocess.Popen([QUICKSTART, tmp_path], env=ENVIRONMENT)
    try:
        while not (tmp_path / "digits").exists():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        kill_tree(process.pid)
        process.wait()
