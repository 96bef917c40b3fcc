"""bench recipes: every seed of every recipe is trained once, also after a stop; what the table says."""

import functools
import json
import shlex
import signal
from pathlib import Path

import pytest

from scripts.bench.__main__ import main
from scripts.bench.recipes import table
from tests.conftest import Refused, call_main
from tests.forked import run_train
from tests.harness import ROOT, launch, start

BENCH = ROOT / "scripts" / "bench"
TINY = "--arch test_resnet --image-size 32 --batch-size 8 --device cpu --workers 1"


def results(*top1: float) -> list[dict[str, float]]:
    return [{"top1": value, "seconds": 10 + value, "images_per_second": 1000 * value} for value in top1]


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_a_difference_has_its_standard_error() -> None:
    found = cells(table({"a": results(1, 2, 3), "b": results(2, 3, 7), "c": results(4, 4, 4)}))
    assert found == [
        ["a", "1.00, 2.00, 3.00", "2.00", "", "", "12.0", "2,000"],
        ["b", "2.00, 3.00, 7.00", "4.00", "+2.00 ± 1.63", "yes", "13.0", "3,000"],  # sqrt(1 / 3 + 7 / 3)
        ["c", "4.00, 4.00, 4.00", "4.00", "+2.00 ± 0.58", "no", "14.0", "4,000"],
    ]
    assert cells(table({"a": results(1), "b": results(1)}))[1][3:5] == ["+0.00", "yes"]


def test_each_line_has_the_result_of_its_own_seed(tmp_path: Path) -> None:
    """Also where a later seed was done before it."""
    for seed, result in enumerate(results(1, 2, 3)):
        (tmp_path / f"a-{seed}").mkdir()
        (tmp_path / f"a-{seed}" / "summary.json").write_text(json.dumps(result))
    done = launch("recipes", "--data-dir", tmp_path, "--output-dir", tmp_path, "--seeds", 3, "a", program=BENCH)
    assert done.status == 0, done.err
    assert done.out.splitlines()[:3] == [
        f"a, seed {seed}: top-1 {seed + 1:.2f} %, {seed + 11:.1f} s" for seed in range(3)
    ]


def test_a_recipe_is_judged_by_the_better_of_its_networks() -> None:
    """Of the raw model and the moving average, as best.pt is."""
    average = [run | {"ema_top1": run["top1"] + 5} for run in results(1, 2)] + [results(6)[0] | {"ema_top1": 4}]
    assert cells(table({"a": results(1, 2, 3), "b": average}))[1][1:3] == ["6.00, 7.00, 6.00", "6.33"]


@pytest.mark.slow  # several runs
def test_a_run_of_other_flags_is_not_taken(
    data: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its result would be shown as that of the flags that are given; one that is not done would go on with them."""
    refuse = functools.partial(refused, main=main, program="bench recipes")
    folder = tmp_path / "out" / "a-0"
    base = ("recipes", "--data-dir", data, "--output-dir", tmp_path / "out", "--seeds", 1, "--flags", TINY)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("epochs: 1\nmixup: 0.2\nema-decay: 0.5\n")
    done = run_train(*shlex.split(TINY), "--data-dir", data, "--config", recipe, "--seed", 0, "--output-dir", folder)
    assert done.status == 0, done.err
    summary = json.loads((folder / "summary.json").read_text())
    for same in (
        f"a: --config {recipe}",
        f"a: --config {recipe} --lr 0.256 --time-limit 9",
        "a: --epochs 1 --mixup 0.2 --ema-decay 0.5",
    ):
        done = call_main(main, (*base, same), capsys)
        top1 = max(summary["top1"], summary["ema_top1"])
        assert (done.status, done.err) == (0, "")
        assert f"| a | {top1:.2f} | {top1:.2f} |" in done.out
    refuse(*base, "b", "a: --epochs 2 --mixup 0.2 --ema-decay 0.5")(
        f"bench recipes: {folder}: holds a run of other flags (--epochs: 1 then, 2 now); name the recipe or"
    )
    others = {
        "--mixup 0": "--mixup: 0.2 then, 0.0 now", "--lr 0.5": "--lr: 0.256 then, 0.5 now",
        "--optimizer adamw": "--optimizer: sgd then, adamw now", "--batch-size 4": "--batch-size: 8 then, 4 now",
        "--val-resize 40": "--val-resize: 37 then, 40 now", "--pretrained": "--pretrained: None then, timm now",
        "--processes 2": "--processes: 1 then, 2 now", "--label-smoothing 0": "--label-smoothing: 0.1 then, 0.0 now",
    }  # fmt: skip
    for words, change in others.items():
        refuse(*base, f"a: --config {recipe} {words}")(
            f"bench recipes: {folder}: holds a run of other flags ({change})"
        )
    refuse(*base, f"a: --config {recipe}", "--flags", TINY.replace("--workers 1", ""))(
        "(--workers: 1 then, not given now)"
    )
    refuse("recipes", "--data-dir", tmp_path, *base[3:], f"a: --config {recipe}")(
        f"(--data-dir: {data} then, {tmp_path} now)"
    )
    recipe.write_text("epochs: 1\nmixup: 0.3\nema-decay: 0.5\n")
    (folder / "summary.json").unlink()
    refuse(*base, f"a: --config {recipe}")("(--mixup: 0.2 then, 0.3 now)")


@pytest.mark.slow  # four runs
def test_all_seeds_are_trained_once(data: Path, tmp_path: Path) -> None:
    base = ("recipes", "--data-dir", data, "--output-dir", tmp_path, "--flags", TINY, "--seeds", 2, "--jobs", 2)
    words = (*base, "long: --epochs 2", "short: --epochs 1")
    with start(*words, program=BENCH) as stopped:
        stopped.wait_for(lambda: (tmp_path / "short-0" / "summary.json").exists())
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.process.wait(100) == 143
    before = (tmp_path / "short-0" / "summary.json").stat().st_mtime_ns
    done = launch(*words, program=BENCH)
    assert done.status == 0, done.err
    assert (tmp_path / "short-0" / "summary.json").stat().st_mtime_ns == before
    found = json.loads((tmp_path / "recipes.json").read_text())
    assert {name: [run["epochs"] for run in runs] for name, runs in found.items()} == {"long": [2, 2], "short": [1, 1]}
    for name in ("long-0", "long-1", "short-0", "short-1"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["seed"] == int(name[-1])
        assert not list((tmp_path / name).glob("*.pt"))
    assert [row[0] for row in cells("\n".join(done.out.splitlines()[-4:]))] == ["long", "short"]


def test_a_run_that_fails_is_named(data: Path, tmp_path: Path) -> None:
    recipe = "a: --pretrained nowhere.pt"  # refused before the imports
    words = ("recipes", "--data-dir", data, "--output-dir", tmp_path, "--flags", TINY, recipe)
    done = launch(*words, program=BENCH)
    assert done.status == 1
    assert f"a, seed 0: exit 2, see {tmp_path}/a-0/log.txt" in done.err
    assert "--pretrained nowhere.pt" in (tmp_path / "a-0" / "log.txt").read_text()
