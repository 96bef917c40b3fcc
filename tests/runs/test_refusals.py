"""The table of bad input: each case ends in exit status 2 and one line that names flag or file, value and remedy."""

import functools
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import train
from tests.conftest import SOCKETS_ARE_ELSEWHERE, TINY, Finished

RUN = ("--batch-size", "4", "--epochs", "1")


def assert_refused(status: int, out: str, err: str, *fragments: str) -> None:
    assert "Traceback" not in err, err
    assert err.startswith("train.py: "), err
    assert len(err.splitlines()) == 1, err
    assert err.endswith("\n")
    for fragment in fragments:
        assert fragment in err, f"{fragment!r} is not in {err!r}"
    assert status == 2
    assert out == ""


class Refused:
    """`refused(*flags)(*fragments)`: train.main() in this process must refuse the flags in these words."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *flags: str | Path) -> Callable[..., None]:
        def check(*fragments: str) -> None:
            self.capsys.readouterr()
            status = train.main([str(flag) for flag in flags])
            assert_refused(status, *self.capsys.readouterr(), *fragments)

        return check


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capsys)


@pytest.fixture
def good(data: Path, tmp_path: Path) -> list[str]:
    """Flags that a tiny run accepts; a case adds what spoils them, and the last one counts."""
    return [*TINY, *RUN, "--data-dir", str(data), "--output-dir", str(tmp_path / "run")]


# ---------------------------------------------------------------------------------------------------------------------
# Values

NOT_WHOLE, NOT_NUMBER = "is not a whole number", "is not a number"
VALUES: list[tuple[str, tuple[str, ...]]] = [
    *[(f"--{name} 0", (f"--{name} 0:", "must be 1 or more")) for name in (
        "epochs", "batch-size", "workers", "num-classes", "grad-accum-steps", "log-steps"
    )],
    *[(f"--{name} -1", (f"--{name} -1:", "must be 0 or more")) for name in ("seed", "checkpoint-steps")],
    *[(f"--{name} -1", (f"--{name} -1.0:", "must be 0 or more")) for name in (
        "weight-decay", "warmup-epochs", "mixup", "cutmix", "clip-grad"
    )],
    *[(f"--{name} 4", (f"--{name} 4:", "must be 8 or more")) for name in ("image-size", "val-resize")],
    *[(f"--{name} {value}", (f"--{name} {float(value)}:", "at least 0 and less than 1"))
      for name in ("momentum", "label-smoothing", "ema-decay") for value in ("1", "1.5", "-0.1", "nan")],
    *[(f"--{name} {value}", (f"--{name} {float(value)}:", "more than 0 and finite"))
      for name in ("lr", "timeout") for value in ("0", "-1", "nan", "inf")],
    *[(f"--crop-scale {value}", (f"--crop-scale {float(value)}:", "more than 0 and at most 1"))
      for value in ("0", "2", "nan")],
    *[(f"--{name} {value}", (f"--{name} {float(value)}:", "from 0 to 1"))
      for name in ("hflip", "random-erase") for value in ("2", "-0.1", "nan")],
    *[(f"--{name} {value}", (f"--{name} {value}:", "0 or more and finite"))
      for name in ("mixup", "clip-grad", "weight-decay", "warmup-epochs") for value in ("inf", "nan")],
    *[(f"--{name} {value}", (f"'--{name}'", f"'{value}'", NOT_WHOLE))
      for name in ("epochs", "batch-size", "seed", "workers") for value in ("2.5", "abc", "1e3")],
    *[(f"--{name} abc", (f"'--{name}'", "'abc'", NOT_NUMBER)) for name in ("lr", "hflip", "warmup-epochs")],
    ("--batch-size -1", ("--batch-size -1:", "1 or more")),
    (f"--seed {2**40}", (f"--seed {2**40}:", "less than 2147483648")),
    ("--loader foo", ("'--loader'", "'foo'", "dali, proxy, torch, synthetic")),
    ("--decode foo", ("'--decode'", "'foo'", "auto, fused, full")),
    ("--augment foo", ("'--augment'", "'foo'", "none, autoaugment, randaugment, trivialaugment")),
    ("--amp foo", ("'--amp'", "'foo'", "auto, bf16, fp16, none")),
    ("--device gpu", ("'--device'", "'gpu'", "auto, cuda, cpu")),
    # Combinations
    ("--bad-files ignore", ("'--bad-files'", "'ignore'", "error, skip")),
    ("--image-size 64 --val-resize 60", ("--val-resize 60:", "--image-size 64", "try --val-resize 73")),
    ("--warmup-epochs 1", ("--warmup-epochs 1:", "less than --epochs 1", "lower it")),
    ("--warmup-epochs 3 --epochs 2", ("--warmup-epochs 3:", "less than --epochs 2")),
    ("--amp fp16", ("--amp fp16", "--device cpu", "use --amp none or bf16")),
    ("--cuda-graph", ("--cuda-graph", "--device cpu", "use --no-cuda-graph")),
    ("--hw-decoder-load 1.5", ("--hw-decoder-load 1.5", "from 0 to 1")),
    ("--cache disk", ("'--cache'", "'disk'", "auto, none, gpu, host")),
    ("--cache gpu", ("--cache gpu", "--device cpu", "use --cache host")),
    ("--cache host --loader torch", ("--cache host", "--loader torch", "only --loader dali")),
    ("--cache host --decode fused", ("--cache host", "--decode fused", "leave --decode out")),
    ("--prefetch 0", ("--prefetch 0", "1 or more")),
    ("--evaluate --resume none", ("--evaluate with --resume none:", "give --resume PATH or --pretrained")),
    ("--evaluate", ("--evaluate: no checkpoint in --output-dir", "/run;", "give --resume PATH")),
    ("--evaluate --pretrained", ("timm's test_resnet has a head of 1,000 classes, the data 3", "or --resume PATH")),
    ("--num-classes 2", ("--num-classes 2:", "the 3 class folders", "leave it out or raise it")),
    ("--batch-size 42", ("--batch-size 42:", "global batch of 42", "41 training images", "lower it")),
    ("--batch-size 21 --grad-accum-steps 2", ("--batch-size 21:", "x 2 batches", "global batch of 42", "lower it")),
    # Names
    ("--arch resnet5o", ("--arch resnet5o:", "the closest are resnet50, ")),
    ("--arch inception_v3", ("--image-size 32:", "inception_v3 cannot compute", "its weights were made for 299")),
    ("--batch-size 1", ("--image-size 32:", "a batch of 1 ", "another --batch-size")),
    ("--optimizer sdg", ("--optimizer sdg:", "the closest are sgd, ")),
    ("--optimizer fusedsgd", ("--optimizer fusedsgd:", "is not available here", "give another")),  # apex's, CUDA only
    ("--optimizer adahessian", ("--optimizer adahessian:", "gradients of gradients", "give another")),
    ("--timeout 1e10", ("--timeout 1e+10:", "at most 1000000 seconds")),
    ("--resume nowhere.pt", ("--resume nowhere.pt:", "no such checkpoint", "give an existing file, auto or none")),
    ("--pretrained nowhere.pt", ("--pretrained nowhere.pt:", "no such file", "give a weights file")),
    ("--config nowhere.yaml", ("--config nowhere.yaml:", "No such file", "give a YAML file")),
    ("--data-dir nowhere", ("--data-dir nowhere:", "no such folder", "train/ and val/")),
    # Flags
    ("--batchsize 4", ("--batchsize", "--batch-size", "--help")),
    ("--nothing-like-it", ("--nothing-like-it", "--help")),
    ("--no-epochs", ("--no-epochs", "--epochs", "--help")),
    ("surplus", ("extra argument", "surplus", "--help")),
    ("--epochs 1 2", ("extra argument", "2", "--help")),
    ("--lr", ("'--lr'", "requires an argument", "--help")),
    ("--compile=3", ("'--compile'", "does not take a value", "--help")),
    # Folders that cannot be written; permission bits would not stop root.
    ("--output-dir /proc/brisk", ("--output-dir /proc/brisk:", "cannot be written", "give another")),
    ("--output-dir /dev/null", ("--output-dir /dev/null:", "cannot be written", "give another")),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "fragments"), VALUES, ids=[flags for flags, _ in VALUES])
def test_flags(refused: Refused, good: list[str], flags: str, fragments: tuple[str, ...]) -> None:
    refused(*good, *flags.split())(*fragments)


@pytest.mark.parametrize("flags", [(), ("--epochs", "1"), ("--loader", "torch")], ids=["none", "other", "torch"])
def test_missing_data_dir(refused: Refused, flags: tuple[str, ...]) -> None:
    refused(*flags)("--data-dir is missing", "train/ and val/", "--loader synthetic needs none")


def test_output_below_a_file(refused: Refused, good: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    refused(*good, "--output-dir", tmp_path / "file" / "run")(f"--output-dir {tmp_path}/file/run:", "give another")
    refused(*good, "--output-dir", tmp_path / "file")(f"--output-dir {tmp_path}/file:", "give another")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "last.pt", "best.pt", "summary.json"])
def test_folder_in_place_of_an_output(refused: Refused, good: list[str], tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    refused(*good, "--resume", "none")(f"--output-dir {tmp_path}/run:", f"{name} in it is a folder", "give another")


@pytest.mark.parametrize("flag", ["--arch", "--optimizer", "--resume", "--pretrained", "--data-dir", "--output-dir"])
def test_line_break_in_a_value_keeps_one_line(refused: Refused, good: list[str], tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" if flag == "--output-dir" else tmp_path
    refused(*good, flag, f"{below}/one\ntwo\r\x1b[2J")(flag, "one\\ntwo\\r\\x1b[2J")


@pytest.mark.parametrize("flag", ["--data-dir", "--resume", "--pretrained", "--config", "--output-dir"])
def test_path_that_the_system_refuses(refused: Refused, good: list[str], flag: str) -> None:
    # Too long a name stands for what root cannot be shown: a folder above it without permission, a stale mount.
    name = "x" * 300
    # The listing of a data set names the file that it stumbles on, which need not be the flag's.
    start = "" if flag == "--data-dir" else f"{flag} "
    refused(*good, flag, name)(f"{start}{name}:", "check its permissions" if flag == "--data-dir" else "give ")


# ---------------------------------------------------------------------------------------------------------------------
# Data


def _no_train(root: Path) -> None:
    shutil.rmtree(root / "train")


def _no_val(root: Path) -> None:
    shutil.rmtree(root / "val")


def _train_is_a_file(root: Path) -> None:
    _no_train(root)
    (root / "train").write_text("")


def _loose(root: Path) -> None:
    for folder in list((root / "train").iterdir()):
        for file in list(folder.iterdir()):
            file.rename(root / "train" / file.name)
        folder.rmdir()


def _no_class(root: Path) -> None:
    _no_val(root)
    (root / "val").mkdir()


def _renamed_class(root: Path) -> None:
    (root / "val" / "green").rename(root / "val" / "verde")


def _class_only_in_val(root: Path) -> None:
    shutil.rmtree(root / "train" / "red")


def _nested(root: Path) -> None:
    (root / "train" / "blue" / "dark").mkdir()
    (root / "train" / "blue" / "blue-000.jpg").rename(root / "train" / "blue" / "dark" / "navy.JPG")


def _nested_twice(root: Path) -> None:
    shutil.move(root / "val" / "blue", root / "val" / "deep" / "er" / "blue")


def _empty_class(root: Path) -> None:
    (root / "val" / "nothing").mkdir()


def _undecodable_class(root: Path) -> None:
    folder = root / "train" / "foreign"
    folder.mkdir()
    Image.new("RGB", (40, 40)).save(folder / "image.gif")
    (folder / "notes.txt").write_text("none")


def _dangling_link(root: Path) -> None:
    (root / "train" / "red" / "link.jpg").symlink_to(root / "gone.jpg")


def _empty_file(root: Path) -> None:
    (root / "val" / "red" / "red-000.jpg").write_bytes(b"")


def _pipe(root: Path) -> None:
    os.mkfifo(root / "val" / "red" / "pipe.jpg")


def _many_empty(root: Path) -> None:
    for name, count in (("blue", 1), ("red", 50)):
        for index in range(count):
            (root / "train" / name / f"{index}.jpg").write_bytes(b"")


TREES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (_no_train, ("--data-dir {}:", "no train/ folder", "must hold train/ and val/")),
    (_no_val, ("--data-dir {}:", "no val/ folder", "must hold train/ and val/")),
    (_train_is_a_file, ("--data-dir {}:", "no train/ folder")),
    (_loose, ("{}/train:", "no class folders", "6 images", "put the images of each class into a folder")),
    (_no_class, ("{}/val:", "no class folders", "put the images of each class into a folder")),
    (_renamed_class, ("--data-dir {}:", "1 classes of train/", "missing in val/", "'green'", "must hold the same")),
    (_class_only_in_val, ("--data-dir {}:", "1 classes of val/", "missing in train/", "'red'")),
    (_nested, ("{}/train/blue/dark:", "nested deeper", "move them up")),
    (_nested_twice, ("{}/val/deep/er/blue:", "nested deeper", "move them up")),
    (_empty_class, ("{}/val/nothing:", "a class without images", "remove the folder or add files", ".jpg")),
    (_undecodable_class, ("{}/train/foreign:", "a class without images", ".jpg")),
    (_empty_file, ("{}/val/red/red-000.jpg:", "an empty file", "delete or replace it")),
    (_dangling_link, ("{}/train/red/link.jpg:", "No such file or directory", "delete or replace it")),
    (_pipe, ("{}/val/red/pipe.jpg: not a regular file", "--bad-files skip")),
    (_many_empty, ("{0}/train/blue/0.jpg: an empty file, {0}/train/red/0.jpg: an empty file", "and 31 more bad files")),
]


@pytest.mark.parametrize(("spoil", "fragments"), TREES, ids=[spoil.__name__[1:] for spoil, _ in TREES])
def test_data(
    refused: Refused, good: list[str], tmp_path: Path, spoil: Callable[[Path], None], fragments: tuple[str, ...]
) -> None:
    root = tmp_path / "data"
    for split in ("train", "val"):
        for name in ("blue", "green", "red"):
            (root / split / name).mkdir(parents=True)
            for index in range(2):
                Image.new("RGB", (40, 40)).save(root / split / name / f"{name}-{index:03}.jpg")
    spoil(root)
    refused(*good, "--batch-size", "1", "--data-dir", root)(*(fragment.format(root) for fragment in fragments))
    assert not (tmp_path / "run").exists()  # refused before anything was begun


# ---------------------------------------------------------------------------------------------------------------------
# Recipes

CANNOT, MAPPING = ("cannot be read", "give a YAML file of flags"), ("must be a mapping like 'lr: 0.5'",)
RECIPES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "list": ("- lr\n- 1\n", (*MAPPING, "not list")),
    "text": ("hello", (*MAPPING, "not str")),
    "number": ("3", (*MAPPING, "not int")),
    "unknown key": ("batchsize: 3", ("unknown key 'batchsize'", "the closest is 'batch-size'")),
    "unknown underscore": ("label_smooth: 3", ("unknown key 'label_smooth'", "the closest is 'label-smoothing'")),
    "key of no text": ("3: 4", ("unknown key '3'", "the closest is")),
    "key of two lines": ('"a\\nb": 3', ("unknown key 'a\\nb'", "the closest is")),
    "recipe in recipe": ("config: other.yaml", ("unknown key 'config'",)),
    "fraction": ("batch-size: 2.5", ("'--batch-size'", "'2.5'", "not a whole number")),
    "true for a number": ("lr: true", ("lr: True is not allowed", "give one value")),
    "number for a switch": ("compile: 3", ("compile: 3 is not allowed", "give true or false")),
    "text for a switch": ("evaluate: 'yes'", ("evaluate: 'yes' is not allowed", "give true or false")),
    "list of values": ("lr: [0.1, 0.2]", ("lr: [0.1, 0.2] is not allowed", "give one value")),
    "date": ("lr: 2020-01-01", ("'--lr'", "'2020-01-01'", "not a number")),
    "choice": ("loader: foo", ("'--loader'", "'foo'", "dali, proxy, torch, synthetic")),
    "no as a choice": ("amp: no", ("amp: False is not allowed", "give one value")),
    "range": ("lr: -1", ("--lr -1.0:", "more than 0")),
    "false": ("false", (*MAPPING, "not bool")),
    "twice": ("lr: 1\nlr: 2", ("'lr' is given twice", "keep one")),
    "twice, spelt differently": ("ema-decay: 0.9\nema_decay: 0.5", ("'ema-decay' is given twice", "keep one")),
    "tag that does not fit": ("lr: !!bool x", CANNOT),
    "nested too deep": ("[" * 5000, CANNOT),
    "too long": ("lr: 1 #" + "x" * 1_000_000, (*CANNOT, "more than 1,000,000 characters")),
    "unclosed": ("lr: [1", CANNOT),
    "two colons": ("lr: 1: 2", CANNOT),
    "two documents": ("lr: 1\n---\nlr: 2", CANNOT),
    "object": ("lr: !!python/object/apply:os.system ['true']", CANNOT),
    "not UTF-8": (b"lr: \xff\xfe", CANNOT),
    "binary": (b"\x00\x01\x02\x7fELF", CANNOT),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(refused: Refused, data: Path, tmp_path: Path, name: str) -> None:
    content, fragments = RECIPES[name]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    by_flag = name in ("fraction", "date", "choice", "range")  # held to the command line's rules, in its words
    # None of the keys above is among these flags; a recipe that slips through makes a short run elsewhere.
    flags = ("--arch", "test_resnet", "--image-size", "32", "--workers", "1", "--device", "cpu", "--epochs", "1")
    refused(*flags, "--data-dir", data, "--output-dir", tmp_path / "run", "--config", path)(
        *fragments, *([] if by_flag else [f"--config {path}:"])
    )


def test_folder_as_recipe(refused: Refused, good: list[str], tmp_path: Path) -> None:
    refused(*good, "--config", tmp_path)(f"--config {tmp_path}:", "Is a directory", "give a YAML file")


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and weights


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Hostile:
    """Unpickled by a careless reader, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


CHECKPOINTS: dict[str, bytes] = {
    "empty": b"",
    "text": b"this is no checkpoint\n",
    "long text": b"this is no checkpoint\n" * 1000,
    "truncated": saved({"format": 1, "model": torch.zeros(100)})[:-200],
    "half": saved({"format": 1, "model": torch.zeros(100)})[:100],
    "zip of nothing": b"PK\x05\x06" + bytes(18),
    "JPEG": b"\xff\xd8\xff\xe0" + bytes(100),
}
FOREIGN: dict[str, Any] = {
    "weights": {"fc.weight": torch.zeros(3)},
    "list": [1, 2],
    "tensor": torch.zeros(3),
    "next format": {"format": 2},
    "format of no number": {"format": torch.zeros(3)},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_damaged_file(refused: Refused, good: list[str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "damaged.pt"
    path.write_bytes(CHECKPOINTS[name])
    refused(*good, "--resume", path)(f"--resume {path}:", "not a readable checkpoint", "give another file")
    refused(*good, "--resume", path, "--evaluate")(f"--resume {path}:", "not a readable checkpoint")
    refused(*good, "--pretrained", path)(f"--pretrained {path}:", "not a readable weights file")


@pytest.mark.parametrize("name", FOREIGN)
def test_file_of_something_else(refused: Refused, good: list[str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "foreign.pt"
    path.write_bytes(saved(FOREIGN[name]))
    refused(*good, "--resume", path)(f"--resume {path}:", "not a checkpoint of this version", f"--pretrained {path}")


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in a checkpoint"])
def test_hostile_pickle_is_not_run(refused: Refused, good: list[str], tmp_path: Path, wrapped: bool) -> None:
    victim, path = tmp_path / "made-by-the-pickle", tmp_path / "hostile.pt"
    hostile = Hostile(victim)
    path.write_bytes(saved({"format": 1, "x": hostile}) if wrapped else pickle.dumps(hostile, protocol=2))
    refused(*good, "--resume", path)(f"--resume {path}:", "not a readable checkpoint", "give another file")
    refused(*good, "--pretrained", path)(f"--pretrained {path}:", "not a readable weights file")
    assert not victim.exists()
    read = functools.partial(torch.load, weights_only=False) if wrapped else pickle.load
    with path.open("rb") as file:
        read(file)
    assert victim.is_dir()  # the bait was live


def test_weights_that_do_not_fit(refused: Refused, good: list[str], tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(saved({"fc.weight": torch.zeros(3, 3), "other": torch.zeros(1)}))
    refused(*good, "--pretrained", path)(
        f"--pretrained {path}:", "does not fit", "weights missing", "give the architecture of these weights"
    )


def test_folder_as_checkpoint_or_weights(refused: Refused, good: list[str], tmp_path: Path) -> None:
    refused(*good, "--resume", tmp_path)(f"--resume {tmp_path}:", "no such checkpoint", "give an existing file")
    refused(*good, "--pretrained", tmp_path)(f"--pretrained {tmp_path}:", "no such file", "give a weights file")


def test_tag_that_timm_does_not_know(refused: Refused, good: list[str]) -> None:
    refused(*good, "--arch", "resnet18.no_such_tag")("--arch resnet18.no_such_tag:", "the closest are resnet18.")


@pytest.fixture(scope="module")
def finished_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of one epoch, trained by `TINY` and `RUN`."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert train.main([*TINY, *RUN, "--data-dir", str(data), "--output-dir", str(output)]) == 0
    return output


OTHER_RUNS: dict[str, tuple[str, ...]] = {
    "--seed 7": ("--seed: 0 then, 7 now",),
    "--seed 7 --hflip 0": ("--seed: 0 then, 7 now; --hflip: 0.5 then, 0.0 now",),
    "--arch test_vit": ("--arch: test_resnet then, test_vit now",),
    "--cache host": ("--cache: none then, host now",),
    "--loader torch": ("--loader: dali then, torch now", "DALI version: "),
    "--num-classes 5": ("--num-classes: 3 then, 5 now",),
    "--ema-decay 0.9": ("--ema-decay",),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("flags", OTHER_RUNS)
def test_checkpoint_of_another_run(refused: Refused, data: Path, finished_run: Path, flags: str) -> None:
    before = contents(finished_run)
    check = refused(*TINY, *RUN, "--data-dir", data, "--output-dir", finished_run, *flags.split())
    check(f"--resume {finished_run}/last.pt:", "another run", *OTHER_RUNS[flags], "another --output-dir")
    assert contents(finished_run) == before  # refused without a byte written over


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (
            "--batch-size 2",
            ("--batch-size 2:", "1 process x 4 images, a global batch of 4", "on 1 process give --batch-size 4"),
        ),
        ("--grad-accum-steps 2", ("--batch-size 4:", "x --grad-accum-steps 2 give --batch-size 2 or leave it out")),
        ("--grad-accum-steps 3", ("1 process x --grad-accum-steps 3: cannot share", "lower --grad-accum-steps")),
    ],
)
def test_checkpoint_of_another_global_batch(
    refused: Refused, data: Path, finished_run: Path, flags: str, fragments: tuple[str, ...]
) -> None:
    before = contents(finished_run)
    check = refused(*TINY, *RUN, "--data-dir", data, "--output-dir", finished_run, *flags.split())
    check(*fragments, "start anew with another --output-dir")
    assert contents(finished_run) == before


@pytest.mark.parametrize("split", ["train", "val"])
def test_checkpoint_of_other_files(
    refused: Refused, data: Path, finished_run: Path, tmp_path: Path, split: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(data, other)
    next((other / split / "blue").iterdir()).unlink()
    check = refused(*TINY, *RUN, "--data-dir", other, "--output-dir", finished_run)
    check(f"--resume {finished_run}/last.pt:", f"(files of {split}/: ", " then, ", " now)")


def test_checkpoint_without_bad_files(
    refused: Refused, data: Path, launch: Callable[..., Finished], tmp_path: Path
) -> None:
    """`--bad-files skip` is all that is missing."""
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "train" / "blue" / "text.jpg").write_text("no image")
    (tmp_path / "data" / "train" / "blue" / "text.txt").write_text("not even by its name")
    flags = (*TINY, *RUN, "--data-dir", tmp_path / "data", "--output-dir", tmp_path / "out")
    done = launch(*flags, "--bad-files", "skip")
    assert done.status == 0, done.err
    assert "\n ignored  in train/ 1 file .txt\n" in done.out
    check = refused(*flags, "--epochs", "2")
    check("(files of train/: ", "give --bad-files skip, without whose bad files it ran, or restore")


def test_evaluation_by_another_architecture(refused: Refused, data: Path, finished_run: Path) -> None:
    check = refused(*TINY, "--data-dir", data, "--output-dir", finished_run, "--evaluate", "--arch", "test_vit")
    check("--arch test_vit:", f"{finished_run}/best.pt holds test_resnet, another architecture; leave --arch out")


def test_evaluation_on_other_classes(refused: Refused, data: Path, finished_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(data, other)
    for split in ("train", "val"):
        (other / split / "blue").rename(other / split / "violet")
    check = refused(*TINY, "--data-dir", other, "--output-dir", finished_run, "--evaluate")
    check(f"--data-dir {other}:", "its classes are not those of", f"{finished_run}/best.pt")


def test_checkpoint_with_a_flipped_bit(refused: Refused, good: list[str], finished_run: Path, tmp_path: Path) -> None:
    content = bytearray((finished_run / "last.pt").read_bytes())
    content[len(content) // 2] ^= 1  # within a weight, which torch.load would read as another number
    path = tmp_path / "flipped.pt"
    path.write_bytes(content)
    refused(*good, "--resume", path)(f"--resume {path}:", "not a readable checkpoint", "give another file")


@pytest.mark.parametrize("missing", ["fingerprint", "model", "optimizer", "ranks", "classes"])
@pytest.mark.parametrize("evaluate", [(), ("--evaluate",)], ids=["train", "evaluate"])
def test_checkpoint_that_lacks_a_part(
    refused: Refused, good: list[str], finished_run: Path, tmp_path: Path, missing: str, evaluate: tuple[str, ...]
) -> None:
    path = tmp_path / "partial.pt"
    checkpoint = torch.load(finished_run / "last.pt", weights_only=True)
    del checkpoint[missing]
    torch.save(checkpoint, path)
    refused(*good, "--resume", path, *evaluate)(f"--resume {path}:", "not a checkpoint of this version")


# ---------------------------------------------------------------------------------------------------------------------
# Whole processes


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        ((), ("--data-dir is missing", "train/ and val/")),
        (("--batchsize", "4"), ("--batchsize", "--batch-size")),
        (("--data-dir", "{data}", "--arch", "resnet5o"), ("--arch resnet5o:", "resnet50")),
        (
            ("--data-dir", "{data}", *TINY, *RUN, "--output-dir", "{tmp}", "--resume", "{tmp}/damaged.pt"),
            ("--resume {tmp}/damaged.pt:", "not a readable checkpoint"),
        ),
    ],
    ids=["no flags", "unknown flag", "arch", "damaged checkpoint"],
)
def test_process(
    launch: Callable[..., Finished], data: Path, tmp_path: Path, flags: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    (tmp_path / "damaged.pt").write_bytes(b"\x80 damaged")
    words = {"data": data, "tmp": tmp_path}
    done = launch(*(flag.format_map(words) for flag in flags), timeout=60)
    assert_refused(done.status, done.out, done.err, *(fragment.format_map(words) for fragment in fragments))


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (("--device", "cuda"), ("--device cuda:", "no usable GPU", "use --device cpu")),
        (("--device", "auto", "--amp", "fp16"), ("--amp fp16", "without a GPU", "use --amp none or bf16")),
        (("--device", "auto", "--cuda-graph"), ("--cuda-graph", "without a GPU", "use --no-cuda-graph")),
        (
            ("--device", "auto", "--cuda-graph", "--grad-accum-steps", "2"),
            ("--cuda-graph", "--grad-accum-steps 2", "use --no-cuda-graph"),
        ),
    ],
    ids=["cuda", "fp16", "graph", "graph-accumulated"],
)
def test_process_without_gpu(
    launch: Callable[..., Finished],
    monkeypatch: pytest.MonkeyPatch,
    good: list[str],
    flags: tuple[str, ...],
    fragments: tuple[str, ...],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also holds on a machine with GPUs
    done = launch(*good, *flags, timeout=60)
    assert_refused(done.status, done.out, done.err, *fragments)


@pytest.mark.parametrize("loader", ["torch", "proxy", "dali"])
def test_too_long_a_path_for_the_sockets_of_workers(
    launch: Callable[..., Finished], good: list[str], long_temporary_folder: Path, loader: str
) -> None:
    done = launch(*good, "--loader", loader, timeout=60)
    if loader == "dali" or SOCKETS_ARE_ELSEWHERE:
        assert (done.status, done.err) == (0, "")
    else:
        workers = f"workers of --loader {loader} cannot open sockets there"
        assert_refused(
            done.status, done.out, done.err, f"TMPDIR {long_temporary_folder}: {workers}", "AF_UNIX", "a short path"
        )
    assert list(long_temporary_folder.iterdir()) == []


def refused_by_torchrun(done: Finished, *fragments: str) -> None:
    """torchrun has a report (and a traceback) of its own, and exits with 1; ours must be one line within it."""
    ours = [line for line in done.err.splitlines() if line.startswith("train.py: ")]
    assert len(ours) == 1, done.err
    for fragment in fragments:
        assert fragment in ours[0]
    assert done.err.count("train.py: ") == 1
    assert "main(sys.argv[1:])" not in done.err, done.err  # the root of any traceback of train.py itself
    assert "exitcode  : 2" in done.err
    assert done.status == 1
    assert done.out == ""


@pytest.mark.dist
def test_torchrun_more_processes_than_images(launch: Callable[..., Finished], tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "only").mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / split / "only" / "one.jpg")
    flags = (*TINY, "--batch-size", "1", "--data-dir", tmp_path, "--output-dir", tmp_path / "run")
    done = launch(*flags, processes=2, timeout=60)
    refused_by_torchrun(done, f"--data-dir {tmp_path}:", "1 training images for 2 processes", "start at most 1")


@pytest.mark.dist
def test_torchrun_where_rank_0_alone_is_refused(launch: Callable[..., Finished], good: list[str]) -> None:
    done = launch(*good, "--output-dir", "/proc/brisk", processes=2, timeout=60)
    refused_by_torchrun(done, "--output-dir /proc/brisk:", "cannot be written", "give another")


@pytest.mark.dist
def test_torchrun_before_the_process_group(launch: Callable[..., Finished], good: list[str]) -> None:
    done = launch(*good, "--batch-size", "0", processes=2, timeout=60)
    refused_by_torchrun(done, "--batch-size 0:", "must be 1 or more")
