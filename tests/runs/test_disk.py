"""A disk that fills up, and one that turns read-only, under a running train.py: no run is lost."""

from pathlib import Path

import pytest

from tests.conftest import TINY, assert_same
from tests.harness import launch, read_checkpoint, read_losses

FLAGS = (*TINY, "--batch-size", "8", "--epochs", "30", "--lr", "0.05", "--deterministic")

STATUSES = ["filling 1", "full 2", "read-only 2", "changed 0", "flickering 0"]

# The disk is a tmpfs in a mount namespace: no root is needed and nothing is left behind. Its words are
# those of train.py's command line.
SCRIPT = """
set -u
TRAIN=("$@")
mount -t tmpfs -o size=30m tmpfs "$DISK"
until_line() { until grep -q "$1" "$OUT/$2"; do kill -0 $! || exit 70; sleep 0.02; done; }

"${TRAIN[@]}" >"$OUT/filling.txt" 2>&1 &                    # the disk fills up while it trains
until_line "epoch 2/" filling.txt
cat /dev/zero >"$DISK/filler" 2>/dev/null
wait $!; echo "filling $?"
cp "$DISK/last.pt" "$OUT/"

"${TRAIN[@]}" >"$OUT/full.txt" 2>&1; echo "full $?"
mount -o remount,ro "$DISK"
"${TRAIN[@]}" >"$OUT/read-only.txt" 2>&1; echo "read-only $?"
mount -o remount,rw "$DISK"
cmp "$DISK/last.pt" "$OUT/last.pt"; echo "changed $?"
rm "$DISK/filler"

"${TRAIN[@]}" >"$OUT/flickering.txt" 2>&1 &                  # read-only for a moment
until_line "step 1/" flickering.txt
until mount -o remount,ro "$DISK" 2>/dev/null; do :; done  # busy while a file is open
until_line "no checkpoint at step .*Read-only" flickering.txt
mount -o remount,rw "$DISK"
wait $!; echo "flickering $?"
cp "$DISK"/* "$OUT/"
"""


@pytest.mark.slow
def test_no_run_is_lost_to_the_disk(data: Path, tmp_path: Path) -> None:
    disk, out, uninterrupted = (tmp_path / name for name in ("disk", "out", "uninterrupted"))
    disk.mkdir()
    out.mkdir()
    flags = ("--data-dir", data, *FLAGS, "--output-dir")
    assert launch(*flags, uninterrupted).status == 0
    namespace = ("unshare", "--map-root-user", "--mount", "bash", "-c", SCRIPT, "bash")
    done = launch(*flags, disk, prefix=namespace, env={"DISK": disk, "OUT": out})
    texts = {path.stem: path.read_text() for path in out.glob("*.txt")}
    assert done.out.splitlines() == STATUSES, (done.err, texts)
    for text in texts.values():
        assert "Traceback" not in text, text
    assert "could not be written (No space left on device)" in texts["filling"]
    assert "cannot be written (No space left on device)" in texts["full"]
    assert "cannot be written (Read-only file system)" in texts["read-only"]
    assert "warning: no checkpoint at step" in texts["flickering"]
    assert "warning: checkpoints will need " in texts["filling"]
    mine, right = read_checkpoint(out), read_checkpoint(uninterrupted)
    for name in ("model", "optimizer", "step", "epoch"):
        assert_same(mine[name], right[name], name)
    assert read_losses(out) == read_losses(uninterrupted)
