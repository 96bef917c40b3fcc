"""scripts/predict.py as a command: the numbers of an evaluation, bad files, shards, several processes, kills."""

import csv
import gc
import json
import math
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from sklearn.metrics import precision_recall_fscore_support

from scripts import predict
from tests import damage, shards
from tests.conftest import CLASSES, TINY, call_main
from tests.contract import CONTRACT, assert_keys
from tests.data.test_verification import dali_accepts
from tests.forked import launch_series
from tests.harness import ROOT, launch, launch_and_end, read_checkpoint, read_metrics
from utils.inference.counts import ClassCounts
from utils.inference.predict import _finish
from utils.inference.predictions import (
    Columns,
    MultilabelColumns,
    PredictOptions,
    Rows,
)
from utils.inference.predictions_file import PredictionsFile
from utils.training.state.output import PROBE_BYTES
from utils.training.state.train_state import NETWORKS

SCRIPT = ROOT / "scripts" / "predict.py"
Row = dict[str, str]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of one epoch. No temperature: probabilities are those of the evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    (done,) = launch_series(
        ("--data-dir", data, *TINY, "--output-dir", folder, "--batch-size", 8, "--epochs", 1, "--ema-decay", 0.5)
    )
    assert done.status == 0, done.err
    saved = read_checkpoint(folder, "best.pt")
    del saved["temperature"]
    torch.save(saved, folder / "best.pt")
    return folder


def run_here(*words: object) -> None:
    assert predict.main([*map(str, words)]) == 0


def read_rows(folder: Path) -> list[Row]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def without_paths(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "path"} for row in rows]


def percent(hits: int, rows: list[Row]) -> float:
    return 100 * hits / len(rows)


@pytest.mark.parametrize("network", ["model", "ema"])
def test_the_numbers_are_those_of_the_evaluation(
    data: Path, trained: Path, tmp_path: Path, network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, flag = ("", "--no-ema") if network == "model" else ("ema_", "--ema")
    run_here(trained, data / "val", "--output-dir", tmp_path, flag)
    rows, expected = read_rows(tmp_path), json.loads((trained / "summary.json").read_text())
    assert [row["path"] for row in rows] == sorted(map(str, (data / "val").glob("*/*.jpg")))
    assert all(row["target"] == Path(row["path"]).parent.name == CLASSES[0] for row in rows[:14])
    assert all((row["correct"] == "true") == (row["label"] == row["target"]) for row in rows)
    assert percent(sum(row["correct"] == "true" for row in rows), rows) == expected[f"{prefix}top1"]
    top5 = sum(row["target"] in (row["label"], row["label_2"], row["label_3"]) for row in rows)
    assert percent(top5, rows) == expected[f"{prefix}top5"]
    for row in rows:
        probabilities = [float(row[name]) for name in ("prob", "prob_2", "prob_3")]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1)
        assert [CLASSES[int(row[f"index{k}"])] for k in ("", "_2", "_3")] == [
            row[f"label{k}"] for k in ("", "_2", "_3")
        ]
    (evaluation,) = (record for record in read_metrics(trained) if "val/loss" in record)
    loss = sum(
        -math.log(float(row["prob" + k])) for row in rows for k in ("", "_2", "_3") if row["label" + k] == row["target"]
    )
    assert loss / len(rows) == pytest.approx(evaluation[f"val/{prefix}loss"], rel=1e-5)
    out = capsys.readouterr().out
    assert f"best.pt: test_resnet{', moving average' if network == 'ema' else ''}, 32 px of 36, amp none\n" in out
    assert f"top1 {expected[f'{prefix}top1']:.2f}  count 41\n" in out
    check_classes_files(tmp_path, rows)


def check_classes_files(folder: Path, rows: list[Row]) -> None:
    """per_class.csv and confusion.csv say what the rows say."""
    pairs = Counter((row["target"], row["label"]) for row in rows)
    with (folder / "confusion.csv").open(newline="") as file:
        heading, *lines = csv.reader(file)
    assert heading == CONTRACT["files"]["confusion.csv"]
    assert lines == [[*pair, str(count)] for pair, count in sorted(pairs.items())]
    with (folder / "per_class.csv").open(newline="") as file:
        heading, *lines = csv.reader(file)
    assert heading == CONTRACT["files"]["per_class.csv"]
    with (folder / "min_prob.csv").open(newline="") as file:
        heading, *lines_of = csv.reader(file)
    assert heading == CONTRACT["files"]["min_prob.csv"]
    for least, share, accuracy in lines_of:
        answered = [row["correct"] == "true" for row in rows if float(row["prob"]) >= float(least)]
        assert float(share) == round(100 * len(answered) / len(rows), 2)
        assert accuracy == ("" if not answered else str(round(100 * sum(answered) / len(answered), 2)))
    images = Counter(row["target"] for row in rows)
    expected = [
        [name, str(images[name]), str(round(100 * pairs[name, name] / images[name], 2)), "100.0"] for name in CLASSES
    ]
    assert [line[:4] for line in lines] == expected
    targets, labels = zip(*((row["target"], row["label"]) for row in rows), strict=True)
    figures = precision_recall_fscore_support(targets, labels, labels=CLASSES, zero_division=0)
    for at, line in enumerate(lines):
        assert list(map(float, line[4:])) == pytest.approx([100 * each[at] for each in figures[:3]], abs=0.005)


def test_without_an_output_folder_the_answers_are_printed(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [*sorted((data / "val" / "red").glob("*.jpg"))[:2], tmp_path / "notes.jpg"]
    files[-1].write_text("no image")
    run_here(trained, *files, "--output-dir", "out", "--topk", 2)
    rows = read_rows(Path("out"))
    answers = [
        ", ".join(f"{row[f'label{k}']} {100 * float(row[f'prob{k}']):.1f} %" for k in ("", "_2")) for row in rows[:2]
    ]
    lines = [f"{file}: {answer}" for file, answer in zip(files, [*answers, rows[2]["error"]], strict=True)]
    capsys.readouterr()
    run_here(trained, *files, "--topk", 2)
    assert capsys.readouterr().out.splitlines()[1:5] == [*lines, "3 images, 1 of them cannot be read"]
    run_here(trained, files[0], "--topk", 2)
    assert capsys.readouterr().out.splitlines()[1:] == lines[:1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.jpg", "out"]


def test_an_answer_has_the_classes_over_their_thresholds() -> None:
    """Of a network for several labels."""
    columns = MultilabelColumns("text", CLASSES, "prob", 3, False, thresholds=[0.5, 0.7, 0.2])
    scores = np.array([[0.6, 0.6, 0.6], [0.1, 0.69, 0.1]], np.float32)
    rows = Rows(["a", "b\n"], np.zeros((2, 3), np.int64), scores, np.full(2, -1), [None, None])
    blue, green, red = CLASSES
    assert columns.encode(rows).decode() == (
        f"a: {blue} 60.0 %, {red} 60.0 %\nb\\n: none of the classes; the best is {green} 69.0 %\n"
    )


def test_mirror_images(data: Path, trained: Path, tmp_path: Path) -> None:
    """`--eval-flip` of both programs: the same loss, which is not that of the images alone."""
    flags = ("--evaluate", "--resume", trained / "best.pt", "--workers", 1, "--output-dir")
    done = launch_series((*flags, tmp_path / "plain"), (*flags, tmp_path / "flipped", "--eval-flip"))
    assert [run.status for run in done] == [0, 0], done
    plain, flipped = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("plain", "flipped"))
    assert_keys("evaluation.json", flipped, "checkpoint, EMA, --eval-flip")
    run_here(trained, data / "val", "--output-dir", tmp_path, "--no-ema", "--eval-flip")
    rows = read_rows(tmp_path)
    loss = sum(
        -math.log(float(row["prob" + k])) for row in rows for k in ("", "_2", "_3") if row["label" + k] == row["target"]
    )
    assert loss / len(rows) == pytest.approx(flipped["loss"], rel=1e-5)
    assert abs(plain["loss"] - flipped["loss"]) > 1e-4


def test_json_lines_and_parquet_are_the_csv(data: Path, trained: Path, tmp_path: Path) -> None:
    logits = (trained / "best.pt", data / "val", "--output-dir", tmp_path, "--topk", 2, "--output-type", "logit")
    run_here(*logits)
    rows = read_rows(tmp_path)
    assert list(rows[0]) == CONTRACT["files"]["predictions.csv"]
    run_here(*logits, "--format", "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [spelled(line) for line in lines] == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["confusion.csv", "per_class.csv", "predictions.jsonl"]
    run_here(*logits, "--format", "parquet")
    table = pyarrow.parquet.read_table(tmp_path / "predictions.parquet")
    assert table["logit"].type == "float"
    assert table["index_2"].type == "int32"
    expected = [{**line, **{name: pytest.approx(line[name]) for name in ("logit", "logit_2")}} for line in lines]
    assert table.to_pylist() == expected
    run_here(trained / "best.pt", data / "val", "--output-dir", tmp_path / "probabilities")
    for row, other in zip(rows, read_rows(tmp_path / "probabilities"), strict=True):
        ratio = float(other["prob"]) / float(other["prob_2"])
        assert math.exp(float(row["logit"]) - float(row["logit_2"])) == pytest.approx(ratio, rel=1e-4)


def spelled(line: dict[str, Any]) -> Row:
    """A JSON line as a CSV has it."""
    return {
        name: "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in line.items()
    }


def test_bad_files_get_a_row_each(data: Path, trained: Path, tmp_path: Path) -> None:
    """Among fifty kinds of damage and good files, those that DALI rejects have an error, and no other."""
    tree = tmp_path / "tree"
    (tree / "red").mkdir(parents=True)
    (tree / "green").mkdir()
    kinds = damage.write_kinds(tree / "red")
    irregular = damage.write_not_regular(tree / "green")
    named = damage.write_unusual_names(tree / "green", damage.JPEG)
    text = tmp_path / "notes.txt"
    text.write_text("an image by its place in the command line")
    first, *good = sorted((data / "val" / "blue").glob("*.jpg"))
    words = ("--batch-size", len(good) + 2, "--output-dir")
    run_here(trained, first, text, *good, tree, *words, tmp_path / "out")
    rows = read_rows(tmp_path / "out")
    assert len(rows) == len(kinds) + len(irregular) + len(named) + 2 + len(good)
    errors = {row["path"]: row["error"] for row in rows}
    for path in kinds.values():
        assert bool(errors[str(path)]) != (path.stat().st_size > 0 and dali_accepts(path)), path
    assert errors[str(text)] == "a text file, not an image"
    assert errors[str(tree / "green" / "pipe.jpg")] == "not a regular file"
    assert all(row["label"] == row["prob"] == row["correct"] == "" for row in rows if row["error"])
    assert all(row["label"] and row["prob"] for row in rows if not row["error"])
    assert [row["target"] for row in rows if row["path"] == str(text)] == [""]
    # A good image of the batch takes the place of the bad one, so the others are computed in the same places.
    run_here(trained, first, first, *good, *words, tmp_path / "alone")
    alone = read_rows(tmp_path / "alone")
    assert rows[: len(alone)] == [alone[0], rows[1], *alone[2:]]


@pytest.mark.slow
def test_an_image_that_only_the_loader_rejects(
    data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI takes `file://NAME` for NAME; everything else reads NAME in the folder `file:`."""
    (tmp_path / "file:").mkdir()
    image = next((data / "val" / "red").iterdir()).read_bytes()
    (tmp_path / "file:" / "red.jpg").write_bytes(image)
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "b.jpg"):
        Path(name).write_bytes(image)
    run_here(trained, "a.jpg", "file://red.jpg", "b.jpg", "--output-dir", "out")
    rows = read_rows(tmp_path / "out")
    assert [row["error"] for row in rows] == ["", "can be decoded, but --loader dali fails on it", ""]
    assert rows[0]["prob"] == rows[2]["prob"]
    assert "target" not in rows[0]
    assert not (tmp_path / "out" / "confusion.csv").exists()


@pytest.mark.parametrize(
    ("write", "pattern"),
    [
        (shards.write_webdataset, "val-*.tar"),
        pytest.param(shards.write_tfrecord, "val-*", marks=pytest.mark.slow),
        pytest.param(shards.write_recordio, "val.rec", marks=pytest.mark.slow),
        pytest.param(shards.write_lmdb, "val_lmdb", marks=pytest.mark.slow),
        pytest.param(shards.write_arrow, "val*/*.arrow", marks=pytest.mark.slow),
    ],
)
def test_shards_have_the_rows_of_the_folder(
    data: Path, trained: Path, tmp_path: Path, write: Callable[[Path, Path], Path], pattern: str
) -> None:
    root = write(data, tmp_path / "shards")
    run_here(trained, root / pattern, "--output-dir", tmp_path / "out", "--batch-size", 41)
    run_here(trained, data / "val", "--output-dir", tmp_path / "expected", "--batch-size", 41)
    found, expected = (without_paths(read_rows(tmp_path / name)) for name in ("out", "expected"))
    assert len(found) == 41
    has_targets = write not in (shards.write_recordio, shards.write_lmdb)  # which name no classes
    assert ("target" in found[0]) == has_targets or {row["target"] for row in found} == set(CLASSES)
    names = ("label", "target", "correct")
    assert sorted([row[name] for name in names] for row in found) == sorted(
        [row[name] for name in names] for row in expected
    )


def spoiled(trained: Path, folder: Path, changes: dict[str, dict[str, Any] | None]) -> Path:
    """The run's best.pt with other keys in some parts, and without those that are None."""
    content = read_checkpoint(trained, "best.pt")
    for name, values in changes.items():
        if values is None:
            del content[name]
        else:
            content[name] |= values
    torch.save(content, folder / "spoiled.pt")
    return folder / "spoiled.pt"


def test_any_name_of_a_file_or_class_is_a_row_that_csv_reads(data: Path, trained: Path, tmp_path: Path) -> None:
    content = read_checkpoint(trained, "best.pt")
    content["classes"] = ["a,b\rc", 'd"e\nf', "g\r\nh"]
    for network in NETWORKS:  # nothing but nan
        content[network] = {name: value * math.nan for name, value in content[network].items()}
    torch.save(content, tmp_path / "names.pt")
    image = next((data / "val" / "red").iterdir()).read_bytes()
    paths = [tmp_path / "a,b\rc" / f"{name}.jpg" for name in ("x\ry", "x\ny", "x\r\ny", 'x"y', "x,y", "\r")]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_bytes(image)
    words = (tmp_path / "names.pt", *paths, "--output-dir", tmp_path / "out", "--batch-size", 10**9)
    run_here(*words)
    rows = read_rows(tmp_path / "out")
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    assert {row["target"] for row in rows} == {"a,b\rc"}
    assert {row[name] for row in rows for name in ("label", "label_2", "label_3")} == set(content["classes"])
    with (tmp_path / "out" / "per_class.csv").open(newline="") as file:
        assert [line["class"] for line in csv.DictReader(file)] == content["classes"]
    run_here(*words, "--format", "jsonl")
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["prob"] for line in lines] == [None] * len(paths)


def test_a_full_disk(data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit of the size of files stands for it; the rows of 1,230 images do not fit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PROBE_BYTES + 10_000, limits[1]))
    try:
        done = call_main(
            predict.main, list(map(str, (trained, *[data / "val"] * 30, "--output-dir", tmp_path))), capsys
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reason = "cannot be written (File too large); the same command starts over"
    assert (done.status, done.err) == (2, f"predict.py: --output-dir {tmp_path}: {reason}\n")
    assert os.listdir(tmp_path) == []
    gc.collect()  # a file that is still open is a warning, and so an error


def test_an_earlier_result_stays_where_the_last_rows_do_not_fit(tmp_path: Path) -> None:
    options = PredictOptions(tmp_path, [], 1, "csv", "prob", None, None, None, "cpu", tmp_path, False)
    columns = Columns("csv", CLASSES, "prob", 1, has_targets=False)
    (tmp_path / "predictions.csv").write_text("earlier")
    file = PredictionsFile(tmp_path / "predictions.csv", columns)
    file.write(bytes(1000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            _finish([file], ClassCounts(), columns, options, {})
        file.release()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "predictions.csv").read_text() == "earlier"


@pytest.mark.slow
@pytest.mark.dist
def test_several_processes_write_the_same_bytes(data: Path, trained: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "red").mkdir(parents=True)
    damage.write_kinds(tree / "red")
    words = (trained, tree, data / "val", "--batch-size", 6)
    for processes in (1, 2, 3):
        done = launch(*words, "--output-dir", tmp_path / f"{processes}", program=SCRIPT, processes=processes)
        assert done.status == 0, done.err
    for name in ("predictions.csv", "per_class.csv", "confusion.csv"):
        one, *others = ((tmp_path / f"{processes}" / name).read_bytes() for processes in (1, 2, 3))
        assert others == [one, one], name


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGKILL), (1, signal.SIGTERM), (2, signal.SIGTERM)])
def test_a_killed_command_starts_over(
    data: Path, trained: Path, tmp_path: Path, processes: int, number: signal.Signals
) -> None:
    """No file of results is there before it is complete."""
    out = tmp_path / "out"
    words = (trained, *[data / "val"] * 100, "--output-dir", out, "--batch-size", 1)
    begun = out / ".predictions.csv.tmp"
    status = launch_and_end(
        *words, when=lambda: begun.exists() and begun.stat().st_size > 10_000, number=number, program=SCRIPT,
        processes=processes,
    )  # fmt: skip
    assert status != 0
    assert os.listdir(out) == [begun.name]
    run_here(trained, data / "val", "--output-dir", out)
    assert len(read_rows(out)) == 41
    assert not begun.exists()


@pytest.mark.gpu
def test_the_numbers_are_those_of_the_evaluation_on_a_gpu(data: Path, tmp_path: Path) -> None:
    tiny = [word for word in TINY if word not in ("--device", "cpu")]
    flags = ("--data-dir", data, *tiny, "--device", "cuda", "--output-dir", tmp_path / "run", "--batch-size", 8)
    for done in launch_series((*flags, "--epochs", 2), (*flags, "--evaluate")):
        assert done.status == 0, done.err
    done = launch(tmp_path / "run", data / "val", "--output-dir", tmp_path / "out", program=SCRIPT)
    assert done.status == 0, done.err
    rows, expected = read_rows(tmp_path / "out"), json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert percent(sum(row["correct"] == "true" for row in rows), rows) == expected["top1"]
    assert len(rows) == expected["count"]
