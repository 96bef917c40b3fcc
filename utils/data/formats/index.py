"""The index of a split's shards: built once by all ranks, saved beside the data, read again at the next launch.

`SPLIT.index.npz` has the names, sizes and times of the shards and the position of every image. It lies in the folder of
the shards, or in the output folder where that cannot be written. A shard whose size or time has changed is read again.
"""

import contextlib
import io
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from utils.data.formats.shards import ShardIndex, Shards, index_entries, join_indexes, split_index
from utils.data.images.records import Entry, ShardFormat
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, broadcast, gather_to_rank0, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.process_pool import process_pool
from utils.errors import UserError
from utils.files import atomic_write_bytes

VERSION = 2
ROUND_SECONDS = 5.0  # between two exchanges among the ranks, which must be shorter than --timeout
BAR_SECONDS = 0.5  # between two updates of a single process's bar


class IndexedShard(NamedTuple):
    """A shard as it was read: its size in bytes, time of change in nanoseconds since 1970, and its images."""

    size: int
    mtime: int
    images: ShardIndex


@collective
def read_shards(
    split: str, source: ShardFormat, paths: Sequence[Path], output_dir: Path, workers: int, env: DistEnv
) -> Shards:
    """The shards of a split with their index.

    The ranks share the shards that no index knows. A bar shows the progress.

    Args:
        split: train or val.
        paths: of the shards, the same on all ranks.
        output_dir: where the index is saved if it cannot be saved beside the shards.
        workers: processes of this rank.

    Raises:
        UserError: on all ranks: a shard cannot be read, is missing, or is not the same on all ranks.
    """
    root = paths[0].parent.absolute()
    stats = _stat_all(split, root, paths, env)
    names = [os.path.relpath(path.absolute(), root) for path in paths]
    known: dict[str, IndexedShard] = {}
    with sync_errors(env):
        if env.is_main:
            known = _load(index_path(output_dir, split), source) | _load(index_path(root, split), source)
            _refuse_missing(known, names, root)
    valid = [_is_valid(known.get(name), found) for name, found in zip(names, stats, strict=True)]
    pending = [at for at, is_valid in enumerate(broadcast(valid, env)) if not is_valid]
    for reports in _scan_by_all(source, paths, pending, workers, env):
        with sync_errors(env):
            for at, report in reports:
                if isinstance(report, str):
                    raise UserError(report)
                known[names[at]] = IndexedShard(stats[at].st_size, stats[at].st_mtime_ns, report)
    if env.is_main and pending:
        _save(split, known, source, (root, output_dir))
    indexes = [known[name].images for name in names] if env.is_main else []
    counts, index = broadcast((list(map(len, indexes)), join_indexes(indexes) if indexes else None), env)
    assert index is not None, "rank 0 has it"
    return Shards(
        split=split,
        root=root,
        paths=tuple(str(path.absolute()) for path in paths),
        mtimes=np.array([found.st_mtime_ns for found in stats], dtype=np.int64),
        counts=np.array(counts, dtype=np.int64),
        index=index,
    )


@collective
def _stat_all(split: str, root: Path, paths: Sequence[Path], env: DistEnv) -> list[os.stat_result]:
    """Sizes and times of the shards, whose sizes are the same on all ranks."""
    with sync_errors(env):
        stats = [_stat(path) for path in paths]
    if len(set(all_gather_object(tuple(found.st_size for found in stats), env))) > 1:
        raise UserError(f"{root}: the shards of {split} differ between the ranks; give all the same", on_all_ranks=True)
    return stats


def _stat(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); copy it there or check its permissions") from None


def _is_valid(known: IndexedShard | None, found: os.stat_result) -> bool:
    return known is not None and (known.size, known.mtime) == (found.st_size, found.st_mtime_ns)


def _refuse_missing(known: Mapping[str, IndexedShard], names: Sequence[str], root: Path) -> None:
    for name in sorted(set(known) - set(names)):
        if not os.path.lexists(root / name):
            raise UserError(
                f"{root / name}: missing, but the index has it; copy it there, or delete the index if the data set is "
                "meant to be without it"
            )


@collective
def _scan_by_all(
    source: ShardFormat, paths: Sequence[Path], pending: Sequence[int], workers: int, env: DistEnv
) -> Generator[list[tuple[int, ShardIndex | str]]]:
    """Read the shards number `pending`, each on one rank.

    Yields:
        On rank 0, the numbers and indexes of a round, or messages of what is wrong; on the others nothing.
    """
    mine = pending[env.rank :: env.world_size]
    hidden = None if env.is_main and pending else True
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=len(pending), desc="indexing", unit="shard", leave=False, disable=hidden))
        running: dict[Future[ShardIndex | str], int] = {}
        if mine:
            pool = stack.enter_context(process_pool(min(workers, len(mine))))
            running = {pool.submit(_scan, source.scan, paths[at]): at for at in mine}
        while any(all_gather_object(len(running), env)):
            deadline = time.monotonic() + (ROUND_SECONDS if env.world_size > 1 else BAR_SECONDS)
            found = []
            while running and (left := deadline - time.monotonic()) > 0:
                for done in wait(running, left, FIRST_COMPLETED).done:
                    at = running.pop(done)
                    found.append((at, _result(done, paths[at])))
            reports = [report for part in gather_to_rank0(found, env) or [] for report in part]
            bar.update(len(reports))
            yield reports


def _result(done: Future[ShardIndex | str], path: Path) -> ShardIndex | str:
    try:
        return done.result()
    except BrokenProcessPool:
        return f"{path}: reading it ends the process (a crash, or no memory left); copy or write it again"


def _scan(scan: Callable[[Path], Iterator[Entry]], path: Path) -> ShardIndex | str:
    """The index of a shard, or what is wrong with it; in a process of its own."""
    try:
        return index_entries(path, scan(path))
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror}); check its permissions"


def index_path(folder: Path, split: str) -> Path:
    """The index of a split in a folder."""
    return folder / f"{split}.index.npz"


def _save(split: str, known: Mapping[str, IndexedShard], source: ShardFormat, folders: Sequence[Path]) -> None:
    """Write the index into the first of the folders that can be written; into none if none can."""
    joined = join_indexes([shard.images for shard in known.values()])
    ends = joined.offsets + joined.lengths
    arrays = {
        "version": np.array(VERSION),
        "format": np.array(source.NAME),
        "names": _pack(map(os.fsencode, known)),
        "sizes": np.array([shard.size for shard in known.values()], dtype=np.int64),
        "mtimes": np.array([shard.mtime for shard in known.values()], dtype=np.int64),
        "counts": np.array([len(shard.images) for shard in known.values()], dtype=np.int64),
        "keys": _pack(joined.keys.tolist()),
        "texts": _pack(text.encode() for text in joined.texts),
        "labels": joined.labels,
        "gaps": joined.offsets - np.concatenate([[0], ends[:-1]]),  # small numbers, which compress well
        "lengths": joined.lengths,
        "parts": joined.parts,
    }
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(index_path(folder, split), content.getvalue(), concurrent=True)
            return


def _load(path: Path, source: ShardFormat) -> dict[str, IndexedShard]:
    """What an index knows, by the shard's name; {} if there is none that can be used."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            if int(saved["version"]) != VERSION or str(saved["format"]) != source.NAME:
                return {}
            names = list(map(os.fsdecode, _unpack(saved["names"])))
            lengths = saved["lengths"]
            # offset = end of the image before + gap
            offsets = np.cumsum(saved["gaps"]) + np.concatenate([[0], np.cumsum(lengths)[:-1]])
            joined = ShardIndex(
                keys=np.array(_unpack(saved["keys"])),
                labels=saved["labels"],
                texts=tuple(text.decode() for text in _unpack(saved["texts"])),
                offsets=offsets,
                lengths=lengths,
                parts=saved["parts"],
            )
            parts = split_index(joined, saved["counts"])
            stats = zip(saved["sizes"].tolist(), saved["mtimes"].tolist(), parts, strict=True)
            return {name: IndexedShard(*stat) for name, stat in zip(names, stats, strict=True)}
    except (OSError, KeyError, ValueError, IndexError, EOFError, zipfile.BadZipFile, zlib.error):  # any damage
        return {}


def _pack(texts: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(text + b"\0" for text in texts), dtype=np.uint8)


def _unpack(packed: NDArray[np.uint8]) -> list[bytes]:
    return packed.tobytes().split(b"\0")[:-1]
