"""scripts/compare_starts.py: the parts of a start add up; a launch that fails is explained."""

import functools
import json
from pathlib import Path

import pytest

from scripts import compare_starts
from tests.conftest import Refused
from tests.harness import launch

PROGRAM = Path(compare_starts.__file__)
TINY = ("--arch", "test_resnet", "--image-size", 32, "--batch-size", 4, "--device", "cpu")


@pytest.mark.slow  # two launches that compile
def test_parts_add_up(data: Path, tmp_path: Path) -> None:
    user, output_dir = tmp_path / "user", tmp_path / "out"
    flags = (*TINY, "--data-dir", data, "--launches", 1, "--cold", "--flags", "--compile", "--output-dir", output_dir)
    env = {"XDG_CACHE_HOME": user, "TORCHINDUCTOR_CACHE_DIR": None, "TRITON_CACHE_DIR": None}
    done = launch(*flags, program=PROGRAM, env=env)
    assert done.status == 0, done.err
    assert not [path for path in user.rglob("*") if path.is_file()], "with --cold no launch uses the user's cache"
    (starts,) = json.loads((output_dir / "starts.json").read_text()).values()
    assert list(starts) == [compare_starts.COLD, compare_starts.WARM]
    for (found,) in starts.values():
        whole, first_batch = found.pop(compare_starts.WHOLE), found.pop(compare_starts.FIRST_BATCH)
        assert sum(found.values()) == pytest.approx(whole, abs=0.1)
        assert 0 < first_batch <= found["first step, compiling"]
        for part in ("loading torch, DALI and timm", "listing the images", "creating the network"):
            assert found[part] > 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.splitlines() if line.startswith("| ")]
    assert rows[0] == ["seconds", "test_resnet, nothing compiled", "test_resnet, compiled before"]
    assert rows[-1][0] == compare_starts.WHOLE
    assert [path.name for path in output_dir.iterdir()] == ["starts.json"], "nobody needs the checkpoints"


def test_refusals(refused: Refused, tmp_path: Path) -> None:
    refuse = functools.partial(refused, main=compare_starts.main, program="compare_starts.py")
    refuse("--launches", 0)("--launches 0")
    refuse("--limit", 0)("--limit 0")
    refuse("--flags", "--name 'a")("--flags --name 'a: no closing quotation")
    refuse("--data-dir", tmp_path / "none")(f"{tmp_path}/none: no such folder")


def test_a_launch_that_fails_is_explained(tmp_path: Path) -> None:
    flags = ("--arch", "test_resnet", "--flags", "--optimizer 'nonsense'", "--device", "cpu")
    done = launch(*flags, "--output-dir", tmp_path, program=PROGRAM)
    assert done.status == 1
    assert "test_resnet: exit 2: train.py: --optimizer nonsense" in done.err
