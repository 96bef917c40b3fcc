"""scripts/gpu_tables.sh on a machine without a GPU, where every command is refused."""

import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, launch

SCRIPT = ROOT / "scripts" / "gpu_tables.sh"


@pytest.mark.slow
def test_failures_are_in_the_table(data: Path, tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text("an earlier call\n")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "BRISK_PYTHON": sys.executable}
    tables = ("small64", "small128", "evaluations", "starts", "pauses", "recipes", "feeds", "distillation")
    done = launch(data, data / "train", tmp_path, *tables, program=SCRIPT, env=hidden)
    table = (tmp_path / "table.txt").read_text()
    assert done.status == 1, table
    assert "an earlier call" not in table
    for name in tables:
        assert f"## {name}\n" in table
        assert f"\n{name}: exit " in f"\n{table}"
        reason = "seed 0: exit 2" if name in ("recipes", "feeds") else "--device cuda: no usable GPU here"
        assert reason in (tmp_path / f"{name}.log").read_text()


@pytest.mark.parametrize("words", [(), ("{data}", "{data}"), ("{data}", "{data}", "{out}", "fast")])
def test_a_call_that_names_no_table_is_refused(data: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = launch(*(word.format(data=data, out=tmp_path / "out") for word in words), program=SCRIPT)
    assert done.status == 2
    assert "usage: scripts/gpu_tables.sh DATA_DIR PHOTOS OUT [TABLE...], where TABLE is one of small64" in done.err
    assert not (tmp_path / "out").exists()
