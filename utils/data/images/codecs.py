"""Image file types: which suffixes name an image, which codec belongs to each, and what else a file may be."""

import codecs
import re

# What both DALI's decoder and Pillow read. GIF and AVIF are not among them: DALI rejects both.
CODECS = {
    ".jpg": "jpeg", ".jpeg": "jpeg", ".jpe": "jpeg", ".png": "png", ".webp": "webp", ".bmp": "bmp", ".tif": "tiff",
    ".tiff": "tiff", ".ppm": "pnm", ".pgm": "pnm", ".pnm": "pnm",
}  # fmt: skip
IMAGE_SUFFIXES = tuple(CODECS)
# Pillow's own names: a JPEG with more pictures behind the first, as phones write it, and all formats of Netpbm.
PILLOW_CODECS = {"mpo": "jpeg", "ppm": "pnm"}


# How a file of another kind begins, and what it is: an image that a decoder may not read, and what is no image.
_IMAGES = {
    rb"GIF8": "a GIF",
    rb".{4}ftypavi[fs]": "an AVIF",
    rb".{4}ftyp(hei|hev|mif1|msf1)": "a HEIC",
    rb"\xff\x0a|\x00{3}\x0cJXL ": "a JPEG XL",
    rb"\x00\x00\x01\x00": "an ICO",
    rb"8BPS": "a Photoshop",
    rb"\s*(<\?xml[^>]*>\s*)?<svg": "an SVG",
}
_OTHERS = {
    rb"\x00+\Z": "only bytes of value 0",
    rb"(?i)\s*(<!doctype html|<html)": "an HTML page",
    rb"version https://git-lfs": "a Git LFS pointer, whose file was not fetched",
    rb"%PDF": "a PDF file",
    rb"PK\x03\x04": "a ZIP archive",
    rb"\x1f\x8b": "a gzip archive",
}
_HEAD = 512  # bytes that decide


def is_image(name: str) -> bool:
    """Whether a file of that name is taken for an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def describe_unreadable(content: bytes, decoder: str) -> str:
    """What a file is of which `decoder`, "DALI" or "Pillow", can make nothing, by its first bytes."""
    head = content[:_HEAD]
    for pattern, name in _IMAGES.items():
        if re.match(pattern, head, re.DOTALL):
            return f"{name} file, which {decoder} does not decode; convert it"
    for pattern, name in _OTHERS.items():
        if re.match(pattern, head, re.DOTALL):
            return f"{name}, not an image"
    return "a text file, not an image" if _is_text(head) else f"no image that {decoder} reads"


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # whose last character may be cut
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter.isspace() for letter in text)
