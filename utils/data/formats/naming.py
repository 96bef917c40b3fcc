"""Which files of a folder are the shards of which split, by their names alone.

Names have no standard. Known ones are `imagenet1k-train-0000.tar`, `train-00000-of-00128`, `train.rec`,
`imagenet2012-validation.tfrecord-00000-of-00064`, and `0000.tar` in a folder train/.
"""

import collections
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from utils.errors import UserError

VAL_NAMES = ("val", "valid", "validation", "test")  # the first that has shards is the split "val"
SPLIT_NAMES = ("train", *VAL_NAMES)
# What others put beside the data, in lower case: a NAS (Synology, QNAP, NetApp), macOS, Windows, a file system.
SYSTEM_NAMES = frozenset(
    {
        "@eadir", "@tmp", "@sharesnap", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "~snapshot",
        "__macosx", "network trash folder", "temporary items", "thevolumesettingsfolder", "icon\r",
        "$recycle.bin", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini",
        "lost+found", "__pycache__",
    }
)  # fmt: skip
# The hub of `datasets` has names with a hash, another one in each: train-00000-of-00002-3f2a09b74b3ef9c3.parquet.
NUMBERED = re.compile(
    r"(?P<before>.*)-(?P<number>\d+)-of-(?P<count>\d+)(?P<hash>-[0-9a-f]{8}[0-9a-f-]*)?(?P<after>.*)", re.DOTALL
)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name, without its folder, is no data: it begins with a dot, or a system made it.

    Such are `._0.jpg`, `.ipynb_checkpoints`, `@eaDir` with a NAS's thumbnails, and `__MACOSX` of an archive.
    """
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def split_of(name: str) -> str | None:
    """The last word of a shard's name that is one of `SPLIT_NAMES`, in lower case; None if there is none.

    A word is a series of letters: "train" in `imagenet_train0001.tar`, but not in `trainval.tar`. The last one counts
    because what stands before is the name of the data set.
    """
    words = re.findall(r"[^\W\d_]+", name.lower())
    return next((word for word in reversed(words) if word in SPLIT_NAMES), None)


def read_names(path: Path) -> tuple[str, ...]:
    """The lines of a file of class names; Windows puts a mark in front of the first.

    Raises:
        UserError: they are not UTF-8.
        OSError: the file cannot be read.
    """
    try:
        return tuple(path.read_text(encoding="utf-8-sig").splitlines())
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 from byte {error.start} on; save it as UTF-8") from None


def find_shards(data_dir: Path, is_shard: Callable[[str], bool]) -> dict[str, list[Path]]:
    """The shards of the splits "train" and "val", sorted by name; a split without shards is not in the result.

    The names of the files in `data_dir` say their split. Files in the folders train/, val/, valid/, validation/ and
    test/ belong to that split whatever their names are. Of several names for validation images, the first of
    `VAL_NAMES` is taken. Hidden files are no shards. No file is opened.

    Args:
        data_dir: folder of the data; {} if it does not exist.
        is_shard: whether a file of this name, without its folder, is a shard of the format.

    Raises:
        UserError: a shard of a series `-NUMBER-of-COUNT` is missing, two series of one split differ in their count
            alone, a split lies in `data_dir` and in a folder as well, or a folder cannot be read.
    """
    found: dict[str, list[Path]] = collections.defaultdict(list)
    for path in _list_shards(data_dir, is_shard):
        split = split_of(path.name)
        if split is not None:
            found[split].append(path)
    for split in SPLIT_NAMES:
        inside = _list_shards(data_dir / split, is_shard)
        if inside and found[split]:
            raise UserError(
                f"{data_dir}: has shards of {split} ({found[split][0].name}, ...) and a folder {split}/ with shards "
                f"({inside[0].name}, ...); move one of the two away"
            )
        found[split] += inside
    val = next((name for name in VAL_NAMES if found[name]), "val")
    splits = {"train": found["train"], "val": found[val]}
    for shards in splits.values():
        _check_series(shards)
    return {split: shards for split, shards in splits.items() if shards}


def one_list(
    shards: Sequence[Path], find: Callable[[Path], tuple[Path, tuple[str, ...]] | None]
) -> tuple[str, ...] | None:
    """The list of classes of a split's shards; None if they have none.

    Args:
        find: folder of shards -> the file of their list, and its names; None if they have none.

    Raises:
        UserError: two folders have different lists; and as `find`.
    """
    found = [pair for folder in dict.fromkeys(path.parent for path in shards) if (pair := find(folder)) is not None]
    for path, names in found[1:]:
        if names != found[0][1]:
            raise UserError(
                f"{path}: has other classes than {found[0][0]}, or the same in another order, so that the same number "
                "would be two classes; give the shards of a split one list"
            )
    return found[0][1] if found else None


def _list_shards(folder: Path, is_shard: Callable[[str], bool]) -> list[Path]:
    """Files of a folder that are shards, sorted; a broken link is one, so that opening it names it."""
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name
                for entry in entries
                if not is_hidden(entry.name) and is_shard(entry.name) and not os.path.isdir(entry.path)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from None
    return [folder / name for name in sorted(names)]


def _check_series(shards: Iterable[Path]) -> None:
    """Raise UserError unless each series `-NUMBER-of-COUNT` is complete, from 0 or from 1 on.

    Hashes behind the count do not divide a series; but where each hash has a complete one, all belong to the split.
    """
    series: dict[tuple[str, str], dict[str, list[tuple[int, str, Path]]]] = collections.defaultdict(dict)
    for path in shards:
        if match := NUMBERED.fullmatch(path.name):
            counts = series[match["before"], match["after"]]
            counts.setdefault(match["count"], []).append((int(match["number"]), match["hash"] or "", path))
    for (before, after), counts in series.items():
        if len(counts) > 1:
            one, other = sorted(counts, key=int)[:2]
            folder = counts[one][0][2].parent
            raise UserError(
                f"{folder}: has shards {before}-...-of-{one}{after} and {before}-...-of-{other}{after}, two copies of "
                "one split; move one of the two away"
            )
        ((count, found),) = counts.items()
        hashes = collections.Counter(hash for _, hash, _ in found)
        if len(hashes) > 1 and any(times != int(count) for times in hashes.values()):
            _refuse_copies(found)
        _check_numbers({number: path for number, _, path in found}, int(count))


def _refuse_copies(found: Iterable[tuple[int, str, Path]]) -> None:
    """Raise UserError if two shards have the same number and other hashes."""
    first: dict[int, Path] = {}
    for number, _, path in found:
        if first.setdefault(number, path) != path:
            raise UserError(
                f"{path.parent}: has {first[number].name} and {path.name}, two copies of one shard; move those of one "
                "copy away"
            )


def _check_numbers(paths: Mapping[int, Path], count: int) -> None:
    """Raise UserError unless these are the shards of a series of `count`, by their number."""
    first = 1 if 0 not in paths and count in paths else 0
    path = next(iter(paths.values()))
    missing = next((number for number in range(first, first + count) if number not in paths), None)
    if missing is not None:
        match = NUMBERED.fullmatch(path.name)
        assert match is not None, "as its series was found"
        name = f"{match['before']}-{missing:0{len(match['number'])}}-of-{match['count']}"
        raise UserError(
            f"{path.parent}: {name}{'-HASH' if match['hash'] else ''}{match['after']} is missing; copy it there, all "
            f"{count} shards are needed"
        )
    beyond = next((path for number, path in paths.items() if number >= first + count), None)
    if beyond is not None:
        raise UserError(f"{beyond.parent}: {beyond.name} is beyond the end of its series of {count}; move it away")
