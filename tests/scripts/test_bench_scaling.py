"""bench scaling on real launches of train.py."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from PIL import Image

from scripts.bench.scaling import gpus_of_round, link_images
from tests.contract import assert_keys
from tests.harness import ROOT, launch, start
from utils.data.formats.folder import scan_splits

BENCH = ROOT / "scripts" / "bench"
FLAGS = "--arch test_resnet --image-size 32 --val-resize 36 --workers 1 --device cpu"


def test_small_runs_use_every_gpu() -> None:
    assert [gpus_of_round(number, 1, 2, None) for number in range(3)] == ["0", "1", "0"]
    assert [gpus_of_round(number, 2, 4, None) for number in range(3)] == ["0,1", "2,3", "0,1"]
    assert [gpus_of_round(number, 4, 4, None) for number in range(2)] == ["0,1,2,3", "0,1,2,3"]


def test_small_runs_use_every_visible_gpu() -> None:
    assert [gpus_of_round(number, 1, 2, "5,7") for number in range(3)] == ["5", "7", "5"]
    assert [gpus_of_round(number, 1, 2, "GPU-a,GPU-b,GPU-c") for number in range(3)] == ["GPU-a", "GPU-b", "GPU-a"]
    assert gpus_of_round(1, 2, 2, "5,7") == "5,7"
    assert gpus_of_round(1, 2, 2, "5") == "5", "train.py reports that this is not enough"
    assert gpus_of_round(1, 2, 2, "") == "", "none is to be used"


@pytest.mark.slow
@pytest.mark.dist
def test_table_and_files(data: Path, tmp_path: Path) -> None:
    flags = ("scaling", "--data-dir", data, "--output-dir", tmp_path / "out", "--flags", FLAGS, "--batch-size", 4)
    sizes = ("--log-steps", 2, "--windows", 3, "--rounds", 1, "--cpus", 2)
    done = launch(*flags, *sizes, program=BENCH)
    assert done.status == 0, done.err
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert_keys("scaling.json", found)
    one, two = found["points"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert len(one["rates"]) == len(two["rates"]) == 3
    assert one["efficiency"] == 1
    rates = [sorted(point["rates"])[1] for point in (one, two)]
    assert two["efficiency"] == pytest.approx(rates[1] / rates[0] / 2)
    assert f"| dali | 2 | {rates[1]:,.0f} (" in done.out
    with Image.open(tmp_path / "out" / "scaling.png") as chart:
        assert chart.size == (840, 540)
    log = (tmp_path / "out" / "dali-2.log").read_text()
    assert "8 = 4 images x 2 processes" in log
    assert "stopped by SIGTERM" in log


def test_links_are_to_what_train_lists(data: Path, tmp_path: Path) -> None:
    copy, links = tmp_path / "copy", tmp_path / "links"
    shutil.copytree(data, copy)
    for name in ("._blue-000.jpg", ".DS_Store", "notes.txt", "x.jpg.part"):
        (copy / "train" / "blue" / name).write_bytes(b"x")
    (copy / "val" / ".thumbnails").mkdir()
    (copy / "val" / ".thumbnails" / "1.jpg").write_bytes(b"x")
    link_images(copy, links, 100)
    listed, linked = scan_splits(copy), scan_splits(links)
    assert [len(split) for split in listed] == [41, 41]
    assert [len(split) for split in linked] == [100, 41]
    assert [split.ignored for split in linked] == [{}, {}]
    for links_of, files_of in zip(linked, listed, strict=True):
        assert links_of.classes == files_of.classes
        assert {name.replace(name.split("/")[1][:7], "", 1) for name in links_of.names()} == set(files_of.names())


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_has_its_own_gpus_and_ends_by_a_signal(data: Path, tmp_path: Path) -> None:
    flags = ("scaling", "--data-dir", data, "--output-dir", tmp_path / "out", "--flags", FLAGS, "--batch-size", 4)
    sizes = ("--log-steps", 1, "--windows", 2000, "--processes", 2)
    log = tmp_path / "out" / "dali-2.log"
    with start(*flags, *sizes, program=BENCH, env={"CUDA_VISIBLE_DEVICES": "5,7,9"}) as started:
        started.wait_for(lambda: log.exists() and "first step" in log.read_text())
        (torchrun, *_) = started.descendants()
        assert b"CUDA_VISIBLE_DEVICES=5,7" in Path(f"/proc/{torchrun}/environ").read_bytes().split(b"\0")
        started.send(signal.SIGTERM, started.pid)
        assert started.end().status == 143
    assert "stopped by" in log.read_text()


@pytest.mark.slow  # three programs, one after the other
def test_a_run_that_ends_by_itself_does_not_take_the_others_along(data: Path, tmp_path: Path) -> None:
    flags = (
        "scaling",
        "--data-dir",
        data,
        "--output-dir",
        tmp_path,
        "--flags",
        f"{FLAGS} --cache host",
    )  # not for torch
    sizes = ("--batch-size", 4, "--log-steps", 1, "--processes", 1, "--rounds", 1, "--loaders", "torch,dali")
    done = launch(*flags, *sizes, program=BENCH)
    assert done.status == 1
    assert done.err.startswith("round 1: torch on 1: ended too early, see"), done.err
    assert len(done.err.splitlines()) == 1
    assert "--cache host with --loader torch" in (tmp_path / "torch-1.log").read_text()
    assert "| dali | 1 |" in done.out
    assert "| torch |" not in done.out
    assert (tmp_path / "scaling.png").is_file()
