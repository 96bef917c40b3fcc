"""Decodes one image, as DALI and as Pillow do it, and finds JPEGs and PNGs that are cut off.

An image counts as readable by DALI only where DALI and Pillow have the same pixels of it, so that all loaders do.
"""

import contextlib
import functools
import io
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageOps

from utils.data.dali import DALI_VERSION
from utils.data.images.codecs import describe_unreadable
from utils.data.reading.orientation import JPEG_START, PNG_START, conflicting, is_usual, orientation
from utils.data.reading.suspects import differs_on_gpu

CPU_ONLY_DEVICE = -99999  # NVIMGCODEC_DEVICE_CPU_ONLY: CUDA is not started
SCAN, END = b"\xff\xda", b"\xff\xd9"  # markers of a JPEG
PNG_END = b"IEND"
WITHOUT_CPU = ("proxy", "stock")  # loaders that cannot have single images decoded on the CPU, if they run on a GPU
# Codecs whose pixels DALI has as Pillow has them, whatever the samples are: tests/data/test_pixels.py has the table.
SAME_PIXELS = ("jpeg", "png", "webp")
RULES = 2  # counts up when this module decides otherwise, so that what an earlier scan found does not count
TOLERANCE = 4.0  # mean difference of two decoders, of 255: one that drops the lowest bits has 3
CONVERT = "convert it to PNG or JPEG"
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # tags of a TIFF
_WHITE_IS_ZERO, _UNSIGNED = 0, 1  # values of the last two
logging.getLogger("PIL").addHandler(logging.NullHandler())  # it logs an error beside the one that it raises
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


def decoder_of(loader: str, device: str = "cpu") -> Decoder:
    """The decoder that decides whether `--loader` can read a file on `device`, "gpu" or "cpu"."""
    if loader == "torch":
        return Decoder(f"Pillow {PIL.__version__}, rules {RULES}", pillow_decode)
    from nvidia import nvimgcodec  # see `_codec`

    name = f"DALI {DALI_VERSION}, nvImageCodec {nvimgcodec.__version__}, Pillow {PIL.__version__}, rules {RULES}"
    if device == "gpu" and loader in WITHOUT_CPU:
        return Decoder(f"{name}, on a GPU", gpu_decode)
    return Decoder(name, dali_decode)


def dali_decode(content: bytes) -> ImageInfo:
    """Decode an image as DALI's decoders do on the CPU: by the library that they are made of.

    A DALI pipeline does not name the file of a batch that it rejects, and cannot run after the error.

    Raises:
        DecodeError: DALI's pipelines fail on such a file, may write over memory, or have other pixels than Pillow.
    """
    from nvidia import nvimgcodec  # see `_codec`

    check_orientation(content)
    try:
        stream = nvimgcodec.CodeStream(content)
        codec = stream.codec_name
    except RuntimeError:
        raise DecodeError(describe_unreadable(content, "DALI")) from None
    # Samples as they are stored, which DALI itself brings to 8 bits.
    image = _codec(os.getpid()).decode(stream, params=nvimgcodec.DecodeParams(allow_any_depth=True))
    if image is None or image.dtype not in (np.uint8, np.uint16, np.float32):
        raise DecodeError(f"a {codec} that DALI cannot decode")
    is_cmyk = codec == "jpeg" and stream.num_channels == 4
    if codec not in SAME_PIXELS or is_cmyk or not is_usual(content):
        _compare(np.asarray(image), content, codec)
    return ImageInfo(codec, image.width, image.height)


def gpu_decode(content: bytes) -> ImageInfo:
    """As `dali_decode`, for loaders that have all images decoded on a GPU."""
    found = dali_decode(content)
    check_gpu(content)
    return found


def check_gpu(content: bytes) -> None:
    """Raise DecodeError for an image that has other pixels on a GPU."""
    if differs_on_gpu(content):
        raise DecodeError("DALI decodes it wrongly on a GPU; use --loader dali or torch, or save it again")


def as_netpbm(contents: Sequence[bytes], threads: int) -> list[NDArray[np.uint8]]:
    """Images decoded on the CPU and turned upright, as files of plain pixels, uint8 (length,), which all decoders read.

    Raises:
        DecodeError: one cannot be decoded.
    """
    from nvidia import nvimgcodec  # see `_codec`

    try:
        streams = [nvimgcodec.CodeStream(content) for content in contents]
    except RuntimeError:
        raise DecodeError("DALI cannot read it") from None
    images = _codec(os.getpid(), threads).decode(streams)
    if any(image is None for image in images):
        raise DecodeError("DALI cannot decode it")
    heads = [f"P6 {image.width} {image.height} 255\n".encode() for image in images]
    return [
        np.concatenate([np.frombuffer(head, np.uint8), np.asarray(image).reshape(-1)])
        for head, image in zip(heads, images, strict=True)
    ]


def _compare(pixels: NDArray[Any], content: bytes, codec: str) -> None:
    """Raise DecodeError unless Pillow decodes the same `pixels`: uint8, uint16 or float32 (H, W, 3)."""
    if pixels.dtype != np.uint8:
        pixels = (pixels * (255.0 / 65535 if pixels.dtype == np.uint16 else 255.0)).clip(0, 255)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow about metadata and sizes
            expected = np.asarray(upright_rgb(content))
    except Image.DecompressionBombError:  # too large for Pillow, not for DALI
        return
    except DecodeError:
        raise
    except Exception:
        raise DecodeError(
            f"a {codec} that DALI decodes and Pillow does not, so that its pixels cannot be checked; {CONVERT}"
        ) from None
    same_size = pixels.shape == expected.shape
    difference = np.abs(pixels.astype(np.float32) - expected).mean() if same_size else 0.0
    if same_size and difference <= TOLERANCE:
        return
    if not is_usual(content):
        raise DecodeError(
            "its EXIF orientation is written in an unusual way, which DALI does not read; save it upright"
        )
    how = f"by {difference:.1f} of 255 on average" if same_size else "in size"
    raise DecodeError(f"a {codec} that DALI and Pillow read differently ({how}); {CONVERT}")


@functools.cache
def _codec(process: int, threads: int = 1) -> Any:
    """The codec of this process: one that was inherited through a fork would wait for threads that were not.

    nvImageCodec is imported where it is used, as its import starts CUDA, which must not know its environment before
    `utils.distributed.ownership.own_process` has set the number of hardware queues.
    """
    from nvidia import nvimgcodec

    backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
    threads = max(1, min(threads, (os.cpu_count() or 1) // 2))  # it warns of more than it finds sensible
    return nvimgcodec.Decoder(device_id=CPU_ONLY_DEVICE, max_num_cpu_threads=threads, backends=backends)


def check_orientation(content: bytes) -> None:
    """Raise DecodeError for an image that DALI must not decode: it may write over memory that is not the image's."""
    if conflicting(content):
        raise DecodeError("its EXIF blocks have different orientations, which DALI mixes up; remove all but one")


def check_end(content: bytes) -> None:
    """Raise DecodeError for a JPEG or PNG without its end that `dali_decode` rejects. Prints nothing."""
    if not has_end(content):
        with _no_stderr():
            dali_decode(content)


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Drop what is printed past Python on standard error, for the milliseconds of one image.

    nvImageCodec prints its errors there, in colors. PYNVIMGCODEC_VERBOSITY has no value that turns them off:
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
            image = _upright_rgb(file, content)
    except PIL.UnidentifiedImageError:
        raise DecodeError(describe_unreadable(content, "Pillow")) from None
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"Pillow cannot decode it ({str(error) or type(error).__name__})") from None
    return ImageInfo(codec, image.width, image.height)


def upright_rgb(content: bytes) -> Image.Image:
    """Decode an image by Pillow as DALI does: in RGB, turned by the orientation of its EXIF data.

    Raises:
        DecodeError: the samples have no range that is known.
        Exception: Pillow's own, of many kinds.
    """
    with Image.open(io.BytesIO(content)) as file:
        return _upright_rgb(file, content)


def _upright_rgb(file: Image.Image, content: bytes) -> Image.Image:
    for name in ("xmp", "XML:com.adobe.xmp", "Raw profile type exif"):  # which DALI does not read
        file.info.pop(name, None)
    is_jpeg = file.format in ("JPEG", "MPO")
    if is_jpeg or file.format in ("PNG", "WEBP"):
        turn = _TRANSPOSES.get(orientation(content))
        image = file if turn is None else file.transpose(turn)
    else:
        image = ImageOps.exif_transpose(file)
    if image.mode == "CMYK" and is_jpeg and "adobe" not in file.info:
        image = ImageChops.invert(image)  # Pillow takes each for Adobe's, which are inverted; DALI only these
    return _eight_bits(image, file).convert("RGB")


def _eight_bits(image: Image.Image, file: Image.Image) -> Image.Image:
    """Gray images of 16 bits in 8, which convert() would clip; others as they are.

    Raises:
        DecodeError: samples of 32 bits, with a sign or of floating point.
    """
    tags = getattr(file, "tag_v2", {})  # a TIFF's
    formats = np.atleast_1d(tags.get(_SAMPLE_FORMAT, _UNSIGNED))
    is_wide = image.mode.startswith("I;16") or (image.mode == "I" and file.format in ("PNG", "PPM"))
    if (formats != _UNSIGNED).any() or (image.mode in ("I", "F") and not is_wide):
        raise DecodeError("its samples have 32 bits, a sign or a fraction, so that their range is unknown; " + CONVERT)
    if not is_wide:
        return image
    bits = int(np.atleast_1d(tags.get(_BITS, 16))[0])
    gray = Image.fromarray(np.rint(np.asarray(image) * (255 / (2**bits - 1))).astype(np.uint8))
    return ImageChops.invert(gray) if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else gray


def has_end(content: bytes) -> bool:
    """Whether a JPEG or PNG has its end, whatever may follow it; True for content that is neither.

    A JPEG's end marker before the first scan is that of a preview within the metadata, and does not count.
    """
    if content.startswith(PNG_START):
        return content.rfind(PNG_END) >= 0
    if not content.startswith(JPEG_START):
        return True
    at = len(JPEG_START)
    while (marker := content[at : at + 2]) != SCAN:
        if not marker.startswith(b"\xff"):
            return False
        at += 2 + int.from_bytes(content[at + 2 : at + 4])  # a segment's length counts itself
    return content.find(END, at) >= 0
