"""The two ways in which a run ends early on purpose, and the exit statuses that scripts can rely on."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 143  # 128 + SIGTERM, what a shell reports for a process that the signal ended


class UserError(Exception):
    """A mistake of the user's: one line that names the flag or file, its value, and the remedy."""


class Stopped(Exception):
    """A signal asked for the end and the checkpoint has been written."""
