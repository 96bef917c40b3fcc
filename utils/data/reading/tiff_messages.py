"""Hides what nvImageCodec's decoders of TIFFs print as errors before they pass an image on to the next decoder.

They print for each CMYK, Lab or YCbCr image, which is then decoded all the same; no variable turns that off. Where no
decoder reads an image, the run says so itself.
"""

import atexit
import contextlib
import io
import os
import subprocess
import sys

from utils.distributed.crash import is_traced

_PATTERN = r"\[(lib|nv)tiff_decoder\] "
_hidden = False


def hide_tiff_messages() -> None:
    """From here to the end of this process, a filter reads what is printed past Python on standard error.

    What Python prints goes past the filter. Does nothing in a process that is no program's own, as a notebook.
    """
    global _hidden
    if _hidden or not is_traced() or sys.stderr is None:
        return
    _hidden = True
    with contextlib.suppress(OSError, ValueError):  # no such program, no descriptor left, or standard error is closed
        _filter()


def _filter() -> None:
    before = os.dup(2)
    raw = io.FileIO(before, "w", closefd=False)
    text = io.TextIOWrapper(raw, sys.stderr.encoding, sys.stderr.errors, line_buffering=True, write_through=True)
    command = ["grep", "--line-buffered", "--text", "-vE", _PATTERN]
    grep = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=before, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert grep.stdin is not None, "a pipe"
    sys.stderr.flush()
    sys.stderr = text
    os.dup2(grep.stdin.fileno(), 2)
    grep.stdin.close()

    def restore() -> None:
        os.dup2(before, 2)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a worker process may still have the pipe
            grep.wait(1.0)

    atexit.register(restore)
