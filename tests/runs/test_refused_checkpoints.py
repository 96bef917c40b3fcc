"""Checkpoints and weights that are damaged, foreign or of another run: refused in one line, nothing is written."""

import functools
import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY, Refused
from tests.forked import launch_series
from tests.harness import assert_refused
from tests.runs.conftest import SHORT
from tests.training.checkpoints import with_flipped_bit
from utils.training.state.checkpoint import FORMAT


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Malicious:
    """Makes a folder when it is unpickled without `weights_only`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


CHECKPOINTS: dict[str, bytes] = {
    "empty": b"",
    "text": b"this is no checkpoint\n",
    "zip of nothing": b"PK\x05\x06" + bytes(18),
    "JPEG": b"\xff\xd8\xff\xe0" + bytes(100),
}
FOREIGN: dict[str, Any] = {
    "weights": {"fc.weight": torch.zeros(3)},
    "next format": {"format": FORMAT + 1},
    "format of no number": {"format": torch.zeros(3)},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_damaged_file(refused: Refused, good: list[str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "damaged.pt"
    path.write_bytes(CHECKPOINTS[name])
    refused(*good, "--resume", path)(f"--resume {path}:", "not a readable checkpoint", "give another file")
    refused(*good, "--pretrained", path)(f"--pretrained {path}:", "not a readable weights file")


@pytest.mark.parametrize("name", FOREIGN)
def test_file_of_something_else(refused: Refused, good: list[str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "foreign.pt"
    path.write_bytes(saved(FOREIGN[name]))
    refused(*good, "--resume", path)(f"--resume {path}:", "not a checkpoint of this version", f"--pretrained {path}")


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in a checkpoint"])
def test_malicious_pickle_is_not_run(refused: Refused, good: list[str], tmp_path: Path, wrapped: bool) -> None:
    victim, path = tmp_path / "made-by-the-pickle", tmp_path / "malicious.pt"
    malicious = Malicious(victim)
    path.write_bytes(saved({"format": 1, "x": malicious}) if wrapped else pickle.dumps(malicious, protocol=2))
    refused(*good, "--resume", path)(f"--resume {path}:", "not a readable checkpoint", "give another file")
    refused(*good, "--pretrained", path)(f"--pretrained {path}: holds posix.mkdir, which is not built")
    assert not victim.exists()
    read = functools.partial(torch.load, weights_only=False) if wrapped else pickle.load
    with path.open("rb") as file:
        read(file)
    assert victim.is_dir()  # without `weights_only` it works


def test_weights_that_do_not_fit(refused: Refused, good: list[str], tmp_path: Path) -> None:
    """Found when the output folder has been made, which does not stay."""
    path = tmp_path / "weights.pt"
    path.write_bytes(saved({"fc.weight": torch.zeros(3, 3), "other": torch.zeros(1)}))
    refused(*good, "--pretrained", path)(
        f"--pretrained {path}:", "does not fit", "(holds fc.weight, other; ", "give the architecture of these weights"
    )
    assert not (tmp_path / "run").exists()


def test_folder_as_checkpoint_or_weights(refused: Refused, good: list[str], tmp_path: Path) -> None:
    refused(*good, "--resume", tmp_path)(f"--resume {tmp_path}/last.pt:", "no such checkpoint", "give a file, the")
    refused(*good, "--evaluate", "--resume", tmp_path)(f"--resume {tmp_path}/best.pt:", "no such checkpoint")
    refused(*good, "--pretrained", tmp_path)(
        f"--pretrained {tmp_path}: a folder without model.safetensors or pytorch_model.bin; give a weights file"
    )


def test_tag_that_timm_does_not_know(refused: Refused, good: list[str]) -> None:
    refused(*good, "--arch", "resnet18.no_such_tag")("--arch resnet18.no_such_tag:", "the closest are resnet18.")


@pytest.fixture(scope="module")
def finished_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of one epoch, trained with `SHORT`."""
    output = tmp_path_factory.mktemp("finished") / "run"
    (done,) = launch_series((*SHORT, "--data-dir", data, "--output-dir", output))
    assert done.status == 0, done.err
    return output


OTHER_RUNS: dict[str, tuple[str, ...]] = {
    "--seed 7 --hflip 0": ("--hflip: 0.5 then, 0 now; --seed: 0 then, 7 now",),
    "--arch test_vit": ("--arch: test_resnet then, test_vit now",),
    "--cache host": ("--cache: none then, host now",),
    "--loader torch": ("--loader: dali then, torch now", "DALI version: "),
    "--num-classes 5": ("--num-classes: 3 then, 5 now",),
}


@pytest.mark.parametrize("flags", OTHER_RUNS)
def test_checkpoint_of_another_run(refused: Refused, data: Path, finished_run: Path, flags: str) -> None:
    check = refused(*SHORT, "--data-dir", data, "--output-dir", finished_run, *flags.split())
    accept = () if flags.startswith(("--arch", "--num-classes")) else ("--accept-changes",)
    remedies = (*accept, "--output-dir NEW", "--resume none --overwrite")
    check(f"--resume {finished_run}/last.pt:", "its run had other settings", *OTHER_RUNS[flags], *remedies)


def test_checkpoint_of_another_global_batch(refused: Refused, data: Path, finished_run: Path) -> None:
    check = refused(*SHORT, "--data-dir", data, "--output-dir", finished_run, "--grad-accum-steps", 2)
    saved_by = "--batch-size 4: the checkpoint was saved by 1 process x 4 images, a global batch of 4; on 1 process"
    check(f"{saved_by} x --grad-accum-steps 2 give --batch-size 2 or leave it out", "start again: --output-dir NEW")


@pytest.mark.parametrize("split", ["train", "val"])
def test_checkpoint_of_other_files(
    refused: Refused, data: Path, finished_run: Path, tmp_path: Path, split: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(data, other)
    removed = min((other / split / "blue").iterdir())
    removed.unlink()
    check = refused(*SHORT, "--data-dir", other, "--output-dir", finished_run)
    check(f"--resume {finished_run}/last.pt:", f"({split}/ has 1 file fewer (blue/{removed.name}));")


@pytest.mark.slow  # several runs
def test_checkpoint_without_bad_files(refused: Refused, data: Path, tmp_path: Path) -> None:
    """`--bad-files skip` is all that is missing; an evaluation takes it from the checkpoint."""
    shutil.copytree(data, tmp_path / "data")
    for split in ("train", "val"):
        (tmp_path / "data" / split / "blue" / "text.jpg").write_text("no image")
    (tmp_path / "data" / "train" / "blue" / "text.txt").write_text("not even by its name")
    flags = (*SHORT, "--data-dir", tmp_path / "data", "--output-dir", tmp_path / "out")
    evaluate = ("--evaluate", "--output-dir", tmp_path / "out", "--workers", 1)
    done, evaluated, named = launch_series(
        (*flags, "--bad-files", "skip"), evaluate, (*evaluate, "--bad-files", "error")
    )
    assert [done.status, evaluated.status] == [0, 0], (done.err, evaluated.err)
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["count"] == 41
    assert_refused(named, "val/blue/text.jpg: a text file, not an image; --bad-files skip leaves it out")
    assert "--resume" not in named.err
    assert "\n ignored  in train/ 1 file .txt\n" in done.out
    check = refused(*flags, "--epochs", "2")
    check(
        "(train/ has 1 file more (blue/text.jpg)", "give --bad-files skip, without whose bad files it ran, or restore"
    )


def test_evaluation_on_other_classes(refused: Refused, data: Path, finished_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(data, other)
    for split in ("train", "val"):
        (other / split / "blue").rename(other / split / "violet")
    check = refused(*TINY, "--data-dir", other, "--output-dir", finished_run, "--evaluate")
    check(f"--data-dir {other}:", "its classes are not those of", f"{finished_run}/best.pt")


def test_checkpoint_with_a_flipped_bit(refused: Refused, good: list[str], finished_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "flipped.pt"
    path.write_bytes(with_flipped_bit(finished_run / "last.pt"))  # torch.load would read another number
    for evaluate in ((), ("--evaluate",)):
        check = refused(*good, "--resume", path, *evaluate)
        check(f"--resume {path}:", "not a readable checkpoint", "give another file")


@pytest.mark.parametrize("evaluate", [(), ("--evaluate",)], ids=["train", "evaluate"])
def test_checkpoint_that_lacks_a_part(
    refused: Refused, good: list[str], finished_run: Path, tmp_path: Path, evaluate: tuple[str, ...]
) -> None:
    path = tmp_path / "partial.pt"
    checkpoint = torch.load(finished_run / "last.pt", weights_only=True)
    del checkpoint["optimizer"]
    torch.save(checkpoint, path)
    refused(*good, "--resume", path, *evaluate)(f"--resume {path}:", "not a checkpoint of this version", "a part")
