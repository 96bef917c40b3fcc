"""Which files can be decoded: as the loaders decide it, saved, and decided again after a change."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import nvidia.dali as dali
import pytest
from nvidia.dali import fn, types
from PIL import Image

import pipelines
from tests import damage
from tests.conftest import resolved, write_images
from utils.data.formats.folder import file_listing, file_record, scan
from utils.data.images.manifest import FileEntry, stat_file
from utils.data.loaders.sampler import RandomSampler
from utils.data.loaders.torch_loader import TorchImages
from utils.data.reading import verification
from utils.data.reading.decode_pool import FileReport, decode_files
from utils.data.reading.decoding import Decoder, ImageInfo, dali_decode, decoder_of, has_end
from utils.data.reading.verification import load_manifest, suspicious, verify_dataset
from utils.distributed.group import DistEnv
from utils.errors import BadFile, UserError


@dali.pipeline_def(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)  # type: ignore[untyped-decorator]
def one_file(path: Path) -> object:
    name = np.frombuffer(os.fsencode(path), dtype=np.uint8)
    content = fn.io.file.read(fn.external_source(lambda: [name], batch=True, dtype=types.UINT8, ndim=1))
    return fn.decoders.image(content, device="cpu", output_type=types.RGB)


def dali_accepts(path: Path) -> bool:
    """The oracle: a fresh pipeline for one file."""
    pipeline = one_file(path)
    pipeline.build()
    try:
        pipeline.run()
    except RuntimeError:
        return False
    return True


@pytest.fixture
def kinds(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "val" / "a").mkdir(parents=True)
    return damage.write_kinds(tmp_path / "val" / "a")


def reports_of(paths: Iterable[Path], decode: Callable[[bytes], ImageInfo]) -> dict[Path, FileReport]:
    """What `decode_files` with two processes finds in each file."""
    listed = list(paths)
    records = [file_record(str(path)) for path in listed]
    return {listed[position]: report for position, report in decode_files(records, decode, 2)}


def decodable(kinds: dict[str, Path], decoder: Decoder) -> dict[str, bool]:
    found = reports_of(kinds.values(), decoder.decode)
    return {kind: found[path].bad is None for kind, path in kinds.items()}


def test_bad_is_what_dali_rejects(kinds: dict[str, Path]) -> None:
    found = decodable(kinds, decoder_of("dali"))
    assert found == {kind: dali_accepts(path) for kind, path in kinds.items()}
    assert min(sum(found.values()), len(found) - sum(found.values())) > 20  # kinds of either sort
    assert not found["GIF"]
    assert found["WebP"]


def test_bad_for_the_torch_loader_is_what_pillow_rejects(kinds: dict[str, Path], cpu: DistEnv) -> None:
    manifest = scan(kinds["PNG"].parents[2], "val", skip_bad=True)
    config = resolved(loader="torch", image_size=32, val_resize=36, workers=1, batch_size=1)
    images = TorchImages(config, manifest, train=False)
    accepted = {"empty": False}
    for index, name in enumerate(manifest.names()):
        kind = name[len("a/") : -len(".jpg")]
        try:
            accepted[kind] = images[index, 0][0].shape == (3, 32, 32)
        except Exception:
            accepted[kind] = False
    found = decodable(kinds, decoder_of("torch"))
    assert found == {kind: accepted[kind] for kind in kinds}
    assert found["GIF"]  # unlike DALI
    assert not found["text"]


def test_training_pipelines_decode_what_is_good(kinds: dict[str, Path], cpu: DistEnv) -> None:
    """Also those that decode no more than a crop: whatever the crop, a good file is no reason to end a run."""
    root = kinds["PNG"].parents[2]
    good = decodable(kinds, decoder_of("dali"))
    manifest = scan(root, "val", skip_bad=True)
    manifest = manifest.without({f"a/{kind}.jpg": "bad" for kind in kinds if not good[kind]})
    assert len(manifest) == sum(good.values())
    size = len(manifest)
    config = resolved(
        batch_size=size, image_size=32, val_resize=36, workers=2, decode="fused", hw_decoder_load=0.65, prefetch=2
    )
    stream = pipelines.create_train_loader(config, manifest, RandomSampler(size, size), cpu)
    for _ in range(10):
        assert len(next(stream).targets) == size
    assert sum(len(batch.targets) for batch in pipelines.create_val_loader(config, manifest, cpu)) == size


CUT = [kind for kind in damage.CONTENTS if kind.startswith("cut")]


def test_a_cut_image_has_no_end() -> None:
    without = {kind for kind, content in damage.CONTENTS.items() if not has_end(content)}
    assert set(CUT) <= without
    headers = {"random bytes behind a start marker", "broken EXIF", "lossless frame type"}
    assert without - headers == set(CUT)
    assert has_end(damage.JPEG + bytes(99))
    assert has_end(damage.PNG + bytes(99))
    preview = Image.Exif()
    preview[37500] = damage.JPEG  # as makers' notes have it, with its own scan and end marker
    content = damage.encoded(exif=preview)
    assert damage.JPEG in content
    assert has_end(content)
    assert not has_end(content[:-2] + bytes(99))


@pytest.mark.parametrize("loader", ["dali", pytest.param("proxy", marks=pytest.mark.slow)])
def test_a_cut_jpeg_is_found_whatever_the_crop(tmp_path: Path, cpu: DistEnv, loader: Literal["dali", "proxy"]) -> None:
    """DALI alone notices when a crop reaches what is missing, and on a GPU not even then."""
    (tmp_path / "train" / "a").mkdir(parents=True)
    path = tmp_path / "train" / "a" / "cut.jpg"
    path.write_bytes(damage.encoded(height=700, width=900)[:-40])
    (path.parent / "longer.jpg").write_bytes(damage.JPEG + bytes(10))
    config = resolved(
        loader=loader, batch_size=2, image_size=32, workers=1, decode="fused", hw_decoder_load=0.65, prefetch=2,
        crop_scale=0.001, seed=1,
    )  # fmt: skip
    stream = pipelines.create_train_loader(config, scan(tmp_path, "train"), RandomSampler(2, 2), cpu)
    with contextlib.closing(stream), pytest.raises(BadFile) as caught:
        next(stream)
    assert str(path) in str(caught.value)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    paths = damage.write_not_regular(tmp_path)
    found = reports_of(paths, dali_decode)
    assert {path.name for path, report in found.items() if report.bad} == set(damage.NOT_REGULAR)
    assert found[paths[0]].bad == "not a regular file"
    assert found[paths[3]].bad == "cannot be read (No such file or directory)"


def _picky(content: bytes) -> ImageInfo:
    if content.startswith(b"die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return ImageInfo("test", 1, 1)


def test_a_file_that_kills_its_decoder_is_bad_and_the_others_are_not(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index:03}.jpg").write_bytes(b"die" if index in (17, 18, 31) else b"live")
    found = reports_of(sorted(tmp_path.iterdir()), _picky)
    assert len(found) == 40
    assert sorted(path.name for path, report in found.items() if report.bad) == ["017.jpg", "018.jpg", "031.jpg"]
    assert "ends the process" in str(found[tmp_path / "017.jpg"].bad)


# ---------------------------------------------------------------------------------------------------------------------
# Verification of a data set


@pytest.fixture
def verify(tmp_path: Path, cpu: DistEnv) -> "Verify":
    write_images(tmp_path / "data", (4, 4, 4))
    (tmp_path / "out").mkdir()
    return Verify(tmp_path / "data", tmp_path / "out", cpu)


class Verify:
    """`verify()`: the bad files of the data set, by a verification with the manifest of the one before."""

    def __init__(self, root: Path, output_dir: Path, env: DistEnv) -> None:
        self.root, self.output_dir, self.env = root, output_dir, env

    def __call__(self, decoder: Decoder | None = None) -> list[str]:
        entries = [
            stat_file(str(path))._replace(name=str(path.relative_to(self.root)))
            for path in sorted(self.root.glob("*/*.jpg"))
        ]
        known = verify_dataset(
            file_listing(self.root, entries), decoder or decoder_of("dali"), self.output_dir, 2, self.env
        )
        assert known is not None
        assert list(known) == [entry.name for entry in entries]
        return list(verification.bad_files(known))


def spoil_in_secret(path: Path) -> None:
    """Damage that changes neither size nor time of change: only decoding the file again finds it."""
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_has_not_changed_is_not_decoded_again(verify: Verify) -> None:
    assert verify() == []
    spoil_in_secret(verify.root / "red" / "red-001.jpg")
    assert verify() == []
    (verify.output_dir / "manifest.json").unlink()
    assert verify() == ["red/red-001.jpg"]


def test_changed_new_and_deleted_files(verify: Verify) -> None:
    assert verify() == []
    red, green, blue = (verify.root / name / f"{name}-001.jpg" for name in ("red", "green", "blue"))
    before = red.stat()
    red.write_bytes(b"x" * before.st_size)
    os.utime(red, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # the same size, a nanosecond later
    green.write_bytes(green.read_bytes()[:-100])
    blue.unlink()
    (blue.parent / "new.jpg").write_bytes(damage.CONTENTS["HTML"])
    assert verify() == ["blue/new.jpg", "green/green-001.jpg", "red/red-001.jpg"]
    red.write_bytes(damage.JPEG)
    assert verify() == ["blue/new.jpg", "green/green-001.jpg"]


def test_what_was_bad_is_decoded_again(verify: Verify) -> None:
    """It may have been the permissions or the server, which change neither size nor time."""
    path = verify.root / "red" / "red-001.jpg"
    good = path.read_bytes()
    path.write_bytes(b"x" * len(good))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    assert verify() == ["red/red-001.jpg"]
    path.write_bytes(good)
    os.utime(path, ns=times)
    assert verify() == []


def test_a_part_of_a_data_set_does_not_forget_the_rest(verify: Verify, cpu: DistEnv) -> None:
    (verify.root / "red" / "red-001.jpg").write_bytes(b"x")
    assert verify() == ["red/red-001.jpg"]
    entry = stat_file(str(verify.root / "blue" / "blue-001.jpg"))._replace(name="blue/blue-001.jpg")
    one = file_listing(verify.root, [entry])
    decoder, out = decoder_of("dali"), verify.output_dir
    assert list(verify_dataset(one, decoder, out, 1, cpu, partial=True) or {}) == ["blue/blue-001.jpg"]
    assert "red/red-001.jpg" in (out / "bad_files.json").read_text()
    assert len(load_manifest(out / "manifest.json", decoder.name)) == 12
    assert list(verify_dataset(one, decoder, out, 1, cpu) or {}) == ["blue/blue-001.jpg"]
    assert len(load_manifest(out / "manifest.json", decoder.name)) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", None])
def test_without_a_whole_manifest_of_the_same_decoder_all_is_decoded(verify: Verify, content: bytes | None) -> None:
    assert verify() == []
    spoil_in_secret(verify.root / "red" / "red-001.jpg")
    if content is None:
        assert verify(Decoder("DALI 0.0", dali_decode)) == ["red/red-001.jpg"]
    else:
        (verify.output_dir / "manifest.json").write_bytes(content)
        assert verify() == ["red/red-001.jpg"]


_allowed = multiprocessing.Semaphore(60)  # decodes of all processes


def _bounded_decode(content: bytes) -> ImageInfo:
    _allowed.acquire()
    return dali_decode(content)


def test_a_verification_that_is_killed_keeps_what_it_knows(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(verify.root / "more", (100, 0, 0))
    for path in (verify.root / "more" / "blue").iterdir():
        path.rename(verify.root / "blue" / f"more-{path.name}")
    monkeypatch.setattr(verification, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(verification, "BAR_SECONDS", 0.0)  # else 60 may be decoded before the first round ends
    decoder = Decoder(decoder_of("dali").name, _bounded_decode)
    killed = multiprocessing.get_context("fork").Process(target=verify, args=(decoder,))
    killed.start()
    while not (verify.output_dir / "manifest.json").exists():
        assert killed.is_alive()
        time.sleep(0.01)
    killed.kill()
    killed.join()
    known = load_manifest(verify.output_dir / "manifest.json", decoder.name)
    assert 0 < len(known) <= 60
    for path in verify.root.glob("*/*.jpg"):
        spoil_in_secret(path)
    assert len(verify()) == 112 - len(known)


def test_a_manifest_that_cannot_be_written(verify: Verify) -> None:
    (verify.output_dir / "manifest.json").mkdir()
    with pytest.raises(UserError, match=r"--output-dir .*/out: manifest\.json cannot be written \(Is a directory\)"):
        verify()
    assert [path.name for path in verify.output_dir.iterdir()] == ["manifest.json"]


def test_oddities() -> None:
    good = {"size": 1, "mtime": 1, "bad": None, "codec": "jpeg", "width": 90, "height": 70}
    known = {
        "a/plain.jpg": FileReport(**good, digest="1"),  # type: ignore[arg-type]
        "a/twin.jpg": FileReport(**good, digest="1"),  # type: ignore[arg-type]
        "a/named.png": FileReport(**good, digest="2"),  # type: ignore[arg-type]
        "a/UPPER.JPEG": FileReport(**good, digest="3"),  # type: ignore[arg-type]
        "a/worn.jpg": FileReport(**good, digest="4", warning="Corrupt JPEG data"),  # type: ignore[arg-type]
        "a/tiny.jpg": FileReport(**good | {"width": 15}, digest="5"),  # type: ignore[arg-type]
        "a/narrow.jpg": FileReport(**good | {"width": 7000}, digest="6"),  # type: ignore[arg-type]
        "a/bad.jpg": FileReport(1, 1, "damaged"),
        "a/bad too.jpg": FileReport(1, 1, "damaged"),
    }
    assert suspicious(known) == {
        "a/twin.jpg": "the same content as a/plain.jpg",
        "a/named.png": "named .png, holds jpeg",
        "a/worn.jpg": "damaged, decodes all the same (Corrupt JPEG data)",
        "a/tiny.jpg": "tiny, 15 x 70 pixels",
        "a/narrow.jpg": "narrow, 7000 x 70 pixels: its shorter side becomes --val-resize",
    }


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_formats_with_several_names_are_not_suspicious(
    tmp_path: Path, cpu: DistEnv, loader: Literal["dali", "torch"]
) -> None:
    images = [Image.effect_noise((40, 30), 50) for _ in range(7)]
    images[0].convert("RGB").save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=[images[1]])
    for image, name in zip(images[2:6], ("a.pgm", "b.pnm", "c.ppm", "d.png"), strict=True):
        image.convert("RGB" if name == "c.ppm" else "L").save(tmp_path / name)
    images[6].save(tmp_path / "wrong.png", "PPM")
    entries = [stat_file(str(path))._replace(name=path.name) for path in sorted(tmp_path.iterdir())]
    known = verify_dataset(file_listing(tmp_path, entries), decoder_of(loader), tmp_path, 1, cpu)
    assert known is not None
    assert verification.bad_files(known) == {}
    assert suspicious(known) == {"wrong.png": "named .png, holds pnm"}


def test_entries_that_their_listing_calls_bad_are_not_opened(tmp_path: Path, cpu: DistEnv) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    entries = [FileEntry("pipe.jpg", 0, 0, "not a regular file")]
    known = verify_dataset(file_listing(tmp_path, entries), decoder_of("dali"), tmp_path, 1, cpu)
    assert known == {"pipe.jpg": FileReport(0, 0, "not a regular file")}
