"""A crash is explained by another process: it names the image, or says that none was found."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import damage
from tests.harness import ROOT
from tests.odd_images import two_blocks
from utils.distributed.crash import SLOT_BYTES, SLOTS, Notes

# A program that asks for the images of the folder sys.argv[2], and then ends in the way that sys.argv[1] names.
PROGRAM = """
import ctypes, os, pickle, signal, sys, threading, time
sys.argv[0] = "train.py"
import numpy as np
from pathlib import Path
from utils.data.formats.folder import FileTable
from utils.distributed.crash import note, trace_crashes

folder = Path(sys.argv[2])
table = FileTable(folder, np.array(sorted(os.listdir(folder)), dtype=bytes))

def launch():
    ctypes.string_at(0)

with trace_crashes(3, False):
    print("started", flush=True)
    if sys.argv[1] == "launch":  # as of a graph, which has nothing to do with images
        launch()
    note(b"damaged")
    note(pickle.dumps(table))
    if sys.argv[1] == "thread":  # as those of a decoder, beside a main thread that waits
        threading.Thread(target=ctypes.string_at, args=(0,)).start()
        time.sleep(600)
    elif sys.argv[1] == "abort":
        os.abort()
    elif sys.argv[1] == "fork":
        if os.fork() == 0:
            os.abort()
        os.wait()
    elif sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def end(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number:02}.jpg").write_bytes(damage.JPEG)
    return tmp_path


def test_the_image_is_named_on_which_a_thread_crashed(images: Path) -> None:
    (images / "13.jpg").write_bytes(two_blocks(6, 3))
    done = end("thread", images)
    assert done.returncode == -signal.SIGSEGV
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"train.py: rank 3: {images}/13.jpg: its EXIF blocks have different orientations, which DALI"
    )
    assert line.endswith("crashed (Segmentation fault); --bad-files skip leaves it out")


@pytest.mark.slow  # the same search with another end
def test_that_no_image_was_found(images: Path) -> None:
    """Each was decoded as by a scan, and by the loader's operators."""
    done = end("abort", images)
    assert done.returncode == -signal.SIGABRT
    assert "crashed (Aborted): no bad file was found among the 20 images" in done.stderr.splitlines()[0]


def test_where_python_was_is_said_where_no_image_was_found(tmp_path: Path) -> None:
    done = end("launch", tmp_path)
    assert done.returncode == -signal.SIGSEGV
    line, *calls = done.stderr.splitlines()
    assert line.startswith("train.py: rank 3 (process ")
    assert line.endswith(
        "crashed (Segmentation fault): no bad file was found among the 0 images that it had asked for last; "
        "scripts/check_dataset.py decodes all; Python's calls, the innermost first:"
    )
    assert [call.split(" in ")[-1] for call in calls] == ["string_at", "launch", "<module>"]


@pytest.mark.parametrize(("how", "status"), [("well", 0), ("kill", -signal.SIGKILL), ("fork", 0)])
def test_other_ends_print_nothing_and_leave_no_process(images: Path, how: str, status: int) -> None:
    """Nor does that of a worker process, which its parent explains. The pipes end with the last process."""
    done = end(how, images)
    assert (done.returncode, done.stdout, done.stderr) == (status, "started\n", "")


def test_notes_are_the_latest_ones() -> None:
    descriptor = os.memfd_create("notes")
    os.ftruncate(descriptor, 2**25)
    notes = Notes(descriptor)
    assert notes.newest_first() == []
    for number in range(SLOTS + 5):
        notes.add(b"%d" % number)
    notes.add(bytes(SLOT_BYTES + 1))  # too long
    other = Notes(descriptor)  # as another process sees them
    os.close(descriptor)
    assert other.newest_first() == [b"%d" % number for number in range(SLOTS + 4, 4, -1)]
