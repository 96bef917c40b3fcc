"""Which run a folder holds, what a checkpoint decides for those that use it, and what they are told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.conftest import TINY, Finished, read_checkpoint, read_metrics, write_data
from tests.contract import assert_keys
from utils.config import TrainConfig
from utils.errors import UserError
from utils.training.checkpoint import BEST, EARLIER, LAST, find_checkpoints, load_newest
from utils.training.compatibility import changed_versions

# Two architectures with the same names and shapes of weights, which compute another thing.
ARCH, TWIN = "tf_mobilenetv3_small_075", "mobilenetv3_small_075"
Series = Callable[..., list[Finished]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def evaluation(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


def test_an_evaluation_is_as_its_run_was(data: Path, tmp_path: Path, launch_series: Series) -> None:
    """Architecture, sizes, normalization, precision, data: all from the checkpoint, which alone is named."""
    shutil.copytree(data, tmp_path / "data")
    run, other = tmp_path / "run", tmp_path / "other"
    flags = ("--arch", ARCH, "--image-size", 48, "--val-resize", 60, "--epochs", 1, "--batch-size", 8)
    (done,) = launch_series(("--data-dir", tmp_path / "data", *TINY, *flags, "--amp", "bf16", "--output-dir", run))
    assert done.status == 0, done.err
    own = read_metrics(run)[-1]
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
        name: own[f"val/{name}"] for name in ("top1", "top5", "loss", "count")
    }
    assert (found["image_size"], found["val_resize"]) == (48, 60)
    assert "note" not in plain.out
    assert refused.status == 2
    assert f"--arch {TWIN}: {run}/best.pt holds {ARCH}, another architecture; leave --arch out" in refused.err
    assert size.status == 0, size.err
    assert (evaluation(other)["image_size"], evaluation(other)["val_resize"]) == (64, 80)
    assert "note: --image-size 64, its run had 48" in size.out
    assert normalized.status == 0, normalized.err
    assert evaluation(tmp_path / "third")["loss"] != found["loss"]
    assert pretrained.status == 0, pretrained.err
    assert evaluation(tmp_path / "fourth")["loss"] == found["loss"]


def test_what_a_run_starts_from(data: Path, tmp_path: Path, launch_series: Series) -> None:
    """The moving average or not, the head or not: said, and for the user to choose; a resume loads neither again."""
    first = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 1)
    source = tmp_path / "source"
    renamed = tmp_path / "renamed"
    for split in ("train", "val"):
        for name in ("blue", "green", "red"):
            shutil.copytree(data / split / name, renamed / split / f"{name}ish")
    others = ("--data-dir", renamed, *first[2:])
    weights = ("--pretrained", source / LAST)
    runs = [tmp_path / name for name in ("ema", "plain", "other", "kept", "fresh")]
    done = launch_series(
        (*first, "--output-dir", source, "--ema-decay", 0.5),
        (*first, *weights, "--output-dir", runs[0]),
        (*first, *weights, "--output-dir", runs[1], "--no-pretrained-ema", "--lr", 1e-12),
        (*others, *weights, "--output-dir", runs[2]),
        (*others, *weights, "--output-dir", runs[3], "--pretrained-head", "keep"),
        (*first, "--output-dir", runs[4]),
        ("--evaluate", *weights, "--output-dir", tmp_path / "evaluated", "--workers", 1),
        ("--evaluate", *weights, "--output-dir", tmp_path / "not", "--workers", 1, "--no-pretrained-ema"),
        ("--evaluate", *weights, "--data-dir", renamed, "--output-dir", tmp_path / "wrong", "--workers", 1),
        ("--evaluate", "--output-dir", source, "--workers", 1),
    )
    assert [one.status for one in done] == [0] * 8 + [2, 0], [one.err for one in done]
    assert_keys("evaluation.json", evaluation(tmp_path / "evaluated"), "pretrained")
    assert_keys("evaluation.json", evaluation(source), "checkpoint, EMA")
    said = [next(line.split(None, 1)[1] for line in one.out.splitlines() if " start " in line) for one in done[:6]]
    assert said[1] == f"EMA weights of {source}/last.pt, head kept (the same 3 classes)"
    assert said[2] == f"weights of {source}/last.pt, head kept (the same 3 classes)"
    assert said[3] == f"EMA weights of {source}/last.pt, head new (other class names; --pretrained-head keep keeps it)"
    assert said[4] == f"EMA weights of {source}/last.pt, head kept (--pretrained-head keep)"
    assert said[0] == said[5] == "from scratch"
    trained, plain = read_checkpoint(source), read_checkpoint(runs[1])
    torch.testing.assert_close(plain["model"]["fc.weight"], trained["model"]["fc.weight"])
    assert not torch.equal(read_checkpoint(runs[0])["model"]["fc.weight"], trained["model_ema"]["fc.weight"])
    own = read_metrics(source)[-1]
    assert evaluation(tmp_path / "evaluated")["loss"] == own["val/ema_loss"]
    assert evaluation(tmp_path / "evaluated")["weights"] == f"EMA weights of {source}/last.pt"
    assert evaluation(tmp_path / "not")["loss"] == own["val/loss"]
    assert evaluation(tmp_path / "not")["weights"] == f"weights of {source}/last.pt"
    assert f"the classes of {source}/last.pt are not those of the data" in done[8].err

    before = contents(runs[4])
    refused, again, silent = launch_series(
        (*first, *weights, "--output-dir", runs[4], "--epochs", 2),
        (*first, *weights, "--output-dir", runs[0], "--epochs", 2),
        (*first, "--output-dir", runs[0], "--epochs", 3),
    )
    assert refused.status == 2
    assert (
        f"--pretrained {source}/last.pt: not used, as {runs[4]}/last.pt is of a run that began with None" in refused.err
    )
    assert "give another --output-dir" in refused.err
    assert contents(runs[4]) == before
    for one in (again, silent):
        assert one.status == 0, one.err
        assert not [line for line in one.out.splitlines() if " changed " in line and "--pretrained" in line]
    assert read_checkpoint(runs[0])["config"]["pretrained"] == str(source / LAST)


def test_a_folder_is_of_one_run(data: Path, tmp_path: Path, launch_series: Series) -> None:
    """Starting anew there is refused, and with --overwrite nothing of the old run is left that could be resumed."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8)
    run, fork = tmp_path / "run", tmp_path / "fork"
    (first,) = launch_series((*flags, "--epochs", 2, "--output-dir", run, "--tensorboard"))
    assert first.status == 0, first.err
    old = read_checkpoint(run)
    assert {read_checkpoint(run, name)["run"] for name in (LAST, *EARLIER, BEST)} == {old["run"]}
    before = contents(run)
    (run / "evaluation.json").write_text("{}")
    events = set((run / "tensorboard").iterdir())
    anew = (*flags, "--resume", "none", "--output-dir", run)
    refused, back, elsewhere, forked = launch_series(
        (*anew, "--epochs", 1),
        (*flags, "--resume", run / EARLIER[0], "--output-dir", run, "--epochs", 2),
        (*anew, "--epochs", 1, "--output-dir", fork),
        (*flags, "--resume", run / EARLIER[0], "--output-dir", fork, "--epochs", 2),
    )
    assert [one.status for one in (refused, back, elsewhere, forked)] == [2, 2, 0, 2]
    assert (
        f"--resume none: --output-dir {run} holds last.pt, of an earlier run; give another --output-dir" in refused.err
    )
    assert (
        f"--resume {run}/last-1.pt: --output-dir {run} holds last.pt, which is later, of step 10 and epoch 2"
        in back.err
    )
    assert f"--output-dir {fork} holds last.pt, of another run; give" in forked.err
    assert contents(run) == before | {"evaluation.json": b"{}"}

    gone_back, overwritten = launch_series(
        (*flags, "--resume", run / EARLIER[0], "--output-dir", run, "--epochs", 2, "--overwrite"),
        (*anew, "--epochs", 1, "--overwrite", "--tensorboard"),
    )
    assert gone_back.status == 0, gone_back.err
    assert overwritten.status == 0, overwritten.err
    new = read_checkpoint(run)
    assert new["run"] != old["run"]
    kept = {path.name for path in run.iterdir()}
    assert EARLIER[1] not in kept, "one epoch makes two checkpoints"
    assert "evaluation.json" not in kept
    assert {read_checkpoint(run, name)["run"] for name in (LAST, EARLIER[0], BEST)} == {new["run"]}
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5, 5]
    assert not events & set((run / "tensorboard").iterdir())

    # A damaged checkpoint of the new run, beside an older run's: only the new run's best is of use.
    (run / LAST).unlink()  # best.pt is the same file
    (run / LAST).write_bytes(b"damaged")
    for name in EARLIER:
        torch.save(old, run / name)
    saved, skipped = load_newest(find_checkpoints(TrainConfig(output_dir=run)))
    assert saved is not None
    assert (saved.path, saved.record.run) == (run / BEST, new["run"])
    assert [line.rpartition("/")[2] for line in skipped[1:]] == [
        f"{name}: a checkpoint of another run" for name in EARLIER
    ]


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    torch.save({"format": 4, "model": {}}, tmp_path / LAST)
    with pytest.raises(UserError, match=r"not a checkpoint of this version of Brisk: it has format 4, not 6; resume"):
        load_newest(find_checkpoints(TrainConfig(output_dir=tmp_path)))
    torch.save({"model": {}}, tmp_path / LAST)
    with pytest.raises(UserError, match=r"last\.pt: not a checkpoint of this version of Brisk; --pretrained"):
        load_newest(find_checkpoints(TrainConfig(output_dir=tmp_path)))


def test_more_epochs_change_the_schedule(data: Path, tmp_path: Path, launch_series: Series) -> None:
    """The rate before and after is told, the warmup stays; after the last epoch a new run is advised.

    So are other versions than the checkpoint's.
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


def repaint(path: Path, colour: tuple[int, int, int]) -> None:
    """Another image in a file of the same size: bytes behind a JPEG's end mean nothing."""
    size = path.stat().st_size
    Image.new("RGB", (40, 40), colour).save(path, quality=50)
    content = path.read_bytes()
    assert len(content) <= size
    path.write_bytes(content + bytes(size - len(content)))


def test_files_that_changed_since_the_checkpoint(tmp_path: Path, launch_series: Series) -> None:
    """Another file of the same name and size: told, and refused where its content was known."""
    data = write_data(tmp_path / "data")
    flags = ("--data-dir", data, *TINY, "--batch-size", 8)
    plain, scanned = ((*flags, "--output-dir", tmp_path / name) for name in ("plain", "scanned"))
    skip = ("--bad-files", "skip")
    first = launch_series((*plain, "--epochs", 1), (*scanned, *skip, "--epochs", 1))
    assert [one.status for one in first] == [0, 0], first
    touched = data / "train" / "green" / "green-003.jpg"
    touched.touch()
    told, silent = launch_series((*plain, "--epochs", 2), (*scanned, *skip, "--epochs", 2))
    assert [one.status for one in (told, silent)] == [0, 0], silent.err
    line = "warning: 1 train file changed since the checkpoint, by time, not by size (green/green-003.jpg)"
    assert line in told.out
    assert "changed since" not in silent.out, "its content is the same"
    repaint(data / "train" / "blue" / "blue-000.jpg", (255, 0, 0))
    (data / "val" / "red" / "red-001.jpg").touch()
    before = contents(tmp_path / "scanned")
    told, refused, unscanned = launch_series(
        (*plain, "--epochs", 3), (*scanned, *skip, "--epochs", 3), (*scanned, "--epochs", 3)
    )
    assert told.status == 0, told.err
    assert "warning: 1 train file changed since the checkpoint, by time, not by size (blue/blue-000.jpg)" in told.out
    assert "warning: 1 val file changed since" in told.out
    for one in (refused, unscanned):
        assert one.status == 2
        assert f"last.pt: {data}/train/blue/blue-000.jpg has another content than when it was saved" in one.err
    assert {name: content for name, content in contents(tmp_path / "scanned").items() if name in before} | {
        "manifest.json": before["manifest.json"]
    } == before
