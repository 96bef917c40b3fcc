"""A look at some images before a run begins: files whose pixels would be wrong in every epoch, or almost black."""

import contextlib
import io
import random
import time
from collections.abc import Iterator

import numpy as np
from PIL import Image

from utils.data.images.manifest import Manifest, bad_files_error
from utils.data.images.records import Record
from utils.data.reading.decode_pool import decode_files
from utils.data.reading.decoding import Decoder
from utils.data.reading.reader import open_image

SAMPLE = 32
SECONDS = 2.0  # for all reading; a slow disk makes the sample smaller
FEW_LEVELS = 64  # of 256, gray levels that 16 bits must leave
_JPEG = b"\xff\xd8"
_STARTS = (b"\x89PNG", b"RIFF")  # of `utils.data.reading.decoding.SAME_PIXELS`, besides JPEG
_LARGEST = 65535


def check_sample(manifest: Manifest, decoder: Decoder) -> None:
    """Decode images of kinds that DALI may get wrong: more bands than colors, floating point, colors that it lacks.

    Args:
        manifest: images of which `SAMPLE` are looked at, drawn at random, always the same.
        decoder: of the run's loader.

    Raises:
        UserError: one cannot be trained on.
    """
    unusual = [record for record, content in _sample(manifest) if not content.startswith(_STARTS)]
    reports = decode_files(unusual, decoder.decode, 1)
    bad = {unusual[position].name: report.bad for position, report in reports if report.bad is not None}
    if bad:
        raise bad_files_error(bad, "delete or replace {}")


def gray_range(manifest: Manifest) -> tuple[int, int] | None:
    """Least and largest value of the gray images of 16 bits in a sample; None where there is none."""
    found = []
    for _, content in _sample(manifest):
        with (
            contextlib.suppress(Exception),
            Image.open(io.BytesIO(content)) as image,
        ):  # Pillow has errors of many kinds
            if image.mode.startswith("I"):
                values = np.asarray(image)
                found.append((int(values.min()), int(values.max())))
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def describe_depth(manifest: Manifest) -> str:
    """A warning where 8 bits leave few gray levels of 16; "" otherwise."""
    if (values := gray_range(manifest)) is None:
        return ""
    low, high = values
    levels = round(255 * high / _LARGEST) - round(255 * low / _LARGEST) + 1
    if levels >= FEW_LEVELS:
        return ""
    return (
        f"gray images of 16 bits have values from {low:,} to {high:,} of 65,535, of which 8 bits leave "
        f"{levels} of 256 levels; stretch them first: docs/own-data.md, gray images"
    )


def _sample(manifest: Manifest) -> Iterator[tuple[Record, bytes]]:
    """Those of a sample that can be read and are no JPEG, which has neither 16 bits nor more bands than colors."""
    if manifest.images is None:
        return
    deadline = time.monotonic() + SECONDS
    for index in random.Random(0).sample(range(len(manifest)), min(SAMPLE, len(manifest))):
        record = manifest.record(index)
        with contextlib.suppress(OSError), open_image(record) as file:
            if (start := file.read(len(_JPEG))) != _JPEG:
                yield record, start + file.read()
        if time.monotonic() > deadline:
            return
