"""Searches for the image on which a process crashed, from another process: `utils.distributed.crash` starts it.

First as a scan decodes each image, then as the loader does: with the operators of DALI, on the same device.
"""

import contextlib
import functools
import os
import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import nvidia.dali as dali
from nvidia.dali import fn, types

from utils.data.augmentation.policies import RATIO
from utils.data.images.records import Record
from utils.data.reading.decode_pool import decode_files
from utils.data.reading.decoding import DecodeError, ImageInfo, dali_decode
from utils.distributed.crash import Crash, read_stack
from utils.errors import first_line
from utils.log import print_error
from utils.text import count

SECONDS = 20.0  # for each way of decoding, from the first image on
CROPS = 8  # of each image; a crash may need that of one place
MIN_AREA = 0.08


def explain_crash(crash: Crash) -> None:
    """Print which image the process crashed on, or that none was found and where Python was."""
    context, records = crash.context, noted_records(crash.notes)
    end = f"rank {context.rank} (process {context.pid}) crashed ({crash.cause})"
    remedy = "--bad-files skip leaves it out" if context.program == "train.py" else "replace or remove it"
    ways = [(dali_decode, len(os.sched_getaffinity(0))), (functools.partial(operator_decode, context.on_gpu), 1)]
    for decode, workers in ways:
        if found := find_bad(records, decode, workers):
            record, reason = found
            print_error(context.program, f"rank {context.rank}: {record.name}: {reason}; {end}; {remedy}")
            return
    print_error(
        context.program,
        f"{end}: no bad file was found among the {count(len(records), 'image')} that it had asked for last; "
        "scripts/check_dataset.py decodes all; Python's calls, the innermost first:",
    )
    for call in read_stack():
        print_error(context.program, call.strip())


def noted_records(notes: Sequence[bytes]) -> list[Record]:
    """The images of the notes, each once, in their order."""
    found: dict[str, Record] = {}
    for note in notes:
        with contextlib.suppress(pickle.UnpicklingError, EOFError, ValueError):  # written by half
            table = pickle.loads(note)
            records = map(table.record, range(len(table.names)))
            found |= {record.name: record for record in records if record.name not in found}
    return list(found.values())


def find_bad(records: Sequence[Record], decode: Any, workers: int) -> tuple[Record, str] | None:
    """The first image that is found bad, and why; None if there is none, or the time is over."""
    deadline = None
    with contextlib.closing(decode_files(records, decode, workers)) as reports:
        for position, report in reports:
            if report.bad is not None:
                return records[position], report.bad
            deadline = deadline or time.monotonic() + SECONDS
            if time.monotonic() > deadline:
                return None
    return None


def operator_decode(on_gpu: bool, content: bytes) -> ImageInfo:
    """Decode an image as pipelines do: as a whole, and random crops of it. A crash ends this process.

    Raises:
        DecodeError: DALI fails on it.
    """
    pipeline, contents = _operators(on_gpu)
    contents[:] = [np.frombuffer(content, np.uint8)]
    try:
        for _ in range(CROPS):
            pipeline.run()
    except RuntimeError as error:
        _operators.cache_clear()  # a pipeline cannot run after an error
        raise DecodeError(f"DALI fails on it ({first_line(error, 80)})") from None
    return ImageInfo("", 1, 1)


@functools.cache
def _operators(on_gpu: bool) -> tuple[Any, list[Any]]:
    """A pipeline of one image at a time, and the list that holds the image."""
    contents: list[Any] = []

    @dali.pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=1, num_threads=1, device_id=0 if on_gpu else None, prefetch_queue_depth=1, exec_dynamic=True
    )
    def graph() -> Any:
        source = fn.external_source(lambda: contents, batch=True, dtype=types.UINT8, ndim=1)
        options: dict[str, Any] = {"device": "mixed" if on_gpu else "cpu", "output_type": types.RGB}
        crop: dict[str, Any] = {"random_area": [MIN_AREA, 1.0], "random_aspect_ratio": list(RATIO)}
        return fn.decoders.image(source, **options), fn.decoders.image_random_crop(source, **crop, **options)

    pipeline = graph()
    pipeline.build()
    return pipeline, contents
