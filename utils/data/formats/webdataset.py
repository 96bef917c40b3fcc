"""WebDataset tars: shards of samples, files of the same key such as `0001.jpg` and `0001.cls`."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from utils.data.codecs import IMAGE_SUFFIXES, is_image
from utils.data.formats import ilsvrc
from utils.data.formats.base import Entry
from utils.data.formats.naming import find_shards, one_list, read_names
from utils.data.formats.tar_members import Member, read_members, read_small
from utils.errors import UserError, some

NAME = "WebDataset tars"
LABELS = (".cls", ".json")  # suffixes of a sample's label
NAMES_FILE = "classes.txt"  # a class name a line, in label order


class _Sample(NamedTuple):
    """The members of a sample that matter, by their suffix."""

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
    return one_list(shards, _find_list)


def _find_list(folder: Path) -> tuple[Path, tuple[str, ...]] | None:
    path = next((path for path in (folder / NAMES_FILE, folder.parent / NAMES_FILE) if path.is_file()), None)
    return None if path is None else (path, read_names(path))


def scan(shard: Path) -> Iterator[Entry]:
    """See `ShardFormat`. The members of a sample may lie anywhere in the shard."""
    descriptor = os.open(shard, os.O_RDONLY)
    try:
        samples = _samples(shard, descriptor)
        for key, sample in samples.items():
            label = _label(shard, descriptor, key, sample)
            if not sample.images:
                if label is not None:
                    raise UserError(
                        f"{shard}:{key}: a label without an image; images end in {' '.join(IMAGE_SUFFIXES)}, convert "
                        "others, or remove the sample"
                    )
                continue  # text, or what belongs to no image
            if len(sample.images) > 1:
                raise UserError(
                    f"{shard}:{key}: {len(sample.images):,} images of one key ({some(sorted(sample.images), ' ')}); "
                    f"give each a key of its own{_split_at_dot(sample)}"
                )
            ((suffix, image),) = sample.images.items()
            if label is None:
                has_labels = any(each.labels for each in samples.values())
                folders = "" if has_labels or "/" not in key else "; if its folder is the class, unpack the tar"
                raise UserError(
                    f"{shard}:{key}{suffix}: an image without a label; it needs a file {key}.cls, or {key}.json with "
                    f"the key label{_split_at_dot(sample)}{folders}"
                )
            yield Entry(key + suffix, label, ((image.offset, image.size),))
    finally:
        os.close(descriptor)


def _samples(shard: Path, descriptor: int) -> dict[str, _Sample]:
    """The members of each key.

    Raises:
        UserError: a member comes twice, or its content is not in the shard.
    """
    samples: dict[str, _Sample] = {}
    for member in read_members(shard, descriptor):
        folder, _, file = member.name.rpartition("/")
        if file.startswith("."):  # as macOS writes them
            continue
        stem, dot, suffix = file.partition(".")
        key, suffix = f"{folder}/{stem}" if folder else stem, f"{dot}{suffix}"
        sample = samples.setdefault(key, _Sample({}, {}))
        if is_image(suffix):
            members = sample.images
        elif suffix.lower() in LABELS:
            members, suffix = sample.labels, suffix.lower()
        else:
            continue
        if member.problem:
            raise UserError(f"{shard}:{member.name}: {member.problem}")
        if suffix in members:
            raise UserError(f"{shard}:{member.name}: comes twice; write the tar again with one of the two")
        members[suffix] = member
    return samples


def _split_at_dot(sample: _Sample) -> str:
    """Why the key is not what a reader of the names expects, where they have more dots than that of the suffix."""
    if all(suffix.count(".") == 1 for suffix in sample.images):
        return ""
    return ", as WebDataset splits a name at its first dot: leave out the dots before the suffix"


def _label(shard: Path, descriptor: int, key: str, sample: _Sample) -> int | str | None:
    """The label of a sample; None if it has none, or is no image and has something else in its `.json`."""
    for suffix in LABELS:
        if suffix in sample.labels:
            text = read_small(shard, descriptor, sample.labels[suffix]).decode(errors="replace").strip()
            label = _json_label(text) if suffix == ".json" else text
            if label is not None and str(label).removeprefix("-").isdecimal():
                return int(label)
            if label:
                return str(label)
            if sample.images:
                raise UserError(f"{shard}:{key}{suffix}: no label in it ({text[:40]!r}); write a number or a name")
    return None


def _json_label(text: str) -> int | str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    for key in ("label", "cls", "class", "class_name"):
        if isinstance(found, dict) and isinstance(label := found.get(key), int | str) and not isinstance(label, bool):
            return label
    return None
