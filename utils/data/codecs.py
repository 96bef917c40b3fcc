"""Image file types: which suffixes name an image, and which codec belongs to each."""

# What both DALI's decoder and Pillow read. GIF and AVIF are not among them: DALI rejects both.
CODECS = {
    ".jpg": "jpeg", ".jpeg": "jpeg", ".jpe": "jpeg", ".png": "png", ".webp": "webp", ".bmp": "bmp", ".tif": "tiff",
    ".tiff": "tiff", ".ppm": "pnm", ".pgm": "pnm", ".pnm": "pnm",
}  # fmt: skip
IMAGE_SUFFIXES = tuple(CODECS)
# Pillow's own names: a JPEG with more pictures behind the first, as phones write it, and all formats of Netpbm.
PILLOW_CODECS = {"mpo": "jpeg", "ppm": "pnm"}


def is_image(name: str) -> bool:
    """Whether a file of that name is taken for an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)
