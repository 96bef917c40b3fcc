"""Uneven classes in whole runs: weights, groups and `--balance` from a label file; a resume is exact."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY, assert_same_run, write_data
from tests.forked import launch_ranks, launch_series
from tests.harness import assert_refused, read_metrics


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Images of three classes, 40 to 4, in one folder, with a label file that has weights and groups."""
    root = write_data(tmp_path / "data", train=(40, 9, 4), val=(4, 4, 4))
    rows = [
        f"{path.relative_to(root)},{path.parent.name},{1 + at % 3},g{at // 2}"
        for at, path in enumerate(sorted((root / "train").rglob("*.jpg")))
    ]
    (root / "all.csv").write_text("\n".join(["file,label,weight,group", *rows]))
    return root


FLAGS = (
    "--train-data", "all.csv", "--val-fraction", 0.25, "--balance", 0.5, "--class-weights", "auto", "--focal", 2,
    *TINY, "--epochs", 2,
)  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    "loader",
    [
        ("--loader", "dali"),
        pytest.param(("--loader", "torch"), marks=pytest.mark.slow),
        pytest.param(("--device", "cuda", "--cache", "gpu", "--deterministic"), marks=pytest.mark.gpu),
    ],
    ids=["dali", "torch", "GPU memory"],
)
def test_a_stopped_run_ends_as_the_uninterrupted_one(uneven: Path, tmp_path: Path, loader: tuple[str, ...]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ("--data-dir", uneven, *FLAGS, "--batch-size", 8, *loader)
    stopped = (*flags, "--output-dir", cut, "--time-limit", 0.001)
    done = launch_series((*flags, "--output-dir", whole), stopped, stopped, (*flags, "--output-dir", cut))
    assert [run.status for run in done] == [0, 143, 143, 0], done
    assert " classes  3, blue 30 to red 3 images, 10 : 1; weights in the loss 0.61 to 1.9" in done[0].out
    assert " 7 of 27 groups: " in done[0].out
    assert "resumed at epoch 1, step 2" in done[3].out
    assert_same_run(whole, cut)
    # Images that came later change nothing in an evaluation: the run's own are those of its listing.
    with (uneven / "all.csv").open("a") as file:
        for path in (uneven / "val").rglob("*.jpg"):
            file.write(f"\n{path.relative_to(uneven)},{path.parent.name},1,new-{path.name}")
    changed, evaluated = launch_series(
        (*flags, "--output-dir", cut, "--balance", 1, "--class-weights", "none"),
        ("--evaluate", "--output-dir", whole, "--resume", whole / "last.pt", "--workers", 1, *loader),
    )
    assert_refused(
        changed, "--balance: 0.5 then, 1 now; --class-weights: auto then, none now; train/ has 12 files more"
    )
    assert evaluated.status == 0, evaluated.err
    last, found = read_metrics(whole)[-1], json.loads((whole / "evaluation.json").read_text())
    # A GPU rounds by the size of a batch, which is larger in a run from its memory.
    tolerance = 1e-3 if "cuda" in loader else 0.0
    for name in ("top1", "loss", "count"):
        assert found[name] == pytest.approx(last[f"val/{name}"], rel=tolerance, abs=0)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("loader", ["dali", "torch", "proxy"])
def test_other_numbers_of_processes_go_on(uneven: Path, tmp_path: Path, loader: str) -> None:
    """1, 2 and 1 processes; `tests/data/test_own_sampler.py` shows that their images are those of one."""
    flags = ("--data-dir", uneven, *FLAGS, "--loader", loader, "--output-dir", tmp_path / "run", "--arch", "test_vit")
    (first,) = launch_series((*flags, "--batch-size", 8, "--time-limit", 0.001))
    both = launch_ranks(*flags, "--batch-size", 4, "--time-limit", 0.001)
    (last,) = launch_series((*flags, "--batch-size", 8))
    assert [run.status for run in (first, *both, last)] == [143, 143, 143, 0], (first, both, last)
