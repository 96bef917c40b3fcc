"""Decodes one image, as DALI and as Pillow do it, and finds JPEGs and PNGs that are cut off."""

import contextlib
import functools
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image, ImageOps

from utils.data.codecs import describe_unreadable
from utils.data.dali import DALI_VERSION

CPU_ONLY_DEVICE = -99999  # NVIMGCODEC_DEVICE_CPU_ONLY: CUDA is not started
START, SCAN, END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"  # markers of a JPEG
PNG_START, PNG_END = b"\x89PNG", b"IEND"
_REDIRECTED = threading.Lock()  # standard error, by one thread at a time


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
        raise DecodeError(describe_unreadable(content, "DALI")) from None
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
    """Raise DecodeError for a JPEG or PNG without its end that `dali_decode` rejects. Prints nothing."""
    if not has_end(content):
        with _no_stderr():
            dali_decode(content)


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Drop what is printed past Python on standard error, for the milliseconds of one image.

    nvImageCodec prints its errors there, in colours. PYNVIMGCODEC_VERBOSITY has no value that turns them off:
    https://docs.nvidia.com/cuda/nvimagecodec/env_variables.html
    """
    with _REDIRECTED:
        before, nowhere = os.dup(2), os.memfd_create("messages")
        os.dup2(nowhere, 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            os.close(nowhere)


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
        raise DecodeError(describe_unreadable(content, "Pillow")) from None
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
    """Whether a JPEG or PNG has its end, whatever may follow it; True for content that is neither.

    A JPEG's end marker before the first scan is that of a preview within the metadata, and does not count.
    """
    if content.startswith(PNG_START):
        return content.rfind(PNG_END) >= 0
    if not content.startswith(START):
        return True
    at = len(START)
    while (marker := content[at : at + 2]) != SCAN:
        if not marker.startswith(b"\xff"):
            return False
        at += 2 + int.from_bytes(content[at + 2 : at + 4])  # a segment's length counts itself
    return content.find(END, at) >= 0
