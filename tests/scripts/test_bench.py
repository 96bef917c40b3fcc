"""scripts/bench: its names, what each refuses, and what caches, formats and starts measure."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from scripts.bench.__main__ import NAMES, main
from scripts.bench.starts import COLD, FIRST_BATCH, WARM, WHOLE
from tests.conftest import Refused, write_images
from tests.harness import ROOT, Finished, launch
from tests.shards import write_tfrecord, write_webdataset
from utils import __version__
from utils.benchmark.verdict import SYNTHETIC

BENCH = ROOT / "scripts" / "bench"
FLAGS = ("--arch", "test_resnet", "--image-size", "32", "--batch-size", "4")
QUICK = (*FLAGS, "--workers", 1, "--device", "cpu", "--window-seconds", 0.05)


def test_help_has_every_name_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    modules = {path.stem for path in BENCH.glob("*.py") if "PROGRAM = " in path.read_text()}
    assert modules == {*NAMES, "__main__"}
    assert main(["--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in NAMES:
        assert f"{name}: {(BENCH / f'{name}.py').read_text().splitlines()[0][3:]}" in printed


def test_it_is_also_a_module(tmp_path: Path) -> None:
    done = launch("-m", "scripts.bench", "starts", "--version", program=Path(sys.executable), cwd=ROOT)
    assert (done.status, done.out, done.err) == (0, f"bench starts of Brisk {__version__}\n", "")


TINY = f"{shlex.join(FLAGS)} --workers 1 --device cpu"
OUT = "--data-dir {tmp} --output-dir {tmp}/out"
REFUSED = [
    ("", "", "Missing argument 'NAME'; bench --help lists all flags"),
    ("", "nonsense --flag", "nonsense: no such comparison; give one of caches, formats, launch, "),
    ("caches", "--data-dir {tmp}/none", "{tmp}/none: no such folder"),
    ("caches", "--windows 4", "--windows 4: a median needs 5 or more"),
    ("caches", "--side 2", "--side 2"),
    ("caches", "--images 0", "--images 0"),
    ("caches", f"--data-dir {{data}} --output-dir {{tmp}}/out {TINY} --batch-size 64", "there are 41 images; lower it"),
    ("formats", "{data} {tmp}/none", "{tmp}/none: no such folder"),
    ("formats", "{data} --windows 4", "--windows 4: a median needs 5 or more"),
    ("formats", "{data} --decode auto", "--decode auto: give full or fused"),
    ("formats", f"{{data}} {{tmp}}/other --output-dir {{tmp}}/out {TINY}", "/other: has 9 images, but {data} has 41"),
    ("launch", "--limit 0 -- true", "--limit 0.0: must be more than 0 and finite"),
    ("launch", "--limit 5", "Missing argument '"),
    ("launch", "--limit 5 true --never", "No such option: --never"),
    ("launch", "--limit 5 -- /nowhere/program", "/nowhere/program: cannot be started (no such program)"),
    ("networks", "", "Missing argument 'ARCH...'"),
    ("networks", "resnet18 --windows 4", "--windows 4: a median needs 5 or more"),
    ("networks", "resnet18 --data-dir {tmp}/none", "{tmp}/none: no such folder"),
    ("networks", "no_such_network --output-dir {tmp}/out --device cpu", "--arch no_such_network: "),
    ("recipes", f"{OUT} a --seeds 0", "--seeds 0"),
    ("recipes", f"{OUT} a --jobs 0", "--jobs 0"),
    ("recipes", f"{OUT} a 'a: --lr 1'", "a: --lr 1: a recipe needs a name of its own"),
    ("recipes", f"{OUT} ../a", "../a: a recipe needs a name of its own, without a slash"),
    ("recipes", f"{OUT} 'a: --seed 3'", "a: --seed 3: --seed is this program's to give"),
    ("recipes", f'{OUT} "a: \'--lr"', "a: '--lr: no closing quotation"),
    ("recipes", f"{OUT} b 'a: --lr x'", "a: --lr x: Invalid value for '--lr': 'x' is not a number"),
    ("scaling", f"{OUT} --processes a", "--processes a: must be whole numbers"),
    ("scaling", f"{OUT} --processes 0", "--processes 0: must be whole numbers"),
    ("scaling", f"{OUT} --loaders dali,foo", "--loaders dali,foo: 'foo' is not one of dali"),
    ("scaling", f"{OUT} --flags \"--arch 'resnet50\"", "--flags --arch 'resnet50: no closing quotation; quote"),
    ("scaling", "--data-dir {data} --output-dir {tmp}/file", "{tmp}/file: cannot be written (File exists); give"),
    ("scaling", "--data-dir {data} --output-dir {tmp}/file/in", "file/in: cannot be written (Not a directory); give"),
    ("scaling", OUT, "--data-dir {tmp}: train/ holds no CLASS/IMAGE; give a folder with"),
    ("scaling", f"{OUT} --rounds 0", "--rounds 0: "),
    ("series", "--data-dir {tmp}/nowhere --output-dir {tmp}", "--data-dir {tmp}/nowhere: no such folder; give"),
    ("series", "--data-dir {tmp}/file --output-dir {tmp}", "--data-dir {tmp}/file: no such folder; give"),
    ("series", "--data-dir {tmp} --output-dir {tmp}/file", "{tmp}/file: cannot be written (File exists); give"),
    ("series", "--data-dir {tmp} --output-dir /proc/brisk", "/proc/brisk: cannot be written (No such file"),
    ("series", f"{OUT} --only resnet18,foo", "--only resnet18,foo: 'foo' is not one of resnet50, "),
    ("starts", "--launches 0", "--launches 0"),
    ("starts", "--limit 0", "--limit 0"),
    ("starts", "--flags \"--name 'a\"", "--flags --name 'a: no closing quotation"),
    ("starts", "--data-dir {tmp}/none", "{tmp}/none: no such folder"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "message"), REFUSED)
def test_refusals(refused: Refused, data: Path, tmp_path: Path, name: str, words: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    if "/other" in words:
        write_images(tmp_path / "other" / "train", (3, 3, 3))
    given = shlex.split(f"{name} {words}".format(data=data, tmp=tmp_path))
    refused(*given, main=main, program=f"bench {name}".strip())(message.format(data=data, tmp=tmp_path))


# ---------------------------------------------------------------------------------------------------------------------
# caches and formats


def check(done: Finished, results: Path, key: str, loaders: list[str]) -> None:
    """Every loader has a row, and five windows alone and in training."""
    assert done.status == 0, done.err
    rows = [line.split("|")[1:-1] for line in done.out.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows[1:]] == [SYNTHETIC, *loaders]
    found = json.loads(results.read_text())
    assert list(found) == [SYNTHETIC, *loaders]
    for name, kinds in found.items():
        assert list(kinds) == (["training"] if name == SYNTHETIC else ["alone", "training"])
        for each in kinds.values():
            assert len(each[key]) == 5
            assert min(each[key]) > 0
            assert all(0 <= share <= 1 for share in each.get("data_wait", ()))


@pytest.mark.slow  # seven cases of six windows
def test_every_cache_is_measured(tmp_path: Path) -> None:
    images = ("--images", 60, "--side", 40)
    done = launch("caches", *QUICK, *images, "--output-dir", tmp_path, program=BENCH)
    places = ["files", "host's memory", "GPU's memory, one kernel"]
    check(done, tmp_path / "caches.json", "images_per_second", places)


@pytest.mark.gpu
def test_every_cache_is_measured_on_the_gpu(data: Path, tmp_path: Path) -> None:
    flags = ("--workers", 1, "--data-dir", data, "--window-seconds", 0.2)
    done = launch("caches", *FLAGS, *flags, "--output-dir", tmp_path / "out", program=BENCH)
    places = ["files", "host's memory", "GPU's memory, DALI", "GPU's memory, one kernel"]
    check(done, tmp_path / "out" / "caches.json", "images_per_second", places)


@pytest.mark.slow  # eight cases of six windows
def test_every_form_is_measured(data: Path, tmp_path: Path) -> None:
    tars, records = write_webdataset(data, tmp_path / "tars"), write_tfrecord(data, tmp_path / "records")
    done = launch("formats", data, tars, records, *QUICK, "--output-dir", tmp_path / "out", program=BENCH)
    forms = [f"{data}: class folders", f"{data}: class folders, --loader stock"]
    forms += [f"{tars}: WebDataset tars", f"{records}: TFRecord files"]
    check(done, tmp_path / "out" / "formats.json", "windows", forms)


# ---------------------------------------------------------------------------------------------------------------------
# networks


def check_networks(done: Finished, output_dir: Path, steps: list[str], has_peak: bool) -> None:
    """Two networks have every step, with five windows, and a row."""
    assert done.status == 0, done.err
    found = json.loads((output_dir / "networks.json").read_text())
    assert found["batch_size"] == 4
    assert list(found["networks"]) == ["test_resnet", "test_vit"]
    for network in found["networks"].values():
        assert list(network) == steps
        for step in network.values():
            assert len(step["images_per_second"]) == 5
            assert min(step["images_per_second"]) > 0
            assert (step["peak_bytes"] > 0) is has_peak
    rows = [line.split("|")[1:-1] for line in done.out.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows] == ["network, batch 4", "test_resnet", "test_vit"]


@pytest.mark.slow  # four cases of six windows
def test_steps_of_networks(tmp_path: Path) -> None:
    flags = ("--image-size", 32, "--batch-size", 4, "--workers", 1, "--device", "cpu", "--window-seconds", 0.05)
    done = launch("networks", "test_resnet", "test_vit", *flags, "--output-dir", tmp_path, program=BENCH)
    check_networks(done, tmp_path, ["Brisk", "timm"], has_peak=False)


@pytest.mark.gpu
def test_steps_of_networks_on_the_gpu(data: Path, tmp_path: Path) -> None:
    flags = ("--image-size", 32, "--batch-size", 4, "--workers", 1, "--window-seconds", 0.1, "--data-dir", data)
    done = launch("networks", "test_resnet", "test_vit", *flags, "--output-dir", tmp_path / "out", program=BENCH)
    check_networks(done, tmp_path / "out", ["Brisk", "Brisk, fed by DALI", "timm"], has_peak=True)


# ---------------------------------------------------------------------------------------------------------------------
# starts


@pytest.mark.slow  # two launches that compile
def test_parts_of_a_start_add_up(data: Path, tmp_path: Path) -> None:
    user, output_dir = tmp_path / "user", tmp_path / "out"
    flags = (*FLAGS, "--device", "cpu", "--data-dir", data, "--launches", 1, "--cold", "--flags", "--compile")
    env = {"XDG_CACHE_HOME": user, "TORCHINDUCTOR_CACHE_DIR": None, "TRITON_CACHE_DIR": None}
    done = launch("starts", *flags, "--output-dir", output_dir, program=BENCH, env=env)
    assert done.status == 0, done.err
    assert not [path for path in user.rglob("*") if path.is_file()], "with --cold no launch uses the user's cache"
    (starts,) = json.loads((output_dir / "starts.json").read_text()).values()
    assert list(starts) == [COLD, WARM]
    for (found,) in starts.values():
        whole, first_batch = found.pop(WHOLE), found.pop(FIRST_BATCH)
        assert sum(found.values()) == pytest.approx(whole, abs=0.1)
        assert 0 < first_batch <= found["first step, compiling"]
        for part in ("loading torch, DALI and timm", "listing the images", "creating the network"):
            assert found[part] > 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.splitlines() if line.startswith("| ")]
    assert rows[0] == ["seconds", "test_resnet, nothing compiled", "test_resnet, compiled before"]
    assert rows[-1][0] == WHOLE
    assert [path.name for path in output_dir.iterdir()] == ["starts.json"], "nobody needs the checkpoints"


def test_a_launch_that_fails_is_explained(tmp_path: Path) -> None:
    flags = ("--arch", "test_resnet", "--flags", "--pretrained 'nowhere.pt'", "--device", "cpu")
    done = launch("starts", *flags, "--output-dir", tmp_path, program=BENCH)
    assert done.status == 1
    assert "test_resnet: exit 2: train.py: --pretrained nowhere.pt" in done.err
