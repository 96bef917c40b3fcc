"""scripts/gpu_check.sh on a machine without a GPU, where every run fails."""

import json
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, launch


@pytest.mark.dist
@pytest.mark.slow
def test_failures_are_in_the_table_and_results_of_an_earlier_call_are_removed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "resnet50.json").write_text(json.dumps({"top1": 71.92}))
    (tmp_path / "resnet50.log").write_text("an earlier call\n")
    (tmp_path / "mine.json").write_text(json.dumps({"top1": 99.0}))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "BRISK_PYTHON": sys.executable, "PYTEST_ADDOPTS": "--collect-only"}
    done = launch(data, tmp_path, program=ROOT / "scripts" / "gpu_check.sh", env=hidden)
    table = (tmp_path / "table.txt").read_text()
    assert done.status == 1, table
    assert "gpu tests: exit 0\n" in table
    assert "resnet50: exit 2, not 0\n" in table
    assert "efficientnet_b0: exit 2, not 143\n" in table
    assert "efficientnet_b0: exit 2, not 0\n" in table
    assert "resnet50 has no summary\n" in table
    assert "71.92" not in table
    assert "mine" not in table
    assert "an earlier call" not in (tmp_path / "resnet50.log").read_text()
    assert (tmp_path / "mine.json").exists()
