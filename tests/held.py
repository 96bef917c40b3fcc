"""Ends a train.py that is held at a step: where it is ended does not depend on the machine's speed."""

from collections.abc import Callable
from typing import Any

from tests.harness import launch_and_end

# train.py that has done HOLD_AT steps and takes the next when it is asked to stop; or has evaluated two batches.
HOLDS = """
import os, sys, time
import train

def wait(run):
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


def hold_and_end(*flags: object, at: int | str, when: Callable[[], bool], **options: Any) -> int:
    """`launch_and_end` of a train.py that goes no further.

    Args:
        at: after this step, or "evaluation" for two batches of each evaluation. A signal that asks to stop lets all
            processes which get it go on.
        when: no later than that.
    """
    return launch_and_end(*flags, when=when, program=HOLDS, env={"HOLD_AT": at}, **options)
