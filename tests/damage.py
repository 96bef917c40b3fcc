"""Damaged, unusual and irregular files with names of images, of more than thirty kinds."""

import base64
import io
import os
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Two JPEGs of 48 x 40 pixels that Pillow cannot write.
ARITHMETIC = base64.b64decode(
    """
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBkeFxl
Z2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/yQARCAAoADADASIAAhEB
AxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AG+HDK6x69rOZcZJE7H/AJsNUXTOXJzFgBXTtb7SM/x0Y5r8nC6NUPT+q1pcSOe7j8pQ8A+HMxFc
wLZzaVmQ63afVdWsXYaEibIXcmkhyuqKKRyfaZd+TfU1/9k=
"""
)
TWELVE_BITS = base64.b64decode(
    """
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBkeFxl
Z2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/wQARDAAoADADASIAAhEB
AxEB/8QAFwABAQEBAAAAAAAAAAAAAAAABwAJCv/EABkQAAEFAAAAAAAAAAAAAAAAAAAGByMyof/EABgBAQEBAQEAAAAAAAAAAAAAAAcJCgQF/8QAHBEA
AgIDAQEAAAAAAAAAAAAAACIFBwQGMTIh/9oADAMBAAIRAxEAPwDj6S7X0gwYEu19IMHNLtfSDBgS7X0gwqTN751g5q6zPDgWl2vpBgwJdr6QYOiXa+kG
C+l2vpBgMze+dYpbV1meHAxLtfSDBfS7X0gwdEu19IMGBLtfSDAam986xS2rrM8OZ6Jdr6QYL6Xa+kGDol2vpBgwJdr6QYeVN751jETV1meHAtLtfSDB
gS7X0gwc0u19IMGBLtfSDAZm986xS2rrM8OBaXa+kGDAl2vpBg6Jdr6QYL6Xa+kGAzN751iltXWZ4cz0S7X0gwYEu19IMIjum5jL+sYtqun85HGBLtfS
DBfS7X0gwiBmbmMv6xS2rp/ORxgS7X0gwYEu19IMIgam5jL+sUtq6fzkc//Z
"""
)
SEGMENT = {"huffman": b"\xff\xc4", "frame": b"\xff\xc0", "scan": b"\xff\xda"}  # baseline JPEG's markers


def noise_image(height: int = 70, width: int = 90) -> Image.Image:
    """An image that no encoder makes small, the same in every call."""
    size = (-(-height // 4), -(-width // 4), 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)).resize((width, height))


def encoded(kind: str = "JPEG", mode: str = "RGB", height: int = 70, width: int = 90, **options: Any) -> bytes:
    """Content of a file with a `noise_image`."""
    file = io.BytesIO()
    noise_image(height, width).convert(mode).save(file, kind, **options)
    return file.getvalue()


def at(name: str, content: bytes) -> int:
    """Offset of the first segment of that name."""
    return content.index(SEGMENT[name])


def patched(content: bytes, offset: int, new: bytes) -> bytes:
    """`content` with other bytes at `offset`."""
    return content[:offset] + new + content[offset + len(new) :]


def resized(content: bytes, height: int, width: int) -> bytes:
    """A JPEG whose frame header claims other dimensions than its data have."""
    return patched(content, at("frame", content) + 5, struct.pack(">HH", height, width))


def noise(length: int) -> bytes:
    """Random bytes."""
    return np.random.default_rng(1).bytes(length)


JPEG = encoded(quality=90)
PNG = encoded("PNG")
SCAN = at("scan", JPEG)
EXIF = Image.Exif()
EXIF[274] = 6  # to be turned

# Kind -> content of a regular file.
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"\xff",
    "cut in the header": JPEG[:20],
    "cut in the tables": JPEG[: at("huffman", JPEG) + 10],
    "cut before the scan": JPEG[:SCAN],
    "cut early in the scan": JPEG[: SCAN + 40],
    "cut in the middle": JPEG[: len(JPEG) // 2],
    "cut near the end": JPEG[:-40],
    "cut end marker": JPEG[:-2],
    "cut progressive": encoded(progressive=True)[:-600],
    "cut PNG": PNG[: len(PNG) // 2],
    "PNG with a wrong checksum": patched(PNG, len(PNG) // 2, b"\0\0\0\0"),
    "random bytes": noise(3000),
    "zero bytes": bytes(3000),
    "random bytes behind a start marker": b"\xff\xd8\xff\xe0" + noise(3000),
    "text": b"not an image\n" * 30,
    "HTML": b"<!DOCTYPE html>\n<html><body><h1>404 Not Found</h1></body></html>\n",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="90" height="70"><rect width="9" height="9"/></svg>\n',
    "pointer of a version control system": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    "GIF": encoded("GIF"),
    "AVIF": encoded("AVIF"),
    "WebP": encoded("WEBP"),
    "PNG": PNG,
    "PNG of 16 bits": encoded("PNG", "I;16"),
    "PNG with a palette": encoded("PNG", "P"),
    "PNG with alpha": encoded("PNG", "RGBA"),
    "TIFF": encoded("TIFF"),
    "BMP": encoded("BMP"),
    "JPEG 2000": encoded("JPEG2000"),
    "ICO": encoded("ICO"),
    "CMYK": encoded(mode="CMYK"),
    "gray": encoded(mode="L"),
    "progressive": encoded(progressive=True),
    "12 bits": TWELVE_BITS,
    "arithmetic coding": ARITHMETIC,
    "lossless frame type": patched(JPEG, at("frame", JPEG), b"\xff\xc3"),
    "overfull Huffman table": patched(JPEG, at("huffman", JPEG) + 5, b"\xff" * 16),
    "other Huffman codes": patched(JPEG, at("huffman", JPEG) + 21, b"\x0b" * 12),
    "no Huffman tables": JPEG[: at("huffman", JPEG)] + JPEG[SCAN:],
    "frame too high": resized(JPEG, 7000, 90),
    "frame too small": resized(JPEG, 10, 90),
    "frame of no size": resized(JPEG, 0, 0),
    "frame of 65,500 x 65,500": resized(JPEG, 65500, 65500),
    "noise in the scan": patched(JPEG, SCAN + 500, noise(400)),
    "zeros in the scan": patched(JPEG, SCAN + 500, bytes(400)),
    "broken EXIF": patched(encoded(exif=EXIF), 12, b"\xee" * 8),
    "line break before the image": b"\r\n" + JPEG,
    "bytes after the image": JPEG + noise(300),
    "two images in one": JPEG + JPEG,
    "1 x 1": encoded(height=1, width=1),
    "1 x 3,000": encoded(height=1, width=3000),
}

NOT_REGULAR = ("pipe.jpg", "socket.jpg", "zeros without end.jpg", "gone.jpg", "round in circles.jpg")
UNUSUAL_NAMES = (
    "-rf.jpg", "--help.jpg", "two\nlines.jpg", "tab\tbed.jpg", "it's.jpg", 'a"b.jpg', "back\\slash.jpg", "*.jpg",
    " leading.jpg", "猫.jpg", "e\u0301.jpg", "\x1b[2J.jpg", os.fsdecode(b"\xfe.jpg"), "%s{0}.jpg", "UPPER.JPG",
)  # fmt: skip


def write_kinds(folder: Path) -> dict[str, Path]:
    """A regular file for each of CONTENTS; kind -> path."""
    paths = {kind: folder / f"{kind}.jpg" for kind in CONTENTS}
    for kind, path in paths.items():
        path.write_bytes(CONTENTS[kind])
    return paths


def write_not_regular(folder: Path) -> list[Path]:
    """Files with names of images that cannot be opened or have no end, and a folder of such a name."""
    (folder / "folder.jpg").mkdir()
    paths = [folder / name for name in NOT_REGULAR]
    pipe, bound, endless, gone, circle = paths
    os.mkfifo(pipe)
    # The path of a socket must be short, and may be bound from elsewhere.
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(bound.name)
    os.fchdir(before)
    os.close(before)
    endless.symlink_to("/dev/zero")
    gone.symlink_to("nowhere")
    circle.symlink_to(circle.name)
    return paths


def write_unusual_names(folder: Path, content: bytes) -> list[Path]:
    """The same content under names that need quoting or encoding, or look like flags."""
    paths = [folder / name for name in UNUSUAL_NAMES]
    for path in paths:
        path.write_bytes(content)
    return paths
