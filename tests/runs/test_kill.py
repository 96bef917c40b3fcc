"""Killed and stopped at hundreds of random moments, a run ends with the bits of an uninterrupted one.

    BRISK_KILLS=12 BRISK_STOPS=6 BRISK_RESTARTS=2 scripts/test.sh -m slow tests/runs/test_kill.py -rP

What is done in a case follows from its number; the exact moment also depends on the machine.
"""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.conftest import TINY, assert_same_run, curve
from tests.harness import Finished, Started, read_checkpoint
from tests.processes import free_port

KILLS, STOPS, RESTARTS = (
    int(os.environ.get(name, default))
    for name, default in (("BRISK_KILLS", 100), ("BRISK_STOPS", 20), ("BRISK_RESTARTS", 10))
)
EPOCHS, STEPS = 3, 5  # 41 images, a global batch of 8
SAVES = 4 * EPOCHS  # after steps 2, 4 and 5 of an epoch, and after its evaluation
FLAGS = (
    *TINY, "--augment", "trivialaugment", "--mixup", "0.2", "--ema-decay", "0.9", "--deterministic",
    "--epochs", str(EPOCHS), "--checkpoint-steps", "2",
)  # fmt: skip
END_SECONDS = 100  # for the other ranks after one was killed; torchrun kills them after 30
STOP_SECONDS = 100  # on a busy machine; mostly it takes two
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]


def run(data: Path, folder: Path, *torchrun: str, processes: int = 2) -> Started:
    """torchrun and its ranks in one output folder."""
    flags = ("--data-dir", data, *FLAGS, "--batch-size", 4, "--output-dir", folder)
    return harness.start(*flags, processes=processes, torchrun=torchrun)


def steps(launch: Started) -> int:
    """Steps that a launch has logged; torchrun's restarts are the same launch."""
    return launch.out.count("  step ")


def end(launch: Started, timeout: float) -> Finished:
    """Wait for the end of torchrun, which leaves no process behind."""
    done = launch.end(timeout)
    launch.check_nothing_left()
    return done


@pytest.fixture
def start(data: Path, cut: Path) -> Iterator[Callable[..., Started]]:
    """Start the run in the folder `cut`, under these flags of torchrun."""
    with contextlib.ExitStack() as stack:
        yield lambda *torchrun, **options: stack.enter_context(run(data, cut, *torchrun, **options))


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Output folder of the run that is interrupted."""
    return tmp_path / "cut"


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Output folder of the uninterrupted run and its duration in seconds."""
    folder, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    with run(data, folder) as launch:
        done = end(launch, 200)
    assert done.status == 0, done.err
    return folder, time.monotonic() - began


def check_same(whole: Path, cut: Path) -> None:
    """Both checkpoints and all records are the same to the last bit, and no file is left over."""
    for name in ("last.pt", "best.pt"):
        assert_same_run(whole, cut, name)
    assert len(curve(cut)) == EPOCHS * (STEPS + 1)
    assert {path.name for path in cut.iterdir()} == {path.name for path in whole.iterdir()}
    assert (cut / "summary.json").exists()


def saving(cut: Path, number: int) -> Callable[[], bool]:
    """Whether a launch is in its save `number`, from 1: a temporary file is there."""
    was, count = False, 0

    def now() -> bool:
        nonlocal was, count
        found = any((cut / f".{name}.tmp").exists() for name in ("last.pt", "last-1.pt", "best.pt"))
        count += found and not was
        was = found
        return found and count >= number

    return now


def wait_for_the_moment(launch: Started, cut: Path, chance: random.Random, within: str, duration: float) -> bool:
    """A moment within a save, within a step, or anywhere in a launch; False if it ended before."""
    if within == "save":
        reached = launch.reaches(saving(cut, chance.randint(1, SAVES // 2)))
        time.sleep(chance.choice((0, chance.uniform(0, 0.02))))
        return reached
    began, delay = time.monotonic(), chance.uniform(0, duration)
    if within == "step":
        step, delay = chance.randint(1, EPOCHS * STEPS - 1), chance.uniform(0, 0.05)
        if not launch.reaches(lambda: steps(launch) >= step):
            return False
        began = time.monotonic()
    return launch.reaches(lambda: time.monotonic() > began + delay)


@pytest.mark.parametrize("case", range(KILLS))
def test_killed_and_resumed(whole: tuple[Path, float], start: Callable[..., Started], cut: Path, case: int) -> None:
    """SIGKILL to one rank or to everything, a third of them within a save; one in four cases is killed twice."""
    chance = random.Random(case)
    expected, duration = whole
    for _ in range(1 + (chance.random() < 0.25)):
        launch = start()
        within = ("save", "step", "life")[case % 3]
        if not wait_for_the_moment(launch, cut, chance, within, duration):
            break
        ranks = launch.ranks()
        victims = chance.choice(([ranks.get(0)], [ranks.get(1)], [launch.pid, *ranks.values()]))
        if within == "save":  # rank 0 is the one that writes
            victims = [ranks.get(0), *chance.choice(([], [launch.pid, ranks.get(1)]))]
        victims = [pid for pid in victims if pid is not None]
        launch.send(signal.SIGKILL, *victims)
        half = [path.name for path in cut.glob(".*.tmp")]
        end(launch, END_SECONDS if victims else 200)  # a victim that has not started yet is not killed
        print(f"killed: {within}, {len(victims)} processes, step {steps(launch)}, {half or 'no'} half files")
    done = end(start(), 200)
    assert done.status == 0, done.err
    check_same(expected, cut)


@pytest.mark.parametrize("case", range(STOPS))
def test_stopped_and_resumed(whole: tuple[Path, float], start: Callable[..., Started], cut: Path, case: int) -> None:
    """SIGTERM to one rank, to all or to torchrun: a checkpoint, and 143 where torchrun passes it on."""
    chance = random.Random(1000 + case)
    expected, duration = whole
    launch = start()
    who = ("rank", "ranks", "torchrun")[case % 3]
    reached = wait_for_the_moment(launch, cut, chance, "step" if case % 4 else "life", duration)
    ranks = launch.ranks()
    targets = {"rank": [chance.choice(list(ranks.values()))] if ranks else [], "ranks": list(ranks.values())}
    listens = "first step done" in launch.out
    began = time.monotonic()
    launch.send(signal.SIGTERM, *targets.get(who, [launch.pid]) or [launch.pid])
    done = end(launch, STOP_SECONDS)
    print(f"stopped: {who}, status {done.status}, {time.monotonic() - began:.1f} s, step {steps(launch)}")
    if reached and not (cut / "summary.json").exists():
        assert done.status == 1, done.err  # torchrun's own
        codes = re.findall(r"exitcode +: (-?\d+)", done.err)
        # torchrun signals the others when the first is gone, and before a process listens that simply ends it.
        assert set(codes) <= {"143", "-15"}, done.err
        assert "143" in codes or who == "torchrun" or not listens, done.err
        if listens:
            stopped = re.findall(r"stopped by (?:SIGTERM|another rank) at step (\d+);", done.out)
            assert len(stopped) == 1, done.err
            saved = read_checkpoint(cut)
            assert saved["step"] == int(stopped[0])
    done = end(start(), 200)
    assert done.status == 0, done.err
    check_same(expected, cut)


@pytest.mark.parametrize("case", range(RESTARTS))
def test_torchrun_restarts(whole: tuple[Path, float], start: Callable[..., Started], cut: Path, case: int) -> None:
    """`--max-restarts`: one launcher, then two, as on two machines."""
    chance = random.Random(2000 + case)
    if case % 2:
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", f"--rdzv-id={case}")
        agents = [start("--nnodes=2", *rendezvous, "--max-restarts=3", processes=1) for _ in range(2)]
    else:
        agents = [start("--standalone", "--max-restarts=3")]
    deaths = 0
    for _ in range(1 + (chance.random() < 0.5)):
        at = sum(map(steps, agents)) + chance.randint(1, 2 * STEPS)
        delay = chance.uniform(0, 0.05)
        if not agents[0].reaches(lambda at=at: sum(map(steps, agents)) >= at):  # type: ignore[misc]
            break
        time.sleep(delay)
        agent = chance.choice(agents) if deaths else agents[-1]
        pid = chance.choice(list(agent.ranks().values()) or [0])
        if pid:
            agent.send(signal.SIGKILL, pid)
            deaths += 1
    assert deaths, "it ended before"
    done = [end(agent, 300) for agent in agents]
    assert [each.status for each in done] == [0] * len(agents), done
    starts = "".join(each.out for each in done).count("first step done")
    print(f"restarted: {len(agents)} agents, {deaths} deaths, {starts} starts")
    assert starts == deaths + 1
    check_same(whole[0], cut)
