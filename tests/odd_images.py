"""Images that few programs write: JPEGs of any components and segments, TIFFs, PNGs and Netpbm files of any samples."""

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

Plane = NDArray[Any]
SIDE = 64
_ROWS, _COLUMNS = np.mgrid[0:SIDE, 0:SIDE]
RAMP: Plane = (2 * _ROWS + 2 * _COLUMNS).astype(float)  # 0 to 252, mean 126
GRAY: NDArray[np.uint8] = RAMP.astype(np.uint8)
# Four fields of colors that tell how an image was turned: red, green; blue, white.
FIELDS = np.full((SIDE, 96, 3), (240, 240, 240), np.uint8)
FIELDS[:32, :48], FIELDS[:32, 48:], FIELDS[32:, :48] = (240, 20, 20), (20, 240, 20), (20, 20, 240)
COLORS: NDArray[np.uint8] = np.stack([GRAY, GRAY[::-1], GRAY[:, ::-1]], axis=-1)

# ---------------------------------------------------------------------------------------------------------------------
# JPEG


def ycc(rgb: Plane) -> list[Plane]:
    """Y, Cb and Cr of uint8 RGB, each of 0 to 255."""
    red, green, blue = (np.asarray(rgb, float)[..., channel] for channel in range(3))
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return [luma, (blue - luma) / 1.772 + 128, (red - luma) / 1.402 + 128]


def _zigzag() -> list[int]:
    """Row-major positions of an 8 x 8 block in the order in which a JPEG stores them."""
    cells = [(row, column) for row in range(8) for column in range(8)]
    order = sorted(cells, key=lambda cell: (sum(cell), cell[0] if sum(cell) % 2 else cell[1]))
    return [8 * row + column for row, column in order]


ZIGZAG = _zigzag()
# Codes of one length: symbol -> bits. Each table leaves the code of ones alone free, as it must.
_DC = {size: format(size, "04b") for size in range(12)}
_AC_SYMBOLS = [0x00, 0xF0, *(16 * run + size for run in range(16) for size in range(1, 11))]
_AC = {symbol: format(number, "08b") for number, symbol in enumerate(_AC_SYMBOLS)}


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def _amplitude(value: int) -> str:
    size = abs(value).bit_length()
    return format(value if value > 0 else value + (1 << size) - 1, f"0{size}b") if size else ""


def _block_bits(block: Sequence[int], before: int) -> str:
    """The code of a block's 64 coefficients in zigzag order; `before` is the first one of the block before."""
    difference = block[0] - before
    bits = [_DC[abs(difference).bit_length()], _amplitude(difference)]
    run = 0
    for value in block[1:]:
        if value == 0:
            run += 1
            continue
        bits += [_AC[0xF0]] * (run // 16)
        bits += [_AC[16 * (run % 16) + abs(value).bit_length()], _amplitude(value)]
        run = 0
    return "".join([*bits, _AC[0] if run else ""])


def _packed(bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    return int(bits or "0", 2).to_bytes(len(bits) // 8).replace(b"\xff", b"\xff\0")


def _blocks(plane: Plane, across: int, down: int, size: tuple[int, int]) -> NDArray[np.int64]:
    """Coefficients (rows, columns, 64) of a component, shrunk by `across` and `down` after padding to `size`."""
    height, width = plane.shape
    whole = np.pad(plane, ((0, size[0] - height), (0, size[1] - width)), mode="edge")
    small = whole.reshape(size[0] // down, down, size[1] // across, across).mean(axis=(1, 3)) - 128
    rows, columns = small.shape[0] // 8, small.shape[1] // 8
    frequency, sample = np.mgrid[0:8, 0:8]
    basis = np.cos((2 * sample + 1) * frequency * np.pi / 16) / 2
    basis[0] /= np.sqrt(2)
    tiles = small.reshape(rows, 8, columns, 8).swapaxes(1, 2)
    found: NDArray[np.int64] = np.rint(basis @ tiles @ basis.T).astype(int).clip(-1023, 1023)
    return found.reshape(rows, columns, 64)[..., ZIGZAG]


def _scan(tables: Sequence[Any], factors: Sequence[tuple[int, int]], units: tuple[int, int], restart: int) -> bytes:
    """Entropy-coded data of blocks in tables, one a component, for so many units across and down."""
    parts, bits, before = [], "", [0] * len(tables)
    for unit in range(units[0] * units[1]):
        if restart and unit and unit % restart == 0:
            parts.append(_packed(bits) + bytes([0xFF, 0xD0 + (unit // restart - 1) % 8]))
            bits, before = "", [0] * len(tables)
        row, column = divmod(unit, units[0])
        for number, (h, v) in enumerate(factors):
            for y in range(row * v, row * v + v):
                for x in range(column * h, column * h + h):
                    block = tables[number][y][x]
                    bits += _block_bits(block, before[number])
                    before[number] = block[0]
    return b"".join([*parts, _packed(bits)])


def jpeg(
    planes: Sequence[Plane],
    *,
    ids: Sequence[int] = (1, 2, 3, 4),
    sampling: Sequence[tuple[int, int]] = ((1, 1),) * 4,
    segments: bytes = b"",
    restart: int = 0,
    fill: int = 0,
) -> bytes:
    """A baseline JPEG of components that are taken as they are, 0 to 255.

    Args:
        planes: the components, all of one size.
        ids: of the components.
        sampling: factors of each, across and down.
        segments: behind the start, see `segment`.
        restart: units between two restart markers; 0 for none.
        fill: bytes of 0xFF before the scan.
    """
    height, width = planes[0].shape
    factors = list(sampling[: len(planes)])
    written, factors = factors, factors if len(planes) > 1 else [(1, 1)]  # the blocks of a single one are in rows
    across, down = max(h for h, _ in factors), max(v for _, v in factors)
    units = -(-width // (8 * across)), -(-height // (8 * down))
    size = units[1] * 8 * down, units[0] * 8 * across
    tables = [
        _blocks(plane, across // h, down // v, size).tolist() for plane, (h, v) in zip(planes, factors, strict=True)
    ]
    scan = _scan(tables, factors, units, restart)
    components = list(zip(ids, written, strict=False))
    frame = struct.pack(">BHHB", 8, height, width, len(planes))
    return b"".join(
        [
            b"\xff\xd8" + segments,
            segment(0xDB, bytes([0, *[1] * 64])),
            segment(0xC0, frame + b"".join(bytes([name, 16 * h + v, 0]) for name, (h, v) in components)),
            segment(0xC4, b"\x00" + bytes([0, 0, 0, 12, *[0] * 12]) + bytes(range(12))),
            segment(0xC4, b"\x10" + bytes([*[0] * 7, 162, *[0] * 8]) + bytes(_AC_SYMBOLS)),
            segment(0xDD, struct.pack(">H", restart)) if restart else b"",
            b"\xff" * fill,
            segment(0xDA, bytes([len(planes)]) + b"".join(bytes([name, 0]) for name, _ in components) + b"\0\x3f\0"),
            scan + b"\xff\xd9",
        ]
    )


JFIF = segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")
_XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'


def adobe(transform: int) -> bytes:
    """Adobe's segment: 0 for RGB or CMYK, 1 for YCbCr, 2 for YCCK."""
    return segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


def tiff_header(orientation: int | None, *, kind: int = 3, order: str = "<", count: int = 1, entries: int = 1) -> bytes:
    """A block of EXIF data with an orientation, of type `kind`: 1 a byte, 3 a short, 4 a long; None for another tag."""
    letter = {1: "B", 3: "H", 4: "I", 9: "i"}[kind]
    value = struct.pack(order + letter, orientation or 0).ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, entries)
    return head + struct.pack(order + "HHI", 274 if orientation is not None else 256, kind, count) + value + bytes(4)


def exif(orientation: int | None, **options: Any) -> bytes:
    """An EXIF segment, see `tiff_header`."""
    return segment(0xE1, b"Exif\0\0" + tiff_header(orientation, **options))


def xmp(orientation: int) -> bytes:
    return segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + _XMP % orientation)


FIELD_PLANES = ycc(FIELDS)


def turned(*segments: bytes) -> bytes:
    """A JPEG of FIELDS, 96 x 64 pixels as stored, with these segments."""
    return jpeg(FIELD_PLANES, segments=b"".join(segments))


def two_blocks(first: int, second: int) -> bytes:
    """A JPEG of FIELDS with two EXIF segments, as a program leaves it that adds its own to a camera's."""
    return turned(JFIF, exif(first), exif(second))


# ---------------------------------------------------------------------------------------------------------------------
# PNG, WebP, TIFF, Netpbm


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(rows: NDArray[Any], color: int, bits: int, *chunks: tuple[bytes, bytes], last: bytes = b"") -> bytes:
    """A PNG of rows of packed samples, with these chunks before the pixels, and `last` as EXIF data behind them."""
    data = b"".join(b"\0" + row.tobytes() for row in rows)
    width = rows.shape[1] if rows.ndim == 3 else rows.shape[1] * 8 * rows.dtype.itemsize // bits
    header = struct.pack(">IIBBBBB", width, len(rows), bits, color, 0, 0, 0)
    listed = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(data)), *([(b"eXIf", last)] if last else [])]
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in [*listed, (b"IEND", b"")]
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(samples: NDArray[Any], photometric: int = 1, *, order: str = "<", **tags: int | Sequence[int]) -> bytes:
    """An uncompressed TIFF of (H, W) or (H, W, C) samples; `tags` by number as `t338=2`, with packed rows `t258`."""
    height, width = samples.shape[:2]
    channels = samples.shape[2] if samples.ndim == 3 else 1
    data = samples.astype(np.dtype(order + samples.dtype.str[1:])).tobytes()
    kinds = {"u": 1, "i": 2, "f": 3}
    values: dict[int, Any] = {
        256: width, 257: height, 258: [8 * samples.dtype.itemsize] * channels, 259: 1, 262: photometric,
        277: channels, 278: height, 339: [kinds[samples.dtype.kind]] * channels,
    }  # fmt: skip
    values |= {int(name[1:]): value for name, value in tags.items()}
    listed = [(tag, 3, np.atleast_1d(value).tolist()) for tag, value in values.items()]
    listed += [(273, 4, [0]), (279, 4, [len(data)])]
    offset = 8 + 2 + 12 * len(listed) + 4
    extra = b""
    directory = []
    for tag, kind, numbers in sorted(listed):
        packed = struct.pack(f"{order}{len(numbers)}{'H' if kind == 3 else 'I'}", *numbers)
        if len(packed) > 4:
            stored = struct.pack(order + "I", offset + len(extra))
            extra += packed
        else:
            stored = packed.ljust(4, b"\0")
        directory.append((struct.pack(order + "HHI", tag, kind, len(numbers)), stored))
    start = struct.pack(order + "I", offset + len(extra))
    body = b"".join(
        head + (start if head[:2] == struct.pack(order + "H", 273) else stored) for head, stored in directory
    )
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "IH", 8, len(listed)) + body + bytes(4) + extra + data


def packed_bits(values: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Rows of samples of fewer than 8, or of 12, bits: uint8 (H, bytes)."""
    columns = [(values.astype(np.int64) >> shift) & 1 for shift in range(bits - 1, -1, -1)]
    return np.packbits(np.stack(columns, axis=-1).reshape(len(values), -1), axis=1)


def tiff_of_bits(values: NDArray[Any], bits: int, photometric: int = 1, **tags: Any) -> bytes:
    """A TIFF of samples of an unusual number of bits."""
    return tiff(packed_bits(values, bits), photometric, t256=values.shape[1], t258=bits, **tags)


def netpbm(kind: int, maximum: int, values: Plane) -> bytes:
    """P2, P3 (text), P5 or P6 of values of 0 to 255, scaled to a maximum."""
    scaled = np.rint(values * (maximum / 255)).astype(">u2" if maximum > 255 else np.uint8)
    body = scaled.tobytes() if kind > 4 else b" ".join(b"%d" % value for value in scaled.ravel().tolist()) + b"\n"
    return b"P%d %d %d %d\n" % (kind, values.shape[1], values.shape[0], maximum) + body


def lab_tiff() -> bytes:
    rgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    image = ImageCms.profileToProfile(Image.fromarray(COLORS), rgb, lab, outputMode="LAB")
    assert image is not None
    return encoded(image, "TIFF")
