"""Loader settings that are chosen from the machine and the size of the images."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.conftest import resolved
from utils.data.loaders.settings import SMALL_IMAGE, choose_loader_settings, keeps_val_batches, with_val_batch
from utils.distributed.group import DistEnv
from utils.distributed.machine import Machine
from utils.options.config import TrainConfig

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


@pytest.mark.parametrize("decode", ["auto", "full", "fused"])
def test_jpeg_engines_decode_no_small_images(decode: Any) -> None:
    there, config = machine(16, gpu=True, jpeg_engines=7), TrainConfig(decode=decode)
    large, small = (choose_loader_settings(config, there, 0, SMALL_IMAGE + more) for more in (1, 0))
    assert large == choose_loader_settings(config, there, 0)
    assert large.hw_decoder_load > 0 == small.hw_decoder_load
    assert small.decode == ("fused" if decode == "auto" else decode)
    because = "the images are small"
    assert [small.reasons.get(name) for name in ("decode", "hw_decoder_load")] == [
        because if decode == "auto" else None,
        because,
    ]
    given = dataclasses.replace(config, hw_decoder_load=0.5)
    assert choose_loader_settings(given, there, 0, 1.0).hw_decoder_load == 0.5


def test_small_images_that_stay_on_the_gpu_are_decoded_whole_without_jpeg_engines() -> None:
    choice = choose_loader_settings(TrainConfig(), machine(16, gpu=True, jpeg_engines=7), 10**6, 3 * 64**2)
    assert (choice.cache, choice.decode, choice.hw_decoder_load) == ("gpu", "full", 0)


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


@pytest.mark.parametrize(("decoded", "cache"), [(20 * GB, "gpu"), (20 * GB + 1, "none")])
def test_small_images_stay_on_the_gpu(decoded: int, cache: str) -> None:
    choice = choose_loader_settings(TrainConfig(), machine(16, gpu=True, jpeg_engines=7), decoded)
    assert (choice.cache, choice.decode) == (cache, "full")
    assert ("take 20.0 GB; the GPU has 80.0 GB free" in choice.reasons.get("cache", "")) == (cache == "gpu")


@pytest.mark.parametrize("values", [{"decode": "fused"}, {"cache": "none"}])
@pytest.mark.parametrize("gpu", [False, True])
def test_images_are_not_kept_against_a_flag(values: dict[str, Any], gpu: bool) -> None:
    choice = choose_loader_settings(TrainConfig(**values), machine(16, gpu=gpu, jpeg_engines=0), 1)
    assert choice.cache == "none"
    assert "cache" not in choice.reasons


@pytest.mark.parametrize(
    "values", [{"augment": "randaugment"}, {"augment_schedule": "0:none,5:randaugment"}, {"transform": "file.py:name"}]
)
def test_images_that_dali_crops_do_not_stay_on_the_gpu_by_default(values: dict[str, Any]) -> None:
    assert choose_loader_settings(TrainConfig(**values), machine(16, gpu=True, jpeg_engines=7), 1).cache == "none"


@pytest.mark.parametrize(
    ("cache", "batch_size", "val_image_size", "expected"),
    [
        ("gpu", 64, 128, 256),
        ("gpu", 32, 128, 128),
        ("gpu", 64, 181, 128),
        ("gpu", 64, 512, 64),
        ("gpu", 512, 128, 512),
        ("none", 64, 128, 64),
        ("host", 64, 128, 64),
    ],
)
def test_small_batches_are_larger_in_an_evaluation(
    cache: str, batch_size: int, val_image_size: int, expected: int
) -> None:
    config = resolved(cache=cache, batch_size=batch_size, image_size=128, val_image_size=val_image_size)
    assert with_val_batch(config) == dataclasses.replace(config, batch_size=expected)


@pytest.mark.parametrize(
    ("device", "values", "expected"),
    [
        ("cpu", {}, False),
        ("cpu", {"cache": "host"}, False),
        ("cpu", {"cache": "gpu"}, True),
        ("cuda", {}, True),
        ("cuda", {"cache": "host"}, True),
        ("cuda", {"freeze_epochs": 1}, False),
        ("cuda", {"resize_schedule": "0:64,2:128"}, False),
        ("cuda", {"cache": "gpu", "freeze_epochs": 1}, True),
    ],
)
def test_validation_batches_stay_where_no_later_epoch_needs_their_memory(
    device: str, values: dict[str, Any], expected: bool
) -> None:
    assert keeps_val_batches(resolved(**values), DistEnv.single(torch.device(device))) == expected
