"""Writes docs/internals/refusals.md: what is refused, and the message.

Data sets are in refused_folders.py, refused_labels.py and refused_shards.py, command lines in refused_commands.py.

    python -m tests.refusals

tests/runs/test_refusals.py holds the page true.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import train
from tests.harness import ROOT, Finished
from tests.refused_commands import COMMANDS, Command, prepare
from tests.refused_folders import FOLDERS, SHARDS, Case
from tests.refused_labels import LABELS
from tests.refused_shards import ARROW, LMDB, OTHERS, RECORDIO, TFRECORDS

PAGE = ROOT / "docs" / "internals" / "refusals.md"
CASES = [*FOLDERS, *LABELS, *SHARDS, *TFRECORDS, *RECORDIO, *LMDB, *ARROW, *OTHERS]
NOBODY = 65534  # user id
# Words of libraries and of the system, which change with their versions.
FOREIGN = re.compile(
    r"(is no row of a CSV|is no JSON|no regular expression|not the devkit's meta.mat|cannot be read|"
    r"no readable \w+ \w+) \((?!No such|P)[^;]*\)"
)
HEAD = """# What is refused, and how

`tests/runs/test_refusals.py` runs every row, and `python -m tests.refusals` writes the page.

## Data sets

Every row is a data set and a command line, `train.py --data-dir DATA --output-dir RUN --device cpu` with the flags of
the row. Each ends with exit status 2 and one line on standard error, before the output folder is made. WORDS are those
of a library.

Two things are no mistakes. RecordIO files need no `.idx`. A TFRecord or RecordIO file that was cut exactly between two
records does not show it, unless its `.idx` lies beside it.

| data | what is wrong | flags | exit status | message |
|---|---|---|---|---|
"""
COMMANDS_HEAD = """
## Files of a run

`train.py` with a teacher, and the scripts, in a folder with the files that `tests/refused_commands.py` writes. None of
them is changed.

| what is wrong | command | exit status | message |
|---|---|---|---|
"""


@contextlib.contextmanager
def written(case: Case) -> Iterator[Path]:
    """A folder with the data set of a case as `data`, read by a user who is not root, if needed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "data").mkdir()
        case.make(folder / "data")
        changes_user = case.unprivileged and os.geteuid() == 0
        if changes_user:
            folder.chmod(0o755)
            os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            if changes_user:
                os.seteuid(0)
            for path in (folder / "data").glob("**") if case.unprivileged else ():
                path.chmod(0o700)


def row(case: Case, done: Finished, folder: Path) -> str:
    """A row of the page."""
    message = done.err.rstrip("\n").replace(str(folder / "data"), "DATA").replace(str(folder / "run"), "RUN")
    message = FOREIGN.sub(r"\1 (WORDS)", message)
    cells = (
        case.form,
        case.what,
        f"`{case.flags}`" if case.flags else "",
        str(done.status),
        f"`{message}`",
    )
    return f"| {' | '.join(cells)} |"


def command_row(command: Command, done: Finished) -> str:
    """A row of the second table."""
    message = done.err.rstrip("\n")
    return f"| {command.what} | `{command.line}` | {done.status} | `{message}` |"


def run_commands() -> Iterator[str]:
    """The rows of the command lines, in this process."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        prepare(Path())
        for command in COMMANDS:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = command.program(command.words)
            yield command_row(command, Finished(status, out.getvalue(), err.getvalue()))


def run(case: Case) -> str:
    """The row of a case, by train.py in this process."""
    out, err = io.StringIO(), io.StringIO()
    with written(case) as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = train.main(case.words(folder))
        return row(case, Finished(status, out.getvalue(), err.getvalue()), folder)


if __name__ == "__main__":
    tables = ((HEAD, map(run, CASES)), (COMMANDS_HEAD, run_commands()))
    PAGE.write_text("".join(head + "".join(f"{line}\n" for line in rows) for head, rows in tables))
    sys.exit(0)
