"""A tracker in a file, and programs that send to it; nothing that is slow to import."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.report.tracking.trackers import Outcome

# Sends a folder while the process of the last argument lives. Files in the folder say what the package does.
FOLLOW = """
import os, subprocess, sys, time
from pathlib import Path
from tests.tracker import FileTracker
from utils.report.tracking import sender as tracking

tracking.READ_SECONDS, tracking.RETRY_SECONDS, tracking.END_SECONDS = 0.05, (0.05, 0.1), 2.0
tracking.MAX_OUTPUT_BYTES = 1000
folder, pid = Path(sys.argv[1]), int(sys.argv[-1])

def create():
    print("of the package", flush=True)
    if (folder / "exits").exists():
        sys.exit("not logged in")
    if (folder / "forks").exists():
        subprocess.Popen(["sleep", "600"])
        if os.fork() == 0:
            time.sleep(600)
    while (folder / "hangs").exists():
        print("waiting", flush=True)
        time.sleep(0.01)
    return FileTracker(folder / "tracker")

sys.exit(tracking.send_run(folder, "file", create, pid=pid))
"""
# Starts the program above as train.py does, and ends at once.
SHORT = f"""
import sys, types
from pathlib import Path
from utils.report.tracking import sender as tracking

folder = Path(sys.argv[1])
tracking.PROGRAM = folder / "follow.py"
tracking.PROGRAM.write_text({FOLLOW!r})
config = types.SimpleNamespace(output_dir=folder, track="file", track_project=None, track_checkpoint=False)
with tracking.TrackerProcess(config, True, None) as tracker:
    tracker.start()
"""
# Starts it, and then lives until a signal comes.
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {FOLLOW!r}, sys.argv[1], str(os.getpid())], start_new_session=True)
time.sleep(600)
"""


class FileTracker:
    """Appends what it gets to a file, a line a call; has an error where the file `broken` lies beside it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def _write(self, *words: Any) -> None:
        if self._file.with_name("broken").exists():
            raise ConnectionError("no route to the tracker")
        with self._file.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def open(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> str:
        self._write("open", run_id, name, config)
        opened = [json.loads(line) for line in self._file.read_text().splitlines()]
        count = sum(words[:2] == ["open", None] for words in opened)
        return run_id or ("first" if count == 1 else f"run {count}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._write("log", step, values)

    def finish(self, outcome: Outcome, summary: Mapping[str, Any], checkpoint: Path | None) -> None:
        self._write("finish", outcome, summary, checkpoint and checkpoint.name)
