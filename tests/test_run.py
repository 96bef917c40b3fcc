"""Weights that went wrong are never saved."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, environment, read_checkpoint, read_metrics

# train.py with a fault in its memory: after step 3 of rank FAULTY a weight gets another value.
FAULTY = """
import os, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
import train

steps = 0

def corrupt(optimizer, arguments, options):
    global steps
    steps += 1
    if steps == 3 and os.environ.get("RANK", "0") == os.environ["FAULTY"]:
        with torch.no_grad():
            optimizer.param_groups[-1]["params"][-1].view(-1)[0] = float(os.environ["VALUE"])

register_optimizer_step_post_hook(corrupt)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("processes", "faulty", "value", "said", "steps"),
    [
        (1, "0", "nan", "no checkpoint at step 3: the weights are not finite", [1, 2, 3, 4, 5]),
        (2, "1", "0.125", "at step 3: the weights of rank 1 are no longer those of rank 0 (", [1, 2, 3]),
    ],
    ids=["nan", "diverged"],
)
def test_weights_that_went_wrong_are_not_saved(
    data: Path, tmp_path: Path, processes: int, faulty: str, value: str, said: str, steps: list[int]
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = [
        sys.executable,
        *(torchrun if processes > 1 else ()),
        script,
        *TINY,
        "--data-dir",
        data,
        "--batch-size",
        "4",
    ]
    done = subprocess.run(
        [*map(str, words), "--output-dir", str(tmp_path / "out"), "--checkpoint-steps", "1", "--epochs", "9",
         "--max-bad-steps", "2"],
        capture_output=True, text=True, timeout=200, check=False,
        env=environment() | {"PYTHONPATH": str(ROOT), "FAULTY": faulty, "VALUE": value},
    )  # fmt: skip
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count(said) == 1
    assert done.stderr.count("train.py: ") == 1, "one line, of rank 0"
    assert read_checkpoint(tmp_path / "out")["step"] == 2
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == steps
    assert "NaN" not in (tmp_path / "out" / "metrics.jsonl").read_text(), "which is not JSON"
