"""What is chosen for the user, and why."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import resolved
from tests.training.checkpoints import checkpoint_of
from utils.data.formats.folder import scan, scan_splits
from utils.data.loaders.settings import choose_loader_settings
from utils.distributed.group import DistEnv
from utils.distributed.machine import Machine
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.training.settings.autotune import choose_common_loader_settings, gains_by_fp16, resolve, resolve_warmup

GB = 10**9


def machine(cpu_threads: int, gpu: bool, jpeg_engines: int) -> Machine:
    return Machine(cpu_threads, gpu, jpeg_engines, gpu_memory=80 * GB if gpu else 0, host_memory=160 * GB)


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


def test_a_resume_keeps_the_pixels_of_its_checkpoint(data: Path, cpu: DistEnv) -> None:
    train, _ = scan_splits(data)
    fresh = choose_common_loader_settings(TrainConfig(), cpu, None, train)
    assert (fresh.decode, fresh.cache) == ("full", "host")
    assert fresh.reasons["decode"] == "whole images are cached"
    assert fresh.hw_decoder_load == 0, "the images are small"
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
    with pytest.raises(
        UserError, match=r"--cache gpu without a GPU: .* checkpoint was trained so: .* --overwrite to replace it"
    ):
        choose_common_loader_settings(TrainConfig(), cpu, saved, train)
    asked = choose_common_loader_settings(TrainConfig(decode="fused", cache="none"), cpu, saved, train)
    assert (asked.decode, asked.cache) == ("fused", "none"), "which the fingerprint then refuses"
    assert set(asked.reasons) == {"workers"}


def test_images_that_do_not_fit_are_refused(tmp_path: Path, cpu: DistEnv) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("1", (13_000, 13_000)).save(tmp_path / "train" / "a" / "large.png")  # half a gigabyte decoded
    train = scan(tmp_path, "train")
    many = train.select(np.tile(np.arange(len(train)), 10**5))
    with pytest.raises(UserError, match=r"--cache host: .* take [\d.]+ GB, and [\d.]+ GB are free.* use --cache none"):
        choose_common_loader_settings(TrainConfig(cache="host"), cpu, None, many)
    with pytest.raises(UserError, match=r"--cache gpu without a GPU: .*; use --cache none"):
        choose_common_loader_settings(TrainConfig(cache="gpu"), cpu, None, train)


@pytest.mark.parametrize(
    ("flags", "fused_layers", "cuda_graph"),
    [
        ({}, True, True),
        ({"sync_bn": True}, False, True),
        ({"grad_checkpointing": True}, True, True),
        ({"grad_checkpointing": True, "compile": False}, False, False),
        ({"grad_checkpointing": True, "compile": False, "cuda_graph": True}, False, True),
        ({"grad_accum_steps": 2}, True, False),
    ],
    ids=str,
)
def test_how_a_step_is_computed_on_a_gpu(flags: dict[str, Any], fused_layers: bool, cuda_graph: bool) -> None:
    config = TrainConfig(amp="bf16", **flags)
    settings = choose_loader_settings(config, machine(16, gpu=True, jpeg_engines=7), 0)
    env = DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cuda", 0))
    found = resolve(config, ("a", "b"), env, settings)
    assert (found.fused_layers, found.cuda_graph) == (fused_layers, cuda_graph)


@pytest.mark.parametrize(
    ("num_train", "world_size", "flags", "compiled"),
    [
        (None, 1, {}, True),
        (9_469, 1, {"epochs": 5}, False),
        (9_469, 1, {"epochs": 27}, True),
        (9_469, 8, {"epochs": 27}, False),
        (9_469, 1, {"epochs": 5, "compile": True}, True),
        (9_469, 1, {"epochs": 80, "image_size": 128}, False),
        (1_281_167, 8, {}, True),
        (1_281_167, 1, {"epochs": 1}, True),
        (1_281_167, 1, {"epochs": 1, "image_size": 64}, False),
        (1_281_167, 1, {"epochs": 1, "compile": False}, False),
    ],
    ids=str,
)
def test_short_runs_are_not_compiled(
    num_train: int | None, world_size: int, flags: dict[str, Any], compiled: bool
) -> None:
    config = TrainConfig(amp="bf16", grad_exchange="flat", **flags)
    settings = choose_loader_settings(config, machine(16, gpu=True, jpeg_engines=7), 0)
    env = DistEnv(0, 0, world_size, world_size, torch.device("cuda", 0))
    found = resolve(config, ("a", "b"), env, settings, num_train=num_train)
    assert (found.compile, found.fused_layers, found.cuda_graph) == (compiled, compiled, True)


def test_warmup_that_is_not_given() -> None:
    assert resolve_warmup(TrainConfig(epochs=90), None) == 5
    assert resolve_warmup(TrainConfig(epochs=30), None) == 3
    assert resolve_warmup(TrainConfig(epochs=30, cooldown_epochs=20), None) == 1
    assert resolve_warmup(TrainConfig(epochs=30), checkpoint_of(resolved(warmup_epochs=2.0))) == 2
    assert resolve_warmup(TrainConfig(epochs=30, warmup_epochs=0.0), checkpoint_of(resolved(warmup_epochs=2.0))) == 0


@pytest.mark.parametrize("arch", ["resnet18", "resnet50.a1_in1k", "resnet50d", "resnext50_32x4d", "wide_resnet50_2"])
def test_fp16_gains_where_most_sums_are_folded(arch: str) -> None:
    step, config = {"compile": True, "fused_layers": True}, TrainConfig(arch=arch)
    assert gains_by_fp16(config, step)
    for name in step:
        assert not gains_by_fp16(config, step | {name: False})
    others: list[dict[str, Any]] = [
        {"deterministic": True}, {"grad_checkpointing": True}, {"optimizer": "muon"}, {"evaluate": True}
    ]  # fmt: skip
    for flags in others:
        assert not gains_by_fp16(dataclasses.replace(config, **flags), step)


@pytest.mark.parametrize("arch", ["resnet50_gn", "resnet51q", "seresnet50", "regnety_032", "vit_small_patch16_224"])
def test_other_networks_keep_bf16(arch: str) -> None:
    assert not gains_by_fp16(TrainConfig(arch=arch), {"compile": True, "fused_layers": True})
