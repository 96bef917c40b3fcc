#!/usr/bin/env python3
"""Find the images that DALI cannot read, before a training run does, and those that look suspicious.

    scripts/check_dataset.py DIR --output-dir OUT

DIR is a data set in any form that train.py reads, also a URL with --stage-dir, or any tree of images. Every image is
decoded once by the libraries of DALI's CPU decoder. Prints a table and writes to OUT: manifest.json, the facts about
each image, and bad_files.json, a list of {"path", "reason"} with paths below DIR. Images that have not changed since
the last time (size, time of change) are not decoded again, also if that was killed. train.py --bad-files skip
--output-dir OUT uses the same manifest. Files that are not named like images are counted, but not decoded.

Exit status: 0 no bad file, 1 bad files, 2 wrong usage, 143 stopped by Ctrl-C or SIGTERM: what is known by then has been
written, and the same command goes on from there. A second Ctrl-C, seconds later, ends it at once.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.data.formats.folder import file_listing, list_images
from utils.data.formats.refused import refuse_unreadable
from utils.data.formats.sources import LabelFileError, Source, find_source
from utils.data.images.manifest import FileEntry, Listing, describe_counts
from utils.distributed.signals import REPEAT_SECONDS
from utils.errors import EXIT_DONE, EXIT_FAILED, Stopped, UserError, escape_control_chars
from utils.files import check_writable
from utils.options.cli import REQUIRED, Program, train_flag, with_train_flags
from utils.options.config import TrainConfig
from utils.options.limits import MIN_1
from utils.options.readers import number_option
from utils.options.store_url import require_store, store_url
from utils.text import count

if TYPE_CHECKING:
    from utils.distributed.group import DistEnv

ALL_IMAGES = "all images of the folder are decoded, as train.py refuses its label file"
WHOLE = number_option(int)
SIGNAL_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextlib.contextmanager
def record_signals() -> Iterator[Callable[[], str]]:
    """A function that names the signal that came, "" before; one that comes seconds later ends the process.

    Raises:
        Stopped: that of the block, and says that the same command goes on.
    """
    name, received_at = "", 0.0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal name, received_at
        if not name:
            name, received_at = SIGNAL_NAMES[signal.Signals(number)], time.monotonic()
        elif time.monotonic() - received_at > REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    previous = {number: signal.signal(number, receive) for number in SIGNAL_NAMES}
    try:
        yield lambda: name
    except Stopped as stopped:
        raise Stopped(f"stopped by {stopped}; the same command goes on from there") from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def table(title: str, reasons: Mapping[str, str], rows: int, where: Path) -> list[str]:
    """Lines that name at most `rows` of the files, in two columns; a line at the end counts the others."""
    if not reasons:
        return []
    shown = [
        (escape_control_chars(reason), escape_control_chars(path)) for path, reason in list(reasons.items())[:rows]
    ]
    width = max(len(reason) for reason, _ in shown)
    lines = ["", f"{title}: {len(reasons):,}", *(f"  {reason:<{width}}  {path}" for reason, path in shown)]
    return lines + ([f"  and {len(reasons) - rows:,} more, see {where}"] if len(reasons) > rows else [])


def local_folder(config: TrainConfig, stopped_by: Callable[[], str]) -> Path:
    """The data's folder; of a URL that of its copy, which is made.

    Raises:
        UserError: the URL cannot be copied.
        Stopped: by `stopped_by`.
    """
    if store_url(config.data_dir):
        import torch  # slow

        from utils.data.staging.stage import stage
        from utils.distributed.group import DistEnv

        config = stage(config, DistEnv.single(torch.device("cpu")), stopped_by)
    assert config.data_dir is not None, "given"
    return config.data_dir


def list_tree(config: TrainConfig, stopped_by: Callable[[], str]) -> tuple[Source, list[FileEntry], Mapping[str, int]]:
    """What the folder holds; if that is no shards and no label file, all images in it, and other files by suffix.

    Raises:
        UserError: there is nothing to check.
        Stopped: by `stopped_by`.
    """
    assert config.data_dir is not None, "given"
    refusal = None
    try:
        source = find_source(config, ())
    except LabelFileError as error:
        source, refusal = Source(None, config.data_dir), error
    if not source.has_class_folders:
        return source, [], {}
    entries, others = list_images(config.data_dir, stopped_by)
    if not entries and refusal:
        raise refusal
    if not entries:
        refuse_unreadable(config.data_dir)
        found = f"no images in it ({describe_counts(others)})" if others else "no images in it"
        raise UserError(f"{config.data_dir}: {found}; give a data set, or any folder of images")
    if refusal:
        print(f"{ALL_IMAGES}: {refusal}")
    return source, entries, others


def list_split(
    source: Source, config: TrainConfig, alone: "DistEnv", stopped_by: Callable[[], str]
) -> tuple[Listing, Mapping[str, int]]:
    """The images of shards or of label files; of a file that train.py refuses, all images of its folder, and others.

    Raises:
        UserError: shards are refused, or there is no image in the folder.
        Stopped: by `stopped_by`.
    """
    from utils.data.splits.selection import listing_of, read_data

    assert config.data_dir is not None, "given"
    try:
        return listing_of(config.data_dir, read_data(config, alone, source.splits)), {}
    except UserError as error:
        entries, others = list_images(config.data_dir, stopped_by) if source.format is None else ([], {})
        if not entries:
            raise
        print(f"{ALL_IMAGES}: {error}")
    return file_listing(config.data_dir.absolute(), entries), others


def check(stopped_by: Callable[[], str], config: TrainConfig, rows: int) -> int:
    """Scan, print and write; returns the exit status.

    Raises:
        UserError: there is nothing to scan, or the results cannot be written.
        Stopped: by `stopped_by`.
    """
    data_dir, output_dir, workers = local_folder(config, stopped_by), config.output_dir, config.workers
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: no such folder; give a data set, or any folder of images")
    config = dataclasses.replace(config, data_dir=data_dir)
    assert workers is not None, "set"
    source, entries, others = list_tree(config, stopped_by)
    check_writable(output_dir)

    import torch  # what takes seconds comes after the checks of the command line

    from utils.data.reading.decoding import decoder_of
    from utils.data.reading.verification import BAD_FILES, MANIFEST, bad_files, suspicious, verify_dataset
    from utils.distributed.group import DistEnv

    alone = DistEnv.single(torch.device("cpu"))
    decoder = decoder_of("dali")
    listing = file_listing(data_dir.absolute(), entries)
    if not source.has_class_folders:
        listing, others = list_split(source, config, alone, stopped_by)
    known = verify_dataset(listing, decoder, output_dir, workers, alone, stopped_by=stopped_by)
    assert known is not None, "rank 0"
    bad, unusual = bad_files(known), suspicious(known)
    lines = [
        *table("bad, training would end at them", bad, rows, output_dir / BAD_FILES),
        *table("suspicious, but DALI decodes them", unusual, rows, output_dir / MANIFEST),
        "",
        *([f"not decoded, as no image is named so: {describe_counts(others)}"] if others else []),
        f"{count(len(known), 'file')}: {len(bad):,} bad, {len(unusual):,} suspicious; {output_dir}: {MANIFEST}, "
        f"{BAD_FILES}",
    ]
    print("\n".join(lines).lstrip("\n"), flush=True)
    return EXIT_FAILED if bad else EXIT_DONE


@with_train_flags(
    train_flag("output_dir", default=REQUIRED, help="Where manifest.json and bad_files.json go."),
    train_flag("stage_dir", help="Where DIR s3://... or gs://... is copied to."),
)
def read_options(
    data_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A data set, or any folder of images.")],
    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="all cores", **WHOLE)] = None,
    rows: Annotated[int, typer.Option(help="Files that a table shows.", **WHOLE)] = 50,
    *,
    output_dir: Path,
    stage_dir: Path | None,
) -> tuple[TrainConfig, int]:
    """Find the images that DALI cannot read, and those that look suspicious.

    Exit status: 0 no bad file, 1 bad files, 2 wrong usage, 143 stopped by Ctrl-C or SIGTERM; the same command goes on
    from there.
    """
    MIN_1.check("--workers", workers)
    MIN_1.check("--rows", rows)
    if store_url(data_dir):
        require_store(data_dir, stage_dir, flag="")
    cores = workers or len(os.sched_getaffinity(0))
    config = TrainConfig(data_dir=data_dir, stage_dir=stage_dir, output_dir=output_dir, workers=cores, bad_files="skip")
    return config, rows


def run(options: tuple[TrainConfig, int]) -> int:
    """Check the data set; returns the exit status.

    Raises:
        UserError: as `check`.
        Stopped: a signal came; what is known has been written.
    """
    with record_signals() as stopped_by:
        return check(stopped_by, *options)


PROGRAM = Program("check_dataset.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
