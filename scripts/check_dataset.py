#!/usr/bin/env python3
"""Find the images that DALI cannot read, before a training run meets them, and those that look odd.

    scripts/check_dataset.py DIR --output-dir OUT

DIR is a data set with train/ and val/, or any tree of images. Every file is decoded once by what DALI's CPU decoder is
made of. Prints a table and writes to OUT: manifest.json, what is known of each file, and bad_files.json, a list of
{"path", "reason"} with paths below DIR. Files that have not changed since the last time (size, time of change) are not
decoded again, also if that was killed. train.py --bad-files skip --output-dir OUT uses the same manifest. Files that
are not named like images are not looked at, but counted.

Exit status: 0 no bad file, 1 bad files, 2 wrong usage, 143 stopped by Ctrl-C or SIGTERM: what is known by then has been
written, and the same command goes on from there. A second Ctrl-C, seconds later, does not wait for that.
"""

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer

from utils.cli import USAGE_ERROR, number_option
from utils.data.decoding import decoder_of
from utils.data.formats.folder import is_folder, is_image, stat_file, suffix_of
from utils.data.manifest import FileEntry, describe_counts
from utils.data.verification import BAD_FILES, MANIFEST, bad_files, suspicious, verify_dataset
from utils.distributed.group import DistEnv
from utils.distributed.stop import REPEAT_SECONDS
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, Stopped, UserError, escape_control_chars

WHOLE = number_option(int)
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextlib.contextmanager
def signals_noted() -> Iterator[Callable[[], str]]:
    """A function that names the signal that came, "" before; one that comes seconds later ends the process."""
    name, came = "", 0.0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal name, came
        if not name:
            name, came = NAMES[signal.Signals(number)], time.monotonic()
        elif time.monotonic() - came > REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    previous = {number: signal.signal(number, receive) for number in NAMES}
    try:
        yield lambda: name
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def list_images(root: Path, stopped_by: Callable[[], str] = str) -> tuple[list[FileEntry], Mapping[str, int]]:
    """All files below `root` that are named like images, sorted; what is hidden is left out, as training does.

    Links to folders are followed, but no folder is listed twice.

    Returns:
        The files, and how many others there are of which suffix.

    Raises:
        UserError: a folder cannot be read.
        Stopped: by `stopped_by`.
    """
    entries: list[FileEntry] = []
    others: Counter[str] = Counter()
    folders, seen = [""], set()
    while folders:
        if reason := stopped_by():
            raise Stopped(reason)
        folder = folders.pop()
        path = os.path.join(root, folder)
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(path) as found:
                for entry in found:
                    name = os.path.join(folder, entry.name)
                    if entry.name.startswith("."):
                        continue
                    if is_folder(entry):
                        folders.append(name)
                    elif is_image(entry.name):
                        entries.append(stat_file(entry.path)._replace(name=name))
                    else:
                        others[suffix_of(entry.name)] += 1
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from None
    return sorted(entries), others


def table(title: str, reasons: Mapping[str, str], rows: int, where: Path) -> list[str]:
    """Lines that name at most `rows` of the files, the longest reason first in width."""
    if not reasons:
        return []
    shown = [
        (escape_control_chars(reason), escape_control_chars(path)) for path, reason in list(reasons.items())[:rows]
    ]
    width = max(len(reason) for reason, _ in shown)
    lines = ["", f"{title}: {len(reasons):,}", *(f"  {reason:<{width}}  {path}" for reason, path in shown)]
    return lines + ([f"  and {len(reasons) - rows:,} more, see {where}"] if len(reasons) > rows else [])


def check(stopped_by: Callable[[], str], data_dir: Path, output_dir: Path, workers: int, rows: int) -> int:
    """Scan, print and write; returns the exit status.

    Raises:
        UserError: there is nothing to scan, or the results cannot be written.
        Stopped: by `stopped_by`.
    """
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: no such folder; give a data set, or any folder of images")
    entries, others = list_images(data_dir, stopped_by)
    if not entries:
        found = f" ({describe_counts(others)})" if others else ""
        raise UserError(f"{data_dir}: no images in it{found}; give a data set, or any folder of images")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output-dir {output_dir}: cannot be written ({error.strerror}); give another folder"
        ) from None
    alone = DistEnv.single(torch.device("cpu"))
    decoder = decoder_of("dali")
    known = verify_dataset(data_dir.absolute(), entries, decoder, output_dir, workers, alone, stopped_by=stopped_by)
    assert known is not None, "rank 0"
    bad, odd = bad_files(known), suspicious(known)
    lines = [
        *table("bad, training would end at them", bad, rows, output_dir / BAD_FILES),
        *table("suspicious, but DALI decodes them", odd, rows, output_dir / MANIFEST),
        "",
        *([f"not looked at, as no image is named so: {describe_counts(others)}"] if others else []),
        f"{len(known):,} files: {len(bad):,} bad, {len(odd):,} suspicious; {output_dir}: {MANIFEST}, {BAD_FILES}",
    ]
    print("\n".join(lines).lstrip("\n"), flush=True)
    return EXIT_FAILED if bad else EXIT_DONE


def read_options(
    data_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A data set, or any folder of images.")],
    output_dir: Annotated[Path, typer.Option(help="Where manifest.json and bad_files.json go.")],
    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="all cores", **WHOLE)] = None,
    rows: Annotated[int, typer.Option(help="Files that a table shows.", **WHOLE)] = 50,
) -> tuple[Any, ...]:
    """Find the images that DALI cannot read, and those that look odd.

    Exit status: 0 no bad file, 1 bad files, 2 wrong usage, 143 stopped by Ctrl-C or SIGTERM; the same command goes on
    from there.
    """
    for flag, value in (("--workers", workers), ("--rows", rows)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: must be 1 or more")
    return data_dir, output_dir, workers or len(os.sched_getaffinity(0)), rows


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(read_options)
    try:
        options = typer.main.get_command(app).main(list(argv), prog_name="check_dataset.py", standalone_mode=False)
        if not isinstance(options, tuple):  # --help
            return EXIT_DONE
        with signals_noted() as stopped_by:
            return check(stopped_by, *options)
    except USAGE_ERROR as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        return _refuse(f"{message}; check_dataset.py --help lists all flags")
    except UserError as error:
        return _refuse(str(error))
    except Stopped as error:
        print(f"check_dataset.py: stopped by {error}; the same command goes on from there", file=sys.stderr, flush=True)
        return EXIT_STOPPED


def _refuse(text: str) -> int:
    print(f"check_dataset.py: {escape_control_chars(text)}", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
