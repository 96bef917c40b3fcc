"""Which run a folder holds, what a checkpoint decides for the runs that use it, and what they log."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.conftest import TINY, write_data
from tests.contract import assert_keys
from tests.forked import launch_series
from tests.harness import Finished, assert_refused, read_checkpoint, read_metrics
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.training.resume.compatibility import changed_versions
from utils.training.state.checkpoint import BEST, EARLIER, FORMAT, LAST, find_checkpoints, load_newest

# Two architectures with the same names and shapes of weights, which compute another thing.
ARCH, TWIN = "tf_mobilenetv3_small_075", "mobilenetv3_small_075"


def evaluation(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


@pytest.mark.slow
def test_an_evaluation_takes_its_settings_from_the_checkpoint(data: Path, tmp_path: Path) -> None:
    """Architecture, sizes, normalization, precision and data; the checkpoint is all that the user names."""
    shutil.copytree(data, tmp_path / "data")
    run, other = tmp_path / "run", tmp_path / "other"
    flags = ("--arch", ARCH, "--image-size", 48, "--val-resize", 60, "--epochs", 1, "--batch-size", 8)
    (done,) = launch_series(("--data-dir", tmp_path / "data", *TINY, *flags, "--amp", "bf16", "--output-dir", run))
    assert done.status == 0, done.err
    expected = read_metrics(run)[-1]
    (tmp_path / "data" / "train").rename(tmp_path / "data" / "away")
    shifted = read_checkpoint(run, BEST)
    shifted["normalization"]["mean"] = [0.1, 0.2, 0.3]
    torch.save(shifted, tmp_path / "shifted.pt")
    plain, refused, size, normalized, pretrained = launch_series(
        ("--evaluate", "--output-dir", run, "--device", "cpu", "--workers", 1),
        ("--evaluate", "--output-dir", run, "--arch", TWIN),
        ("--evaluate", "--output-dir", other, "--resume", run / BEST, "--image-size", 64, "--workers", 1),
        ("--evaluate", "--output-dir", tmp_path / "third", "--resume", tmp_path / "shifted.pt", "--workers", 1),
        ("--evaluate", "--output-dir", tmp_path / "fourth", "--pretrained", run / BEST, "--workers", 1),
    )
    assert plain.status == 0, plain.err
    found = evaluation(run)
    assert {name: found[name] for name in ("top1", "top5", "loss", "count")} == {
        name: expected[f"val/{name}"] for name in ("top1", "top5", "loss", "count")
    }
    assert (found["image_size"], found["val_resize"]) == (48, 60)
    assert "note" not in plain.out
    assert_refused(refused, f"--arch {TWIN}: {run}/best.pt holds {ARCH}, another architecture; leave --arch out")
    assert size.status == 0, size.err
    assert (evaluation(other)["image_size"], evaluation(other)["val_resize"]) == (64, 80)
    assert "note: --image-size 64, its run had 48" in size.out
    assert normalized.status == 0, normalized.err
    assert evaluation(tmp_path / "third")["loss"] != found["loss"]
    assert pretrained.status == 0, pretrained.err
    assert evaluation(tmp_path / "fourth")["loss"] == found["loss"]


def first_lines(runs: Sequence[Finished]) -> list[str]:
    """What each run logs that it starts from."""
    return [next(line.split(None, 1)[1] for line in run.out.splitlines() if " start " in line) for run in runs]


@pytest.mark.slow  # several runs
def test_what_a_run_starts_from(data: Path, tmp_path: Path) -> None:
    """The moving average or not, the head or not: logged, and for the user to choose."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 1)
    source = tmp_path / "source"
    renamed = tmp_path / "renamed"
    for split in ("train", "val"):
        for name in ("blue", "green", "red"):
            shutil.copytree(data / split / name, renamed / split / f"{name}ish")
    other = ("--data-dir", renamed, *flags[2:])
    weights = ("--pretrained", source / LAST)
    ema, plain, evaluated, evaluated_plain = (tmp_path / name for name in ("1", "2", "3", "4"))
    done = launch_series(
        (*flags, "--output-dir", source, "--ema-decay", 0.5),
        (*flags, *weights, "--output-dir", ema),
        (*flags, *weights, "--output-dir", plain, "--no-pretrained-ema", "--lr", 1e-12),
        (*other, *weights, "--output-dir", tmp_path / "5"),
        (*other, *weights, "--output-dir", tmp_path / "6", "--pretrained-head", "keep"),
        ("--evaluate", *weights, "--output-dir", evaluated, "--workers", 1),
        ("--evaluate", *weights, "--output-dir", evaluated_plain, "--workers", 1, "--no-pretrained-ema"),
        ("--evaluate", *weights, "--data-dir", renamed, "--output-dir", tmp_path / "7", "--workers", 1),
        ("--evaluate", "--output-dir", source, "--workers", 1),
    )
    assert [run.status for run in done[:7]] == [0] * 7, [run.err for run in done]
    assert first_lines(done[:5]) == [
        "from scratch",
        f"EMA weights of {source}/last.pt, head kept (the same 3 classes)",
        f"weights of {source}/last.pt, head kept (the same 3 classes)",
        f"EMA weights of {source}/last.pt, head new (other class names; --pretrained-head keep keeps it)",
        f"EMA weights of {source}/last.pt, head kept (--pretrained-head keep)",
    ]
    trained = read_checkpoint(source)
    torch.testing.assert_close(read_checkpoint(plain)["model"]["fc.weight"], trained["model"]["fc.weight"])
    assert not torch.equal(read_checkpoint(ema)["model"]["fc.weight"], trained["model_ema"]["fc.weight"])
    assert_keys("evaluation.json", evaluation(evaluated), "pretrained")
    assert_keys("evaluation.json", evaluation(source), "checkpoint, EMA")
    expected, names = read_metrics(source)[-1], ("loss", "weights")
    for folder, key, origin in ((evaluated, "val/ema_loss", "EMA weights"), (evaluated_plain, "val/loss", "weights")):
        result = evaluation(folder)
        assert [result[name] for name in names] == [expected[key], f"{origin} of {source}/last.pt"]
    assert_refused(done[7], f"the classes of {source}/last.pt are not those of the data")


@pytest.mark.slow  # several runs
def test_a_resume_does_not_load_pretrained_weights_again(data: Path, tmp_path: Path) -> None:
    """And a run that started without them is not resumed with them. The architecture is theirs, too."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8)
    assert TINY[0] == "--arch"
    without_arch = ("--data-dir", data, *TINY[2:], "--batch-size", 8)
    fresh, run = tmp_path / "fresh", tmp_path / "run"
    weights = ("--pretrained", fresh / LAST)
    done = launch_series(
        (*flags, "--epochs", 1, "--output-dir", fresh),
        (*without_arch, "--epochs", 1, "--output-dir", run, *weights),
        (*flags, "--epochs", 2, "--output-dir", fresh, *weights),
        (*flags, "--epochs", 2, "--output-dir", fresh, "--pretrained", run / LAST),
        (*flags, "--epochs", 2, "--output-dir", run, *weights),
        (*without_arch, "--epochs", 3, "--output-dir", run),
    )
    reason = f"--pretrained {fresh}/last.pt: {fresh} holds the run that these weights are of; give --pretrained {fresh}"
    assert_refused(
        done.pop(2),
        reason,
        "--output-dir NEW to train on from them",
        "or leave --pretrained out to go on with this one",
    )
    reason = f"--pretrained {run}/last.pt: not used, as {fresh}/last.pt is of a run that began with None"
    assert_refused(done.pop(2), reason, "leave it out, or start again: --output-dir NEW")
    assert [run.status for run in done] == [0, 0, 0, 0], done
    assert re.search(rf"--arch {TINY[1]}, --val-[^;]*: {fresh}/last.pt\n", done[1].out)
    for resumed in done[2:]:
        assert not [line for line in resumed.out.splitlines() if " changed " in line and "--pretrained" in line]
    assert read_checkpoint(run)["config"]["pretrained"] == str(fresh / LAST)


@pytest.mark.slow  # several runs
def test_a_run_goes_on_from_a_copy_of_its_checkpoint(data: Path, tmp_path: Path) -> None:
    """Elsewhere, with its metrics and its best epoch."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path / "run", "--eval-every", 3)
    (first,) = launch_series((*flags, "--epochs", 1))
    shutil.copy(tmp_path / "run" / LAST, tmp_path / "copy.pt")
    (second,) = launch_series((*flags, "--epochs", 9, "--time-limit", 0.001, "--resume", tmp_path / "copy.pt"))
    assert [first.status, second.status] == [0, 143], (first.err, second.err)
    assert read_checkpoint(tmp_path / "run", BEST)["step"] == 5
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 5, 6]


@pytest.fixture(scope="module")
def two_epochs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of a run of two epochs of five steps; not to be changed."""
    folder = tmp_path_factory.mktemp("two epochs")
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2)
    (done,) = launch_series((*flags, "--output-dir", folder, "--tensorboard"))
    assert done.status == 0, done.err
    return folder


def test_a_folder_is_of_one_run(data: Path, two_epochs: Path, tmp_path: Path) -> None:
    """A new run there is refused, and so is a resume from an earlier checkpoint or from another run's."""
    run, fork = two_epochs, tmp_path / "fork"
    assert len({read_checkpoint(run, name)["run"] for name in (LAST, *EARLIER[:2], BEST)}) == 1
    flags = ("--data-dir", data, *TINY, "--batch-size", 8)
    earlier = ("--resume", run / EARLIER[0], "--epochs", 2)
    again, back, elsewhere, forked = launch_series(
        (*flags, "--resume", "none", "--epochs", 1, "--output-dir", run),
        (*flags, *earlier, "--output-dir", run),
        (*flags, "--resume", "none", "--epochs", 1, "--output-dir", fork),
        (*flags, *earlier, "--output-dir", fork),
    )
    holds = f"--output-dir {run} holds last.pt"
    assert_refused(again, f"--resume none: {holds}, of an earlier run; give --output-dir NEW for another")
    assert_refused(back, f"--resume {run}/last-1.pt: {holds}, which is later, of step 10 and epoch 2")
    assert elsewhere.status == 0, elsewhere.err
    assert_refused(forked, f"--output-dir {fork} holds last.pt, of another run; give")


def test_overwrite_leaves_nothing_of_the_earlier_run(data: Path, two_epochs: Path, tmp_path: Path) -> None:
    run, old = shutil.copytree(two_epochs, tmp_path / "run"), read_checkpoint(two_epochs)
    (run / "evaluation.json").write_text("{}")
    events = set((run / "tensorboard").iterdir())
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", run, "--overwrite")
    resumed, again = launch_series(
        (*flags, "--resume", run / EARLIER[0], "--epochs", 2),
        (*flags, "--resume", "none", "--epochs", 1, "--tensorboard"),
    )
    assert resumed.status == 0, resumed.err
    assert again.status == 0, again.err
    new = read_checkpoint(run)
    assert new["run"] != old["run"]
    names = {path.name for path in run.iterdir()}
    assert EARLIER[1] not in names, "one epoch makes two checkpoints"
    assert "evaluation.json" not in names
    assert {read_checkpoint(run, name)["run"] for name in (LAST, EARLIER[0], BEST)} == {new["run"]}
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5, 5]
    assert not events & set((run / "tensorboard").iterdir())

    # A damaged checkpoint of the new run, beside those of the earlier one: only the new run's best is of use.
    (run / LAST).unlink()  # best.pt is the same file
    (run / LAST).write_bytes(b"damaged")
    for name in EARLIER[:2]:
        torch.save(old, run / name)
    saved, skipped = load_newest(find_checkpoints(TrainConfig(output_dir=run)))
    assert saved is not None
    assert (saved.path, saved.record.run) == (run / BEST, new["run"])
    assert [line.rpartition("/")[2] for line in skipped[1:]] == [
        f"{name}: a checkpoint of another run" for name in EARLIER[:2]
    ]


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    torch.save({"format": 4, "model": {}}, tmp_path / LAST)
    refusal = f"not a checkpoint of this version of Brisk: it has format 4, not {FORMAT}; use it"
    with pytest.raises(UserError, match=refusal):
        load_newest(find_checkpoints(TrainConfig(output_dir=tmp_path)))
    torch.save({"model": {}}, tmp_path / LAST)
    with pytest.raises(UserError, match=r"last\.pt: not a checkpoint of this version of Brisk; train\.py --pretrained"):
        load_newest(find_checkpoints(TrainConfig(output_dir=tmp_path)))


@pytest.mark.slow  # the schedule itself is quick
def test_more_epochs_change_the_schedule(data: Path, tmp_path: Path) -> None:
    """The rate before and after is logged, the warmup stays; after the last epoch a new run is advised.

    Other versions than the checkpoint's are logged, too.
    """
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path, "--lr", 0.32, "--epochs")
    first, same = launch_series((*flags, 3), (*flags, 3))
    saved = read_checkpoint(tmp_path)
    assert saved["versions"].keys() == {"torch", "torchvision", "timm", "DALI", "Pillow"}
    assert saved["versions"]["torch"] == str(torch.__version__)
    assert changed_versions(saved["versions"], saved["versions"]) == []
    saved["versions"]["timm"] = "0.4.5"
    torch.save(saved, tmp_path / LAST)
    (more,) = launch_series((*flags, 13))
    assert [one.status for one in (first, same, more)] == [0, 0, 0], more.err
    assert f"resumed after all 3 epochs, step 15, from {tmp_path}/last.pt" in same.out
    assert f"start a new run from its weights: --pretrained {tmp_path}/best.pt --output-dir NEW" in same.out
    assert "warning" not in same.out
    warnings = [line for line in more.out.splitlines() if line.startswith("warning: ")]
    lines = [line for line in warnings if "the learning rate goes from" in line]
    assert len(lines) == 1
    assert [line for line in warnings if line not in lines] == [f"warning: timm 0.4.5 -> {timm.__version__}"]
    # A global batch of 8: the peak is 0.01. Half a cosine over 14 steps after a warmup of 1 (a tenth of 3 epochs, 2
    # steps, would be 1.5 rounded to even): the last of 13 steps of decay; step 15 of 65 comes after 13 of 63 steps.
    last = 0.01 * (1 + np.cos(np.pi * 12 / 13)) / 2
    now = 0.01 * (1 + np.cos(np.pi * 13 / 63)) / 2
    assert (
        f"from {last:.4g} to {now:.4g} in one step, from {last / 0.01:.2%} to {now / 0.01:.2%} of its peak" in lines[0]
    )
    assert "(--epochs 3 -> 13); --pretrained" in lines[0]
    assert "changed  --epochs 3 -> 13\n" in more.out
    assert read_checkpoint(tmp_path)["config"]["warmup_epochs"] == 0.3
    rates = {record["step"]: record["lr"] for record in read_metrics(tmp_path) if "train/loss" in record}
    assert (rates[15], rates[16]) == (pytest.approx(last), pytest.approx(now))


def repaint(path: Path, color: tuple[int, int, int]) -> None:
    """Another image in a file of the same size: bytes behind a JPEG's end mean nothing."""
    size = path.stat().st_size
    Image.new("RGB", (40, 40), color).save(path, quality=50)
    content = path.read_bytes()
    assert len(content) <= size
    path.write_bytes(content + bytes(size - len(content)))


def test_files_that_changed_since_the_checkpoint(tmp_path: Path) -> None:
    """Another file of the same name and size: a warning, and refused where its content was known."""
    data = write_data(tmp_path / "data")
    flags = ("--data-dir", data, *TINY, "--batch-size", 8)
    plain, scanned = ((*flags, "--output-dir", tmp_path / name) for name in ("plain", "scanned"))
    skip = ("--bad-files", "skip")
    first = launch_series((*plain, "--epochs", 1), (*scanned, *skip, "--epochs", 1))
    assert [one.status for one in first] == [0, 0], first
    touched = data / "train" / "green" / "green-003.jpg"
    touched.touch()
    warned, silent = launch_series((*plain, "--epochs", 2), (*scanned, *skip, "--epochs", 2))
    assert [one.status for one in (warned, silent)] == [0, 0], silent.err
    line = "warning: 1 train file changed since the checkpoint, by time, not by size (green/green-003.jpg)"
    assert line in warned.out
    assert "changed since" not in silent.out, "its content is the same"
    repaint(data / "train" / "blue" / "blue-000.jpg", (255, 0, 0))
    (data / "val" / "red" / "red-001.jpg").touch()
    warned, refused, unscanned = launch_series(
        (*plain, "--epochs", 3), (*scanned, *skip, "--epochs", 3), (*scanned, "--epochs", 3)
    )
    assert warned.status == 0, warned.err
    assert "warning: 1 train file changed since the checkpoint, by time, not by size (blue/blue-000.jpg)" in warned.out
    assert "warning: 1 val file changed since" in warned.out
    for run in (refused, unscanned):
        reason = f"last.pt: {data}/train/blue/blue-000.jpg has another content than when it was saved"
        assert_refused(run, reason, written=("bad_files.json", "manifest.json"))
