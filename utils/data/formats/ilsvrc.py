"""ImageNet as it is downloaded: ILSVRC2012_img_train.tar, a tar of tars, ILSVRC2012_img_val.tar and the devkit."""

import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from utils.data.formats.flat import DEVKIT_FILES, devkit_labels
from utils.data.formats.tar_members import Member, read_members
from utils.data.images.codecs import is_image
from utils.data.images.records import Entry
from utils.errors import UserError

NAME = "ILSVRC archives"
SHARDS = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
DEVKIT = "ILSVRC2012_devkit_t12"  # a folder, or .tar.gz as downloaded


def is_shard(name: str) -> bool:
    """See `ShardFormat`."""
    return name in SHARDS.values()


def find(data_dir: Path) -> dict[str, list[Path]]:
    """See `ShardFormat`."""
    return {split: [data_dir / name] for split, name in SHARDS.items() if (data_dir / name).is_file()}


def class_names(shards: Sequence[Path]) -> tuple[str, ...] | None:
    """None: the labels are WordNet IDs, and name the classes."""
    return None


def scan(shard: Path) -> Iterator[Entry]:
    """See `ShardFormat`; the validation archive needs the devkit beside it."""
    descriptor = os.open(shard, os.O_RDONLY)
    try:
        yield from _scan_train(shard, descriptor) if shard.name == SHARDS["train"] else _scan_val(shard, descriptor)
    finally:
        os.close(descriptor)


def _scan_train(shard: Path, descriptor: int) -> Iterator[Entry]:
    for outer in _readable(shard, read_members(shard, descriptor)):
        wnid, suffix = os.path.splitext(outer.name)
        if suffix != ".tar":
            raise UserError(f"{shard}: holds {outer.name}, not the archive of a class; download it again")
        for member in _readable(shard, read_members(shard, descriptor, outer.offset, outer.offset + outer.size)):
            yield Entry(member.name, wnid, ((member.offset, member.size),))


def _scan_val(shard: Path, descriptor: int) -> Iterator[Entry]:
    found = _readable(shard, read_members(shard, descriptor))
    members = {os.path.basename(each.name): each for each in found if is_image(each.name)}
    with tempfile.TemporaryDirectory() as temporary:
        labels = devkit_labels(_devkit(shard.parent, Path(temporary)), shard, list(members))
    for name, wnid in labels:
        yield Entry(name, wnid, ((members[name].offset, members[name].size),))


def _readable(shard: Path, members: Iterable[Member]) -> Iterator[Member]:
    """The members; raises UserError for one whose content is not in the archive."""
    for member in members:
        if member.problem:
            raise UserError(f"{shard}:{member.name}: {member.problem}")
        yield member


def _devkit(folder: Path, temporary: Path) -> Path:
    """The folder with the devkit's two files of labels, unpacked to `temporary` where it is an archive."""
    unpacked = folder / DEVKIT / "data"
    if unpacked.is_dir():
        return unpacked
    archive = folder / f"{DEVKIT}.tar.gz"
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if os.path.basename(member.name) in DEVKIT_FILES:
                    content = tar.extractfile(member)
                    assert content is not None, "a regular file"
                    (temporary / os.path.basename(member.name)).write_bytes(content.read())
    except FileNotFoundError:
        raise UserError(f"{archive}: missing; it has the labels of {SHARDS['val']}, download it too") from None
    except (OSError, EOFError, tarfile.TarError) as error:
        raise UserError(f"{archive}: cannot be read ({error}); download it again") from None
    return temporary
