"""Whole runs with `--transform`: exact resume, what a resume compares, and mistakes on several ranks."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY, Refused, assert_same_run
from tests.forked import launch_series
from tests.harness import assert_refused, launch, read_checkpoint
from tests.test_train import in_separate_folders

RANDOM = """from nvidia.dali import fn
def f(images, config):
    if fn.random.coin_flip():
        images = fn.brightness(images, brightness=fn.random.uniform(range=[0.5, 1.5]))
    return images
"""


@pytest.mark.slow  # tests of the function itself are quick
def test_a_resume_is_exact_and_compares_the_content(data: Path, tmp_path: Path) -> None:
    """Stopped in mid-epoch; then the file moves, then it is changed, which is refused and accepted."""
    one, moved, changed = (tmp_path / f"{name}.py" for name in ("one", "moved", "changed"))
    for path, text in ((one, RANDOM), (moved, RANDOM), (changed, RANDOM.replace("1.5", "1.4"))):
        path.write_text(text)
    whole, plain, cut, forked = (tmp_path / name for name in ("whole", "plain", "cut", "forked"))
    base = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2)
    flags = (*base, "--transform", f"{one}:f")
    other = (*base, "--transform", f"{changed}:f", "--resume", cut / "last.pt")
    stop = ("--time-limit", 0.001)
    done = launch_series(
        (*flags, "--output-dir", whole),
        (*base, "--output-dir", plain),
        (*flags, "--output-dir", cut, *stop),
        (*other, "--output-dir", forked),
        (*other, "--output-dir", forked, "--accept-changes", *stop),
        (*base, "--output-dir", cut),
        (*base, "--output-dir", cut, "--transform", f"{moved}:f"),
    )
    assert [run.status for run in done] == [0, 0, 143, 2, 143, 2, 0], done
    assert read_checkpoint(forked)["step"] == 2, "stopped in the first epoch, of 5 steps"
    assert_refused(done[3], "(--transform: f (SHA-256 ", "restore these, go on with them by --resume")
    assert "accepted changes: --transform: f (SHA-256 " in done[4].out
    assert_refused(done[5], " then, None now); restore these")
    assert_same_run(whole, cut)
    assert json.loads((cut / "config.json").read_text())["transform"] == f"{moved}:f"
    assert not read_checkpoint(whole)["model"]["fc.weight"].equal(read_checkpoint(plain)["model"]["fc.weight"])


def test_flags_that_do_not_fit(refused: Refused, good: list[str], tmp_path: Path) -> None:
    path = tmp_path / "user.py"
    path.write_text(RANDOM)
    for loader in ("torch", "synthetic"):
        refused(*good, "--transform", f"{path}:f", "--loader", loader)(
            f"--transform {path}:f with --loader {loader}:", "use --loader dali or proxy"
        )
    refused(*good, "--transform", path)(f"--transform {path}: must be FILE.py:NAME")
    refused(*good, "--transform", "nowhere.py:f")("--transform nowhere.py:f: no such file nowhere.py")
    refused(*good, "--transform", f"{path}:g")(f"{path} has no function g")
    refused(*good, "--dali-plugin", "x.so")("--dali-plugin x.so without --transform: nothing uses it")
    refused(*good, "--transform", f"{path}:f", "--dali-plugin", "x.so")("--dali-plugin x.so: no such file")


@pytest.mark.slow  # two launches of two processes
@pytest.mark.dist
def test_mistakes_end_all_ranks(data: Path, tmp_path: Path) -> None:
    """A function that does not fit, and a file that is not the same on two machines."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 4, "--epochs", 1, "--timeout", 30)
    (tmp_path / "wrong.py").write_text("def f(images, config):\n    return images * 1.5\n")
    done = launch(*flags, "--output-dir", tmp_path / "run", "--transform", f"{tmp_path}/wrong.py:f", processes=2)
    assert_refused(done, "returns float images instead of uint8", processes=2)
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
        (folder / "user.py").write_text(f"{RANDOM}# {folder.name}\n")
    ranks = in_separate_folders(folders, [*flags, "--output-dir", "run", "--transform", "user.py:f"])
    assert_refused(ranks[0], "--transform: not the same on rank 0 (f (SHA-256 ", "and rank 1", "use a shared folder")
    assert (ranks[1].status, ranks[1].err) == (2, "")
