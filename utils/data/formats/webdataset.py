"""WebDataset tars: shards of samples, files of the same key such as `0001.jpg` and `0001.cls`."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from utils.data.codecs import is_image
from utils.data.formats import ilsvrc
from utils.data.formats.base import Entry
from utils.data.formats.naming import find_shards
from utils.data.formats.tar_members import Member, read_members, read_small
from utils.errors import UserError

NAME = "WebDataset tars"
LABELS = (".cls", ".json")  # suffixes of a sample's label
NAMES_FILE = "classes.txt"  # a class name a line, in label order


class _Sample(NamedTuple):
    """The members of a sample that matter, by their suffix."""

    key: str
    images: dict[str, Member]
    labels: dict[str, Member]


def is_shard(name: str) -> bool:
    """See `ShardFormat`."""
    return name.endswith(".tar") and not ilsvrc.is_shard(name)


def find(data_dir: Path) -> dict[str, list[Path]]:
    """See `ShardFormat`."""
    return find_shards(data_dir, is_shard)


def class_names(shards: Sequence[Path]) -> tuple[str, ...] | None:
    """The lines of `classes.txt` beside the shards or in the folder above."""
    for folder in (shards[0].parent, shards[0].parent.parent):
        path = folder / NAMES_FILE
        if path.is_file():
            return tuple(path.read_text().splitlines())
    return None


def scan(shard: Path) -> Iterator[Entry]:
    """See `ShardFormat`."""
    descriptor = os.open(shard, os.O_RDONLY)
    try:
        for sample in _samples(shard, descriptor):
            if not sample.images:
                continue  # text, or what belongs to no image
            if len(sample.images) > 1:
                suffixes = " ".join(sorted(sample.images))
                raise UserError(f"{shard}:{sample.key}: images {suffixes} of one key; give each a key of its own")
            ((suffix, image),) = sample.images.items()
            yield Entry(sample.key + suffix, _label(shard, descriptor, sample), ((image.offset, image.size),))
    finally:
        os.close(descriptor)


def _samples(shard: Path, descriptor: int) -> Iterator[_Sample]:
    """Members of one key, which follow each other."""
    sample = _Sample("", {}, {})
    for member in read_members(shard, descriptor):
        folder, _, file = member.name.rpartition("/")
        if file.startswith("."):  # as macOS writes them
            continue
        stem, dot, suffix = file.partition(".")
        key, suffix = f"{folder}/{stem}" if folder else stem, f"{dot}{suffix}"
        if key != sample.key:
            yield sample
            sample = _Sample(key, {}, {})
        if is_image(suffix):
            sample.images[suffix] = member
        elif suffix.lower() in LABELS:
            sample.labels[suffix.lower()] = member
    yield sample


def _label(shard: Path, descriptor: int, sample: _Sample) -> int | str:
    for suffix in LABELS:
        if suffix in sample.labels:
            text = read_small(shard, descriptor, sample.labels[suffix]).decode(errors="replace").strip()
            label = _json_label(text) if suffix == ".json" else text
            if label is not None and str(label).removeprefix("-").isdecimal():
                return int(label)
            if label:
                return str(label)
            raise UserError(f"{shard}:{sample.key}{suffix}: no label in it ({text[:40]!r}); write a number or a name")
    raise UserError(
        f"{shard}:{sample.key}: an image without a label; it needs a file {sample.key}.cls, or {sample.key}.json "
        "with the key label"
    )


def _json_label(text: str) -> int | str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    for key in ("label", "cls", "class", "class_name"):
        if isinstance(found, dict) and isinstance(label := found.get(key), int | str) and not isinstance(label, bool):
            return label
    return None
