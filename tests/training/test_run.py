"""Weights that went wrong are never saved; a run outlives files that turn bad."""

from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.forked import launch_ranks
from tests.harness import error_line, read_checkpoint, read_metrics
from utils.data.formats.folder import scan_splits
from utils.data.images.manifest import Manifest
from utils.data.splits.selection import InitialFiles, apply_exclusions

# train.py with a fault in its memory: after step 3 of rank FAULTY a weight, or a statistic, gets another value.
FAULTY = """
import os, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
import train

steps = 0
models = []
create = train.models.create_model

def keep(*arguments, **options):
    models.append(create(*arguments, **options))
    return models[-1]

train.models.create_model = keep

def corrupt(optimizer, arguments, options):
    global steps
    steps += 1
    if steps == 3 and os.environ.get("RANK", "0") == os.environ["FAULTY"]:
        with torch.no_grad():
            wrong = optimizer.param_groups[-1]["params"][-1]
            if os.environ["WHAT"] == "statistics":
                wrong = models[-1].get_buffer("bn1.running_var")
            wrong.view(-1)[0] = float(os.environ["VALUE"])

register_optimizer_step_post_hook(corrupt)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("processes", "faulty", "what", "value", "message", "steps"),
    [
        (1, "0", "weights", "nan", "no checkpoint at step 3: the weights are not finite", [1, 2, 3, 4, 5]),
        (2, "1", "weights", "0.125", "at step 3: the weights of rank 1 are no longer those of rank 0 (", [1, 2, 3]),
        pytest.param(
            2,
            "1",
            "statistics",
            "inf",
            "at step 3: running statistics are not finite, as activations",
            [1, 2, 3],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["nan", "diverged", "statistics"],
)
def test_weights_that_went_wrong_are_not_saved(
    data: Path, tmp_path: Path, processes: int, faulty: str, what: str, value: str, message: str, steps: list[int]
) -> None:
    flags = ["--data-dir", data, *TINY, "--batch-size", 4, "--output-dir", tmp_path / "out", "--epochs", 9]
    flags += ["--checkpoint-steps", 1, "--max-bad-steps", 2]
    env = {"FAULTY": faulty, "WHAT": what, "VALUE": value}
    ranks = launch_ranks(*flags, program=FAULTY, processes=processes, env=env)
    assert ranks[0].status == 1, ranks
    assert sum((done.out + done.err).count(message) for done in ranks) == 1
    assert error_line(ranks[0]), "one line, of rank 0"
    assert read_checkpoint(tmp_path / "out")["step"] == 2
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == steps
    assert "NaN" not in (tmp_path / "out" / "metrics.jsonl").read_text(), "which is not JSON"


def test_files_that_turned_bad_since_the_run_began(tmp_path: Path) -> None:
    """`apply_exclusions` at each kind of change; the run began without blue/0.jpg, in both splits."""
    for split in ("train", "val"):
        for name in ("blue/0", "blue/1", "blue/2", "red/0", "red/1"):
            path = tmp_path / split / f"{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(name.encode())
    listed = dict(zip(("train", "val"), scan_splits(tmp_path), strict=True))
    first = {"blue/0.jpg": "damaged"}
    begun = {split: manifest.without(first) for split, manifest in listed.items()}
    fingerprints = {split: manifest.fingerprint for split, manifest in begun.items()}
    initial = InitialFiles({split: list(first) for split in begun}, fingerprints)

    def later(split: str, bad: dict[str, str]) -> Manifest:
        return apply_exclusions(listed[split], listed[split].without(bad), bad, initial, split)

    for split, manifest in begun.items():
        same = later(split, first)
        assert (same.names(), same.fingerprint, same.bad) == (manifest.names(), manifest.fingerprint, first)
        repaired = later(split, {})
        assert (repaired.names(), repaired.fingerprint) == (manifest.names(), manifest.fingerprint)
        assert list(repaired.bad) == ["blue/0.jpg"]
    turned = first | {"blue/2.jpg": "torn"}
    train, val = later("train", turned), later("val", turned)
    assert train.names() == ["blue/1.jpg", "blue/1.jpg", "red/0.jpg", "red/1.jpg"]
    assert train.replacements == {"blue/2.jpg": "blue/1.jpg"}
    assert val.names() == ["blue/1.jpg", "red/0.jpg", "red/1.jpg"]
    for split, manifest in (("train", train), ("val", val)):
        assert manifest.bad == turned
        assert manifest.fingerprint == begun[split].fingerprint
    initial = InitialFiles({split: [] for split in begun}, fingerprints)
    for split in begun:
        assert later(split, turned).names() == listed[split].without(turned).names()
        assert later(split, turned).fingerprint != begun[split].fingerprint
