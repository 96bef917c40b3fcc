"""How a run ends early on purpose: exceptions, the exit statuses that scripts rely on, and one-line messages."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # as a shell reports Ctrl-C, of a program with nothing to save
EXIT_STOPPED = 143  # as a shell reports SIGTERM, whatever asked for the stop


class UserError(Exception):
    """A mistake of the user's: one line that names the flag or file, its value, and the remedy.

    Attributes:
        common: whether every rank is known to raise the same, so that rank 0 can speak for all.
    """

    def __init__(self, message: str, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class BadFile(UserError):
    """A file that its loader cannot read, met by one rank while the others may be waiting for it.

    Attributes:
        path, reason: which, and why.
    """

    def __init__(self, path: str, reason: str, rank: int) -> None:
        super().__init__(
            f"rank {rank}: {path}: {reason}; --bad-files skip leaves it out, and --resume auto goes on from the last "
            "checkpoint"
        )
        self.path, self.reason = path, reason


class RunFailed(Exception):
    """A failure in the run that one line explains; exit status 1.

    Attributes:
        common: whether rank 0 is there to speak for all.
    """

    def __init__(self, message: str, on_all_ranks: bool = True) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class Stopped(Exception):
    """A signal or the time limit asked for the end, and the checkpoint has been written."""


def escape_control_chars(text: str) -> str:
    """`text` for a terminal: a line break in a file's name makes no second line, an escape sequence does nothing."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
