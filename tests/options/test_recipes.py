"""configs/: train.py runs each recipe with all of its flags, and its header and docs/recipes.md say what is in it."""

import json
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch

from tests.conftest import resolved
from tests.forked import launch_series
from tests.harness import ROOT, read_losses
from utils.options.arguments import model_options
from utils.options.cli import parse
from utils.options.config import TrainConfig
from utils.options.flags import flag
from utils.options.rates import lr_factor
from utils.options.recipes import read_run_recipe
from utils.options.schedules import size_schedule
from utils.options.sizes import ImageSize
from utils.training.optimization.optim import create_optimizer, resolve_optimizer

PATHS = sorted((ROOT / "configs").iterdir())
PAGE = ROOT / "docs" / "recipes.md"
# Beginning of an architecture's name -> a small network of the same family.
FAMILIES = {
    "convnext": "test_convnext",
    "deit3": "test_vit",
    "efficientnet": "test_efficientnet",
    "resnet": "test_resnet",
}
# Values that make a run small, always or in place of the recipe's.
SMALL = {"batch_size": 8, "image_size": 32, "val_resize": 36, "warmup_epochs": 0.5}
SMALL_IF_GIVEN = {"val_image_size": 36, "resize_schedule": "0:24,1:32", "decay_epochs": 0.5}
TWO_EPOCHS = {"freeze_epochs", "resize_schedule"}  # which these need


def name_of(path: Path) -> str:
    return path.stem


def read(path: Path) -> TrainConfig:
    return parse(["--config", str(path), "--data-dir", "images"])


def header(path: Path) -> str:
    """The comment above the flags, without its marks."""
    lines = re.match(r"(#.*\n)+", path.read_text())
    assert lines, path
    return re.sub(r"^# ?", "", lines[0], flags=re.MULTILINE)


def top1(path: Path, kind: str) -> str:
    """`Published` or `Measured` figure of a header in percent; "" for none."""
    found = re.search(rf"{kind} top-1: ([\d.]+) %", header(path))
    return found[1] if found else ""


def train_sizes(config: TrainConfig) -> list[ImageSize]:
    """Sides of the training images in their order, pixels."""
    return list(dict.fromkeys(size_schedule(config).values())) or [config.image_size]


def val_size(config: TrainConfig) -> ImageSize:
    """Side of the evaluated images, pixels."""
    if config.pretrained:
        return int(timm.get_pretrained_cfg(config.arch).test_input_size[-1])
    return config.val_image_size or config.image_size


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_a_header_says_what_the_recipe_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, config = header(path), read(path)
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^  (?:python|torchrun --nproc_per_node=8) train\.py (.*)$", text, re.MULTILINE)
    first, *_ = [parse(shlex.split(command)) for command in commands]
    assert first.config == Path("configs", path.name)
    assert re.search(r"^Source: .+", text, re.MULTILINE)
    assert re.search(r"^  https://\S+$", text, re.MULTILINE)
    assert ("ot run here" in text) == (not top1(path, "Measured"))
    sizes = [int(size) for size in re.findall(r"(\d+) px", text.partition("\n")[0])]
    assert sizes == list(dict.fromkeys([*train_sizes(config), val_size(config)]))
    assert f" {config.epochs} epochs, " in text.partition("\n")[0]


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_a_header_has_batch_and_rate_of_the_recipe(path: Path) -> None:
    config = read(path)
    pattern = r"^(\d+) process(?:es)? of (\d+) images: ([\d,]+) a step, at a rate of (\d+\.\d+)\."
    found = re.search(pattern, header(path), re.MULTILINE)
    assert found
    assert config.batch_size is not None
    assert config.lr is not None
    processes, images, step = (int(number.replace(",", "")) for number in found.groups()[:3])
    assert (images, step) == (config.batch_size, processes * config.batch_size)
    scaling = resolve_optimizer(config)["lr_scaling"]
    assert float(found[4]) == pytest.approx(config.lr * lr_factor(scaling, step), rel=1e-5)
    assert processes == 1 or f"torchrun --nproc_per_node={processes} " in header(path)


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_the_network_of_a_recipe_takes_its_arguments(path: Path) -> None:
    """A run of the tests has a small one."""
    config = read(path)
    with torch.device("meta"):
        timm.create_model(config.arch, **model_options(config))
    assert resolve_optimizer(config)["lr"] == config.lr


def test_the_page_has_all_recipes() -> None:
    rows = re.findall(r"^\| \[.*\|$", PAGE.read_text(), re.MULTILINE)
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    expected = []
    for path in PATHS:
        config = read(path)
        sizes = (", ".join(map(str, train_sizes(config))), str(val_size(config)))
        link = f"[{path.stem}](../configs/{path.name})"
        figures = (top1(path, kind) for kind in ("Published", "Measured"))
        expected.append([link, f"`{config.arch}`", str(config.epochs), *sizes, *figures])
    assert sorted(found) == sorted(expected)


def small_run(path: Path, data: Path, folder: Path, weights: Path) -> tuple[list[object], set[str]]:
    """A recipe's command line with a small network on small images, and the names of the fields that it replaces."""
    recipe, arch = read_run_recipe(path)[0], read(path).arch
    changes: dict[str, object] = {
        **SMALL,
        **{name: value for name, value in SMALL_IF_GIVEN.items() if name in recipe},
        **({"pretrained": weights} if "pretrained" in recipe else {}),
        "arch": next(small for beginning, small in FAMILIES.items() if arch.startswith(beginning)),
        "epochs": 2 if TWO_EPOCHS & recipe.keys() else 1,
    }
    words: list[object] = ["--config", path, "--data-dir", data, "--output-dir", folder / path.stem]
    words += ["--device", "cpu", "--workers", 1, "--cache", "none", "--log-steps", 1]
    return words + [word for name, value in changes.items() for word in (flag(name), value)], set(changes)


@pytest.mark.slow
def test_recipes_run(data: Path, tmp_path: Path) -> None:
    """All in one process, as its start costs more than the five steps of an epoch."""
    weights = tmp_path / "weights.pt"
    torch.save(timm.create_model("test_convnext").state_dict(), weights)
    runs = [small_run(path, data, tmp_path, weights) for path in PATHS]
    finished = launch_series(*(words for words, _ in runs))
    for path, (_, changed), done in zip(PATHS, runs, finished, strict=True):
        assert done.status == 0, (path, done.err)
        used, config = json.loads((tmp_path / path.stem / "config.json").read_text()), read(path).to_dict()
        given = {name: config[name] for name in read_run_recipe(path)[0].keys() - changed}
        assert {name: used[name] for name in given} == given
        assert len(read_losses(tmp_path / path.stem)) == 5 * used["epochs"], path


def test_resnet50_is_trained_with_plain_momentum() -> None:
    """As in DeepLearningExamples; timm's sgd is Nesterov's."""
    recipe = read(ROOT / "configs" / "resnet50.yaml")
    config = resolved(optimizer=recipe.optimizer, **resolve_optimizer(recipe))
    optimizer = create_optimizer(config, torch.nn.Linear(2, 2), 256)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [(group["momentum"], group["nesterov"]) for group in optimizer.param_groups] == [(0.875, False)] * 2
