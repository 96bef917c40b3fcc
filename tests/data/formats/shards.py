"""What tests of shard formats share: images, and reading what a scan has found."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali as dali

from tests.damage import encoded
from utils.data.images.records import Entry


def jpegs(count: int) -> list[bytes]:
    """JPEGs of different lengths, of all remainders by 4."""
    return [encoded(height=40 + 7 * number, width=60 + number) for number in range(count)]


def contents(shard: Path, entries: Iterable[Entry]) -> list[bytes]:
    """The bytes of each image, joined from its ranges."""
    whole = shard.read_bytes()
    return [b"".join(whole[offset : offset + length] for offset, length in entry.ranges) for entry in entries]


def read_by_dali(outputs: Sequence[Any], count: int) -> list[list[bytes]]:
    """What DALI's readers give, as a list of `count` samples for each output; called below a pipeline's `with`."""
    pipeline = dali.Pipeline.current()
    pipeline.set_outputs(*outputs)
    pipeline.build()
    batch = pipeline.run()
    return [[np.asarray(output.at(number)).tobytes() for number in range(count)] for output in batch]
