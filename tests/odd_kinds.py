"""Tables of unusual images: every format and sample type that DALI decodes, and every place of an orientation.

The right result of each is known. What DALI gets wrong must be bad; what is good must be the same for all loaders.
"""

import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests import odd_images as odd
from tests.odd_images import COLOURS, FIELDS, GREY, JFIF, RAMP, exif, turned, two_blocks

RGB = odd.ycc(COLOURS)
OPAQUE = np.full_like(GREY, 255)
HALF = np.full_like(GREY, 128)
GREY16, COLOURS16 = GREY.astype(np.uint16) * 257, COLOURS.astype(np.uint16) * 257
INK = [*np.moveaxis(255.0 - COLOURS, 2, 0), np.zeros((odd.SIDE, odd.SIDE))]  # CMYK without black
INVERTED = [255 - plane for plane in INK]  # as Adobe stores it
YCCK = [*odd.ycc(np.stack(INK[:3], axis=-1)), INVERTED[3]]
COLOUR_IMAGE = Image.fromarray(COLOURS)
MAP = [value * 257 for value in range(256)] * 3  # colour map of a TIFF
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


def _grey(content: bytes, dali: bool = True, pillow: bool = True) -> Kind:
    return Kind(content, np.stack([GREY] * 3, axis=-1), dali, pillow)


def _colour(content: bytes, dali: bool = True, pillow: bool = True) -> Kind:
    return Kind(content, COLOURS, dali, pillow)


def _saved(kind: str, mode: str, **options: Any) -> Kind:
    content = odd.encoded(COLOUR_IMAGE.convert(mode), kind, **options)
    return Kind(content, np.asarray(COLOUR_IMAGE.convert(mode).convert("RGB")))


JPEGS = {
    "JPEG": _colour(odd.jpeg(RGB, segments=JFIF)),
    "JPEG without JFIF": _colour(odd.jpeg(RGB)),
    "JPEG, grey": _grey(odd.jpeg([RAMP], segments=JFIF)),
    "JPEG, grey 2x2": _grey(odd.jpeg([RAMP], sampling=[(2, 2)])),
    "JPEG, grey 2x1": _grey(odd.jpeg([RAMP], sampling=[(2, 1)])),
    "JPEG, grey 1x2": _grey(odd.jpeg([RAMP], sampling=[(1, 2)])),
    "JPEG, grey of Adobe": _grey(odd.jpeg([RAMP], segments=odd.adobe(0))),
    "JPEG, RGB by ids": _colour(odd.jpeg(list(np.moveaxis(COLOURS, 2, 0)), ids=b"RGB")),
    "JPEG, RGB by Adobe": _colour(odd.jpeg(list(np.moveaxis(COLOURS, 2, 0)), segments=odd.adobe(0))),
    "JPEG, JFIF, then RGB by Adobe": _colour(odd.jpeg(RGB, segments=JFIF + odd.adobe(0))),
    "JPEG, ids 0 to 2": _colour(odd.jpeg(RGB, ids=[0, 1, 2])),
    "JPEG, ids 34 to 36": _colour(odd.jpeg(RGB, ids=[34, 35, 36])),
    "JPEG, restart markers": _colour(odd.jpeg(RGB, restart=3, segments=JFIF)),
    "JPEG, fill bytes": _colour(odd.jpeg(RGB, fill=5, segments=JFIF)),
    "JPEG, extended": _colour(odd.jpeg(RGB).replace(b"\xff\xc0", b"\xff\xc1")),
    "JPEG, all 2x1": _colour(odd.jpeg(RGB, sampling=[(2, 1)] * 3)),
    "JPEG, all 1x2": _colour(odd.jpeg(RGB, sampling=[(1, 2)] * 3)),
    "JPEG, chroma 2x2": _colour(odd.jpeg(RGB, sampling=[(1, 1), (2, 2), (2, 2)])),
    "JPEG of odd sides": Kind(odd.jpeg([plane[:61, :47] for plane in RGB], sampling=OF_FOUR), COLOURS[:61, :47]),
    "JPEG, progressive": _saved("JPEG", "RGB", progressive=True, quality=95, subsampling=0),
    "JPEG with more pictures": _saved("MPO", "RGB", save_all=True, append_images=[Image.fromarray(GREY)], quality=95),
    "JPEG, CMYK of Adobe": _colour(odd.jpeg(INVERTED, segments=odd.adobe(0))),
    "JPEG, CMYK without Adobe": _colour(odd.jpeg(INK)),
    "JPEG, CMYK with JFIF": _colour(odd.jpeg(INK, segments=JFIF)),
    "JPEG, CMYK subsampled": _colour(odd.jpeg(INVERTED, sampling=OF_FOUR, segments=odd.adobe(0))),
    "JPEG, YCCK": _colour(odd.jpeg(YCCK, segments=odd.adobe(2))),
    "JPEG, YCCK subsampled": _colour(odd.jpeg(YCCK, sampling=OF_FOUR, segments=odd.adobe(2))),
    **{
        f"JPEG {name}": _colour(odd.jpeg(RGB, sampling=[factors, (1, 1), (1, 1)], segments=JFIF))
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
        found[f"PNG, clear colours of {bits} bits"] = Kind(odd.png(rows, 3, bits, palette, (b"tRNS", b"\0\x80")), shown)
    for bits, grey, colours in ((8, GREY, COLOURS), (16, GREY16.astype(">u2"), COLOURS16.astype(">u2"))):
        cover = np.full_like(grey, 128 * (257 if bits == 16 else 1))
        found[f"PNG, grey of {bits} bits"] = _grey(odd.png(grey, 0, bits))
        found[f"PNG, a clear grey of {bits} bits"] = _grey(odd.png(grey, 0, bits, (b"tRNS", b"\0\0")))
        found[f"PNG of {bits} bits"] = _colour(odd.png(colours, 2, bits))
        found[f"PNG, grey and alpha of {bits} bits"] = _grey(odd.png(np.dstack([grey, cover]), 4, bits))
        found[f"PNG, alpha of {bits} bits"] = _colour(odd.png(np.dstack([colours, cover]), 6, bits))
    return found


def _tiffs() -> dict[str, Kind]:
    found = {}
    for name, order in (("little", "<"), ("big", ">")):
        for kind, scale, good in (
            ("u1", 1, True), ("u2", 257, True), ("u4", 2**24, False), ("i1", 0.5, False), ("i2", 128, False),
            ("i4", 2**23, False), ("f2", 1, False), ("f4", 1, False), ("f8", 1, False), ("f4", 1 / 255, False),
        ):  # fmt: skip
            content = odd.tiff((RAMP * scale).astype(kind), order=order)
            found[f"TIFF, {kind} times {scale:.3g}, {name} endian"] = _grey(content, good, good)
        found[f"TIFF of 16 bits, {name} endian"] = _colour(odd.tiff(COLOURS16, 2, order=order))
    for bits, good in ((1, True), (2, False), (4, False), (12, True)):
        top = 2**bits - 1
        values = np.rint(RAMP * top / 255)
        shown = np.stack([np.rint(values * 255 / top).astype(np.uint8)] * 3, axis=-1)
        found[f"TIFF, {bits} bits"] = Kind(odd.tiff_of_bits(values, bits), shown, good)
        if bits < 12:
            ramp = [value * 65535 // top for value in range(top + 1)] * 3
            found[f"TIFF, palette of {bits} bits"] = Kind(odd.tiff_of_bits(values, bits, 3, t320=ramp), shown)
    for name, channels, good, pillow in (
        ("associated alpha", odd.tiff(np.dstack([COLOURS // 2, HALF]), 2, t338=1), False, True),
        ("grey and alpha", odd.tiff(np.dstack([GREY, OPAQUE]), t338=2), False, True),
        ("grey and more", odd.tiff(np.dstack([GREY, OPAQUE]), t338=0), False, True),
        ("grey and alpha of 16 bits", odd.tiff(np.dstack([GREY16, GREY16]), t338=2), False, False),
        ("13 bands", odd.tiff(np.dstack([GREY16] * 13), t338=[0] * 12), False, False),
        ("floating-point colours", odd.tiff((COLOURS / 255).astype("f4"), 2), False, False),
    ):
        shown = COLOURS if "associated" in name else np.stack([GREY] * 3, axis=-1)
        found[f"TIFF, {name}"] = Kind(channels, shown, good, pillow)
    return found | {
        "TIFF": _colour(odd.tiff(COLOURS, 2)),
        "TIFF, white is zero": _grey(odd.tiff(255 - GREY, 0)),
        "TIFF of 16 bits, white is zero": _grey(odd.tiff(65535 - GREY16, 0), False),
        "TIFF, alpha": _colour(odd.tiff(np.dstack([COLOURS, HALF]), 2, t338=2)),
        "TIFF, alpha of 16 bits": _colour(odd.tiff(np.dstack([COLOURS16, COLOURS16[..., 0]]), 2, t338=2)),
        "TIFF, palette": _grey(odd.tiff(GREY, 3, t320=MAP)),
        "TIFF, CMYK": _colour(odd.tiff(np.dstack([255 - COLOURS, np.zeros_like(GREY)]), 5)),
        "TIFF, CMYK of 16 bits": _colour(odd.tiff(np.dstack([65535 - COLOURS16, 0 * GREY16]), 5), False),
        "TIFF, Lab": _colour(odd.lab_tiff(), False),
        "TIFF, YCbCr": _saved("TIFF", "YCbCr"),
        **{
            f"TIFF, {name}": _saved("TIFF", mode, compression=name)
            for name in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits", "zstd")
            for mode in ("RGB",)
        },
        "TIFF, group4": _saved("TIFF", "1", compression="group4"),
        "TIFF, several pages": _saved("TIFF", "RGB", save_all=True, append_images=[Image.fromarray(GREY)]),
        "TIFF, big": _saved("TIFF", "RGB", big_tiff=True),
    }  # fmt: skip


def _netpbm() -> dict[str, Kind]:
    found = {}
    for kind, values in ((5, RAMP), (6, COLOURS), (2, RAMP), (3, COLOURS)):
        for maximum in (1, 15, 100, 254, 255, 256, 1000, 4095, 65535):
            # DALI reads text and 255 with their maximum, and takes 65,535 for that of all other 16-bit samples.
            good = maximum in (254, 255, 65535) or (kind < 4 and maximum < 255)
            shown = np.rint(np.rint(values * (maximum / 255)) * (255 / maximum)).astype(np.uint8)
            pixels = shown if shown.ndim == 3 else np.stack([shown] * 3, axis=-1)
            found[f"Netpbm P{kind}, at most {maximum}"] = Kind(odd.netpbm(kind, maximum, values), pixels, good)
    bits = np.packbits(GREY < 128, axis=1).tobytes()
    black = np.where(GREY < 128, 0, 255).astype(np.uint8)
    found["Netpbm P4"] = Kind(b"P4 64 64\n" + bits, np.stack([black] * 3, axis=-1))
    return found


OTHERS = {
    "BMP": _saved("BMP", "RGB"),
    "BMP, grey": _saved("BMP", "L"),
    "BMP, palette": _saved("BMP", "P"),
    "BMP, 1 bit": _saved("BMP", "1"),
    "BMP, alpha": _saved("BMP", "RGBA"),
    "WebP": _saved("WEBP", "RGB", lossless=True),
    "WebP, lossy": _saved("WEBP", "RGB", quality=95),
    "WebP, alpha": _colour(odd.encoded(Image.fromarray(np.dstack([COLOURS, HALF])), "WEBP", lossless=True, exact=True)),
    "JPEG 2000": _saved("JPEG2000", "RGB"),
    "JPEG 2000, grey": _saved("JPEG2000", "L"),
    "JPEG 2000, grey of 16 bits": _grey(odd.encoded(Image.fromarray(GREY16), "JPEG2000")),
    "JPEG 2000, YCbCr": Kind(odd.encoded(COLOUR_IMAGE.convert("YCbCr"), "JPEG2000"), None, False),
    "JPEG 2000, grey and alpha": Kind(odd.encoded(COLOUR_IMAGE.convert("LA"), "JPEG2000"), None, False),
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
