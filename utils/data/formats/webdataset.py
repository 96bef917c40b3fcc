"""WebDataset tars: shards of samples, files of the same key such as `0001.jpg` and `0001.cls`."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from utils.data.formats import ilsvrc
from utils.data.formats.naming import find_shards, one_list, read_names
from utils.data.formats.tar_members import Member, read_members, read_small
from utils.data.images.codecs import IMAGE_SUFFIXES, is_image
from utils.data.images.records import Entry
from utils.errors import UserError, some
from utils.text import count

NAME = "WebDataset tars"
LABELS = (".cls", ".json")  # suffixes of a sample's label
NAMES_FILE = "classes.txt"  # a class name a line, in label order


class _Sample(NamedTuple):
    """The members of a sample, by their suffix.

    Attributes:
        key: path without the suffix.
        images: by their suffix.
        labels: by their suffix in lower case.
        others: suffixes of all others.
    """

    key: str
    images: dict[str, Member]
    labels: dict[str, Member]
    others: list[str]

    def is_complete(self) -> bool:
        """Whether it has an image and a label."""
        return bool(self.images and self.labels)


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
        for sample in samples:
            label = _label(shard, descriptor, sample)
            if not sample.images:
                if label is not None and sample.others:
                    raise UserError(
                        f"{shard}:{sample.key}{sample.others[0]}: has a label, but is no image by its name; convert it "
                        f"to one that ends in {' '.join(IMAGE_SUFFIXES)}, or remove the sample"
                    )
                continue  # text, or a label of what is not there
            if len(sample.images) > 1:
                names = some(sorted(sample.images), " ")
                raise UserError(
                    f"{shard}:{sample.key}: {count(len(sample.images), 'image')} of one key ({names}); give each a "
                    f"key of its own{_split_at_dot(sample)}"
                )
            ((suffix, image),) = sample.images.items()
            if label is None:
                raise UserError(f"{shard}:{sample.key}{suffix}: {_without_label(sample, samples)}")
            yield Entry(sample.key + suffix, label, ((image.offset, image.size),))
    finally:
        os.close(descriptor)


def _samples(shard: Path, descriptor: int) -> list[_Sample]:
    """The samples in the order of their first members. A key that begins again is another sample.

    Raises:
        UserError: the content of a member is not in the shard, or a member comes twice in a sample.
    """
    samples: list[_Sample] = []
    last: dict[str, _Sample] = {}  # of each key
    repeated: list[_Sample] = []  # before another one of the same key
    for member in read_members(shard, descriptor):
        folder, _, file = member.name.rpartition("/")
        if file.startswith("."):  # as macOS writes them
            continue
        stem, dot, suffix = file.partition(".")
        key, suffix = f"{folder}/{stem}" if folder else stem, f"{dot}{suffix}"
        is_label = suffix.lower() in LABELS
        suffix = suffix.lower() if is_label else suffix
        sample = last.get(key)
        if sample is None or (sample.is_complete() and suffix in (sample.labels if is_label else sample.images)):
            if sample is not None:
                repeated.append(sample)
            sample = last[key] = _Sample(key, {}, {}, [])
            samples.append(sample)
        if not is_label and not is_image(suffix):
            sample.others.append(suffix)
            continue
        members = sample.labels if is_label else sample.images
        if member.problem:
            raise UserError(f"{shard}:{member.name}: {member.problem}")
        if suffix in members:
            raise _twice(shard, member.name)
        members[suffix] = member
    for sample in (last[before.key] for before in repeated):
        if not sample.is_complete():
            raise _twice(shard, sample.key + next(iter(sample.images | sample.labels)))
    return samples


def _twice(shard: Path, name: str) -> UserError:
    return UserError(f"{shard}:{name}: comes twice; write the tar again with one of the two")


def _without_label(sample: _Sample, samples: Sequence[_Sample]) -> str:
    """What is wrong with an image that has no label."""
    needed = f"an image without a label; it needs a file {sample.key}.cls, or {sample.key}.json with the key label"
    if "/" in sample.key and not any(each.labels for each in samples):
        return f"{needed}; if its folder is the class, unpack the tar"
    return f"{needed}{_split_at_dot(sample)}"


def _split_at_dot(sample: _Sample) -> str:
    """Why the key is not what a reader of the names expects, where they have more dots than that of the suffix."""
    if all(suffix.count(".") == 1 for suffix in sample.images):
        return ""
    return ", as WebDataset splits a name at its first dot: leave out the dots before the suffix"


def _label(shard: Path, descriptor: int, sample: _Sample) -> int | str | None:
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
                raise UserError(
                    f"{shard}:{sample.key}{suffix}: no label in it ({text[:40]!r}); write a number or a name"
                )
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
