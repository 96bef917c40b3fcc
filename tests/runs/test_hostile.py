"""Three hundred random command lines and recipes of strange values: each is refused in one line, or runs."""

import random
from pathlib import Path

import pytest

import train
from tests.conftest import TINY, call_main
from tests.harness import assert_refused

RUN = (*TINY, "--batch-size", "4", "--epochs", "1", "--max-bad-steps", "0")
CASES = 300

NUMBERS = (
    "0", "1", "2", "7", "8", "-1", "-0", "0.5", "2.5", "1e1", "1e400", "1e-400", "1e308", "nan", "-inf", "inf",
    "0x10", "1_0", "+2", "٣", "", " ", " 2", "2 3", "1,5", "999999999999999999999", "-", "--", "two", "None", "true",
    "é", "\x1b[31m", "1\n2", "9" * 5000,
)  # fmt: skip
WORDS = (
    "", " ", "none", "auto", "NONE", "resnet50 ", "test_resnet", "test_vit", "test_efficientnet",
    "hf-hub:nobody/nothing", "local-dir:/nowhere", "../resnet50", "resnet50.a1_in1k", "resnet50.nonsense", "sgd",
    "adamw", "lamb", "lbfgs", "dali", "host", "fused", "-", "--", "--epochs", "'; rm -rf /", "$(reboot)",
    "\x1b]0;x\x07", "a\nb", "ünïcode", "名前", "x" * 5000,
)  # fmt: skip
PATHS = (
    "", ".", "/", "..", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "nowhere", "x" * 300, "a\nb", "-",
    "~",
)  # fmt: skip
RECIPES = (
    "", "null", "[]", "false", "0", "text", "[1, 2]", "- lr", "lr", "lr:", "lr: 0.1", "lr: fast",
    "lr: .nan", "lr: -.inf", "lr: [0.1]", "lr: {a: 1}", "lr: 2020-01-01", "lr: 0.1\nlr: 0.2", "learning-rate: 1",
    "epochs: 1.5", "epochs: 1e1", "epochs: '1'", "epochs: yes", "epochs: 0b11", "epochs: ~", "compile: no",
    "compile: 0", "compile: 'false'", "ema_decay: 0.9", "ema-decay: 0.9\nema_decay: 0.5", "1: 2", "? [a]\n: b", "{",
    "}", "\t", "a: b: c", "&a [*a]", "a: &a [1]\nb: *a", "<<: {lr: 0.1}", "!!python/object/apply:os.abort []",
    "lr: !!float x", "lr: !!int 3", "lr: !!binary aGk=", "\x01", "\ufeffepochs: 1", "---\nepochs: 1\n---\nepochs: 2",
    "data-dir: ''", "config: other.yaml", "pretrained: false", "pretrained: [x]", "amp: on", "seed: 0o17", "seed: 08",
    "seed: 1:30", "arch: 1", "x" * 9999,
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "lr: [*c,*c,*c,*c,*c,*c,*c]",
)  # fmt: skip
NUMERIC = (
    "--epochs", "--batch-size", "--image-size", "--val-resize", "--workers", "--num-classes", "--grad-accum-steps",
    "--lr", "--momentum", "--weight-decay", "--warmup-epochs", "--label-smoothing", "--ema-decay", "--clip-grad",
    "--mixup", "--cutmix", "--random-erase", "--hflip", "--crop-scale", "--seed", "--checkpoint-steps", "--log-steps",
    "--timeout", "--time-limit", "--max-bad-steps", "--prefetch", "--hw-decoder-load",
)  # fmt: skip
NAMED = (
    "--arch", "--optimizer", "--loader", "--augment", "--amp", "--device", "--decode", "--cache",
    "--grad-compression", "--resume",
)  # fmt: skip
PLACES = ("--data-dir", "--output-dir", "--resume", "--config", "--pretrained")
SWITCHES = (
    "--evaluate", "--no-evaluate", "--compile=1", "--deterministic",
    "--no-deterministic", "--tensorboard", "--cuda-graph", "--no-cuda-graph", "--fused-layers", "--no-fused-layers",
    "--epoch", "--no-epochs", "---", "-e", "--=", "surplus", "=", "--lr=",
)  # fmt: skip


def draw(number: int, folder: Path) -> list[str]:
    """Flags of case `number`: one to three strange ones, or a strange recipe."""
    choice = random.Random(number)
    flags = []
    for _ in range(choice.choice((1, 1, 2, 3))):
        kind = choice.choice(("number", "number", "name", "place", "switch", "recipe", "recipe"))
        if kind == "number":
            flags += [choice.choice(NUMERIC), choice.choice(NUMBERS)]
        elif kind == "name":
            flags += [choice.choice(NAMED), choice.choice(WORDS)]
        elif kind == "place":
            flags += [choice.choice(PLACES), choice.choice(PATHS)]
        elif kind == "switch":
            flags += [choice.choice(SWITCHES)]
        else:
            recipe = folder / "recipe.yaml"
            recipe.write_text(choice.choice(RECIPES), encoding="utf-8")
            flags += ["--config", str(recipe)]
    return flags


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what a library warns of is not our subject here
@pytest.mark.parametrize("number", range(CASES))
def test_refused_in_one_line_or_runs(
    number: int, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # which `--output-dir ~` is
    flags = draw(number, tmp_path)
    done = call_main(train.main, [*RUN, "--data-dir", data, "--output-dir", tmp_path / "run", *flags], capsys)
    print(flags, done.status)
    if done.status in (0, 143):  # the latter is what --time-limit asks for
        assert "Traceback" not in done.err
    else:
        assert_refused(done)
