"""Which files of a folder are the shards of which split, by their names alone.

Names have no standard. Known ones are `imagenet1k-train-0000.tar`, `train-00000-of-00128`, `train.rec`,
`imagenet2012-validation.tfrecord-00000-of-00064`, and `0000.tar` in a folder train/.
"""

import collections
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from utils.errors import UserError

VAL_NAMES = ("val", "valid", "validation", "test")  # the first that has shards is the split "val"
SPLIT_NAMES = ("train", *VAL_NAMES)
NUMBERED = re.compile(r"(?P<before>.*)-(?P<number>\d+)-of-(?P<count>\d+)(?P<after>.*)", re.DOTALL)


def split_of(name: str) -> str | None:
    """The last word of a shard's name that is one of `SPLIT_NAMES`, in lower case; None if there is none.

    A word is a series of letters: "train" in `imagenet_train0001.tar`, but not in `trainval.tar`. The last one counts
    because what stands before is the name of the data set.
    """
    words = re.findall(r"[^\W\d_]+", name.lower())
    return next((word for word in reversed(words) if word in SPLIT_NAMES), None)


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


def _list_shards(folder: Path, is_shard: Callable[[str], bool]) -> list[Path]:
    """Files of a folder that are shards, sorted; a broken link is one, so that opening it names it."""
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and is_shard(entry.name) and not os.path.isdir(entry.path)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from None
    return [folder / name for name in sorted(names)]


def _check_series(shards: Iterable[Path]) -> None:
    """Raise UserError unless each series `-NUMBER-of-COUNT` is complete, from 0 or from 1 on."""
    series: dict[tuple[str, str], dict[str, dict[int, str]]] = collections.defaultdict(dict)
    for path in shards:
        if match := NUMBERED.fullmatch(path.name):
            counts = series[match["before"], match["after"]]
            counts.setdefault(match["count"], {})[int(match["number"])] = match["number"]
            folder = path.parent
    for (before, after), counts in series.items():
        if len(counts) > 1:
            one, other = sorted(counts, key=int)[:2]
            raise UserError(
                f"{folder}: has shards {before}-...-of-{one}{after} and {before}-...-of-{other}{after}, two copies of "
                "one split; move one of the two away"
            )
        ((count, numbers),) = counts.items()
        first = 1 if 0 not in numbers and int(count) in numbers else 0
        missing = next((n for n in range(first, first + int(count)) if n not in numbers), None)
        if missing is not None:
            width = len(next(iter(numbers.values())))
            raise UserError(
                f"{folder}: {before}-{missing:0{width}}-of-{count}{after} is missing; copy it there, all "
                f"{int(count)} shards are needed"
            )
        beyond = next((text for n, text in numbers.items() if n >= first + int(count)), None)
        if beyond is not None:
            raise UserError(
                f"{folder}: {before}-{beyond}-of-{count}{after} is beyond the end of its series of {int(count)}; "
                "move it away"
            )
