"""Every rule of the verdict, at its borders."""

import dataclasses
from typing import Any

import pytest

from utils.benchmark.report import format_verdict, table
from utils.benchmark.verdict import LoaderMeasurement, Measurements, Rate, diagnose, show_share


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


@pytest.mark.parametrize(
    ("training", "spread", "shown"),
    [
        (1013, 0.01, "no difference"),
        (1013, 0.0, "no difference"),
        (991, 0.01, "no difference"),
        (989, 0.01, "98.9%"),
        (999.6, 0.0, "no difference"),  # it would be shown as 100.0 %
        (960, 0.05, "no difference"),
        (290, 0.05, "29.0%"),
    ],
)
def test_a_share_within_the_noise_is_no_difference(training: float, spread: float, shown: str) -> None:
    one = dataclasses.replace(loader("dali-fused", 9000, training), training=rate(training, spread))
    both = measurements(one, synthetic=rate(1000, spread))
    assert show_share(one.training, both.synthetic) == shown
    assert f" {shown}" in diagnose(both).summary[2]
    line = table(both).splitlines()[3]
    assert f"  {shown}  " in line


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
    assert f"The loader alone keeps {busy:.1f} of 4 CPU threads busy." in verdict.summary
    assert any("all 4 are in use" in line for line in verdict.advice) == (limit == "cpu threads")
    assert not any("--workers" in line for line in verdict.advice)


@pytest.mark.parametrize(
    ("workers", "busy", "training", "on_gpu", "more"),
    [
        (8, 7.5, 250, True, True),
        (16, 15.0, 250, True, False),  # as many as there are
        (15, 14.0, 290, True, False),  # 14 of 16 are in use
        (8, 7.5, 250, False, True),  # 6 by the loader, 4 by the step
        (8, 7.5, 520, False, False),  # 8 by the step
    ],
)
def test_more_workers_are_advised_where_threads_are_idle(
    workers: int, busy: float, training: float, on_gpu: bool, more: bool
) -> None:
    one = loader("dali-fused", max(300, training), training, cores_busy=busy, data_wait=0.9)
    verdict = diagnose(measurements(one, workers=workers, cores=16, on_gpu=on_gpu))
    assert (verdict.bound, verdict.limit) == ("input", "cpu threads")
    assert any("Give --workers more than 8" in line for line in verdict.advice) == more
    assert any("all 16 are in use" in line for line in verdict.advice) != more


def test_balanced_has_no_limit() -> None:
    verdict = diagnose(measurements(loader("dali-fused", 300, 600), synthetic=rate(1000, spread=0.5)))
    assert verdict.summary == (
        "The limit is not known: the noise of the measurement is as large as the difference.",
        "Training runs at 600 images/s with DALI, fused decode.",
        "The same step runs at 1,000 images/s on synthetic images: no difference.",
        "The loader alone delivers 300 images/s.",
        "The range of the windows is 100.0% of their median.",
    )
    assert verdict.advice == ("Measure again on a quiet machine, or with a longer --window-seconds.",)


def test_hardware_decoders_limit_whatever_their_threads_do() -> None:
    for name, engines, limit in (
        ("dali-full", 7, "decoder"),
        ("dali-full", 0, "cpu threads"),
        ("dali-fused", 7, "cpu threads"),
        ("stock", 7, "decoder"),
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
    assert advised[-3:-1] == ("Add --cuda-graph.", "Leave CUDA_DEVICE_MAX_CONNECTIONS unset.")


def test_the_text_fits_the_bound() -> None:
    starved = diagnose(measurements(loader("dali-fused", 250, 250, cores_busy=7.5)))
    assert starved.summary[0] == "Training is limited by the CPU threads of the loader."
    assert "Training would be 4.00 x as fast with a loader that is never late." in starved.summary
    assert "The loader alone keeps 7.5 of 8 CPU threads busy." in starved.summary
    assert any("all 8 are in use" in line for line in starved.advice)
    assert any("500 x 375 px" in line for line in starved.advice)
    heavy = diagnose(measurements(loader("dali-fused", 4000, 940), unused=("--compile",)))
    assert heavy.summary[0] == "Training is limited by the GPU."
    assert "Loading costs 6.0%, as it shares the device with the step." in heavy.summary
    assert heavy.advice == ("Add --compile.", "Use a smaller --arch or a smaller --image-size.")
    cpu = diagnose(measurements(loader("dali-fused", 4000, 1000), on_gpu=False))
    assert cpu.summary[0] == "Training is limited by the training step on the CPU."
    disk = diagnose(measurements(loader("dali-fused", 250, 250), files=rate(260), image_width=224, image_height=224))
    assert disk.summary[0] == "Training is limited by reading the files."
    assert disk.advice == ("Copy the images to a local disk, or into memory (/dev/shm) if they fit.",)
    assert "The files can be read, not decoded, at 260 a second." in disk.summary
    decoder = diagnose(measurements(loader("dali-fused", 250, 250), image_size=320))
    assert decoder.summary[0] == "Training is limited by decoding."
    assert decoder.advice == ()  # 375 px for 320 px: nothing to gain there
    assert "The files can be read, not decoded, at 50,000 a second." in decoder.summary
    late = diagnose(measurements(loader("dali-full", 3000, 770, data_wait=0.2)))
    assert late.summary[0] == "Training is limited by contention between loader and step."
    assert any("only beside the step" in line for line in late.summary)


def test_cause_evidence_and_remedy_are_a_line_each() -> None:
    verdict = diagnose(measurements(loader("dali-fused", 250, 250)))
    title, cause, evidence, remedy, *_ = format_verdict(verdict).splitlines()
    assert (title, cause) == ("Verdict", "Training is limited by decoding.")
    assert evidence == f"Evidence: {' '.join(verdict.summary[1:])}"
    assert remedy.startswith("Remedy: Store the images smaller:")
    nothing = diagnose(measurements(loader("dali-fused", 250, 250), image_size=320))
    assert "Remedy: None follows from these measurements." in format_verdict(nothing).splitlines()


def test_the_fastest_loader_of_the_trainer_is_advised() -> None:
    dali, torch, timm = loader("dali-full", 900, 500), loader("torch", 900, 800), loader("timm", 900, 900)
    assert diagnose(measurements(dali, torch, timm)).advice[0].startswith("Train with --loader torch,")
    assert not any("--loader" in line for line in diagnose(measurements(dali, torch, timm, would_cache=True)).advice)
    stock = diagnose(measurements(dali, torch, loader("stock", 900, 950)))
    assert stock.advice[0].startswith("Train with --loader stock,")
    assert any("against DALI's own reader and iterator: 0.53 x" in line for line in stock.where_dali_loses)
    near = dataclasses.replace(dali, training=Rate((700.0, 790.0, 801.0)))
    torch = dataclasses.replace(torch, training=Rate((800.0, 800.0, 800.0)))
    assert not any("--loader" in line for line in diagnose(measurements(near, torch)).advice)  # not clearly faster


def test_what_decoded_images_gain_is_said_beside_the_files() -> None:
    files, cached = loader("dali-full", 250, 250), loader("cached", 5000, 960)
    for would_cache, on_gpu, text in (
        (
            True,
            True,
            "Your images fit on the GPU, decoded, and train.py keeps them there by itself: 960 images/s, 96.0%",
        ),
        (False, True, "Your images fit on the GPU, decoded, and --cache gpu keeps them there: 960 images/s, 96.0%"),
        (
            True,
            False,
            "Your images fit in memory, decoded, and train.py keeps them there by itself: 960 images/s, 96.0%",
        ),
        (False, False, "Your images fit in memory, decoded, and --cache host keeps them there: 960 images/s, 96.0%"),
    ):
        verdict = diagnose(measurements(files, cached, would_cache=would_cache, on_gpu=on_gpu))
        assert (verdict.loader, verdict.limit) == ("dali-full", "decoder")
        assert verdict.summary[-1] == f"{text} of the synthetic step."
        assert verdict.where_dali_loses == ("nowhere measured here",), "it is no other loader"
        assert not any("Train with" in line for line in verdict.advice)


@pytest.mark.parametrize(
    ("alone", "on_gpu", "limit"), [(1600, True, "contention"), (900, True, "cpu threads"), (900, False, "cpu threads")]
)
def test_the_limit_of_decoded_images_is_neither_disk_nor_decoder(alone: float, on_gpu: bool, limit: str) -> None:
    only = loader("cached", alone, 770, data_wait=0.2)
    verdict = diagnose(measurements(only, on_gpu=on_gpu, files=rate(100), jpeg_engines=7))
    assert (verdict.loader, verdict.bound, verdict.limit) == ("cached", "input", limit)
    assert not any("Your images fit" in line for line in verdict.summary), "nothing to compare with"


def test_claims_name_the_winner() -> None:
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
    assert "add --loaders cached" in diagnose(measurements(calm, would_cache=True)).warnings[0]
    assert diagnose(measurements(calm, loader("cached", 3000, 900), would_cache=True)).warnings == ()
    assert "generated" in diagnose(measurements(calm, generated=True)).warnings[0]
    assert (
        "range of the windows is 60% of their median"
        in diagnose(measurements(calm, synthetic=rate(1000, 0.3))).warnings[0]
    )


def test_a_rate_is_the_median_of_its_windows() -> None:
    windows = Rate((10.0, 40.0, 20.0, 30.0, 20.0))
    assert (windows.median, windows.spread) == (20.0, 0.75)
