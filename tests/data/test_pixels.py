"""All loaders have the same pixels of an image, whatever its format and samples are, or a scan calls it bad."""

import os
from collections.abc import Mapping

import numpy as np
import nvidia.dali as dali
import pytest
from numpy.typing import NDArray
from nvidia.dali import fn, types

from tests import odd_images
from tests.odd_images import turned, two_blocks
from tests.odd_kinds import ORIENTED, SAMPLES, Kind
from utils.data.formats.folder import file_record
from utils.data.reading.decode_pool import decode_files
from utils.data.reading.decoding import TOLERANCE, DecodeError, dali_decode, pillow_decode, upright_rgb
from utils.data.reading.orientation import conflicting, is_usual, orientation

# Of Pillow, about the tables' images.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Corrupt EXIF data"),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
]
Pixels = NDArray[np.uint8]
# How the fields lie after each turn, by rows; red, green, blue and white are stored.
TURNED = {1: "RGBW", 2: "GRWB", 3: "WBGR", 4: "BWRG", 5: "RBGW", 6: "BRWG", 7: "WGBR", 8: "GWRB"}
LETTERS = {(True, False, False): "R", (False, True, False): "G", (False, False, True): "B", (True, True, True): "W"}


def is_good(content: bytes) -> bool:
    try:
        dali_decode(content)
    except DecodeError:
        return False
    return True


def pillow_pixels(content: bytes) -> Pixels | None:
    try:
        return np.asarray(upright_rgb(content))
    except Exception:
        return None


@dali.pipeline_def(num_threads=1, device_id=None, exec_dynamic=True)  # type: ignore[untyped-decorator]
def decoded_twice(contents: list[Pixels]) -> object:
    """Images as a whole, and by the decoder of crops, here of all."""
    source = fn.external_source(lambda: contents, batch=True, dtype=types.UINT8, ndim=1)
    whole = {"device": "cpu", "output_type": types.RGB}
    crop = fn.decoders.image_slice(source, np.zeros(2, np.float32), np.ones(2, np.float32), **whole)
    return fn.decoders.image(source, **whole), crop


def dali_pixels(contents: Mapping[str, bytes]) -> dict[str, Pixels]:
    """Of each kind; those of a crop are the same."""
    pipeline = decoded_twice(
        [np.frombuffer(content, np.uint8) for content in contents.values()], batch_size=len(contents)
    )
    pipeline.build()
    images, crops = pipeline.run()
    found = {kind: images.at(index) for index, kind in enumerate(contents)}
    for index, kind in enumerate(contents):
        assert difference(crops.at(index), found[kind]) < 1, kind
    return found


def difference(ours: Pixels, theirs: Pixels) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours.astype(float) - theirs).mean())


def turn_of(pixels: Pixels) -> int | str:
    height, width = pixels.shape[:2]
    samples = [pixels[height * row // 4, width * column // 4] for row in (1, 3) for column in (1, 3)]
    fields = "".join(LETTERS.get(tuple((sample > 128).tolist()), "?") for sample in samples)
    return {letters: turn for turn, letters in TURNED.items()}.get(fields, fields)


def test_what_is_bad_for_dali_and_for_pillow() -> None:
    dali_good = {kind: is_good(each.content) for kind, each in SAMPLES.items()}
    assert dali_good == {kind: each.dali for kind, each in SAMPLES.items()}
    pillow_good = {kind: pillow_pixels(each.content) is not None for kind, each in SAMPLES.items()}
    assert pillow_good == {kind: each.pillow for kind, each in SAMPLES.items()}


def test_what_is_good_shows_the_same_to_all_loaders() -> None:
    good = {kind: each for kind, each in SAMPLES.items() if each.dali}
    for kind, pixels in dali_pixels({kind: each.content for kind, each in good.items()}).items():
        pillow = pillow_pixels(good[kind].content)
        assert pillow is not None, kind
        assert difference(pixels, pillow) < TOLERANCE, kind
        assert difference(pillow, good[kind].pixels) < TOLERANCE, kind


def test_pillow_shows_what_dali_does_not() -> None:
    others = {kind: each for kind, each in SAMPLES.items() if each.pillow and not each.dali and each.pixels is not None}
    assert len(others) > 20
    for kind, each in others.items():
        pillow = pillow_pixels(each.content)
        assert pillow is not None
        assert difference(pillow, each.pixels) < TOLERANCE, kind


def test_dali_reads_bad_ones_wrongly() -> None:
    """Or not at all: what a scan calls bad is no good image."""
    assert dali_wrong(SAMPLES["TIFF, gray and alpha"])
    assert dali_wrong(SAMPLES["Netpbm P5, at most 4095"])
    assert dali_wrong(SAMPLES["TIFF, f4 times 1, little endian"])


def dali_wrong(kind: Kind) -> bool:
    return difference(dali_pixels({"": kind.content})[""], kind.pixels) > TOLERANCE


REASONS = {
    "Netpbm P5, at most 15": r"a pnm that DALI and Pillow read differently \(by 118\.\d of 255 on average\); convert",
    "TIFF, f4 times 1, little endian": "its samples have 32 bits, a sign or a fraction, so that their range is unknown",
    "TIFF, 13 bands": "a tiff that DALI decodes and Pillow does not, so that its pixels cannot be checked; convert",
}


@pytest.mark.parametrize("kind", REASONS)
def test_the_reason(kind: str) -> None:
    with pytest.raises(DecodeError, match=REASONS[kind]):
        dali_decode(SAMPLES[kind].content)


def test_samples_without_a_range_are_bad_for_pillow() -> None:
    with pytest.raises(DecodeError, match="range is unknown; convert it to PNG or JPEG"):
        pillow_decode(SAMPLES["TIFF, i2 times 128, big endian"].content)


def test_all_loaders_turn_an_image_as_its_first_exif_block_says() -> None:
    """Or it is bad for DALI. XMP and text chunks turn none."""
    found = {
        kind: (turn_of(np.asarray(upright_rgb(each.content))), is_good(each.content)) for kind, each in ORIENTED.items()
    }
    assert found == {kind: (each.orientation, each.dali) for kind, each in ORIENTED.items()}
    good = dali_pixels({kind: each.content for kind, each in ORIENTED.items() if each.dali})
    assert {kind: turn_of(pixels) for kind, pixels in good.items()} == {
        kind: ORIENTED[kind].orientation for kind in good
    }


def test_damaged_metadata_is_no_error() -> None:
    contents = [turned(), two_blocks(1, 6), *(each.content for each in ORIENTED.values())]
    for content in contents[:80]:
        for length in [*range(0, min(len(content), 300), 7)]:
            assert 1 <= orientation(content[:length]) <= 8
            conflicting(content[:length])


def test_what_phones_write_is_not_decoded_twice() -> None:
    assert is_usual(turned(odd_images.JFIF))
    assert is_usual(turned(odd_images.exif(6)))
    assert not is_usual(turned(odd_images.exif(6), odd_images.exif(6)))


def test_a_decoder_that_passes_an_image_on_is_no_damage(tmp_path: os.PathLike[str]) -> None:
    """DALI's first decoder for TIFFs prints an error for CMYK, and the next one decodes it."""
    path = os.path.join(tmp_path, "cmyk.tif")
    with open(path, "wb") as file:
        file.write(SAMPLES["TIFF, CMYK"].content)
    ((_, report),) = decode_files([file_record(path)], dali_decode, 1)
    assert report.bad is None
    assert report.warning == ""
