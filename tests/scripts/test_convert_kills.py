"""Kills, signals and a full disk under scripts/convert_dataset.py: what it writes in the end is the same."""

import functools
import random
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import damage, harness
from tests.conftest import write_data
from tests.forked import start_forked
from tests.harness import launch
from tests.scripts.test_convert_dataset import SCRIPT, convert, files_of, shards_of, write_rows

Whole = Callable[[str], dict[str, bytes]]  # form -> names and contents of files
FORMS: dict[str, tuple[object, ...]] = {"tar": ("--shard-size", 0.05), "folder": ()}
NUM_FINISHED = {"tar": 75, "folder": 690}

# convert_dataset.py that gives the file HELD no final name until there is a file RELEASE.
HOLDS = """
import os, sys, time
from pathlib import Path
from scripts import convert_dataset
from utils.data.conversion import convert as conversion

def hold(temporary, path, rename=conversion.rename):
    while path.name == os.environ["HELD"] and not Path(os.environ["RELEASE"]).exists():
        time.sleep(0.01)
    rename(temporary, path)

conversion.rename = hold
sys.exit(convert_dataset.main(sys.argv[1:]))
"""
HELD = {"tar": "train-0050.tar", "folder": "green-150.jpg"}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("many"), (200, 200, 200), (30, 30, 30))


@pytest.fixture(scope="module")
def whole(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What a conversion to a form that is not killed writes."""

    @functools.cache
    def written(to: str) -> dict[str, bytes]:
        target = tmp_path_factory.mktemp(to) / "out"
        convert(many, target, "--to", to, *FORMS[to], "--workers", 1)
        return shards_of(target) if to == "tar" else files_of(target)

    return written


def finished(target: Path, to: str) -> int:
    """How many tars or images have their final names."""
    pattern = "*.tar" if to == "tar" else "*/*/*.jpg"
    return sum(not path.name.startswith(".") for path in target.glob(pattern))


def kill_and_repeat(source: Path, target: Path, to: str, kills: int) -> int:
    """Convert with SIGKILL at random moments, then to the end; returns how many of the kills left it unfinished."""
    draw = random.Random(kills)
    flags = (source, target, "--to", to, *FORMS[to], "--workers", 2)
    unfinished = 0
    for _ in range(kills):
        more = finished(target, to) + draw.randrange(40)
        held = {"HELD": HELD[to], "RELEASE": target / "never"}
        with start_forked(*flags, program=HOLDS, env=held) as started:
            started.wait_for(lambda more=more: finished(target, to) > min(more, 65))  # type: ignore[misc]
            time.sleep(draw.random() / 200)
            started.kill()
        unfinished += 0 < finished(target, to) < NUM_FINISHED[to]
        for path in target.rglob("[!.]*"):
            if path.suffix == ".tar":
                with tarfile.open(path) as tar:
                    assert tar.getnames()[-1].endswith(".cls")
            elif path.suffix == ".jpg":
                assert path.read_bytes()[-2:] == b"\xff\xd9"
    convert(*flags)
    return unfinished


@pytest.mark.parametrize(
    ("to", "kills"),
    [("tar", 1), pytest.param("folder", 1, marks=pytest.mark.slow), pytest.param("tar", 10, marks=pytest.mark.slow)],
    ids=["tar", "folder", "tar, ten times"],
)
def test_a_killed_conversion_ends_with_the_same_files(
    many: Path, whole: Whole, tmp_path: Path, to: str, kills: int
) -> None:
    target = tmp_path / "out"
    assert kill_and_repeat(many, target, to, kills) > 0
    found = shards_of(target) if to == "tar" else files_of(target)
    found = {name: content for name, content in found.items() if not name.startswith(".")}
    assert found == whole(to)


@pytest.mark.slow  # the kills of the other test, while parquet is staged
def test_a_killed_conversion_of_parquet(tmp_path: Path) -> None:
    """The Arrow files that are complete are taken, and deleted at the end."""
    source, out = tmp_path / "data", tmp_path / "out"
    for split in ("train", "val"):
        write_rows(source / f"{split}.parquet", [damage.JPEG + b"%d" % number for number in range(500)], [0] * 500)
    with harness.start(source, out, "--workers", 1, program=SCRIPT) as started:
        started.wait_for(lambda: (out / ".arrow" / "train").is_dir())
        started.kill()
    assert not (out / "classes.txt").exists()
    convert(source, out)
    convert(source, tmp_path / "whole")
    assert shards_of(out) == shards_of(tmp_path / "whole")


def test_a_signal_ends_it_with_what_is_finished(many: Path, whole: Whole, tmp_path: Path) -> None:
    flags = (many, tmp_path / "out", *FORMS["tar"], "--workers", 1)
    held = {"HELD": "train-0003.tar", "RELEASE": tmp_path / "release"}
    with start_forked(*flags, program=HOLDS, env=held) as started:
        started.wait_for(lambda: (tmp_path / "out" / "train-0002.tar").exists())
        started.send(signal.SIGTERM, started.pid)
        (tmp_path / "release").touch()
        done = started.end()
    assert (done.status, done.out) == (143, "")
    assert done.err == "convert_dataset.py: stopped by SIGTERM; the same command goes on from there\n"
    convert(*flags)
    assert shards_of(tmp_path / "out") == whole("tar")


# The disk is a tmpfs in a mount namespace: no root is needed and nothing is left behind.
FULL_DISK = """
mount -t tmpfs -o size=700k tmpfs "$DISK"
"$@" 2>"$OUT/err"; echo "full $?"
ls "$DISK/out"/*.tar >"$OUT/finished"
mount -o remount,size=30m "$DISK"
"$@" >/dev/null; echo "room $?"
cp "$DISK"/out/* "$OUT"
"""


@pytest.mark.slow
def test_a_full_disk(many: Path, whole: Whole, tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    out.mkdir()
    namespace = ("unshare", "--map-root-user", "--mount", "bash", "-c", FULL_DISK, "bash")
    flags = (many, disk / "out", *FORMS["tar"], "--workers", 2)
    done = launch(*flags, program=SCRIPT, prefix=namespace, env={"DISK": disk, "OUT": out})
    err, finished = (out / "err").read_text(), (out / "finished").read_text().split()
    assert done.out.splitlines() == ["full 2", "room 0"], (done.err, err)
    assert err == (
        f"convert_dataset.py: {disk / 'out'}: no space left; make room, the same command goes on with what is missing\n"
    )
    assert len(finished) > 3
    assert {name: content for name, content in shards_of(out).items() if name in whole("tar")} == whole("tar")
