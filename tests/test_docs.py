"""README and docs: their commands have flags that exist, links lead to headings, and what can run here runs."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import run as torchrun

from tests.conftest import TINY, assert_same, write_images
from tests.contract import CONTRACT
from tests.forked import launch_forked
from tests.harness import ROOT, read_checkpoint, tracked_files
from tests.pages import USER_PAGES, Block, Command, anchors, blocks, code_spans, commands, links
from tests.shards import write_ilsvrc, write_imagenet, write_webdataset
from tests.test_contract import PROGRAMS
from utils.errors import UserError
from utils.options.aliases import PAGE
from utils.options.cli import TRAIN
from utils.options.config import flag_fields
from utils.options.flags import flag, flag_info

PAGES = tracked_files("*.md")
BLOCKS = [block for path in USER_PAGES for block in blocks(path)]
COMMANDS = [command for block in BLOCKS if block.language == "bash" for command in commands(block)]
BY_NAME = {program.name: program for program in PROGRAMS}
# Programs that are not ours: only their names are checked.
FOREIGN = {"source", "pip"}
# The other scripts measure for minutes, or install.
RUN_HERE = {
    "train.py",
    "check_dataset.py",
    "convert_dataset.py",
    "export.py",
    "predict.py",
    "probe.py",
    "report.py",
    "runs.py",
    "watch.py",
}
SEVERAL_MACHINES = {"torchrun", "srun", "sbatch"}
# Flags in prose that are not ours, with their programs.
FOREIGN_FLAGS = {
    "sbatch": {"--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--signal", "--time"},
    "srun": {"--kill-on-bad-exit"},
    "docker": {"--shm-size", "--ipc"},
}
MODEL = "test_resnet"  # instead of resnet50
RUN = f"runs/imagenet-{MODEL}"
CHECKED = ("strong", "--val-fraction", "--accept-changes")  # words of trainings outside the README


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def where(item: Block | Command) -> str:
    return item.where


# ---------------------------------------------------------------------------------------------------------------------
# Every flag exists


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Name of the program of ours in a command, "" for none, and the words after it."""
    for number, word in enumerate(words):
        if word == "scripts/bench":
            return f"bench {words[number + 1]}", list(words[number + 2 :])
        if word == "train.py" or (word.startswith("scripts/") and word.endswith(".py")):
            return Path(word).name, list(words[number + 1 :])
        if word.startswith("scripts/slurm/"):
            assert (ROOT / word).is_file(), word
            return "train.py", list(words[number + 1 :])
    return "", []


def check_command(words: Sequence[str]) -> None:
    """Read a command as its program would.

    Raises:
        UserError: a flag or value of ours is wrong.
        SystemExit: one of torchrun is.
    """
    if words[0] == "torchrun":
        torchrun.parse_args(list(words[1:]))  # type: ignore[no-untyped-call]
    program, flags = split(words)
    if program:
        BY_NAME[program].parse(flags)
    elif words[0].startswith(("scripts/", "examples/")):
        assert (ROOT / words[0]).is_file()
    else:
        assert words[0] in FOREIGN, words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder of commands, with the recipes and a config.json."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs" / "imagenet-resnet50").mkdir(parents=True)
    (tmp_path / "runs" / "imagenet-resnet50" / "config.json").write_text('{"data_dir": "/data/imagenet"}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=where)
def test_a_command_has_flags_that_exist(command: Command, folder: Path) -> None:
    check_command(command.words)


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --data-dri /data",
        "scripts/check_dataset.py DIR --output-dri OUT",
        "scripts/no_such.py",
        "python scripts/bench no-such --arch resnet50",
        "python scripts/bench starts --arhc resnet50",
        "sbatch scripts/slurm/single_node.sh --data-dir /data --epoch 3",
        "torchrun --nnodse=4 train.py --data-dir /data",
        "python trian.py",
    ],
)
def test_a_wrong_command_is_found(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = commands(Block("page.md:1", "bash", text, ""))
    with pytest.raises((UserError, SystemExit, KeyError, AssertionError)):
        check_command(command.words)


def test_flags_between_backticks_exist() -> None:
    ours = {name for flags in CONTRACT["flags"].values() for key in flags for name in key.split("/")}
    known = ours | {"--help", "--version"} | set().union(*FOREIGN_FLAGS.values())
    pages = [
        path for path in USER_PAGES if path != ROOT / PAGE
    ]  # of which tests/options/test_aliases.py reads the tables
    spans = [(name_of(path), span) for path in pages for span in code_spans(path)]
    found = {(name, flag) for name, span in spans for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span)}
    assert {(name, flag) for name, flag in found if flag not in known} == set()


def test_flags_of_a_resume_are_documented() -> None:
    fields = [field for field in flag_fields() if flag_info(field).role != "free"]
    spans = " ".join(code_spans(ROOT / "docs" / "reliability.md"))
    assert [field.name for field in fields if not re.search(rf"{flag(field.name)}(?![\w-])", spans)] == []


# ---------------------------------------------------------------------------------------------------------------------
# Every link and path leads somewhere


def test_links_lead_to_headings() -> None:
    for path, target in ((page, each) for page in PAGES for each in links(page)):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), (path, target)
        assert not anchor or anchor in anchors(linked), (path, target)


PATHS = r"(?:utils|scripts|tests|configs|docs|examples)/[\w./*-]*\w"


def test_paths_between_backticks_exist() -> None:
    for path, span in ((page, each) for page in PAGES for each in code_spans(page)):
        if re.fullmatch(PATHS, span) and "NAME" not in span:
            assert list(ROOT.glob(span)), (path, span)


def test_mentions_of_pages_are_right() -> None:
    """Those of decisions may end after the number."""
    for path in tracked_files("*.py", "*.sh", "*.md"):
        for mention in re.findall(r"(?<![\w/])docs/[\w/-]+(?:\.md)?", path.read_text()):
            assert list(ROOT.glob(f"{mention}*")), (path, mention)


# ---------------------------------------------------------------------------------------------------------------------
# What can run here runs

# Runs a list of programs in a folder, one after the other, each with the output in a file.
_SERIES = """
import json, os, sys
import train
from scripts import check_dataset, convert_dataset, export, predict, probe, report, runs, watch

mains = {"train.py": train.main, "runs.py": runs.main, "predict.py": predict.main, "export.py": export.main}
mains |= {"report.py": report.main, "watch.py": watch.main, "probe.py": probe.main}
mains |= {"check_dataset.py": check_dataset.main, "convert_dataset.py": convert_dataset.main}
os.chdir(sys.argv[1])
results = []
for number, (program, words) in enumerate(json.loads(sys.argv[2])):
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        with open(f"{number}.log", "a") as file:
            os.dup2(file.fileno(), stream.fileno())
    if program in mains:
        results.append(mains[program](words))
    else:
        sys.argv = ["classify.py", *words]
        exec(compile(program, "block", "exec"), {"__name__": "__main__"})
        results.append(0)
    sys.stdout.flush()
with open("results", "w") as file:
    json.dump(results, file)
"""


def run_pages(data: Path, root: Path, everything: bool) -> dict[str, str]:
    """Run the pages' commands in the folder `root`; returns the output of each by page and line."""
    for name in ("configs", "examples", "scripts"):
        (root / name).symlink_to(ROOT / name)
    (root / "data").mkdir()
    for name in ("imagenet", "imagenet-v2"):
        (root / "data" / name).symlink_to(data)
    for split_name in ("train", "val"):
        write_images(root / "data" / "flowers" / split_name, (8, 8, 8), seed=3)
        (root / "data" / "flowers" / split_name / "red").rename(root / "data" / "flowers" / split_name / "rose")
    for folder in ("animals", "birds/train", "birds/valid", "photos/train"):
        write_images(root / "data" / folder, (8, 8, 8))
    write_images(root / "data" / "waste" / "images", (8, 8, 8))
    photos = sorted(path.relative_to(root / "data" / "waste") for path in (root / "data" / "waste").rglob("*.jpg"))
    rows = [f"{path},{path.parent.name},camera-{at % 6}" for at, path in enumerate(photos)]
    (root / "data" / "waste" / "labels.csv").write_text("\n".join(["file,label,group", *rows]))
    write_webdataset(data, root / "data" / "imagenet-wds")
    write_ilsvrc(write_imagenet(root / "folders"), root / "data" / "ilsvrc")
    shards = write_webdataset(data, root / "data" / "shards")
    for path in shards.glob("*.tar"):
        path.rename(shards / path.name.replace("train", "a").replace("val", "b"))
    with (root / "labels.csv").open("w") as file:
        csv.writer(file).writerows([("file", "label", "split"), (data / "train/red/red-000.jpg", "red", "train")])
    programs = list(to_run(root, everything))
    words = json.dumps([each for _, *each in programs])
    done = launch_forked(root, words, program=_SERIES)
    logs = [(root / f"{number}.log") for number in range(len(programs))]
    outputs = {
        location: path.read_text() if path.exists() else "" for (location, *_), path in zip(programs, logs, strict=True)
    }
    assert done.status == 0, outputs
    statuses = dict(zip(outputs, json.loads((root / "results").read_text()), strict=True))
    assert {location: outputs[location] for location, status in statuses.items() if status != 0} == {}
    return outputs


def to_run(root: Path, everything: bool) -> Iterator[tuple[str, str, list[str]]]:
    """Page and line, program and words of what runs here, with small networks and images instead of the pages'.

    Not `everything`: of the trainings those of the README, and those whose output is compared.
    """
    launches: Counter[Path] = Counter()
    pages: dict[tuple[str, ...], str] = {}  # where a command has run already; twice on one page is a resume
    for block in BLOCKS:
        if block.language == "python" and not block.comment.startswith("not run: "):
            words = [f"{RUN}/best.pt", f"{root}/data/imagenet/val/red/red-001.jpg"]
            yield block.where, block.text.replace("resnet50", MODEL).replace('"/data/', f'"{root}/data/'), words
        for command in commands(block) if block.language == "bash" else ():
            program, words = split(command.words)
            if not command.is_run or program not in RUN_HERE or command.words[0] in SEVERAL_MACHINES:
                continue
            page = command.where.partition(":")[0]
            if pages.setdefault(command.words, page) != page:
                continue
            is_checked = page == "README.md" or any(text in command.words for text in CHECKED)
            if program == "train.py" and not (everything or is_checked):
                continue
            words = [re.sub(r"^/data/", f"{root}/data/", word) for word in words]
            words = [word if word.startswith("configs/") else word.replace("resnet50", MODEL) for word in words]
            if program == "train.py":
                recipe = "--config" in words  # which is not there yet
                given = None if recipe else TRAIN.parse([*words, "--arch", MODEL])
                output = given.output_dir if given else Path("of a recipe")
                resumed = Path(given.resume).parent if given else output  # of `--resume auto` no folder of a run
                launches[output] = max(launches[output], launches[resumed]) + 1  # a resume has an epoch to train
                words += [*TINY, "--batch-size", "8", "--warmup-epochs", "0", "--epochs", str(launches[output])]
            yield command.where, program, words


def output_of(outputs: dict[str, str], text: str) -> list[str]:
    """Outputs of the commands that have these words, in the order of the pages."""
    return [outputs[each.where] for each in COMMANDS if each.where in outputs and text in " ".join(each.words)]


def test_blocks_that_do_not_run_have_a_reason() -> None:
    for block in BLOCKS:
        assert re.fullmatch(r"|not run: .+|name: \w+\.py", block.comment), block.where
        assert block.language in ("", "bash", "python"), block.where


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_commands_of_the_pages_run(data: Path, tmp_path: Path, everything: bool) -> None:
    """One test, as workers of pytest would each run all commands again."""
    outputs = run_pages(data, tmp_path, everything)
    check_outputs(tmp_path, outputs)
    check_classes(outputs)
    check_accuracy(tmp_path, RUN)
    check_accuracy(tmp_path, "runs/strong")
    check_keys(tmp_path / "runs" / "strong" / "best.pt")
    check_better_network(tmp_path / "runs" / "strong" / "best.pt", tmp_path / "changed.pt")


def check_outputs(root: Path, outputs: dict[str, str]) -> None:
    """What the commands print and write."""
    assert "from scratch" in output_of(outputs, "train.py --processes auto")[0]
    train, resumed, *_ = output_of(outputs, "--arch resnet50 --epochs 90")
    assert f"resumed at epoch 2, step 5, from {RUN}/last.pt" in train
    assert f"resumed at epoch 3, step 10, from {RUN}/last.pt" in resumed
    assert f"weights of {RUN}/best.pt, head new (other class names" in output_of(outputs, "/data/flowers")[0]
    assert json.loads((root / RUN / "evaluation.json").read_text())["count"] == 41
    assert "82 files: 0 bad, 0 suspicious" in output_of(outputs, "check_dataset.py")[0]
    assert "41 images of train, 41 images of val in 2 shards" in output_of(outputs, "convert_dataset.py")[0]
    assert re.search(r"top1 [\d.]+  count 41\n", output_of(outputs, "predict.py")[0])
    assert "near-duplicates, similarity 0.98 or more: " in output_of(outputs, "probe.py")[0]
    assert "same class for 41 of 41" in output_of(outputs, "--format timm")[0]
    assert "report.html: 1 run, " in output_of(outputs, "scripts/report.py")[0]
    assert re.search(rf"{RUN} +finished", output_of(outputs, "scripts/runs.py")[0])
    assert "from scratch" in output_of(outputs, "config.json")[0]
    assert "the held-out part of train/" in output_of(outputs, "--val-fraction")[0]
    assert " of 6 groups: " in output_of(outputs, "--name waste")[0]
    assert "accepted changes: --mixup: 0 then, 0.2 now" in output_of(outputs, "--accept-changes")[0]


def check_classes(outputs: dict[str, str]) -> None:
    """docs/using-a-model.md's program prints the classes of an image."""
    (location,) = (block.where for block in BLOCKS if block.comment == "name: classify.py")
    printed = re.findall(r"^[\d.]+%  (\w+)$", outputs[location], re.MULTILINE)
    assert sorted(printed) == ["blue", "green", "red"]


def check_keys(best: Path) -> None:
    """docs/checkpoints.md has every key of a checkpoint, and its format."""
    saved, page = read_checkpoint(best.parent, best.name), ROOT / "docs" / "checkpoints.md"
    assert {*saved, *saved["ranks"][0]} - set(code_spans(page)) == set()
    assert f"| `format` | {saved['format']}:" in page.read_text()


def classify_module() -> dict[str, Any]:
    """The names of docs/using-a-model.md's program."""
    (block,) = (block for block in BLOCKS if block.comment == "name: classify.py")
    names: dict[str, Any] = {"__name__": "classify"}
    exec(compile(block.text, "classify.py", "exec"), names)
    return names


def check_accuracy(root: Path, run: str) -> None:
    """The program's accuracy and loss are those of the run's evaluation, before the temperature."""
    program = classify_module()
    model, transform, classes, temperature = program["load_model"](root / run / "best.pt")
    saved = read_checkpoint(root / run, "best.pt")
    assert [*map(pytest.approx, saved["temperature"].values())] == [float(temperature)]
    files = sorted((root / "data" / "imagenet" / "val").glob("*/*.jpg"))
    probabilities = torch.stack([program["classify"](model, transform, 1.0, file) for file in files])
    labels = torch.tensor([classes.index(file.parent.name) for file in files])
    result = saved["result"]
    prefix = "val/ema_" if result.get("val/ema_top1", -1) > result["val/top1"] else "val/"
    correct = int((probabilities.argmax(1) == labels).sum())
    assert abs(correct - result[f"{prefix}top1"] * len(files) / 100) <= 1, "an image at the border of two classes"
    assert float(nn.functional.nll_loss(probabilities.log(), labels)) == pytest.approx(
        result[f"{prefix}loss"], rel=0.01
    )


def check_better_network(best: Path, changed: Path) -> None:
    """The program takes the moving average where that is better."""
    saved = read_checkpoint(best.parent, best.name)
    for ema_top1, name in ((0.0, "model"), (100.0, "model_ema")):
        saved["result"] |= {"val/top1": 50.0, "val/ema_top1": ema_top1}
        torch.save(saved, changed)
        assert_same(dict(classify_module()["load_model"](changed)[0].state_dict()), dict(saved[name]))
