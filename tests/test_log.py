"""metrics.jsonl holds one history, whatever was lost."""

import json
from pathlib import Path

import pytest

from utils.distributed import DistEnv
from utils.log import Log


def test_rewind_drops_what_is_after_the_position(tmp_path: Path, cpu: DistEnv) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"epoch": 1, "step": step, "train/loss": 1.0} for step in (1, 2)]
    records += [{"epoch": 1, "step": 2, "val/top1": 50.0}, {"epoch": 2, "step": 3, "train/loss": 1.0}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"epoch": 2, "st')
    log = Log(tmp_path, cpu, epochs=2, steps_per_epoch=2, tensorboard=False)
    log.rewind(epoch=1, step=3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == records
    log.rewind(epoch=0, step=2)  # trained to the epoch's end, not evaluated
    assert [json.loads(line) for line in path.read_text().splitlines()] == records[:2]


def test_only_rank_0_writes(tmp_path: Path, cpu: DistEnv, capsys: pytest.CaptureFixture[str]) -> None:
    other = DistEnv(rank=1, local_rank=1, world_size=2, local_world_size=2, device=cpu.device)
    log = Log(tmp_path, other, epochs=1, steps_per_epoch=1, tensorboard=True)
    log.say("hello")
    log.record({"step": 1})
    log.rewind(0, 0)
    log.close()
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
