"""scripts/gpu_check.sh where there is no GPU, so that nothing ends as it should, and with eight that are made up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment


@pytest.mark.dist
def test_what_fails_is_told_and_nothing_is_left_of_an_earlier_call(data: Path, tmp_path: Path) -> None:
    (tmp_path / "resnet50.json").write_text(json.dumps({"top1": 71.92}))
    (tmp_path / "resnet50.log").write_text("an earlier call\n")
    (tmp_path / "mine.json").write_text(json.dumps({"top1": 99.0}))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "BRISK_PYTHON": sys.executable, "PYTEST_ADDOPTS": "--collect-only"}
    words = [ROOT / "scripts" / "gpu_check.sh", data, tmp_path]
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=280, env=environment() | hidden, check=False
    )
    table = (tmp_path / "table.txt").read_text()
    assert done.returncode == 1, table
    assert "gpu tests: exit 0\n" in table
    assert "resnet50: exit 2, not 0\n" in table
    assert "efficientnet_b0: exit 2, not 143\n" in table
    assert "efficientnet_b0: exit 2, not 0\n" in table
    assert "resnet50 has no summary\n" in table
    assert "71.92" not in table
    assert "mine" not in table
    assert "an earlier call" not in (tmp_path / "resnet50.log").read_text()
    assert (tmp_path / "mine.json").exists()


# Instead of Python: eight GPUs that train on Imagenette's 9,469 images, and torchrun's status after a signal.
PRETENDER = """#!{python}
import pathlib, signal, sys, time
words = sys.argv[1:]
if words[0] == "-c":
    print(8)
if "train.py" in words:
    flags = dict(zip(words, words[1:]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    output_dir = pathlib.Path(flags["--output-dir"])
    output_dir.mkdir(exist_ok=True)
    epoch = 9469 // (8 * int(flags["--batch-size"]))
    for step in range(1, int(flags["--epochs"]) * epoch + 1):
        time.sleep(0.1)
        if step % int(flags["--log-steps"]) == 0 or step % epoch == 0:
            with (output_dir / "metrics.jsonl").open("a") as file:
                file.write(str(step) + chr(10))
    (output_dir / "summary.json").write_text("")
"""


def test_the_signal_comes_before_the_end_on_eight_gpus_too(data: Path, tmp_path: Path) -> None:
    pretender = tmp_path / "python"
    pretender.write_text(PRETENDER.format(python=sys.executable))
    pretender.chmod(0o755)
    words = [ROOT / "scripts" / "gpu_check.sh", data, tmp_path / "out"]
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=60, check=False,
        env=environment() | {"BRISK_PYTHON": str(pretender)},
    )  # fmt: skip
    runs = ("resnet50: exit 0", "efficientnet_b0: exit 1", "efficientnet_b0: no summary yet", "efficientnet_b0: exit 0")
    assert (tmp_path / "out" / "table.txt").read_text() == "\n".join(("gpu tests: exit 0", *runs, ""))
    assert (done.returncode, done.stderr) == (0, "")
