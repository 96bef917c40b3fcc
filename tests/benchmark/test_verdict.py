"""Every rule of the verdict, at its borders."""

import dataclasses
from typing import Any

import pytest

from utils.benchmark.verdict import LoaderMeasurement, Measurements, Rate, diagnose


def rate(median: float, spread: float = 0.01) -> Rate:
    return Rate(tuple(median * (1 + spread * offset) for offset in (-1, -0.5, 0, 0.5, 1)))


def loader(name: str, alone: float, training: float, **values: Any) -> LoaderMeasurement:
    costs: dict[str, Any] = {
        "cpu_seconds": 1.0, "cores_busy": 2.0, "data_wait": 0.0, "first_batch": 1.0, "gpu_memory": 100.0,
    }  # fmt: skip
    rates = {"alone": rate(alone), "training": rate(training)}
    return LoaderMeasurement(name=name, **(rates | costs | values))


def measurements(*loaders: LoaderMeasurement, **values: Any) -> Measurements:
    base = Measurements(
        num_images=1000,
        generated=False,
        image_width=500,
        image_height=375,
        image_size=224,
        workers=8,
        cores=8,
        on_gpu=True,
        jpeg_engines=0,
        would_cache=False,
        unused=(),
        synthetic=rate(1000),
        files=rate(50_000),
        loaders=loaders,
    )
    return dataclasses.replace(base, **values)


@pytest.mark.parametrize(
    ("alone", "training", "values", "bound", "limit"),
    [
        (9000, 1000, {}, "compute", "gpu"),
        (9000, 985, {}, "compute", "gpu"),
        (9000, 980, {}, "compute", "gpu"),
        (9000, 930, {}, "compute", "gpu"),  # interference: the loader alone is fast enough
        (1000, 500, {}, "compute", "gpu"),
        (999, 500, {}, "input", "decoder"),
        (999, 990, {}, "compute", "gpu"),
        (999, 971, {}, "balanced", None),  # 0.9% short, which is within the noise of 1%
        (999, 969, {}, "input", "decoder"),
        (300, 290, {}, "input", "decoder"),
        (300, 290, {"on_gpu": False}, "input", "decoder"),
        (300, 290, {"files": rate(359)}, "input", "disk"),
        (300, 290, {"files": rate(361)}, "input", "decoder"),
        (300, 290, {"workers": 2}, "input", "cpu threads"),
        (300, 290, {"workers": 2, "files": rate(310)}, "input", "disk"),  # waiting for the disk can look busy
        (9000, 1000, {"on_gpu": False}, "compute", "cpu threads"),
        (9000, 1100, {}, "compute", "gpu"),
        (300, 600, {"synthetic": rate(1000, spread=0.5)}, "balanced", None),
    ],
)
def test_bound_and_limit(alone: float, training: float, values: dict[str, Any], bound: str, limit: str | None) -> None:
    verdict = diagnose(measurements(loader("dali-fused", alone, training), **values))
    assert (verdict.bound, verdict.limit) == (bound, limit)
    median = values.get("synthetic", rate(1000)).median
    assert verdict.share == pytest.approx(training / median)
    assert f"{training / median:.1%}" in verdict.summary[0]


@pytest.mark.parametrize(("data_wait", "bound", "limit"), [(0.19, "compute", "gpu"), (0.21, "input", "cpu threads")])
def test_fast_alone_but_late_in_training(data_wait: float, bound: str, limit: str) -> None:
    """Where the loader's threads and the training step take the cores from each other, the step waits for input."""
    verdict = diagnose(measurements(loader("torch", 1050, 600, data_wait=data_wait, cores_busy=7.9)))
    assert (verdict.bound, verdict.limit) == (bound, limit)


@pytest.mark.parametrize(("busy", "limit"), [(6.39, "decoder"), (6.41, "cpu threads")])
def test_busy_threads_limit(busy: float, limit: str) -> None:
    assert diagnose(measurements(loader("dali-fused", 300, 290, cores_busy=busy))).limit == limit


@pytest.mark.parametrize(("busy", "limit"), [(3.19, "decoder"), (3.21, "cpu threads")])
def test_busy_cores_limit_more_workers_than_they_are(busy: float, limit: str) -> None:
    verdict = diagnose(measurements(loader("dali-fused", 300, 290, cores_busy=busy), workers=32, cores=4))
    assert verdict.limit == limit
    assert f"{busy:.1f} of 4 CPU threads are busy" in verdict.summary[1]
    assert any("more than 4 CPU threads" in line for line in verdict.advice) == (limit == "cpu threads")


def test_balanced_has_no_limit() -> None:
    verdict = diagnose(measurements(loader("dali-fused", 300, 600), synthetic=rate(1000, spread=0.5)))
    assert verdict.summary == (
        "Balanced, within the noise: fed by DALI, fused decode, training runs at 600 images/s, 60.0% of the same step "
        "on synthetic images.",
        "The limit is not known: the range of the windows is 100.0% of their median, and no more than half of that is "
        "missing; alone, the loader delivers 0.30 x what the step takes.",
    )
    assert verdict.advice == ("Measure again on a quiet machine, or with a longer --window-seconds.",)


def test_hardware_decoders_limit_whatever_their_threads_do() -> None:
    for name, engines, limit in (
        ("dali-full", 7, "decoder"),
        ("dali-full", 0, "cpu threads"),
        ("dali-fused", 7, "cpu threads"),
    ):
        found = diagnose(measurements(loader(name, 300, 290, cores_busy=8), jpeg_engines=engines))
        assert found.limit == limit, (name, engines)
    slow_disk = measurements(loader("dali-full", 250, 250), jpeg_engines=7, files=rate(260))
    assert diagnose(slow_disk).limit == "disk"


def test_the_faster_dali_path_is_diagnosed() -> None:
    fused, full = loader("dali-fused", 9000, 400), loader("dali-full", 9000, 990)
    verdict = diagnose(measurements(fused, full, loader("torch", 9000, 999)))
    assert (verdict.loader, verdict.bound) == ("dali-full", "compute")
    assert diagnose(measurements(loader("torch", 9000, 700), loader("timm", 9000, 800))).loader == "timm"


@pytest.mark.parametrize(("alone", "limit"), [(1490, "decoder"), (1510, "contention")])
def test_ample_alone_but_late_beside_the_step(alone: float, limit: str) -> None:
    """As with eight hardware queues: 20,253 images/s alone, of which a step of 6,632 got 5,108."""
    slow = loader("dali-full", alone, 770, data_wait=0.206)
    verdict = diagnose(measurements(slow, jpeg_engines=7))
    assert (verdict.bound, verdict.limit) == ("input", limit)
    assert any("smaller" in line for line in verdict.advice) == (limit == "decoder")
    assert any("CUDA_DEVICE_MAX_CONNECTIONS" in line for line in verdict.advice) == (limit == "contention")
    assert diagnose(measurements(slow, jpeg_engines=7, on_gpu=False)).limit == "decoder"
    advised = diagnose(measurements(loader("dali-full", 3000, 770, data_wait=0.2), unused=("--cuda-graph",))).advice
    assert advised[-1].startswith("try --cuda-graph; leave")


def test_the_text_fits_the_bound() -> None:
    starved = diagnose(measurements(loader("dali-fused", 250, 250, cores_busy=7.5)))
    assert starved.summary[0].startswith("Input-bound")
    assert "4.00 x as fast" in starved.summary[0]
    assert "0.25 x what the step takes; 7.5 of 8 CPU threads are busy" in starved.summary[1]
    assert any("more than 8 CPU threads, and as many --workers" in line for line in starved.advice)
    spared = diagnose(measurements(loader("dali-fused", 250, 250, cores_busy=7.5), cores=16))
    assert any("--workers more than 8: the process may run on 16" in line for line in spared.advice)
    assert any("500 x 375 px" in line for line in starved.advice)
    heavy = diagnose(measurements(loader("dali-fused", 4000, 940), unused=("--compile",)))
    assert heavy.summary[0].startswith("Compute-bound")
    assert "loading costs 6.0%" in heavy.summary[1]
    assert heavy.advice == (
        "The network costs the time: --compile, a smaller --arch or a smaller --image-size would speed it up.",
    )
    disk = diagnose(measurements(loader("dali-fused", 250, 250), files=rate(260), image_width=224, image_height=224))
    assert disk.advice == ("Copy the images to a local disk, or into memory (/dev/shm).",)
    assert "260 a second" in disk.summary[1]
    decoder = diagnose(measurements(loader("dali-fused", 250, 250), image_size=320))
    assert decoder.advice == ()  # 375 px for 320 px: nothing to gain there
    assert "200.0 x as fast" in decoder.summary[1]


def test_the_fastest_of_our_own_loaders_is_advised() -> None:
    dali, torch, timm = loader("dali-full", 900, 500), loader("torch", 900, 800), loader("timm", 900, 900)
    assert diagnose(measurements(dali, torch, timm)).advice[0].startswith("Train with --loader torch,")
    assert not any("--loader" in line for line in diagnose(measurements(dali, torch, timm, would_cache=True)).advice)
    near = dataclasses.replace(dali, training=Rate((700.0, 790.0, 801.0)))
    torch = dataclasses.replace(torch, training=Rate((800.0, 800.0, 800.0)))
    assert not any("--loader" in line for line in diagnose(measurements(near, torch)).advice)  # not clearly faster


def test_claims_say_who_is_ahead() -> None:
    fused = loader("dali-fused", 9000, 900, cpu_seconds=0.5, first_batch=0.1, gpu_memory=10.0)
    full = loader("dali-full", 8000, 800, first_batch=4.0, gpu_memory=2000.0)
    verdict = diagnose(measurements(fused, full, loader("torch", 3000, 1000, cpu_seconds=5.0)))
    assert verdict.where_dali_wins == (
        "loading alone, against torch's DataLoader: 3.00 x (9,000 against 3,000 images/s)",
        "CPU time per 1,000 images, against torch's DataLoader: 0.50 against 5.00 s",
    )
    assert verdict.where_dali_loses == (
        "training, against torch's DataLoader: 0.90 x (900 against 1,000 images/s)",
        "time to the first batch, against torch's DataLoader: 4.0 against 1.0 s",  # the path that loaded the library
        "GPU memory of the loader, against torch's DataLoader: 2,000 against 100 MB",
    )


@pytest.mark.parametrize("others", [(), (loader("torch", 3010, 302),), (loader("dali-full", 1, 1),)])
def test_nothing_is_claimed_that_was_not_measured(others: tuple[LoaderMeasurement, ...]) -> None:
    verdict = diagnose(measurements(loader("dali-fused", 3000, 300), *others))
    assert verdict.where_dali_wins == verdict.where_dali_loses == ("nowhere measured here",)
    alone = diagnose(measurements(loader("torch", 3000, 300), loader("timm", 1, 1)))
    assert alone.where_dali_wins == alone.where_dali_loses == ("nowhere measured here",)


def test_warnings() -> None:
    calm = loader("dali-fused", 3000, 300)
    assert diagnose(measurements(calm)).warnings == ()
    assert diagnose(measurements(calm, num_images=100)).warnings == ()
    assert "99 images: the measurements mean little" in diagnose(measurements(calm, num_images=99)).warnings[0]
    assert "keep these images decoded" in diagnose(measurements(calm, would_cache=True)).warnings[0]
    assert "generated" in diagnose(measurements(calm, generated=True)).warnings[0]
    assert (
        "range of the windows is 60% of their median"
        in diagnose(measurements(calm, synthetic=rate(1000, 0.3))).warnings[0]
    )


def test_a_rate_is_the_median_of_its_windows() -> None:
    windows = Rate((10.0, 40.0, 20.0, 30.0, 20.0))
    assert (windows.median, windows.spread) == (20.0, 0.75)
