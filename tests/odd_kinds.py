"""Tables of unusual images: every format and sample type that DALI decodes, and every place of an orientation.

The right result of each is known. What DALI gets wrong must be bad; what is good must be the same for all loaders.
"""

import contextlib
import io
import zlib
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image

from tests import odd_images as odd
from tests.odd_images import COLORS, FIELDS, GRAY, JFIF, RAMP, exif, turned, two_blocks

READS_GRAY_AND_MORE = int(PIL.__version__.split(".")[0]) >= 13
RGB = odd.ycc(COLORS)
OPAQUE = np.full_like(GRAY, 255)
HALF = np.full_like(GRAY, 128)
GRAY16, COLORS16 = GRAY.astype(np.uint16) * 257, COLORS.astype(np.uint16) * 257
INK = [*np.moveaxis(255.0 - COLORS, 2, 0), np.zeros((odd.SIDE, odd.SIDE))]  # CMYK without black
INVERTED = [255 - plane for plane in INK]  # as Adobe stores it
YCCK = [*odd.ycc(np.stack(INK[:3], axis=-1)), INVERTED[3]]
COLOR_IMAGE = Image.fromarray(COLORS)
MAP = [value * 257 for value in range(256)] * 3  # color map of a TIFF
OF_FOUR = [(2, 2), (1, 1), (1, 1), (2, 2)]  # sampling of CMYK
# Names of samplings -> factors of the first component; the others have 1.
SAMPLINGS = {
    "4:1:1": (4, 1),
    "4:2:2": (2, 1),
    "4:4:0": (1, 2),
    "4:2:0": (2, 2),
    "3x1": (3, 1),
    "1x3": (1, 3),
    "4:1:0": (4, 2),
}


class Kind(NamedTuple):
    """An image.

    Attributes:
        content: of the file.
        pixels: uint8 (H, W, 3), what it shows; None if nobody can say.
        dali: whether it is good for DALI.
        pillow: whether it is good for Pillow.
    """

    content: bytes
    pixels: Any
    dali: bool = True
    pillow: bool = True


def _gray(content: bytes, dali: bool = True, pillow: bool = True) -> Kind:
    return Kind(content, np.stack([GRAY] * 3, axis=-1), dali, pillow)


def _color(content: bytes, dali: bool = True, pillow: bool = True) -> Kind:
    return Kind(content, COLORS, dali, pillow)


def _saved(kind: str, mode: str, **options: Any) -> Kind:
    content = odd.encoded(COLOR_IMAGE.convert(mode), kind, **options)
    return Kind(content, np.asarray(COLOR_IMAGE.convert(mode).convert("RGB")))


JPEGS = {
    "JPEG": _color(odd.jpeg(RGB, segments=JFIF)),
    "JPEG without JFIF": _color(odd.jpeg(RGB)),
    "JPEG, gray": _gray(odd.jpeg([RAMP], segments=JFIF)),
    "JPEG, gray 2x2": _gray(odd.jpeg([RAMP], sampling=[(2, 2)])),
    "JPEG, gray 2x1": _gray(odd.jpeg([RAMP], sampling=[(2, 1)])),
    "JPEG, gray 1x2": _gray(odd.jpeg([RAMP], sampling=[(1, 2)])),
    "JPEG, gray of Adobe": _gray(odd.jpeg([RAMP], segments=odd.adobe(0))),
    "JPEG, RGB by ids": _color(odd.jpeg(list(np.moveaxis(COLORS, 2, 0)), ids=b"RGB")),
    "JPEG, RGB by Adobe": _color(odd.jpeg(list(np.moveaxis(COLORS, 2, 0)), segments=odd.adobe(0))),
    "JPEG, JFIF, then RGB by Adobe": _color(odd.jpeg(RGB, segments=JFIF + odd.adobe(0))),
    "JPEG, ids 0 to 2": _color(odd.jpeg(RGB, ids=[0, 1, 2])),
    "JPEG, ids 34 to 36": _color(odd.jpeg(RGB, ids=[34, 35, 36])),
    "JPEG, restart markers": _color(odd.jpeg(RGB, restart=3, segments=JFIF)),
    "JPEG, fill bytes": _color(odd.jpeg(RGB, fill=5, segments=JFIF)),
    "JPEG, extended": _color(odd.jpeg(RGB).replace(b"\xff\xc0", b"\xff\xc1")),
    "JPEG, all 2x1": _color(odd.jpeg(RGB, sampling=[(2, 1)] * 3)),
    "JPEG, all 1x2": _color(odd.jpeg(RGB, sampling=[(1, 2)] * 3)),
    "JPEG, chroma 2x2": _color(odd.jpeg(RGB, sampling=[(1, 1), (2, 2), (2, 2)])),
    "JPEG of odd sides": Kind(odd.jpeg([plane[:61, :47] for plane in RGB], sampling=OF_FOUR), COLORS[:61, :47]),
    "JPEG, progressive": _saved("JPEG", "RGB", progressive=True, quality=95, subsampling=0),
    "JPEG with more pictures": _saved("MPO", "RGB", save_all=True, append_images=[Image.fromarray(GRAY)], quality=95),
    "JPEG, CMYK of Adobe": _color(odd.jpeg(INVERTED, segments=odd.adobe(0))),
    "JPEG, CMYK without Adobe": _color(odd.jpeg(INK)),
    "JPEG, CMYK with JFIF": _color(odd.jpeg(INK, segments=JFIF)),
    "JPEG, CMYK subsampled": _color(odd.jpeg(INVERTED, sampling=OF_FOUR, segments=odd.adobe(0))),
    "JPEG, YCCK": _color(odd.jpeg(YCCK, segments=odd.adobe(2))),
    "JPEG, YCCK subsampled": _color(odd.jpeg(YCCK, sampling=OF_FOUR, segments=odd.adobe(2))),
    **{
        f"JPEG {name}": _color(odd.jpeg(RGB, sampling=[factors, (1, 1), (1, 1)], segments=JFIF))
        for name, factors in SAMPLINGS.items()
    },
}  # fmt: skip


def _pngs() -> dict[str, Kind]:
    found = {}
    for bits in (1, 2, 4):
        top = 2**bits - 1
        values = np.rint(RAMP * top / 255)
        shown = np.stack([np.rint(values * 255 / top).astype(np.uint8)] * 3, axis=-1)
        palette = (b"PLTE", bytes(value * 255 // top for value in range(top + 1) for _ in range(3)))
        rows = odd.packed_bits(values, bits)
        found[f"PNG, {bits} bits"] = Kind(odd.png(rows, 0, bits), shown)
        found[f"PNG, palette of {bits} bits"] = Kind(odd.png(rows, 3, bits, palette), shown)
        found[f"PNG, clear colors of {bits} bits"] = Kind(odd.png(rows, 3, bits, palette, (b"tRNS", b"\0\x80")), shown)
    for bits, gray, colors in ((8, GRAY, COLORS), (16, GRAY16.astype(">u2"), COLORS16.astype(">u2"))):
        cover = np.full_like(gray, 128 * (257 if bits == 16 else 1))
        found[f"PNG, gray of {bits} bits"] = _gray(odd.png(gray, 0, bits))
        found[f"PNG, a clear gray of {bits} bits"] = _gray(odd.png(gray, 0, bits, (b"tRNS", b"\0\0")))
        found[f"PNG of {bits} bits"] = _color(odd.png(colors, 2, bits))
        found[f"PNG, gray and alpha of {bits} bits"] = _gray(odd.png(np.dstack([gray, cover]), 4, bits))
        found[f"PNG, alpha of {bits} bits"] = _color(odd.png(np.dstack([colors, cover]), 6, bits))
    return found


def _tiffs_of_pillow() -> dict[str, Kind]:
    """What Pillow itself reads of what it writes: 11.3 has no zstd, and writes YCbCr wrongly."""
    found = {}
    names = ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits", "zstd")
    for name, mode, compression in (("YCbCr", "YCbCr", None), *((name, "RGB", name) for name in names)):
        with contextlib.suppress(OSError):
            kind = _saved("TIFF", mode, compression=compression)
            Image.open(io.BytesIO(kind.content)).load()
            found[f"TIFF, {name}"] = kind
    return found


def _tiffs() -> dict[str, Kind]:
    found = {}
    for name, order in (("little", "<"), ("big", ">")):
        for kind, scale, good in (
            ("u1", 1, True), ("u2", 257, True), ("u4", 2**24, False), ("i1", 0.5, False), ("i2", 128, False),
            ("i4", 2**23, False), ("f2", 1, False), ("f4", 1, False), ("f8", 1, False), ("f4", 1 / 255, False),
        ):  # fmt: skip
            content = odd.tiff((RAMP * scale).astype(kind), order=order)
            found[f"TIFF, {kind} times {scale:.3g}, {name} endian"] = _gray(content, good, good)
        found[f"TIFF of 16 bits, {name} endian"] = _color(odd.tiff(COLORS16, 2, order=order))
    for bits, good in ((1, True), (2, False), (4, False), (12, True)):
        top = 2**bits - 1
        values = np.rint(RAMP * top / 255)
        shown = np.stack([np.rint(values * 255 / top).astype(np.uint8)] * 3, axis=-1)
        found[f"TIFF, {bits} bits"] = Kind(odd.tiff_of_bits(values, bits), shown, good)
        if bits < 12:
            ramp = [value * 65535 // top for value in range(top + 1)] * 3
            found[f"TIFF, palette of {bits} bits"] = Kind(odd.tiff_of_bits(values, bits, 3, t320=ramp), shown)
    for name, channels, good, pillow in (
        ("associated alpha", odd.tiff(np.dstack([COLORS // 2, HALF]), 2, t338=1), False, True),
        ("gray and alpha", odd.tiff(np.dstack([GRAY, OPAQUE]), t338=2), False, True),
        ("gray and more", odd.tiff(np.dstack([GRAY, OPAQUE]), t338=0), False, READS_GRAY_AND_MORE),
        ("gray and alpha of 16 bits", odd.tiff(np.dstack([GRAY16, GRAY16]), t338=2), False, False),
        ("13 bands", odd.tiff(np.dstack([GRAY16] * 13), t338=[0] * 12), False, False),
        ("floating-point colors", odd.tiff((COLORS / 255).astype("f4"), 2), False, False),
    ):
        shown = COLORS if "associated" in name else np.stack([GRAY] * 3, axis=-1)
        found[f"TIFF, {name}"] = Kind(channels, shown, good, pillow)
    return found | {
        "TIFF": _color(odd.tiff(COLORS, 2)),
        "TIFF, white is zero": _gray(odd.tiff(255 - GRAY, 0)),
        "TIFF of 16 bits, white is zero": _gray(odd.tiff(65535 - GRAY16, 0), False),
        "TIFF, alpha": _color(odd.tiff(np.dstack([COLORS, HALF]), 2, t338=2)),
        "TIFF, alpha of 16 bits": _color(odd.tiff(np.dstack([COLORS16, COLORS16[..., 0]]), 2, t338=2)),
        "TIFF, palette": _gray(odd.tiff(GRAY, 3, t320=MAP)),
        "TIFF, CMYK": _color(odd.tiff(np.dstack([255 - COLORS, np.zeros_like(GRAY)]), 5)),
        "TIFF, CMYK of 16 bits": _color(odd.tiff(np.dstack([65535 - COLORS16, 0 * GRAY16]), 5), False),
        "TIFF, Lab": _color(odd.lab_tiff(), False),
        **_tiffs_of_pillow(),
        "TIFF, group4": _saved("TIFF", "1", compression="group4"),
        "TIFF, several pages": _saved("TIFF", "RGB", save_all=True, append_images=[Image.fromarray(GRAY)]),
        "TIFF, big": _saved("TIFF", "RGB", big_tiff=True),
    }  # fmt: skip


def _netpbm() -> dict[str, Kind]:
    found = {}
    for kind, values in ((5, RAMP), (6, COLORS), (2, RAMP), (3, COLORS)):
        for maximum in (1, 15, 100, 254, 255, 256, 1000, 4095, 65535):
            # DALI reads text and 255 with their maximum, and takes 65,535 for that of all other 16-bit samples.
            good = maximum in (254, 255, 65535) or (kind < 4 and maximum < 255)
            shown = np.rint(np.rint(values * (maximum / 255)) * (255 / maximum)).astype(np.uint8)
            pixels = shown if shown.ndim == 3 else np.stack([shown] * 3, axis=-1)
            found[f"Netpbm P{kind}, at most {maximum}"] = Kind(odd.netpbm(kind, maximum, values), pixels, good)
    bits = np.packbits(GRAY < 128, axis=1).tobytes()
    black = np.where(GRAY < 128, 0, 255).astype(np.uint8)
    found["Netpbm P4"] = Kind(b"P4 64 64\n" + bits, np.stack([black] * 3, axis=-1))
    return found


OTHERS = {
    "BMP": _saved("BMP", "RGB"),
    "BMP, gray": _saved("BMP", "L"),
    "BMP, palette": _saved("BMP", "P"),
    "BMP, 1 bit": _saved("BMP", "1"),
    "BMP, alpha": _saved("BMP", "RGBA"),
    "WebP": _saved("WEBP", "RGB", lossless=True),
    "WebP, lossy": _saved("WEBP", "RGB", quality=95),
    "WebP, alpha": _color(odd.encoded(Image.fromarray(np.dstack([COLORS, HALF])), "WEBP", lossless=True, exact=True)),
    "JPEG 2000": _saved("JPEG2000", "RGB"),
    "JPEG 2000, gray": _saved("JPEG2000", "L"),
    "JPEG 2000, gray of 16 bits": _gray(odd.encoded(Image.fromarray(GRAY16), "JPEG2000")),
    "JPEG 2000, YCbCr": Kind(odd.encoded(COLOR_IMAGE.convert("YCbCr"), "JPEG2000"), None, False),
    "JPEG 2000, gray and alpha": Kind(odd.encoded(COLOR_IMAGE.convert("LA"), "JPEG2000"), None, False),
}
SAMPLES: dict[str, Kind] = JPEGS | _pngs() | _tiffs() | _netpbm() | OTHERS


class Turned(NamedTuple):
    """An image of FIELDS: its content, how it must be turned (1 to 8), and whether it is good for DALI."""

    content: bytes
    orientation: int
    dali: bool = True


def _png(*chunks: tuple[bytes, bytes], last: bytes = b"") -> bytes:
    return odd.png(FIELDS, 2, 8, *chunks, last=last)


def _webp(orientation: int, **options: Any) -> bytes:
    data = odd.tiff_header(orientation)
    return odd.encoded(Image.fromarray(FIELDS), "WEBP", quality=95, exif=data, **options)


def _profile(name: bytes, orientation: int) -> tuple[bytes, bytes]:
    """The text chunk in which ImageMagick keeps EXIF data."""
    data = b"Exif\0\0" + odd.tiff_header(orientation)
    return b"zTXt", b"Raw profile type " + name + b"\0\0" + zlib.compress(
        b"\nexif\n%8d\n" % len(data) + data.hex().encode()
    )


DAMAGED = odd.segment(0xE1, b"Exif\0\0XX" + bytes(9))


def _orientations() -> dict[str, Turned]:
    found = {f"{value}": Turned(turned(JFIF, exif(value)), value) for value in range(1, 9)}
    found |= {f"{value}, which means nothing": Turned(turned(exif(value)), 1) for value in (0, 9, 65535)}
    preview = exif(8)[4:]
    for value in (3, 6):
        head = odd.tiff_header
        found |= {
            f"{value}, big endian": Turned(turned(exif(value, order=">")), value),
            f"{value} as a long": Turned(turned(exif(value, kind=4)), value),
            f"{value} as a signed long": Turned(turned(exif(value, kind=9)), value),
            f"{value} as a big-endian long": Turned(turned(exif(value, kind=4, order=">")), value, False),
            f"{value} as a byte": Turned(turned(exif(value, kind=1)), value),
            f"{value} of a list": Turned(turned(exif(value, count=2)), value),
            f"{value} in a cut directory": Turned(turned(exif(value, entries=5)), value, False),
            f"{value} before JFIF": Turned(turned(exif(value), JFIF), value),
            f"{value} behind other segments": Turned(
                turned(odd.segment(0xE2, bytes(90)), odd.segment(0xFE, b"Hi"), exif(value)), value
            ),
            f"{value} behind fill bytes": Turned(turned(b"\xff\xff", exif(value)), value),
            f"{value} before another XMP": Turned(turned(exif(value), odd.xmp(8)), value),
            f"{value} with a turned preview": Turned(
                turned(odd.segment(0xE1, b"Exif\0\0" + head(value) + b"\xff\xd8" + preview)), value
            ),
            f"{value} in XMP alone": Turned(turned(odd.xmp(value)), 1),
            f"{value} behind a block without one": Turned(turned(exif(None), exif(value)), value),
            f"{value} behind a damaged block": Turned(turned(DAMAGED, exif(value)), value),
            f"{value} twice": Turned(turned(exif(value), exif(value)), value),
            f"{value} in another segment": Turned(turned(odd.segment(0xE2, exif(value)[4:])), 1),
            f"PNG {value}": Turned(_png((b"eXIf", head(value))), value),
            f"PNG {value}, big endian": Turned(_png((b"eXIf", head(value, order=">"))), value),
            f"PNG {value} behind the pixels": Turned(_png(last=head(value)), value),
            f"PNG {value} with a JPEG's mark": Turned(_png((b"eXIf", b"Exif\0\0" + head(value))), value, False),
            f"PNG {value} in a profile": Turned(_png(_profile(b"exif", value)), 1),
            f"PNG {value} in XMP": Turned(_png((b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + odd.xmp(value)[33:])), 1),
            f"PNG {value}, then 1": Turned(_png((b"eXIf", head(value)), (b"eXIf", head(1))), value, False),
            f"PNG 1, then {value}": Turned(_png((b"eXIf", head(1)), last=head(value)), 1, False),
            f"WebP {value}": Turned(_webp(value), value),
            f"WebP {value}, lossless": Turned(_webp(value, lossless=True), value, False),
            f"WebP {value} in XMP": Turned(
                odd.encoded(Image.fromarray(FIELDS), "WEBP", lossless=True, xmp=odd.xmp(value)[33:]), 1
            ),
            f"TIFF {value}": Turned(odd.tiff(FIELDS, 2, t274=value), value),
        }  # fmt: skip
    pairs = [(1, 6), (6, 3), (6, 1), (3, 8), (1, 3), (8, 6), (2, 5), (0, 6), (6, 9)]
    found |= {
        f"{first}, then {second}": Turned(two_blocks(first, second), first or 1, False) for first, second in pairs
    }
    return found


ORIENTED = _orientations()
