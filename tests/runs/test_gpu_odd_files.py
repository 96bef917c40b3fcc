"""On a real GPU: odd images have the CPU's pixels, those of two orientations are named, crashes are explained."""

import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import pipelines
from tests.conftest import resolved
from tests.data.test_pixels import Pixels, dali_pixels, difference
from tests.data.test_suspects import GOOD, ON_GPU, odd_manifest
from tests.distributed.test_crash import PROGRAM
from tests.harness import ROOT
from tests.odd_kinds import ORIENTED, SAMPLES
from utils.data.formats.folder import scan_splits
from utils.data.loaders.cache import decoded_batches
from utils.data.loaders.sampler import RandomSampler
from utils.data.reading.suspects import differs_on_gpu
from utils.distributed.group import DistEnv
from utils.errors import BadFile

pytestmark = pytest.mark.gpu

ALL = GOOD | {f"turned {kind}": each.content for kind, each in ORIENTED.items() if each.dali}
CLOSE = 8.0  # mean difference of a GPU's decoders and the CPU's, of 255; other colors, or another turn, are tens off

# Decodes the images of sys.argv[1], a pickled dict, one at a time, as sys.argv[2] says, and prints each name before it
# does so. Leaves the pixels in sys.argv[3].
DECODE = """
import pickle, sys
from pathlib import Path
import numpy as np
from nvidia import dali
from nvidia.dali import fn, types
from utils.data.dali import decoder_options

contents, found = [], {}

@dali.pipeline_def(batch_size=1, num_threads=2, device_id=0, prefetch_queue_depth=1, exec_dynamic=True)
def graph():
    source = fn.external_source(lambda: contents, batch=True, dtype=types.UINT8, ndim=1)
    if sys.argv[2] == "whole":
        options = {"device": "mixed", "output_type": types.RGB, "jpeg_fancy_upsampling": True}
        return fn.decoders.image(source, **options)
    options = decoder_options(0.65, "gpu")
    if sys.argv[2] == "crops":
        return fn.decoders.image_random_crop(source, random_area=[0.05, 1.0], **options)
    return fn.decoders.image_slice(source, np.zeros(2, np.float32), np.ones(2, np.float32), **options)

pipeline = None
for kind, content in pickle.loads(Path(sys.argv[1]).read_bytes()).items():
    print(kind, flush=True)
    if pipeline is None:
        pipeline = graph()
        pipeline.build()
    contents[:] = [np.frombuffer(content, np.uint8)]
    try:
        for _ in range(20 if sys.argv[2] == "crops" else 1):
            found[kind] = np.array(pipeline.run()[0].as_cpu().at(0))
    except RuntimeError as error:
        found[kind], pipeline = str(error), None
    Path(sys.argv[3]).write_bytes(pickle.dumps(found))
"""


def decode_on_gpu(contents: dict[str, bytes], how: str, folder: Path) -> dict[str, Pixels | str]:
    """Pixels of each kind; where it fails, the error; where the process ends, its status."""
    found: dict[str, Pixels | str] = {}
    given, result = folder / "given", folder / "found"
    while left := {kind: content for kind, content in contents.items() if kind not in found}:
        given.write_bytes(pickle.dumps(left))
        result.write_bytes(pickle.dumps({}))
        command = [sys.executable, "-c", DECODE, str(given), how, str(result)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        found |= pickle.loads(result.read_bytes())
        if done.returncode != 0:
            last = done.stdout.splitlines()[-1]
            found.setdefault(last, f"ends with {done.returncode}: {done.stderr[-300:]}")
    return found


@pytest.mark.parametrize("how", ["whole", "slice", "crops"])
def test_unusual_images_have_the_pixels_of_the_cpu(tmp_path: Path, gpu: DistEnv, how: str) -> None:
    """Samplings, YCCK, CMYK, RGB by ids, restart markers, fill bytes, sample types, places of an orientation."""
    found = decode_on_gpu(ALL, how, tmp_path)
    failed = {kind: pixels for kind, pixels in found.items() if isinstance(pixels, str)}
    assert failed == {}
    if how == "crops":
        return
    # Those that the reader decodes on the CPU are not shown to these decoders.
    assert set(other_pixels(found, dali_pixels(ALL))) <= ON_GPU


def other_pixels(found: Mapping[str, Any], expected: Mapping[str, Pixels]) -> dict[str, str]:
    other = {}
    for kind, pixels in found.items():
        if pixels.shape != expected[kind].shape:
            other[kind] = f"{pixels.shape} instead of {expected[kind].shape}"
        elif (mean := difference(pixels, expected[kind])) > CLOSE:
            other[kind] = f"{mean:.1f} off"
    return other


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_a_run_has_the_pixels_of_the_cpu(tmp_path: Path, gpu: DistEnv, form: str) -> None:
    config = resolved(batch_size=16, workers=2, decode="full", hw_decoder_load=0.65, prefetch=2)
    batches = decoded_batches(config, odd_manifest(tmp_path, form, gpu), gpu)
    images = [np.array(batch.as_cpu().at(at)) for batch in batches for at in range(len(batch))]
    assert other_pixels(dict(zip(GOOD, images, strict=True)), dali_pixels(GOOD)) == {}


def test_crops_of_what_differs_have_the_brightness_of_the_image(tmp_path: Path, gpu: DistEnv) -> None:
    contents = [content for content in GOOD.values() if differs_on_gpu(content)]
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for number, content in enumerate(contents):
            (tmp_path / split / "a" / f"{number:02d}.jpg").write_bytes(content)
    train, _ = scan_splits(tmp_path)
    config = resolved(
        batch_size=len(contents), image_size=32, workers=2, decode="fused", hw_decoder_load=0.65, prefetch=2,
        crop_scale=0.9,
    )  # fmt: skip
    loader = pipelines.create_train_loader(config, train, RandomSampler(len(contents), len(contents)), gpu)
    means = next(loader).images.float().mean(dim=(1, 2, 3))
    assert ((means > 105) & (means < 147)).all(), means


@pytest.mark.parametrize(("decode", "cache"), [("fused", "none"), ("full", "none"), ("full", "gpu"), ("full", "host")])
@pytest.mark.parametrize("kind", ["1, then 6", "6, then 3", "6, then 1"])
def test_two_orientations_are_named(
    tmp_path: Path, gpu: DistEnv, kind: str, decode: Literal["fused", "full"], cache: Literal["none", "gpu", "host"]
) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for number in range(8):
            content = ORIENTED[kind].content if (split, number) == ("train", 5) else SAMPLES["JPEG"].content
            (tmp_path / split / "a" / f"{number}.jpg").write_bytes(content)
    train, _ = scan_splits(tmp_path)
    config = resolved(
        batch_size=8, image_size=32, workers=2, decode=decode, cache=cache, hw_decoder_load=0.65, prefetch=2
    )
    with pytest.raises(BadFile, match=r"train/a/5\.jpg: its EXIF blocks have different orientations"):
        next(pipelines.create_train_loader(config, train, RandomSampler(8, 8), gpu))


def test_a_crash_is_explained_after_a_search_on_the_gpu(tmp_path: Path, gpu: DistEnv) -> None:
    for kind in ("JPEG", "JPEG 4:1:1", "JPEG, YCCK", "PNG of 8 bits"):
        (tmp_path / f"{kind}.jpg").write_bytes(SAMPLES[kind].content)
    program = PROGRAM.replace("trace_crashes(3, False)", "trace_crashes(3, True)")
    done = subprocess.run(
        [sys.executable, "-c", program, "thread", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGSEGV
    assert "no bad file was found among the 4 images that it had asked for last" in done.stderr
