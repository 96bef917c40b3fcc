"""What is chosen for the user, and why."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import resolved
from tests.training.checkpoints import checkpoint_of
from utils.config import TrainConfig
from utils.data.formats.folder import scan, scan_splits
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.training.autotune import (
    choose_common_loader_settings,
    choose_loader_settings,
)
from utils.training.machine import Machine, cpu_share, free_memory, inspect_machine

GB = 10**9


def machine(cpu_threads: int, gpu: bool, jpeg_engines: int) -> Machine:
    return Machine(cpu_threads, gpu, jpeg_engines, gpu_memory=80 * GB if gpu else 0, host_memory=160 * GB)


@pytest.mark.parametrize(
    ("there", "decode", "load", "prefetch", "because"),
    [
        (machine(16, gpu=False, jpeg_engines=0), "fused", 0.65, 6, "CPU"),
        (machine(16, gpu=True, jpeg_engines=0), "fused", 0.65, 6, "no hardware decoder"),
        (machine(16, gpu=True, jpeg_engines=7), "full", 0.9, 6, "7 hardware decoders"),
    ],
)
def test_choice_by_machine(there: Machine, decode: str, load: float, prefetch: int, because: str) -> None:
    choice = choose_loader_settings(TrainConfig(), there, 0)
    assert (choice.workers, choice.decode, choice.hw_decoder_load, choice.prefetch) == (
        there.cpu_threads,
        decode,
        load,
        prefetch,
    )
    assert because in choice.reasons["decode"]
    assert "share" in choice.reasons["workers"]


def test_only_what_the_loader_uses_has_a_reason(data: Path, cpu: DistEnv) -> None:
    there = machine(16, gpu=True, jpeg_engines=7)
    train, _ = scan_splits(data)
    saved = checkpoint_of(resolved(decode="full", cache="none"))
    for config in (TrainConfig(loader="dali"), TrainConfig(loader="proxy")):
        assert set(choose_loader_settings(config, there, 0).reasons) == {"workers", "decode", "hw_decoder_load"}
        assert choose_common_loader_settings(config, cpu, saved, train).reasons["decode"] == "as in the checkpoint"
    for config in (TrainConfig(loader="torch"), TrainConfig(loader="synthetic")):
        assert set(choose_loader_settings(config, there, 0).reasons) == {"workers"}
        for before in (None, saved):
            assert set(choose_common_loader_settings(config, cpu, before, train).reasons) == {"workers"}


def test_flags_win_over_the_machine_and_give_no_reason() -> None:
    config = TrainConfig(workers=3, decode="fused", hw_decoder_load=0.25, prefetch=7)
    choice = choose_loader_settings(config, machine(16, gpu=True, jpeg_engines=7), 0)
    assert (choice.workers, choice.decode, choice.hw_decoder_load, choice.prefetch) == (3, "fused", 0.25, 7)
    assert choice.reasons == {}
    assert choose_loader_settings(TrainConfig(workers=3), machine(16, gpu=True, jpeg_engines=7), 0).decode == "full"


@pytest.mark.parametrize(("decoded", "cache"), [(20 * GB, "host"), (20 * GB + 1, "none")])
def test_small_images_are_kept_decoded_on_the_cpu(decoded: int, cache: str) -> None:
    choice = choose_loader_settings(TrainConfig(), machine(16, gpu=False, jpeg_engines=0), decoded)
    assert (choice.cache, choice.decode) == (cache, "fused" if cache == "none" else "full")
    assert "take 20.0 GB; 160.0 GB are free" in choice.reasons["cache"]
    assert choose_loader_settings(TrainConfig(), machine(16, gpu=True, jpeg_engines=7), decoded).cache == "none"


@pytest.mark.parametrize("values", [{"decode": "fused"}, {"cache": "none"}])
def test_images_are_not_kept_against_a_flag(values: dict[str, Any]) -> None:
    choice = choose_loader_settings(TrainConfig(**values), machine(16, gpu=False, jpeg_engines=0), 1)
    assert choice.cache == "none"
    assert "cache" not in choice.reasons


def test_a_resume_keeps_the_pixels_of_its_checkpoint(data: Path, cpu: DistEnv) -> None:
    train, _ = scan_splits(data)
    fresh = choose_common_loader_settings(TrainConfig(), cpu, None, train)
    assert (fresh.decode, fresh.cache) == ("full", "host")
    assert fresh.reasons["decode"] == "whole images are cached"
    assert "free" in fresh.reasons["cache"]
    for decode, cache in (("full", "none"), ("fused", "none"), ("full", "host")):
        choice = choose_common_loader_settings(
            TrainConfig(), cpu, checkpoint_of(resolved(decode=decode, cache=cache)), train
        )
        assert (choice.decode, choice.cache) == (decode, cache)
        assert choice.reasons["decode"] == choice.reasons["cache"] == "as in the checkpoint"
    saved = checkpoint_of(resolved(decode="full", cache="gpu"))
    assert choose_common_loader_settings(TrainConfig(evaluate=True), cpu, saved, train).cache == "none"
    assert choose_common_loader_settings(TrainConfig(loader="torch"), cpu, None, train).cache == "none"
    with pytest.raises(UserError, match=r"--cache gpu without a GPU: .* checkpoint was trained so: .* --output-dir"):
        choose_common_loader_settings(TrainConfig(), cpu, saved, train)
    asked = choose_common_loader_settings(TrainConfig(decode="fused", cache="none"), cpu, saved, train)
    assert (asked.decode, asked.cache) == ("fused", "none"), "which the fingerprint then refuses"
    assert set(asked.reasons) == {"workers"}


def test_images_that_do_not_fit_are_refused(tmp_path: Path, cpu: DistEnv) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("1", (13_000, 13_000)).save(tmp_path / "train" / "a" / "large.png")  # half a gigabyte decoded
    train = scan(tmp_path, "train")
    many = dataclasses.replace(train, files=train.files * 10**5, labels=np.tile(train.labels, 10**5))
    with pytest.raises(UserError, match=r"--cache host: .* take [\d.]+ GB, and [\d.]+ GB are free.* use --cache none"):
        choose_common_loader_settings(TrainConfig(cache="host"), cpu, None, many)
    with pytest.raises(UserError, match=r"--cache gpu without a GPU: .*; use --cache none"):
        choose_common_loader_settings(TrainConfig(cache="gpu"), cpu, None, train)


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
