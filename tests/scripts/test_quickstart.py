"""scripts/quickstart.sh DIR where DIR/run exists; .ci/run runs the complete quickstart."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT, assert_refused, launch, start

OPTIONS: Any = {
    "program": ROOT / "scripts" / "quickstart.sh",
    "env": {"BRISK_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
}


@pytest.mark.parametrize(
    "config", [None, "no JSON", "[]", "{}", json.dumps({"data_dir": None}), json.dumps({"data_dir": "/data/imagenet"})]
)
def test_another_run_is_not_deleted(tmp_path: Path, config: str | None) -> None:
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    (output_dir / "last.pt").write_text("weeks of work")
    if config is not None:
        (output_dir / "config.json").write_text(config)
    done = launch(tmp_path, **OPTIONS)
    assert_refused(done, f"{output_dir} exists and is not from a quickstart", program="quickstart.sh")
    assert (output_dir / "last.pt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
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
    with start(tmp_path, **OPTIONS) as started:
        started.wait_for(lambda: not old.exists())


@pytest.mark.slow
@pytest.mark.dist
def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with start(tmp_path, **OPTIONS) as started:
        started.wait_for((tmp_path / "digits").exists)
