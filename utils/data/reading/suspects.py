"""Encoded images that must be looked at before DALI decodes them, found by their first bytes, a batch at once.

DALI's decoders take different EXIF blocks where a JPEG has several (`utils.data.reading.orientation`). On a GPU some
kinds of images get other pixels than on the CPU: `differs_on_gpu` names them.
"""

import contextlib
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from utils.data.reading.orientation import ADOBE, APP0, APP1, APP15, COMMENT, EXIF, JPEG_START, PNG_START, jpeg_segments

_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)  # that DALI decodes: baseline, extended, progressive; arithmetic coding
_TABLES = (0xC4, 0xDB, 0xDD)  # in front of a frame: Huffman, quantization, restart interval
_SEGMENT_BYTES = 17  # of the start of a segment, which are looked at
# Device -> whether the walk through a header goes on behind a marker, bool (256,): up to the tables, or to the frame.
_PASSED = {"cpu": np.isin(np.arange(256), [*range(APP0, APP15 + 1), COMMENT])}
_PASSED["gpu"] = _PASSED["cpu"] | np.isin(np.arange(256), _TABLES)
_RGB = b"RGB"  # ids of components that are not YCbCr
_SINGLE = 0x11  # sampling factors of one by one
_MOST_SEGMENTS = 16  # of a JPEG whose header is looked at here
_PNG_DEPTH = 24  # where a PNG has the bits of a sample
_PNG_BITS = (2, 4)  # which a GPU takes for more
_TIFF_STARTS = (b"II", b"MM")
_TIFF_BITS = {1, 8, 16}  # which a GPU takes for what they are
_BITS = 258  # the tag


def may_be_odd(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], device: str
) -> NDArray[np.bool_]:
    """Which images `conflicting` and, on a GPU, `differs_on_gpu` must look at: those of which too little is known, too.

    Looks at the segments that applications write, of all images at once.

    Args:
        data: (P,), the first bytes of each image or more of them.
        starts, ends: where in `data` those of each image are.
        device: which decodes them, "gpu" or "cpu".

    Returns:
        (len(starts),).
    """
    found = np.zeros(len(starts), dtype=bool)
    active = np.flatnonzero(ends - starts > 4)
    at = starts[active] + 2
    first, second = data[at - 2], data[at - 1]
    if device == "gpu":
        depths = data[np.minimum(at + _PNG_DEPTH - 2, len(data) - 1)]
        found[active] = (first == PNG_START[0]) & ((depths == _PNG_BITS[0]) | (depths == _PNG_BITS[1]))
        for start in _TIFF_STARTS:
            found[active] |= (first == start[0]) & (second == start[1])
    is_jpeg = (first == JPEG_START[0]) & (second == JPEG_START[1])
    active, at = active[is_jpeg], at[is_jpeg]
    blocks = np.zeros(len(starts), dtype=np.int64)
    passed = _PASSED[device]
    for _ in range(_MOST_SEGMENTS):
        if not len(active):
            break
        inside = at + _SEGMENT_BYTES <= ends[active]
        found[active[~inside]] = True
        active, at = active[inside], at[inside]
        marker = data[at + 1]
        blocks[active] += (marker == APP1) & (data[at + 4] == EXIF[0]) & (data[at + 5] == EXIF[1])
        if device == "gpu":
            found[active] |= (marker == ADOBE) & (data[at + 15] == 0)
        goes_on = passed[marker]
        last, end = active[~goes_on], at[~goes_on]
        found[last] |= marker[~goes_on] == 0xFF
        if device == "gpu" and len(last):  # at a frame; what is none is at worst looked at in vain
            components, sampling = data[end + 9], data[end + 11]
            found[last] |= (components == 3) & (data[end + 10] == _RGB[0])
            found[last] |= (components == 1) & (sampling != _SINGLE)
        at = at + 2 + data[at + 2].astype(np.int64) * 256 + data[at + 3]
        active, at = active[goes_on], at[goes_on]
    found[active] = True
    return found | (blocks > 1)


def differs_on_gpu(content: bytes) -> bool:
    """Whether DALI decodes an image on a GPU to other pixels than on the CPU, or may do so.

    A GPU takes three components for YCbCr whatever their names are. Its hardware decoder does not know a gray JPEG with
    sampling factors. Samples of 2, 4 and 12 bits become too bright.

    Args:
        content: of the file, at least its header.
    """
    if content.startswith(PNG_START):
        return content[_PNG_DEPTH : _PNG_DEPTH + 1] in (bytes([bits]) for bits in _PNG_BITS)
    if content.startswith(_TIFF_STARTS):
        with contextlib.suppress(Exception), Image.open(io.BytesIO(content)) as file:  # Pillow has errors of many kinds
            return not set(np.atleast_1d(getattr(file, "tag_v2", {}).get(_BITS, 1)).tolist()) <= _TIFF_BITS
        return False
    plain = False
    for marker, start, end in jpeg_segments(content):
        if marker == ADOBE and content.startswith(b"Adobe", start):
            plain = content[start + 11 : start + 12] == b"\0"
        if marker in _FRAMES:
            ids, sampling = content[start + 6 : end : 3], content[start + 7 : end : 3]
            return (len(ids) == 3 and (plain or ids == _RGB)) or (len(ids) == 1 and sampling[:1] != bytes([_SINGLE]))
    return content.startswith(JPEG_START)  # the header is longer than `content`, or is none
