"""Names of other trainers: the message has the name here, and docs/coming-from.md has all of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import CONTRACT
from tests.harness import ROOT
from utils.errors import UserError
from utils.options.aliases import ALIASES, FLAG, PAGE, VALUES
from utils.options.cli import TRAIN, parse
from utils.options.config import flag_fields

FLAGS = {name for option in TRAIN.command().params for name in (*option.opts, *option.secondary_opts)}
FOREIGN = {"--nnodes"}  # torchrun's


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as refused:
        parse(words)
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--model resnet18", "--model is --arch;"),
        ("--model=resnet18 --img-size 64", "--model=resnet18 is --arch resnet18; --img-size is --image-size;"),
        ("--no-such 1 --opt sgd", "--opt is --optimizer;"),
        ("--wd 1e-4", "--wd is --weight-decay, for all weights but"),
        ("--lr-base 0.1", "--lr-base is --lr, for a global batch of 256 images (--lr-scaling none"),
        ("--aa rand-m9-mstd0.5", "--aa is --augment, where rand-m9-mstd0.5 is --augment randaugment --randaugment-mag"),
        ("--batch_size 8", "--batch_size is --batch-size;"),
        ("fit --trainer.max_epochs 3", "--trainer.max_epochs is --epochs;"),
        ("--optimizer.lr 0.1", "--optimizer.lr is --lr, for a global batch"),
        ("imgsz=64 epochs=3", "imgsz=64 is --image-size 64; epochs=3 is --epochs 3;"),
        ("compile=True sync_bn=False", "compile=True is --compile; sync_bn=False is --no-sync-bn;"),
        ("amp=True", "amp=True is --amp auto, the default;"),
        ("data/photos", "data/photos is --data-dir data/photos;"),
        ("{here}", "{here} is --data-dir {here};"),
        ("--name x {here} --gpus 2", "{here} is --data-dir {here}; --gpus is --processes N"),
    ],
)
def test_other_names(words: str, answer: str, tmp_path: Path) -> None:
    message = refusal(*words.format(here=tmp_path).split())
    assert message.startswith(f"other names here: {answer.format(here=tmp_path)}")
    assert message.endswith("; docs/coming-from.md has more")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--amp", "Option '--amp' requires an argument; a bare --amp is --amp auto here, the default"),
        ("--amp --lr 1", "'--lr' is not one of auto, bf16, fp16, none; a bare --amp is --amp auto here, the default"),
        ("--augment rand-m9", "three-augment; rand-m9-mstd0.5 is --augment randaugment --randaugment-magnitude 27"),
        ("--device 0", "'0' is not one of auto, cuda, cuda:N, cpu; train.py --help"),
        ("--device cuda:N", "'cuda:N' is not one of auto"),
        ("--device mps:0", "'mps:0' is not one of auto"),
        ("--device cuda:1 --processes 2 --data-dir x", "--device cuda:1 with --processes 2: it is the GPU of one proc"),
        ("--device cuda:1 --processes auto --data-dir x", "--processes 1, or --device cuda"),
        ("--epochs", "Option '--epochs' requires an argument; train.py --help lists all flags"),
        ("word", "Got unexpected extra argument(s) (word); train.py --help lists all flags"),
        ("--no-such data/photos", "No such option: --no-such"),
        ("--model x --lr", "other names here: --model is --arch"),
    ],
)
def test_values_of_others_and_what_is_no_name(words: str, message: str) -> None:
    assert message in refusal(*words.split())


def test_short_flags_and_a_gpu() -> None:
    config = parse(["--data-dir", "x", "-b", "3", "-j2", "--device", "cuda:12"])
    assert (config.batch_size, config.workers, config.device) == (3, 2, "cuda:12")


def test_keys_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("model: resnet18\nimg_size: 64\n")
    message = refusal("--data-dir", "x", "--config", str(tmp_path / "args.yaml"))
    assert message.endswith("unknown key 'model'; it is --arch here; docs/coming-from.md has more")


def test_answers_name_flags_that_are_here() -> None:
    answers = " ".join([*ALIASES.values(), *VALUES.values()])
    assert set(FLAG.findall(answers)) - FLAGS == FOREIGN
    assert {field.name for field in flag_fields()} >= VALUES.keys()


def rows() -> Iterator[list[str]]:
    """Cells of the rows of the page's tables."""
    for line in (ROOT / PAGE).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and not line.endswith(("| here |", "what differs |")):
            yield cells


def names(cell: str) -> list[str]:
    """What a cell has between backticks, as `ALIASES` has it."""
    words = re.findall(r"`([^` ]+)`", cell)
    return [word.strip("-=").rpartition(".")[2].replace("_", "-").lower() for word in words]


def test_the_page_has_every_name_with_its_flags() -> None:
    missing = dict(ALIASES)
    for theirs, *others in rows():
        for name in names(theirs):
            if set(FLAG.findall(ALIASES.get(name, ""))) <= set(FLAG.findall(" ".join(others))):
                missing.pop(name, None)
    assert missing == {}


def test_the_page_has_flags_and_defaults_that_are_here() -> None:
    defaults = {name: flag["default"] for key, flag in CONTRACT["flags"]["train.py"].items() for name in key.split("/")}
    shown = {
        name: "off" if default in (None, False, "off", 0.0) else str(default) for name, default in defaults.items()
    }
    for cells in rows():
        here = FLAG.findall(cells[1 if len(cells) == 2 else 2])
        assert set(FLAG.findall(" ".join(cells[1:]))) - FLAGS <= FOREIGN | {"--wd"}, cells
        if len(cells) == 5 and here:
            expected = {shown[here[0]], str(defaults[here[0]])} | ({""} if defaults[here[0]] in ("", None) else set())
            assert cells[3] in expected, (cells, expected)
