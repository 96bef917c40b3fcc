"""What a process has of its machine: CPU threads and memory."""

import os
from pathlib import Path

from utils.distributed.group import DistEnv
from utils.distributed.machine import cpu_share, free_memory, inspect_machine

GB = 10**9


def test_free_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    # An outer group of 3 GB, 2 used, 1.5 of them page cache; an inner one without a limit.
    membership = tmp_path / "cgroup"
    membership.write_text("0::/slurm/job\n")
    outer, inner = tmp_path / "fs" / "slurm", tmp_path / "fs" / "slurm" / "job"
    inner.mkdir(parents=True)
    for folder, limit in ((outer, "3000000000"), (inner, "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("2000000000\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 1500000000\n")
    assert free_memory(tmp_path / "fs", membership) == 2.5 * GB
    (inner / "memory.max").write_text("2500000000\n")
    assert free_memory(tmp_path / "fs", membership) == 2 * GB
    assert free_memory(tmp_path / "nothing", tmp_path / "none") > 2.5 * GB, "of this machine"


def test_free_memory_is_that_of_the_control_group_of_version_1(tmp_path: Path) -> None:
    # As above; 9223372036854771712 is no limit. An empty hierarchy of version 2 is there too.
    membership = tmp_path / "cgroup"
    membership.write_text("9:name=systemd:/\n4:memory:/slurm/job\n1:cpu,cpuacct:/elsewhere\n0::/\n")
    outer, inner = (tmp_path / "fs" / "memory" / path for path in ("slurm", "slurm/job"))
    inner.mkdir(parents=True)
    for folder, limit in ((outer, "3000000000"), (inner, "9223372036854771712")):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text("2000000000\n")
        (folder / "memory.stat").write_text("inactive_file 8192\ntotal_inactive_file 1500000000\n")
    assert free_memory(tmp_path / "fs", membership) == 2.5 * GB
    (inner / "memory.limit_in_bytes").write_text("2500000000\n")
    assert free_memory(tmp_path / "fs", membership) == 2 * GB
    membership.write_text("4:memory:/docker/host's name of this container\n")
    for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"):
        (outer / name).rename(outer.parent / name)  # a container sees its own group as the root
    assert free_memory(tmp_path / "fs", membership) == 2.5 * GB


def test_cpu_threads_are_shared_by_the_processes_of_a_machine(cpu: DistEnv) -> None:
    alone = inspect_machine(cpu)
    assert (alone.cpu_threads, alone.gpu, alone.jpeg_engines) == (len(os.sched_getaffinity(0)), False, 0)
    assert alone.gpu_memory == 0
    assert 0 < alone.host_memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    everything = set(range(16))
    assert cpu_share(everything, [everything]) == 16
    assert cpu_share(everything, [everything] * 2) == 8, "torchrun: all may use all"
    assert cpu_share({0, 1}, [{0, 1}, {2, 3}]) == 2, "Slurm: each has its own"
    assert cpu_share({0, 1, 2}, [{0, 1, 2}, {2, 3, 4}]) == 2
    assert cpu_share({0}, [{0}] * 8) == 1
