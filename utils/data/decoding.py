"""Decoding one image: as DALI and as Pillow do it, and whether a JPEG was cut off."""

import contextlib
import functools
import io
import os
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image, ImageOps

from utils.data.dali import DALI_VERSION
from utils.data.manifest import Manifest

CPU_ONLY_DEVICE = -99999  # NVIMGCODEC_DEVICE_CPU_ONLY: CUDA is not even looked for
START, SCAN, END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"  # markers


class DecodeError(Exception):
    """A decoder does not take a file; the text says why, as far as it knows."""


class ImageInfo(NamedTuple):
    """What a decoder tells of an image that it took: the file's format in lower case, and pixels."""

    codec: str
    width: int
    height: int


class Decoder(NamedTuple):
    """A decoder and its name with the version; `decode` raises DecodeError."""

    name: str
    decode: Callable[[bytes], ImageInfo]


def decoder_of(loader: str) -> Decoder:
    """What decides whether `--loader` can read a file, for `utils.data.verification`."""
    if loader == "torch":
        return Decoder(f"Pillow {PIL.__version__}", pillow_decode)
    from nvidia import nvimgcodec  # see `_codec`

    return Decoder(f"DALI {DALI_VERSION}, nvImageCodec {nvimgcodec.__version__}", dali_decode)


def dali_decode(content: bytes) -> ImageInfo:
    """Decode an image as DALI's decoders do on the CPU: by the library that they are made of.

    A pipeline of DALI's own does not say which file of a batch it refused, and is of no use after.

    Raises:
        DecodeError: DALI's pipelines fail on such a file.
    """
    from nvidia import nvimgcodec  # see `_codec`

    try:
        stream = nvimgcodec.CodeStream(content)
        codec = stream.codec_name
    except RuntimeError:
        raise DecodeError("no image that DALI reads") from None
    image = _codec(os.getpid()).decode(stream)
    if image is None:
        raise DecodeError(f"a {codec} that DALI cannot decode")
    return ImageInfo(codec, image.width, image.height)


@functools.cache
def _codec(process: int) -> Any:
    """The codec of this process: one that was inherited through a fork would wait for threads that were not.

    nvImageCodec is imported where it is used, as its import starts CUDA, which must not know its environment before
    `utils.distributed.ownership.own_process` has set the number of hardware queues.
    """
    from nvidia import nvimgcodec

    backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
    return nvimgcodec.Decoder(device_id=CPU_ONLY_DEVICE, max_num_cpu_threads=1, backends=backends)


def _check_end(content: bytes) -> None:
    """Raise DecodeError for a JPEG that was cut off, by the verdict of `dali_decode`."""
    if not has_end(content):
        dali_decode(content)


def pillow_decode(content: bytes) -> ImageInfo:
    """Decode an image as `--loader torch` does.

    Raises:
        DecodeError: Pillow fails on such a file, in any of the many ways that it has.
    """
    try:
        with Image.open(io.BytesIO(content)) as file:
            codec = (file.format or "").lower()
            image = _upright(file)
    except PIL.UnidentifiedImageError:
        raise DecodeError("no image that Pillow reads") from None
    except Exception as error:
        raise DecodeError(f"Pillow cannot decode it ({str(error) or type(error).__name__})") from None
    return ImageInfo(codec, image.width, image.height)


def _upright(file: Image.Image) -> Image.Image:
    """RGB and turned as its EXIF data ask, as DALI decodes."""
    image = ImageOps.exif_transpose(file)
    # Grey of 16 bits, which convert() would clip; a mode "I" of other formats may have 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and file.format in ("PNG", "PPM")):
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    return image.convert("RGB")


def has_end(content: bytes) -> bool:
    """Whether a JPEG goes on to its end marker, whatever may follow; True for what is no JPEG at all.

    An end marker before the first scan is that of a preview within the metadata, and does not count.
    """
    if not content.startswith(START):
        return True
    at = len(START)
    while (marker := content[at : at + 2]) != SCAN:
        if not marker.startswith(b"\xff"):
            return False
        at += 2 + int.from_bytes(content[at + 2 : at + 4])  # a segment's length counts itself
    return content.find(END, at) >= 0


def decoded_bytes(manifest: Manifest, sample: int = 256) -> int:
    """Bytes that all images of `manifest` take as uint8 RGB, estimated from `sample` of them; 0 for synthetic data."""
    if manifest.root is None:
        return 0
    chosen = random.Random(0).sample(range(len(manifest)), min(sample, len(manifest)))
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a size is read, nothing is decoded
        for index in chosen:
            # Whoever decodes it will say what is wrong with a file.
            with (
                contextlib.suppress(OSError, ValueError, Image.DecompressionBombError),
                Image.open(manifest.path(index)) as image,
            ):
                sizes.append(3 * image.width * image.height)
    return round(len(manifest) * sum(sizes) / len(sizes)) if sizes else 0
