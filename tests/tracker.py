"""A tracker in a file, and nothing that is slow to import."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.training.trackers import Outcome


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
        return run_id or "first"

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._write("log", step, values)

    def finish(self, outcome: Outcome, summary: Mapping[str, Any], checkpoint: Path | None) -> None:
        self._write("finish", outcome, summary, checkpoint and checkpoint.name)
