"""Errors that end a run with one line, the exit statuses that scripts rely on, and text for one-line messages."""

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # as a shell reports Ctrl-C, of a program with nothing to save
EXIT_STOPPED = 143  # as a shell reports SIGTERM, whatever requested the stop

SHOWN = 3  # names of a list that one line shows; a data set can have millions


class UserError(Exception):
    """A mistake of the user's: one line that names the flag or file, its value, and the remedy.

    Attributes:
        on_all_ranks: whether every rank is known to raise the same, so that rank 0 prints it for all.
    """

    def __init__(self, message: str, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class BadFile(UserError):
    """A file that its loader cannot read, on one rank while the others may be waiting for it.

    Args:
        evaluates: whether the process only evaluates.
        remedy: what the user can do; "" for the flags of train.py.
    """

    def __init__(self, path: str, reason: str, rank: int, evaluates: bool = False, remedy: str = "") -> None:
        then = "" if evaluates else ", and --resume auto goes on from the last checkpoint"
        super().__init__(f"rank {rank}: {path}: {reason}; {remedy or f'--bad-files skip leaves it out{then}'}")
        self.path, self.reason, self.rank = path, reason, rank


class RunFailed(Exception):
    """A failure in the run that one line explains; exit status 1.

    Attributes:
        on_all_ranks: whether rank 0 raises it too, so that it prints it for all.
    """

    def __init__(self, message: str, on_all_ranks: bool = True) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class Stopped(Exception):
    """A signal or the time limit ended the run, and the checkpoint has been written."""


def escape_control_chars(text: str) -> str:
    """`text` for a terminal: a line break in a file's name makes no second line, an escape sequence does nothing."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def readable(text: str) -> str:
    """`text` in characters that every encoding of Unicode has: `\\udce9` for the byte of a name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def first_line(error: BaseException, limit: int | None = None) -> str:
    """The first line of an error's message, of at most `limit` characters; its type for an empty message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:limit]


def some(names: Sequence[str], separator: str = ", ") -> str:
    """The first `SHOWN` names, and how many more there are: `a, b, c and 21 more`."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return separator.join(names[:SHOWN]) + more
