"""train.py that also writes which images each rank trains on, as read from their pixels, to a file for each rank.

    torchrun ... tests/recorder.py RECORDS FLAGS_OF_TRAIN...

The images must be those of `conftest.write_numbered`, whose colors encode their numbers.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from tests.conftest import number_of
from utils.data.images.batch import Batch, TrainLoader
from utils.training.build import build
from utils.training.run import Run


class RecordingLoader:
    """The loader of a run. Writes a line for each batch that it returns."""

    def __init__(self, run: Run, records: Path) -> None:
        self._loader: TrainLoader = run.train_loader
        self._run, self._path = run, records / f"{run.env.rank}-{os.getpid()}.jsonl"

    def __next__(self) -> Batch:
        batch = next(self._loader)
        numbers = [number_of(image.float().mean((1, 2)).tolist()) for image in batch.images]
        with self._path.open("a") as file:
            record = {"epoch": self._run.state.epoch, "step": self._run.state.step, "images": numbers}
            file.write(json.dumps(record | {"world_size": self._run.env.world_size}) + "\n")
        return batch

    def state(self) -> dict[str, Any]:
        return self._loader.state()

    def close(self) -> None:
        self._loader.close()


def recorded_run(*parts: Any) -> Run:
    run = build(*parts)
    run.train_loader = RecordingLoader(run, Path(sys.argv[1]))
    return run


if __name__ == "__main__":
    setattr(train, "build", recorded_run)  # noqa: B010 -- of another type
    sys.exit(train.main(sys.argv[2:]))
