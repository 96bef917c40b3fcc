"""DALI's checkpoints name the operators of its graph: a run goes on with a newer Brisk only where these stay."""

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import nvidia.dali
import pytest

import pipelines
from tests.conftest import resolved
from utils.data.formats.folder import scan
from utils.data.loaders.sampler import RandomSampler
from utils.distributed.group import DistEnv

BASE = resolved(batch_size=8, image_size=32, workers=1)
FROZEN: list[tuple[dict[str, Any], str]] = [
    ({"decode": "fused"}, "ac17e3b97a743dd3"),
    ({"decode": "full"}, "df7118bbc550029c"),
    ({"decode": "full", "interpolation": "random"}, "666de65b0b676800"),
    ({"decode": "full", "cache": "host", "augment": "trivialaugment"}, "ffa93fe8f8c66354"),
    ({"decode": "fused", "augment": "randaugment", "randaugment_std": 1.5, "color_jitter": 0.0}, "9826f8c643c6b367"),
]


@pytest.mark.parametrize(("values", "digest"), FROZEN, ids=lambda value: str(value)[:40])
def test_operators_are_frozen(data: Path, cpu: DistEnv, values: dict[str, Any], digest: str) -> None:
    """If this fails, `checkpoint.FORMAT` must rise. Another DALI refuses the checkpoints itself."""
    if nvidia.dali.__version__ != "2.4.0":
        pytest.skip("names are those of DALI 2.4.0")
    train = scan(data, "train")
    config = dataclasses.replace(BASE, **values)
    loader = pipelines.create_train_loader(config, train, RandomSampler(len(train), 8), cpu)
    next(loader)
    blobs = [bytes(blob.numpy()) for blob in loader.state()["dali"]]
    loader.close()
    names = sorted(set(re.findall(rb"__\w+?_\d+", b"".join(blobs))))
    assert len(names) > 8
    assert hashlib.sha256(b" ".join(names)).hexdigest()[:16] == digest
