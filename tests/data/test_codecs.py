"""A file that no decoder reads is named by what it is."""

import pytest

from tests import damage
from utils.data.images.codecs import describe_unreadable

HEIC = b"\0\0\0\x24ftypheic\0\0\0\0mif1heic"


@pytest.mark.parametrize(
    ("content", "described"),
    [
        (damage.CONTENTS["GIF"], "a GIF file, which DALI does not decode; convert it"),
        (damage.CONTENTS["AVIF"], "an AVIF file, which DALI does not decode; convert it"),
        (HEIC, "a HEIC file, which DALI does not decode; convert it"),
        (damage.CONTENTS["ICO"], "an ICO file, which DALI does not decode; convert it"),
        (damage.CONTENTS["SVG"], "an SVG file, which DALI does not decode; convert it"),
        (b'<?xml version="1.0"?>\n<svg/>', "an SVG file, which DALI does not decode; convert it"),
        (damage.CONTENTS["HTML"], "an HTML page, not an image"),
        (b"\n<HTML><BODY>404", "an HTML page, not an image"),
        (damage.CONTENTS["text"], "a text file, not an image"),
        ("ä猫".encode() * 200, "a text file, not an image"),
        (damage.CONTENTS["pointer of a version control system"],
         "a Git LFS pointer, whose file was not fetched, not an image"),
        (damage.CONTENTS["zero bytes"], "only bytes of value 0, not an image"),
        (bytes(511) + b"\1", "no image that DALI reads"),
        (damage.CONTENTS["random bytes"], "no image that DALI reads"),
        (damage.CONTENTS["cut in the header"], "no image that DALI reads"),
        (b"GI", "a text file, not an image"),
    ],
)  # fmt: skip
def test_what_a_file_is(content: bytes, described: str) -> None:
    assert describe_unreadable(content, "DALI") == described
    assert describe_unreadable(content, "Pillow") == described.replace("DALI", "Pillow")
