"""Ends a train.py that is held at a step: where it is ended does not depend on the machine's speed."""

import signal
import tempfile
from pathlib import Path

from tests.forked import start_forked
from tests.harness import launch_and_end

# train.py that has done HOLD_AT steps and takes the next when it is asked to stop; or has evaluated two batches.
# Each rank says that it waits by a file in HOLD_MARKS, after its saves are written.
HOLDS = """
import os, pathlib, sys, time
import train

def wait(run):
    run.finish_write()
    (pathlib.Path(os.environ["HOLD_MARKS"]) / os.environ.get("RANK", "0")).touch()
    while not run.stop.by_signal:
        time.sleep(0.01)

def hold_step(run, step=train.train_step):
    if str(run.state.step) == os.environ["HOLD_AT"]:
        wait(run)
    step(run)

def hold_evaluation(run, batches=train.Run.val_batches):
    for number, batch in enumerate(batches(run)):
        yield batch
        if number == 1 and os.environ["HOLD_AT"] == "evaluation":
            wait(run)

train.train_step, train.Run.val_batches = hold_step, hold_evaluation
sys.exit(train.main(sys.argv[1:]))
"""


def hold_and_end(*flags: object, at: int | str, number: int = signal.SIGKILL, processes: int = 1) -> int:
    """End a train.py, all ranks of which are held, with a signal; returns the exit status.

    Args:
        at: after this step, or "evaluation" for two batches of each evaluation. A signal that asks to stop lets all
            processes which get it go on.
    """
    with tempfile.TemporaryDirectory() as marks:
        env = {"HOLD_AT": at, "HOLD_MARKS": marks}
        when = lambda: len(list(Path(marks).iterdir())) == processes  # noqa: E731
        if processes > 1:
            return launch_and_end(*flags, when=when, number=number, program=HOLDS, env=env, processes=processes)
        with start_forked(*flags, program=HOLDS, env=env) as started:
            return started.end_when(when, number)
