"""scripts/scaling.py on real launches of train.py."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from scripts.scaling import gpus_of_round, link_images
from tests.conftest import ROOT, descendants, environment
from tests.contract import assert_keys
from utils.data.formats.folder import scan_splits

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


@pytest.mark.dist
def test_each_round_uses_other_gpus(data: Path, tmp_path: Path) -> None:
    words = [sys.executable, ROOT / "scripts" / "scaling.py", "--data-dir", data, "--output-dir", tmp_path / "out"]
    sizes = ("--batch-size", "4", "--log-steps", "1", "--windows", "2000", "--processes", "1,2")
    chosen = environment() | {"CUDA_VISIBLE_DEVICES": "5,7"}
    process = subprocess.Popen([*map(str, words), "--flags", FLAGS, *sizes], env=chosen)
    log = tmp_path / "out" / "dali-1.log"
    while not (log.exists() and "first step" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    (trainer, *_) = descendants(process.pid)
    seen = Path(f"/proc/{trainer}/environ").read_bytes().split(b"\0")
    process.terminate()
    assert process.wait(60) == 143
    assert b"CUDA_VISIBLE_DEVICES=5" in seen


@pytest.mark.dist
def test_table_and_files(data: Path, tmp_path: Path) -> None:
    words = [sys.executable, ROOT / "scripts" / "scaling.py", "--data-dir", data, "--output-dir", tmp_path / "out"]
    sizes = ("--batch-size", "4", "--log-steps", "2", "--windows", "3", "--rounds", "1", "--cpus", "2")
    done = subprocess.run(
        [*map(str, words), "--flags", FLAGS, *sizes], capture_output=True, text=True, env=environment(), timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert_keys("scaling.json", found)
    one, two = found["points"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert len(one["rates"]) == len(two["rates"]) == 3
    assert one["efficiency"] == 1
    rates = [sorted(point["rates"])[1] for point in (one, two)]
    assert two["efficiency"] == pytest.approx(rates[1] / rates[0] / 2)
    assert f"| dali | 2 | {rates[1]:,.0f} (" in done.stdout
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
        assert {name.replace(name.split("/")[1][:7], "", 1) for name in links_of.files} == set(files_of.files)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--processes", "a"), "--processes a: must be whole numbers"),
        (("--processes", "0"), "--processes 0: must be whole numbers"),
        (("--rounds", "0"), "--rounds 0: must be 1 or more"),
        (("--batch-size", "0"), "--batch-size 0: must be 1 or more"),
        (("--loaders", "dali,foo"), "--loaders dali,foo: 'foo' is not one of dali"),
        (("--flags", "--arch 'resnet50"), "--flags --arch 'resnet50: no closing quotation; quote"),
        (("--output-dir", "{}/file"), "--output-dir {}/file: cannot be written (File exists); give another folder"),
        (("--output-dir", "{}/file/in"), "--output-dir {}/file/in: cannot be written (Not a directory); give"),
        (("--data-dir", "{}"), "--data-dir {}: train/ holds no CLASS/IMAGE; give a folder with"),
    ],
)
def test_refusals(data: Path, tmp_path: Path, flags: tuple[str, ...], named: str) -> None:
    (tmp_path / "file").write_text("")
    words = ["--data-dir", data, "--output-dir", tmp_path / "out", *(flag.format(tmp_path) for flag in flags)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "scaling.py"), *map(str, words)],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"scaling.py: {named.format(tmp_path)}")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.dist
def test_a_signal_ends_the_run_under_way(data: Path, tmp_path: Path) -> None:
    words = [sys.executable, ROOT / "scripts" / "scaling.py", "--data-dir", data, "--output-dir", tmp_path / "out"]
    sizes = ("--batch-size", "4", "--log-steps", "1", "--windows", "2000", "--processes", "2")
    process = subprocess.Popen([*map(str, words), "--flags", FLAGS, *sizes], env=environment())
    log = tmp_path / "out" / "dali-2.log"
    while not (log.exists() and "first step" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143
    assert "stopped by" in log.read_text()


def test_a_failed_run_does_not_end_the_others(data: Path, tmp_path: Path) -> None:
    words = [sys.executable, ROOT / "scripts" / "scaling.py", "--data-dir", data, "--output-dir", tmp_path]
    words += ["--batch-size", 4, "--log-steps", 1, "--processes", 1, "--rounds", 1, "--loaders", "torch,dali"]
    words += ["--flags", f"{FLAGS} --cache host"]  # which the torch loader has not
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 1
    assert done.stderr.startswith("round 1: torch on 1: ended too early, see"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "--cache host with --loader torch" in (tmp_path / "torch-1.log").read_text()
    assert "| dali | 1 |" in done.stdout
    assert "| torch |" not in done.stdout
    assert (tmp_path / "scaling.png").is_file()
