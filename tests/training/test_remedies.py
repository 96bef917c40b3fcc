"""What a refusal of a resume offers works: its flags are taken out of the message, and added to the command."""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.forked import launch_series
from tests.harness import error_line
from tests.runs.test_refused_flags import VALUES
from utils.errors import UserError
from utils.options.cli import TRAIN, parse
from utils.options.remedies import accept_changes, from_weights, other_folder, start_again

TAKES_VALUE = {
    name: not option.is_flag for option in TRAIN.command().params for name in option.opts + option.secondary_opts
}
PATH = "runs/x/last.pt"


def offered(message: str) -> list[list[str]]:
    """The flags in a message's last part, with their values: a list for each run of them."""
    words = [word.rstrip(",;") for word in message.rpartition("; ")[2].split(" ")]
    found: list[list[str]] = []
    follows = False
    for at, word in enumerate(words):
        if word in TAKES_VALUE and words[at - 1] != "leave":
            run = [word, *words[at + 1 : at + 1 + TAKES_VALUE[word]]]
            found = [*found[:-1], found[-1] + run] if follows else [*found, run]
        follows = word in TAKES_VALUE or (follows and TAKES_VALUE.get(words[at - 1], False))
    return found


def test_offers_are_found() -> None:
    message = (
        "--seed 7: no; go on by --resume a/b.pt --accept-changes --name NEW, or start: --overwrite to replace --lr 3"
    )
    assert offered(message) == [
        ["--resume", "a/b.pt", "--accept-changes", "--name", "NEW"],
        ["--overwrite"],
        ["--lr", "3"],
    ]


@pytest.mark.parametrize("folder", ["", "--name x", "--output-dir runs/x", "--config recipe.yaml"])
@pytest.mark.parametrize("resume", ["", f"--resume {PATH}", f"--resume {PATH} --accept-changes"])
def test_flags_fit_the_command(folder: str, resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders are refused, and so is --accept-changes with the checkpoint that is found."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("output-dir: runs/x")
    command = f"--data-dir x {folder} {resume}".split()
    config, path = parse(command), Path(PATH)
    fresh, replacing = offered(start_again(config))
    assert (
        parse(command + fresh).output_dir.name
        == parse(command + offered(other_folder(config))[0]).output_dir.name
        == "NEW"
    )
    assert parse(command + fresh).resume in ("auto", "none")
    again = parse(command + replacing)
    assert (again.resume, again.overwrite, again.output_dir) == ("none", True, config.output_dir)
    (accepting,), (weights,) = offered(accept_changes(config, path)), offered(from_weights(config, path))
    accepted, begun = parse(command + accepting), parse(command + weights)
    assert (accepted.resume, accepted.accept_changes, accepted.output_dir.name) == (PATH, True, "NEW")
    assert (begun.resume in ("auto", "none"), begun.pretrained, begun.output_dir.name) == (True, PATH, "NEW")


def test_a_path_is_quoted() -> None:
    assert "--resume 'my runs/last.pt' --accept-changes" in accept_changes(
        parse(["--data-dir", "x"]), Path("my runs/last.pt")
    )


CASES = (
    "--batch-size 4",
    "--seed 7",
    "--data-dir more",
    "--data-dir renamed",
    "--repeated-augmentation 2 --loader torch",
    "--optimizer adamw --ema-decay 0.9",
    "--arch test_vit",
    "--num-classes 5",
    "--task multilabel",
    "--pretrained {run}/last.pt",
    "--pretrained other/last.pt",
    "--resume none",
    "--resume {run}/last-1.pt",
    "--resume {run}/last.pt --seed 7",
    "--resume {run}/last.pt --accept-changes --batch-size 4",
    "--resume {run}/last.pt --accept-changes --arch test_vit",
    "--resume {run}/last.pt --accept-changes --num-classes 5",
    "--resume {run}/last.pt --accept-changes --model-args global_pool=max",
    "--resume {run}/last.pt --pretrained {run}/best.pt",
)


DAMAGED = (("last.pt",), ("last.pt", "last-1.pt", "last-2.pt", "best.pt"))  # the only checkpoint, and all of them


def made(root: Path, kind: str, numbers: Iterator[int], damaged: Sequence[str] = ()) -> str:
    """A copy of the run, in a folder of --name (runs) or of --output-dir (out)."""
    name = f"{kind}/{next(numbers)}"
    shutil.copytree(root / "run", root / name)
    for file in damaged:
        (root / name / file).write_bytes((root / name / file).read_bytes()[:-1000])
    for path in (root / name).glob("*.pt") if damaged == DAMAGED[0] else ():
        if path.name not in damaged:
            path.unlink()
    return name


def command(case: str, run: str, epochs: int = 3) -> list[str]:
    kind, _, name = run.rpartition("/")
    folder = ["--name", name] if kind == "runs" else ["--output-dir", run]
    words = ["--data-dir", "data", "--batch-size", "8", "--epochs", str(epochs), *folder, *case.format(run=run).split()]
    return [*map(str, TINY), "--time-limit", "0.001", *words]


@pytest.mark.slow
def test_what_is_offered_works(data: Path, tmp_path: Path) -> None:
    """A run that was accepted stops after its first step."""
    shutil.copytree(data, tmp_path / "data")
    for name in ("more", "renamed"):
        shutil.copytree(data, tmp_path / name)
    for split in ("train", "val"):
        (tmp_path / "renamed" / split / "blue").rename(tmp_path / "renamed" / split / "cyan")
    shutil.copy(tmp_path / "more/val/blue/blue-001.jpg", tmp_path / "more/train/blue/new.jpg")
    plain = [*map(str, TINY), "--data-dir", "data", "--batch-size", "8", "--epochs", "2"]
    for done in launch_series(
        [*plain, "--output-dir", "run"], [*plain, "--seed", "3", "--output-dir", "other"], cwd=tmp_path
    ):
        assert done.status == 0, done.err
    numbers = itertools.count()
    wanted: list[tuple[str, Sequence[str]]] = [*((case, ()) for case in CASES), *(("", names) for names in DAMAGED)]
    kinds = itertools.cycle(("out", "runs"))
    tried = [
        (case, names, made(tmp_path, kind, numbers, names)) for (case, names), kind in zip(wanted, kinds, strict=False)
    ]
    refused = launch_series(*(command(case, run) for case, _, run in tried), cwd=tmp_path)
    commands, reasons = [], []
    for (case, names, run), done in zip(tried, refused, strict=True):
        line = error_line(done)
        assert done.status == 2, line
        assert offered(line) != [], line
        for flags in offered(line):
            copy = made(tmp_path, run.partition("/")[0], numbers, names)
            words = [word.replace(run, copy).replace("NEW", f"new-{copy.rpartition('/')[2]}") for word in flags]
            commands.append([*command(case, copy), *words])
            reasons.append((line, words))
    results = zip(reasons, launch_series(*commands, cwd=tmp_path), strict=True)
    assert [(*reason, done.err) for reason, done in results if done.status not in (0, 143)] == []


FLAGS = (
    *(flags for flags, _ in VALUES),
    "--cooldown-epochs 3",
    "--min-lr 0.1 --schedule step",
    "--decay-rate 0.2",
    "--schedule step",
    "--decay-epochs 2 --schedule step",
    "--val-data v.csv --val-fraction 0.1",
    "--transform f.py:n --loader torch",
    "--cuda-graph --device auto --grad-accum-steps 2",
    "--loss asymmetric --task multiclass",
    "--focal 1 --loss asymmetric",
    "--augment randaugment --augment-schedule 0:none",
    "--real-labels x",
    "--eval-classes present",
    "--overwrite",
    "--pretrained-head new",
    "--device cuda:1 --processes 2",
    "--loader proxy --cache gpu --device auto",
)


def test_what_is_offered_before_a_run_works() -> None:
    """As far as the command line alone says."""
    given = ["--data-dir", "x", "--epochs", "1", *map(str, TINY)]
    tried = []
    for flags in FLAGS:
        message = refusal([*given, *flags.split()])
        for words in offered(message) if "; " in message else ():
            is_open = TAKES_VALUE.get(words[-1]) or words[-1].isupper()  # the user is to give a value
            if words != ["--help"] and not is_open:
                tried.append((message, refusal([*given, *flags.split(), *words])))
    assert [(message, again) for message, again in tried if again] == []
    assert len(tried) > 20


def refusal(words: Sequence[str]) -> str:
    """The message of a command that is refused before it looks at files; "" for another."""
    try:
        parse(words)
    except UserError as error:
        return str(error)
    return ""
