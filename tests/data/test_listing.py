"""What differs between the files of a run's start and those of now."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from utils.data.formats.folder import scan
from utils.data.images import manifest
from utils.data.images.listing import LISTING, describe_difference, load_listing, save_listing
from utils.data.images.manifest import Manifest


def listed(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Name and size of each file."""
    return zip(manifest.names(), manifest.sizes.tolist(), strict=True)


def test_differences_are_counted_and_named(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    folder = tmp_path / "data" / "train"
    odd = os.fsdecode(b"green/\xff name\nof two lines.jpg")  # not UTF-8
    shutil.copy(folder / "green" / "green-000.jpg", folder / odd)
    before = scan(tmp_path / "data", "train")
    save_listing(tmp_path, {"train": before})
    found = load_listing(tmp_path, "train")
    assert found == dict(listed(before))
    assert odd in found
    assert describe_difference(found, before) == ""

    first, second, third, *_ = sorted(path.name for path in (folder / "blue").iterdir())
    (folder / "blue" / first).unlink()
    (folder / "blue" / second).rename(folder / "blue" / "new.jpg")
    with (folder / "blue" / third).open("ab") as file:
        file.write(b"more")
    expected = f"1 file more (blue/new.jpg), 2 files fewer (blue/{first}, ...), 1 file of another size (blue/{third})"
    assert describe_difference(found, scan(tmp_path / "data", "train")) == expected


def test_without_a_listing_nothing_is_known(data: Path, tmp_path: Path) -> None:
    now = scan(data, "train")
    assert load_listing(tmp_path, "train") == {}
    (tmp_path / LISTING).write_bytes(b"cut off")
    assert load_listing(tmp_path, "train") == {}
    assert describe_difference({}, now) == ""
    save_listing(tmp_path, {"train": now})
    whole = (tmp_path / LISTING).read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at : at + 7] = bytes(byte ^ 0xFF for byte in damaged[at : at + 7])
        (tmp_path / LISTING).write_bytes(damaged)
        assert load_listing(tmp_path, "train") in ({}, dict(listed(now)))
    (tmp_path / LISTING).unlink()
    save_listing(tmp_path, {"train": manifest.synthetic(10, 2)})
    assert not (tmp_path / LISTING).exists()
