"""Images that must be looked at before DALI decodes them: of two orientations, and, on a GPU, of other pixels there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import odd_images, shards
from tests.data.formats.test_index import manifests, read
from tests.data.test_pixels import dali_pixels, difference
from tests.odd_images import turned, two_blocks
from tests.odd_kinds import ORIENTED, SAMPLES
from utils.data.formats.folder import file_record, scan
from utils.data.images.manifest import Manifest
from utils.data.reading.decoding import DecodeError, decoder_of
from utils.data.reading.orientation import conflicting
from utils.data.reading.reader import BatchReader, request_of
from utils.data.reading.shard_reader import ShardFiles
from utils.data.reading.suspects import differs_on_gpu, may_be_odd
from utils.distributed.group import DistEnv

GOOD = {kind: each.content for kind, each in SAMPLES.items() if each.dali}
HEAD = 4096
# The kinds of the table that DALI decodes on a GPU to other pixels, and two palettes that it only might.
ON_GPU = {
    "JPEG, gray 2x2", "JPEG, gray 2x1", "JPEG, gray 1x2", "JPEG, RGB by ids", "JPEG, RGB by Adobe",
    "JPEG, JFIF, then RGB by Adobe", "PNG, 2 bits", "PNG, palette of 2 bits", "PNG, clear colors of 2 bits",
    "PNG, 4 bits", "PNG, palette of 4 bits", "PNG, clear colors of 4 bits", "TIFF, 12 bits",
    "TIFF, palette of 2 bits", "TIFF, palette of 4 bits",
}  # fmt: skip


def suspected(contents: Mapping[str, bytes], device: str) -> set[str]:
    heads = [content[:HEAD] for content in contents.values()]
    ends = np.cumsum([len(head) for head in heads])
    starts = np.concatenate([[0], ends[:-1]])
    found = may_be_odd(np.frombuffer(b"".join(heads), dtype=np.uint8), starts, ends, device)
    return {kind for kind, odd in zip(contents, found, strict=True) if odd}


def test_of_a_batch_those_are_looked_at_whose_metadata_may_conflict() -> None:
    contents = {
        "plain": turned(),
        "one block": turned(odd_images.JFIF, odd_images.exif(6)),
        "two blocks": two_blocks(1, 6),
        "empty": b"",
        "cut": b"\xff\xd8\xff",
        "far": turned(odd_images.segment(0xE2, bytes(5000)), odd_images.exif(6), odd_images.exif(1)),
        "PNG": SAMPLES["PNG of 8 bits"].content,
        "apart": turned(odd_images.exif(6), odd_images.segment(0xFE, b"Hi"), odd_images.exif(3)),
    }
    assert suspected(contents, "cpu") == {"two blocks", "far", "apart"}
    conflicts = {
        kind: each.content
        for kind, each in ORIENTED.items()
        if conflicting(each.content) and each.content.startswith(b"\xff\xd8")
    }
    assert suspected(conflicts, "cpu") == set(conflicts)


def test_what_differs_on_a_gpu_is_looked_at() -> None:
    assert {kind for kind, content in GOOD.items() if differs_on_gpu(content)} == ON_GPU
    found = suspected(GOOD, "gpu")
    assert found >= ON_GPU
    assert {
        kind for kind in found - ON_GPU if "TIFF" not in kind and "Adobe" not in kind and "CMYK" not in kind
    } == set()
    assert not any(differs_on_gpu(each.content) for each in ORIENTED.values())


def test_a_header_behind_the_first_bytes_is_found() -> None:
    profile = odd_images.segment(0xE2, bytes(60_000))
    planes = list(np.moveaxis(odd_images.COLORS, 2, 0))
    far = odd_images.jpeg(planes, ids=b"RGB", segments=profile)
    assert suspected({"far": far}, "gpu") == {"far"}
    assert differs_on_gpu(far)
    assert not differs_on_gpu(turned(profile))
    assert differs_on_gpu(turned(profile)[:HEAD])  # nobody knows


def test_a_damaged_header_is_no_error() -> None:
    for kind in ("JPEG, gray 2x2", "JPEG, RGB by Adobe", "PNG, 4 bits", "TIFF, 12 bits"):
        for length in range(min(300, len(GOOD[kind]))):
            differs_on_gpu(GOOD[kind][:length])
            suspected({kind: GOOD[kind][:length], "plain": GOOD["JPEG"]}, "gpu")


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_what_differs_on_a_gpu_reaches_it_decoded(tmp_path: Path, cpu: DistEnv, form: str) -> None:
    """As a file of the CPU's pixels; all others as they are."""
    manifest = odd_manifest(tmp_path, form, cpu)
    batches = [np.arange(at, min(at + 32, len(GOOD))) for at in range(0, len(GOOD), 32)]
    reader = BatchReader(
        manifest, lambda position: batches[position % len(batches)], device="gpu", batch_size=32, threads=2, prefetch=0
    )
    kinds, expected = list(GOOD), dali_pixels(GOOD)
    for position, indices in enumerate(batches):
        images, targets = reader.read(position)
        found = {kinds[index]: content_of(images, at) for at, index in enumerate(indices)}
        for kind, pixels in dali_pixels(found).items():
            assert (found[kind] == GOOD[kind]) == (kind not in ON_GPU), kind
            assert difference(pixels, expected[kind]) == 0, kind
        assert np.asarray(targets if isinstance(targets, np.ndarray) else targets.as_array()).shape == (len(indices), 1)


def odd_manifest(folder: Path, form: str, env: DistEnv) -> Manifest:
    """The images of GOOD, in its order."""
    named = {f"{number:04d}": content for number, content in enumerate(GOOD.values())}
    if form == "tar":
        members = {
            f"{name}.{kind}": each
            for name, content in named.items()
            for kind, each in (("jpg", content), ("cls", b"0"))
        }
        shards.write_tar(folder / "train-0.tar", members)
        return manifests(read(folder, folder, env, ("train",)))["train"]
    for split in ("train", "val"):
        (folder / split / "a").mkdir(parents=True)
        for name, content in named.items():
            (folder / split / "a" / f"{name}.jpg").write_bytes(content)
    return scan(folder, "train")


def content_of(images: Any, at: int) -> bytes:
    return np.asarray(images[at]).tobytes() if isinstance(images, list) else images.at(at).tobytes()


@pytest.mark.parametrize("loader", ["proxy", "stock"])
def test_loaders_that_decode_files_themselves_refuse_what_differs_on_a_gpu(loader: str) -> None:
    decode = decoder_of(loader, "gpu").decode
    decode(GOOD["JPEG"])
    with pytest.raises(DecodeError, match="DALI decodes it wrongly on a GPU; use --loader dali or torch"):
        decode(GOOD["PNG, 4 bits"])
    decoder_of("dali", "gpu").decode(GOOD["PNG, 4 bits"])
    decoder_of(loader).decode(GOOD["PNG, 4 bits"])
    assert decoder_of(loader, "gpu").name != decoder_of(loader).name


def test_a_request_of_what_differs_on_a_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(GOOD["PNG, palette of 4 bits"])
    request_of(file_record(str(path)), ShardFiles(), "cpu")
    with pytest.raises(DecodeError, match="wrongly on a GPU"):
        request_of(file_record(str(path)), ShardFiles(), "gpu")
