"""Staging: the objects of `--data-dir s3://...` or `gs://...` are copied below `--stage-dir` before they are read."""

import contextlib
import dataclasses
import hashlib
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from utils.data.staging.object_store import Canceled, ObjectStore, Outage
from utils.data.staging.staged_files import StagedFiles, StoredObject
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import Stopped, UserError
from utils.files import DISK_FULL
from utils.log import emit
from utils.options.config import TrainConfig
from utils.options.store_url import require_store, stage_folder, store_url
from utils.progress import end_status, is_terminal, show_status
from utils.text import count, data_size

REQUESTS = 16  # at a time
RANGE_BYTES = 64 << 20  # of an object that one request reads
ROUND_SECONDS = 1.0  # between two exchanges among the ranks, which must be shorter than --timeout
LINE_SECONDS = 60.0  # between two lines on the progress where there is no terminal
LOCK_SECONDS = 0.5  # between two tries
JOIN_SECONDS = 5.0  # for threads to notice that nobody waits for them
_MD5 = re.compile(r"[0-9a-f]{32}")


class Progress(NamedTuple):
    """How far a machine is.

    Attributes:
        bytes_done, bytes_total: of the objects to fetch.
        notes: lines for the user since the last round.
        is_done: whether all objects are there.
        error: what ends the staging; None for nothing.
    """

    bytes_done: int = 0
    bytes_total: int = 0
    notes: tuple[str, ...] = ()
    is_done: bool = True
    error: str | None = None


@collective
def stage(config: TrainConfig, env: DistEnv, stopped_by: Callable[[], str] = str) -> TrainConfig:
    """Copy the objects of a URL to this machine.

    One rank of each machine copies; the others wait, for any time. What is there already, and is the same in the
    store, is not copied again. Does nothing for a folder.

    Args:
        config: whose `data_dir` may be a URL.
        stopped_by: names a signal that has come, "" before.

    Returns:
        The configuration with the folder of the copies as `data_dir`.

    Raises:
        UserError: on all ranks: the store refuses or does not answer, an object has changed, the disk is full, ...
        Stopped: by `stopped_by`.
    """
    url = store_url(config.data_dir)
    if not url:
        return config
    assert config.data_dir is not None, "it is a URL"
    with sync_errors(env):
        require_store(config.data_dir, config.stage_dir)
    assert config.stage_dir is not None, "checked"
    folder = stage_folder(url, config.stage_dir)
    show_status(f"staging {url}")
    work = Staging(url, folder) if env.local_rank == 0 else None
    try:
        _wait_for_all(work, url, folder, env, stopped_by)
    finally:
        if work is not None:
            work.close()
    return dataclasses.replace(config, data_dir=folder, data_url=url)


@collective
def _wait_for_all(work: "Staging | None", url: str, folder: Path, env: DistEnv, stopped_by: Callable[[], str]) -> None:
    """Until all machines have all objects. The ranks meet once a second, so that no collective waits for long."""
    started = printed_at = time.monotonic()
    bar: tqdm[Any] | None = None
    with contextlib.ExitStack() as stack:
        while True:
            if work is not None:
                work.finished.wait(ROUND_SECONDS)
            elif env.world_size > 1:
                time.sleep(ROUND_SECONDS / 2)
            if reason := stopped_by():
                raise Stopped(reason)
            found = all_gather_object(Progress() if work is None else work.progress(), env)
            done, total = (sum(getattr(each, name) for each in found) for name in ("bytes_done", "bytes_total"))
            if env.is_main:
                if total and bar is None:
                    end_status()
                    bar = stack.enter_context(_open_bar(total))
                if bar is not None:
                    bar.total = total
                    bar.update(done - bar.n)
                for note in dict.fromkeys(note for each in found for note in each.notes):
                    emit(note)
                if total and time.monotonic() - printed_at > LINE_SECONDS and not is_terminal(sys.stderr):
                    printed_at = time.monotonic()
                    emit(f"staging {url}: {data_size(done)} of {data_size(total)}")
            if error := next((each.error for each in found if each.error), None):
                raise UserError(error, on_all_ranks=True)
            if all(each.is_done for each in found):
                break
    if env.is_main and total:
        seconds = time.monotonic() - started
        emit(f"staged {data_size(total)} in {seconds:.0f} s, {total / 1e6 / seconds:,.0f} MB/s: {folder}")


def _open_bar(total: int) -> "tqdm[Any]":
    return tqdm(
        total=total, desc="staging", unit="B", unit_scale=True, leave=False, dynamic_ncols=True, disable=None
    )  # fmt: skip


class _Target:
    """An object in progress: its file, which threads fill, and the ranges that are missing."""

    def __init__(self, found: StoredObject, part: Path) -> None:
        self.found, self.part = found, part
        self.missing = max(1, -(-found.size // RANGE_BYTES))
        self.file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self.version = ""

    def ranges(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.found.size, RANGE_BYTES) or (0,):
            yield start, min(start + RANGE_BYTES, self.found.size)

    def digest(self) -> str:
        """MD5 of the content."""
        md5 = hashlib.md5(usedforsecurity=False)
        at = 0
        while block := os.pread(self.file, 1 << 20, at):
            md5.update(block)
            at += len(block)
        return md5.hexdigest()


class Staging:
    """Copies the objects of a URL to a folder in threads of its own, from the start on.

    Attributes:
        finished: set at the end, good or bad.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.finished = threading.Event()
        self._url, self._folder = url, folder
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._outage = Outage(url, self._notes.put)
        self._lock = threading.Lock()
        self._error: str | None = None
        self._bytes_done = self._bytes_total = 0
        self._unverified = 0  # objects whose ETag is not the MD5 of their content
        self._files: StagedFiles | None = None
        self._threads = [self._start(self._run)]

    def _start(self, function: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(function,), name="staging", daemon=True)
        thread.start()
        return thread

    def progress(self) -> Progress:
        """What has happened since the last call."""
        is_done = self.finished.is_set()  # before the notes are read
        notes = []
        with contextlib.suppress(queue.Empty):
            while True:
                notes.append(self._notes.get_nowait())
        return Progress(self._bytes_done, self._bytes_total, tuple(notes), is_done, self._error)

    def close(self) -> None:
        """End the threads, unless they wait for a store that does not answer, and let other processes in."""
        self._outage.canceled.set()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._files is not None:
            self._files.close()

    def _guarded(self, function: Callable[[], None]) -> None:
        """Run a thread; its error is that of the staging, and ends the other threads."""
        try:
            function()
        except Canceled:
            pass
        except OSError as error:
            self._fail(_disk_error(self._folder, error))
        except UserError as error:
            self._fail(str(error))
        except Exception as error:
            self._fail(f"{self._url}: {type(error).__name__}: {error}")
        except BaseException as error:  # a panic of obstore
            self._fail(f"{self._url}: {error}; check endpoint and other variables of the environment")

    def _fail(self, message: str) -> None:
        with self._lock:
            self._error = self._error or message
        self._outage.canceled.set()
        self.finished.set()

    def _run(self) -> None:
        store = ObjectStore(self._url, self._outage)
        listed = store.list_objects()  # before a folder is made
        files = self._files = StagedFiles(self._folder)
        if not files.try_lock():
            self._notes.put(f"{self._folder}: another process stages there; waiting for its end")
            while not files.try_lock():
                if self._outage.canceled.wait(LOCK_SECONDS):
                    raise Canceled
            listed = store.list_objects()
        known = files.known()
        pending = [each for each in listed if not each.is_same(known.get(each.name))]
        removed = files.start_record(known, listed)
        total = sum(each.size for each in pending)
        if total > files.free_bytes():
            raise UserError(
                f"--stage-dir: {data_size(files.free_bytes())} are free at {self._folder}, {data_size(total)} are to "
                "be copied; free some, or give a folder on another disk"
            )
        self._bytes_total = total
        self._note_start(len(listed), pending, removed)
        tasks = _Tasks(pending, files)
        threads = [self._start(lambda: self._fetch(tasks, store, files)) for _ in range(min(REQUESTS, len(pending)))]
        self._threads += threads
        for thread in threads:
            thread.join()
        if self._unverified and self._error is None:
            self._notes.put(
                f"{self._url}: {count(self._unverified, 'object')} came twice with the same bytes, whose MD5 is not "
                "the ETag (as with encryption by KMS); only their size is checked"
            )
        files.close()
        self.finished.set()

    def _note_start(self, total: int, pending: list[StoredObject], removed: int) -> None:
        facts = f"{total - len(pending):,} of {count(total, 'object')} {'is' if total == 1 else 'are'} there"
        facts += f", {removed:,} that the store no longer has are deleted" if removed else ""
        facts += f", {data_size(self._bytes_total)} to copy" if pending else ""
        self._notes.put(f"staging {self._url} to {self._folder}: {facts}")

    def _fetch(self, tasks: "_Tasks", store: ObjectStore, files: StagedFiles) -> None:
        """A thread: range after range, until none is left."""
        while not self._outage.canceled.is_set() and (task := tasks.next()) is not None:
            target, start, end = task
            self._read(target, start, end, store)
            if tasks.end(target):
                self._complete(target, store, files)

    def _read(self, target: _Target, start: int, end: int, store: ObjectStore) -> None:
        def write(chunk: Any, at: int) -> None:
            view = memoryview(chunk).cast("B")
            while view:
                written = os.pwrite(target.file, view, at)
                view, at = view[written:], at + written
            with self._lock:
                self._bytes_done += len(chunk)

        if end > start:
            target.version = store.read(target.found, start, end, write)

    def _complete(self, target: _Target, store: ObjectStore, files: StagedFiles) -> None:
        """Verify an object, and give it its name."""
        found = target.found
        if _MD5.fullmatch(found.tag) and (digest := target.digest()) != found.tag:
            for start, end in target.ranges():  # the way may have damaged it
                self._read(target, start, end, store)
            with self._lock:
                self._bytes_done -= found.size
            second = target.digest()
            if second not in (digest, found.tag):
                raise UserError(f"{self._url}/{found.name}: other bytes each time it is read; check the network")
            self._unverified += second != found.tag
        size = os.fstat(target.file).st_size
        os.close(target.file)
        assert size == found.size, "all ranges"
        files.add(target.part, found._replace(version=target.version))


class _Tasks:
    """The ranges of all objects, one object after the other; any thread may ask for the next."""

    def __init__(self, pending: list[StoredObject], files: StagedFiles) -> None:
        self._lock = threading.Lock()
        self._tasks = self._generate(pending, files)

    @staticmethod
    def _generate(pending: list[StoredObject], files: StagedFiles) -> Iterator[tuple[_Target, int, int]]:
        for found in pending:
            target = _Target(found, files.new_part())
            for start, end in target.ranges():
                yield target, start, end

    def next(self) -> tuple[_Target, int, int] | None:
        with self._lock:
            return next(self._tasks, None)

    def end(self, target: _Target) -> bool:
        """One more range is there; whether it was the last."""
        with self._lock:
            target.missing -= 1
            return target.missing == 0


def _disk_error(folder: Path, error: OSError) -> str:
    if error.errno in DISK_FULL:
        return f"--stage-dir: the disk of {folder} is full; free some room, the same command goes on from there"
    name = error.filename or folder
    return f"--stage-dir: {name} cannot be written ({error.strerror or error}); give another folder"
