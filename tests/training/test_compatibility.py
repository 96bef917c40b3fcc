"""What a resume depends on, and what it logs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import resolved
from tests.training.checkpoints import checkpoint_of
from utils.data.dali import DALI_VERSION
from utils.data.images.manifest import synthetic
from utils.data.splits.selection import Splits
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.training.resume.compatibility import changed_flags, check_fingerprint, run_fingerprint


@pytest.mark.parametrize(
    ("loader", "decode", "cache", "dali"),
    [
        ("dali", "full", "host", DALI_VERSION),
        ("stock", "full", None, DALI_VERSION),
        ("proxy", "full", None, DALI_VERSION),
        ("torch", None, None, None),
    ],
)
def test_what_a_resume_depends_on(
    cpu: DistEnv, loader: Any, decode: str | None, cache: str | None, dali: str | None
) -> None:
    config = resolved(loader=loader, decode="full", cache="host", ema_decay=0.5, seed=3)
    splits: Splits = {"train": synthetic(8, 4), "val": synthetic(6, 4)}
    found = run_fingerprint(config, splits, cpu)
    of_the_loader = {name: found[name] for name in ("--loader", "--decode", "--cache", "DALI version")}
    assert of_the_loader == {"--loader": loader, "--decode": decode, "--cache": cache, "DALI version": dali}
    assert (found["--ema-decay above 0"], found["--seed"], found["classes"], found["device"]) == (True, 3, 4, "cpu")
    assert (found["files of train/"], found["files of val/"]) == ("synthetic-8-4", "synthetic-6-4")
    assert check_fingerprint(config, splits, cpu, None) == found
    assert check_fingerprint(config, splits, cpu, checkpoint_of(config, fingerprint=found)) == found
    without = dataclasses.replace(config, ema_decay=0.0)
    words = r"settings or data \(--ema-decay above 0: True then, False now\); restore these, go on with them by"
    saved = checkpoint_of(config, fingerprint=found)
    same = dataclasses.replace(saved.record, classes=splits["train"].classes)
    with pytest.raises(UserError, match=words):
        check_fingerprint(without, splits, cpu, dataclasses.replace(saved, record=same))
    with pytest.raises(UserError, match="restore these, or start again"):  # other names of classes are not accepted
        check_fingerprint(without, splits, cpu, saved)
    before = checkpoint_of(config, fingerprint=found | {"files of val/": "x", "--seed": 4})
    before.record.excluded_files["train"] = ["blue/1.jpg"]
    words = r"\(--seed: 4 then, 3 now; val/ has other files or classes\); give --bad-files skip, without whose"
    with pytest.raises(UserError, match=words):
        check_fingerprint(config, splits, cpu, before)


def test_changed_flags_are_logged(tmp_path: Path) -> None:
    before = resolved(lr=0.5)
    now = resolved(
        lr=0.1, clip_grad=1.0, resize_schedule="0:32", workers=3, log_steps=7, output_dir=tmp_path, time_limit=5.0
    )
    assert changed_flags(before, resolved(lr=0.5)) == []
    assert changed_flags(before, now) == ["--lr 0.5 -> 0.1", "--resize-schedule off -> 0:32", "--clip-grad 0.0 -> 1.0"]
    odd, near = resolved(lr=0.1 + 0.2, clip_grad=1 / 3), resolved(lr=0.3, clip_grad=1.0)
    assert changed_flags(odd, near) == [
        "--lr 0.30000000000000004 -> 0.3",  # which six digits do not distinguish
        "--clip-grad 0.333333 -> 1.0",
    ]
    several = resolved(lr=0.5, grad_exchange="flat")
    assert changed_flags(several, resolved(lr=0.5, grad_exchange="ddp"), 2) == ["--grad-exchange flat -> ddp"]
    assert changed_flags(several, resolved(lr=0.5, grad_exchange="ddp"), 1) == []
