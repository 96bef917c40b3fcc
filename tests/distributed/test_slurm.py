"""scripts/slurm/ on a real Slurm: a controller and two nodes on this machine; their GPUs are only device files.

    scripts/test.sh -m slurm -n 0

Needs root, and Slurm's and munge's programs: slurmctld, slurmd, slurm-client and munge, as Debian calls them.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import TINY, assert_same
from tests.harness import ROOT, environment, launch, read_checkpoint, read_metrics

pytestmark = [pytest.mark.slurm, pytest.mark.dist, pytest.mark.timeout(600)]

CONFIG = """
ClusterName=brisk
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 Gres=gpu:2
NodeName=zz NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
GRES = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
FLAGS = (*TINY, "--batch-size", "4", "--deterministic", "--augment", "trivialaugment", "--mixup", "0.2")
HOST = socket.gethostname()  # also the first node: processes meet at a job's first node, so its name must be known
TWO_OF_ONE_NODE = (f"--nodelist={HOST}", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
ONE_OF_EACH_NODE = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")
FOR_EVER = ("--epochs", "100000")
SECONDS = 240  # for anything to happen


def until(when: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not when():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


class Cluster:
    """Slurm's commands."""

    def __init__(self, config: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environ = environment() | {"SLURM_CONF": str(config), "PATH": path}

    def call(self, *words: object) -> str:
        done = subprocess.run(
            list(map(str, words)), env=self._environ, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def has_idle_nodes(self, count: int) -> bool:
        command_line = ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"]
        done = subprocess.run(command_line, env=self._environ, capture_output=True, text=True, check=False)
        return done.stdout.split() == ["idle"] * count

    def submit(self, script: str, output: Path, options: tuple[str, ...], *flags: object) -> "Job":
        path = ROOT / "scripts" / "slurm" / script
        number = self.call("sbatch", "--parsable", f"--output={output}", *options, path, *flags).strip()
        return Job(self, number, output)


class Job:
    """One job and its output so far."""

    def __init__(self, cluster: Cluster, number: str, output: Path) -> None:
        self._cluster, self.number, self._output = cluster, number, output

    def __getitem__(self, field: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        found = re.search(rf"\b{field}=(\S+)", self._cluster.call("scontrol", "show", "job", "-o", self.number))
        assert found, field
        return found[1]

    @property
    def text(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def has_ended(self) -> bool:
        return self["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

    def cancel(self, *options: str) -> None:
        self._cluster.call("scancel", *options, self.number)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with contextlib.ExitStack() as sockets:
        free = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in free]
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=HOST, ports=ports))
    (folder / "gres.conf").write_text(GRES)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
    daemons = [
        ("munged", "--foreground", "--force", f"--socket={folder}/munge", *files.values()),
        ("slurmctld", "-D", "-c"),
        ("slurmd", "-D", "-N", HOST),
        ("slurmd", "-D", "-N", "zz"),
    ]
    cluster = Cluster(folder / "slurm.conf")
    with contextlib.ExitStack() as stack:
        for number, command_line in enumerate(daemons):
            log = stack.enter_context((folder / f"daemon-{number}.log").open("w"))
            environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
            process = subprocess.Popen(command_line, stdout=log, stderr=log, env=environ)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if command_line[0] == "munged":
                until((folder / "munge").exists)
        until(lambda: cluster.has_idle_nodes(2))
        yield cluster
        cluster.call("scancel", "--full", "--user=root")
        until(lambda: cluster.has_idle_nodes(2))


def steps(run: Path) -> int:
    return len(read_metrics(run)) if (run / "metrics.jsonl").exists() else 0


def test_two_nodes(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *FLAGS, "--epochs", 2, "--output-dir", tmp_path / "run")
    job = cluster.submit("multi_node.sh", tmp_path / "log", ONE_OF_EACH_NODE, *flags)
    until(job.has_ended)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), job.text
    assert "8 = 4 images x 2 processes" in job.text
    assert read_checkpoint(tmp_path / "run")["epoch"] == 2


def test_the_warning_before_the_time_limit_saves(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--data-dir", data, *FLAGS, *FOR_EVER, "--output-dir", run)
    job = cluster.submit("single_node.sh", tmp_path / "log", TWO_OF_ONE_NODE, *flags)
    until(lambda: steps(run) > 7)
    job.cancel("--signal=USR1")  # as --signal=USR1@180 has it sent
    until(job.has_ended)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "143:0"), job.text
    assert "stopped by SIGUSR1 at step" in job.text
    assert read_checkpoint(run)["step"] >= 7


def test_a_preempted_job_goes_on_as_if_nothing_had_happened(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *FLAGS, "--epochs", 20)
    uninterrupted, run = tmp_path / "uninterrupted", tmp_path / "run"
    assert launch(*flags, "--output-dir", uninterrupted, processes=2).status == 0
    job = cluster.submit("preemptible.sh", tmp_path / "log", TWO_OF_ONE_NODE, *flags, "--output-dir", run)
    until(lambda: steps(run) > 10)
    options = ("-p", "high", f"--nodelist={HOST}", "--exclusive", f"--output={tmp_path}/high")
    cluster.call("sbatch", *options, "--wrap", "true")
    until(job.has_ended)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("COMPLETED", "1", "0:0"), job.text
    assert re.search(r"stopped by SIGTERM at step \d+; the same command resumes here", job.text), job.text
    assert "resumed at epoch" in job.text
    for part in ("model", "optimizer", "step", "epoch", "result"):
        assert_same(read_checkpoint(uninterrupted)[part], read_checkpoint(run)[part], part)
    losses = [[record.get("train/loss") for record in read_metrics(folder)] for folder in (uninterrupted, run)]
    assert losses[0] == losses[1]


def test_a_preemptible_job_that_stops_itself_goes_back_into_the_queue(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = ("--data-dir", data, *FLAGS, *FOR_EVER, "--output-dir", run)
    job = cluster.submit("preemptible.sh", tmp_path / "log", TWO_OF_ONE_NODE, *flags)
    until(lambda: steps(run) > 7)
    job.cancel("--signal=USR1")
    until(lambda: job["Restarts"] == "1")
    assert "stopped by SIGUSR1 at step" in job.text
    until(lambda: job["JobState"] == "RUNNING" and bool(workers(run)))
    job.cancel("--signal=USR1")  # while it still starts
    until(lambda: job["Restarts"] == "2" or job.has_ended())
    assert job["Restarts"] == "2", job.text
    job.cancel()
    until(lambda: job.has_ended() and not workers(run))


def test_a_preemptible_job_that_is_canceled_stays_canceled(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--data-dir", data, *FLAGS, *FOR_EVER, "--output-dir", run)
    job = cluster.submit("preemptible.sh", tmp_path / "log", TWO_OF_ONE_NODE, *flags)
    until(lambda: steps(run) > 7)
    job.cancel()
    until(lambda: (job.has_ended() or job["Restarts"] != "0") and not workers(run))
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), job.text
    assert "stopped by SIGTERM at step" in job.text
    assert read_checkpoint(run)["step"] >= 7


def workers(run: Path) -> list[int]:
    """Process ids of the trainers of an output folder, on all nodes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command_line = (folder / "cmdline").read_bytes().split(b"\0")
            if command_line[0].endswith(b"python") and str(run).encode() in command_line:
                found.append(int(folder.name))
    return found


def test_two_steps_of_one_job_at_a_time(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    flags = " ".join(map(str, ("--data-dir", data, *FLAGS, "--epochs", 2)))
    step = f"srun -n 2 --exact --cpus-per-task=1 python {ROOT}/train.py {flags}"
    script = "\n".join(
        ["#!/bin/bash"]
        + [f"{step} --seed {seed} --output-dir {tmp_path}/{seed} & first[{seed}]=$!" for seed in (1, 2)]
        + ["wait ${first[1]} && wait ${first[2]}"]
    )
    (tmp_path / "two.sh").write_text(script)
    options = (f"--nodelist={HOST}", "--ntasks=4", "--cpus-per-task=1")
    job = cluster.submit(str(tmp_path / "two.sh"), tmp_path / "log", options)
    until(job.has_ended)
    assert job["ExitCode"] == "0:0", job.text
    weights = [read_checkpoint(tmp_path / str(seed)) for seed in (1, 2)]
    assert [each["epoch"] for each in weights] == [2, 2]
    assert job.text.count("8 = 4 images x 2 processes") == 2


def test_a_rank_that_is_killed_is_named(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--data-dir", data, *FLAGS, *FOR_EVER, "--output-dir", run)
    job = cluster.submit("multi_node.sh", tmp_path / "log", ONE_OF_EACH_NODE, *flags)
    until(lambda: steps(run) > 2)
    (second,) = [
        pid for pid in workers(run) if b"SLURM_PROCID=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    os.kill(second, signal.SIGKILL)
    until(job.has_ended)
    assert job["JobState"] == "FAILED"
    assert f"rank 1 (process {second} on " in job.text
    assert not workers(run)


def test_a_job_that_is_canceled_saves(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--data-dir", data, *FLAGS, *FOR_EVER, "--output-dir", run)
    job = cluster.submit("single_node.sh", tmp_path / "log", TWO_OF_ONE_NODE, *flags)
    until(lambda: steps(run) > 7)
    job.cancel()
    until(lambda: job.has_ended() and not workers(run))
    assert job["JobState"] == "CANCELLED"
    assert "stopped by SIGTERM at step" in job.text
    assert read_checkpoint(run)["step"] >= 7
