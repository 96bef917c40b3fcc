"""Hundreds of ends: killed and stopped at random moments, a run resumes to the bits of the one nobody disturbed.

    BRISK_KILLS=12 BRISK_STOPS=6 BRISK_RESTARTS=2 scripts/test.sh -m slow tests/test_kill.py -rP

What is done in a case follows from its number; when exactly it strikes is the machine's chance too.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import (
    TINY,
    alive,
    assert_same,
    command,
    descendants,
    environment,
    free_port,
    identify,
    kill_tree,
    read_checkpoint,
    read_metrics,
    workers_of,
)

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
END_SECONDS = 45  # for the rest of a group after a death; torchrun kills after 30
STOP_SECONDS = 30
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]


class Launch:
    """torchrun and its ranks in one output folder, under watch."""

    def __init__(self, data: Path, folder: Path, *of_torchrun: str, processes: int = 2) -> None:
        folder.mkdir(exist_ok=True)
        self.run = folder / "run"
        self._out, self._err = (folder / f"{time.monotonic_ns()}-{name}" for name in ("out", "err"))
        self._seen: dict[int, int] = {}
        flags = ("--data-dir", data, *FLAGS, "--batch-size", 4, "--output-dir", self.run)
        with self._out.open("w") as out, self._err.open("w") as err:
            words = [*command(processes, *of_torchrun), *map(str, flags)]
            self.torchrun = subprocess.Popen(words, stdout=out, stderr=err, env=environment())

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def steps(self) -> int:
        """Steps that this launch has logged; torchrun's restarts are the same launch."""
        return self.out.count("  step ")

    def wait_for(self, when: Callable[[], bool]) -> bool:
        """Until `when`, or the end; whether it is not the end."""
        while not when():
            if self.torchrun.poll() is not None:
                return False
            time.sleep(0.001)
        return True

    def ranks(self) -> dict[int, int]:
        self._seen |= identify(descendants(self.torchrun.pid))
        return workers_of(self.torchrun.pid)

    def send(self, number: int, *pids: int) -> None:
        self._seen |= identify(descendants(self.torchrun.pid))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, seconds: float) -> int:
        """Status of torchrun, which ends within `seconds` and leaves no process behind."""
        status = self.torchrun.wait(seconds)
        deadline = time.monotonic() + 10
        while left := alive(self._seen):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        return status

    def close(self) -> None:
        if self.torchrun.poll() is None:
            kill_tree(self.torchrun.pid)
        for pid in alive(self._seen):
            kill_tree(pid)
        self.torchrun.wait()


@pytest.fixture
def start(data: Path, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(*of_torchrun: str, processes: int = 2) -> Launch:
        launches.append(Launch(data, tmp_path / "cut", *of_torchrun, processes=processes))
        return launches[-1]

    yield start
    for launch in launches:
        launch.close()


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The undisturbed run and its duration in seconds."""
    began = time.monotonic()
    launch = Launch(data, tmp_path_factory.mktemp("whole"))
    assert launch.end(200) == 0, launch.err
    return launch.run, time.monotonic() - began


def check_same(whole: Path, cut: Path) -> None:
    """Weights, moving average, optimizer, random state, losses and evaluations, to the last bit."""
    for name in ("last.pt", "best.pt"):
        expected, found = read_checkpoint(whole, name), read_checkpoint(cut, name)
        for part in expected.keys() - {"config", "launchers", "run", "saved_at", "seconds", "ranks"}:
            assert_same(expected[part], found[part], f"{name}: {part}")
        for one, other in zip(expected["ranks"], found["ranks"], strict=True):
            for part in ("buffers", "random"):
                assert_same(one[part], other[part], f"{name}: {part}")
    assert curve(whole) == curve(cut)
    assert len(curve(cut)) == EPOCHS * (STEPS + 1)
    assert (cut / "summary.json").exists()
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in cut.iterdir()} == names  # no file left over


def curve(folder: Path) -> list[Any]:
    timing = ("images_per_second", "data_wait")
    return [{name: record[name] for name in record if name not in timing} for record in read_metrics(folder)]


def saving(launch: Launch, number: int) -> Callable[[], bool]:
    """Whether the launch is in its save `number`, from 1: a temporary file is there."""
    was, count = False, 0

    def now() -> bool:
        nonlocal was, count
        found = any((launch.run / f".{name}.tmp").exists() for name in ("last.pt", "last-1.pt", "best.pt"))
        count += found and not was
        was = found
        return found and count >= number

    return now


def wait_for_the_moment(launch: Launch, chance: random.Random, within: str, duration: float) -> bool:
    """A moment within a save, within a step, or anywhere in the life of a launch; False if it ended before."""
    if within == "save":
        reached = launch.wait_for(saving(launch, chance.randint(1, SAVES // 2)))
        time.sleep(chance.choice((0, chance.uniform(0, 0.02))))
        return reached
    began, delay = time.monotonic(), chance.uniform(0, duration)
    if within == "step":
        step, delay = chance.randint(1, EPOCHS * STEPS - 1), chance.uniform(0, 0.05)
        if not launch.wait_for(lambda: launch.steps >= step):
            return False
        began = time.monotonic()
    return launch.wait_for(lambda: time.monotonic() > began + delay)


@pytest.mark.parametrize("case", range(KILLS))
def test_killed_and_resumed(whole: tuple[Path, float], start: Callable[..., Launch], case: int) -> None:
    """SIGKILL to one rank or to everything, a third of them within a save; one in four cases is killed twice."""
    chance = random.Random(case)
    expected, duration = whole
    for _ in range(1 + (chance.random() < 0.25)):
        launch = start()
        within = ("save", "step", "life")[case % 3]
        if not wait_for_the_moment(launch, chance, within, duration):
            break
        ranks = launch.ranks()
        victims = chance.choice(([ranks.get(0)], [ranks.get(1)], [launch.torchrun.pid, *ranks.values()]))
        if within == "save":  # rank 0 is the one that writes
            victims = [ranks.get(0), *chance.choice(([], [launch.torchrun.pid, ranks.get(1)]))]
        launch.send(signal.SIGKILL, *(pid for pid in victims if pid is not None))
        half = [path.name for path in launch.run.glob(".*.tmp")]
        launch.end(END_SECONDS)
        print(f"killed: {within}, {len(victims)} processes, step {launch.steps}, {half or 'no'} half files")
    last = start()
    assert last.end(200) == 0, last.err
    check_same(expected, last.run)


@pytest.mark.parametrize("case", range(STOPS))
def test_stopped_and_resumed(whole: tuple[Path, float], start: Callable[..., Launch], case: int) -> None:
    """SIGTERM to one rank, to all or to torchrun: a checkpoint within 30 s, and 143 where torchrun passes it on."""
    chance = random.Random(1000 + case)
    expected, duration = whole
    launch = start()
    who = ("rank", "ranks", "torchrun")[case % 3]
    reached = wait_for_the_moment(launch, chance, "step" if case % 4 else "life", duration)
    ranks = launch.ranks()
    targets = {"rank": [chance.choice(list(ranks.values()))] if ranks else [], "ranks": list(ranks.values())}
    armed = "first step done" in launch.out
    began = time.monotonic()
    launch.send(signal.SIGTERM, *targets.get(who, [launch.torchrun.pid]) or [launch.torchrun.pid])
    status = launch.end(STOP_SECONDS)
    print(f"stopped: {who}, status {status}, {time.monotonic() - began:.1f} s, step {launch.steps}")
    if reached and not (launch.run / "summary.json").exists():
        assert status == 1, launch.err  # torchrun's own
        codes = re.findall(r"exitcode +: (-?\d+)", launch.err)
        # torchrun signals the others when the first is gone, and before a process listens that simply ends it.
        assert set(codes) <= {"143", "-15"}, launch.err
        assert "143" in codes or who == "torchrun" or not armed, launch.err
        if armed:
            stopped = re.findall(r"stopped by (?:SIGTERM|another rank) at step (\d+);", launch.out)
            assert len(stopped) == 1, launch.err
            saved = read_checkpoint(launch.run)
            assert saved["step"] == int(stopped[0])
    last = start()
    assert last.end(200) == 0, last.err
    check_same(expected, last.run)


@pytest.mark.parametrize("case", range(RESTARTS))
def test_torchrun_restarts(whole: tuple[Path, float], start: Callable[..., Launch], case: int) -> None:
    """`--max-restarts`: one launcher, then two that are to each other like two machines."""
    chance = random.Random(2000 + case)
    if case % 2:
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", f"--rdzv-id={case}")
        agents = [start("--nnodes=2", *rendezvous, "--max-restarts=3", processes=1) for _ in range(2)]
    else:
        agents = [start("--standalone", "--max-restarts=3")]
    deaths = 0
    for _ in range(1 + (chance.random() < 0.5)):
        at = sum(agent.steps for agent in agents) + chance.randint(1, 2 * STEPS)
        delay = chance.uniform(0, 0.05)
        if not agents[0].wait_for(lambda at=at: sum(agent.steps for agent in agents) >= at):  # type: ignore[misc]
            break
        time.sleep(delay)
        agent = chance.choice(agents) if deaths else agents[-1]
        pid = chance.choice(list(agent.ranks().values()) or [0])
        if pid:
            agent.send(signal.SIGKILL, pid)
            deaths += 1
    assert deaths, "it ended before"
    assert [agent.end(300) for agent in agents] == [0] * len(agents), "".join(agent.err for agent in agents)
    said = "".join(agent.out for agent in agents)
    print(f"restarted: {len(agents)} agents, {deaths} deaths, {said.count('first step done')} starts")
    assert said.count("first step done") == deaths + 1
    check_same(whole[0], agents[0].run)
