"""Decodes one image, as DALI and as Pillow do it, and finds JPEGs that are cut off."""

import functools
import io
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image, ImageOps

from utils.data.dali import DALI_VERSION

CPU_ONLY_DEVICE = -99999  # NVIMGCODEC_DEVICE_CPU_ONLY: CUDA is not started
START, SCAN, END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"  # markers


class DecodeError(Exception):
    """A decoder rejects a file; the text is the reason, as far as the decoder gives one."""


class ImageInfo(NamedTuple):
    """What a decoder knows of an image that it has decoded: the format in lower case, and the size in pixels."""

    codec: str
    width: int
    height: int


class Decoder(NamedTuple):
    """A decoder and its name with the version. `decode` maps encoded bytes to ImageInfo or raises DecodeError."""

    name: str
    decode: Callable[[bytes], ImageInfo]


def decoder_of(loader: str) -> Decoder:
    """The decoder that decides whether `--loader` can read a file."""
    if loader == "torch":
        return Decoder(f"Pillow {PIL.__version__}", pillow_decode)
    from nvidia import nvimgcodec  # see `_codec`

    return Decoder(f"DALI {DALI_VERSION}, nvImageCodec {nvimgcodec.__version__}", dali_decode)


def dali_decode(content: bytes) -> ImageInfo:
    """Decode an image as DALI's decoders do on the CPU: by the library that they are made of.

    A DALI pipeline does not name the file of a batch that it rejects, and cannot run after the error.

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


def check_end(content: bytes) -> None:
    """Raise DecodeError for a JPEG without its end that `dali_decode` rejects."""
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
            image = upright_rgb(file)
    except PIL.UnidentifiedImageError:
        raise DecodeError("no image that Pillow reads") from None
    except Exception as error:
        raise DecodeError(f"Pillow cannot decode it ({str(error) or type(error).__name__})") from None
    return ImageInfo(codec, image.width, image.height)


def upright_rgb(file: Image.Image) -> Image.Image:
    """The image in RGB, rotated by its EXIF orientation, as DALI decodes it."""
    image = ImageOps.exif_transpose(file)
    # Grey of 16 bits, which convert() would clip; a mode "I" of other formats may have 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and file.format in ("PNG", "PPM")):
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    return image.convert("RGB")


def has_end(content: bytes) -> bool:
    """Whether a JPEG has its end marker, whatever may follow it; True for content that is no JPEG.

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
