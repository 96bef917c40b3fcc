"""scripts/predict.py --calibrate and --min-prob: a temperature for a checkpoint, a least probability for answers."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from numpy.typing import NDArray

from scripts import export, predict
from tests.conftest import CLASSES, TINY
from tests.contract import CONTRACT, assert_keys
from tests.forked import launch_ranks, launch_series
from tests.harness import ROOT, launch, read_checkpoint
from tests.inference.exported import write_checkpoint
from utils.data.loaders.torch_loader import torch_val_transform
from utils.data.reading.decoding import upright_rgb
from utils.options.resolved import ResolvedConfig

SCRIPT = ROOT / "scripts" / "predict.py"
Row = dict[str, str]


@pytest.fixture
def best(tmp_path: Path) -> Path:
    """A network that is far too sure."""
    path = write_checkpoint(tmp_path / "run" / "best.pt", loader="torch", batch_size=7)
    saved = read_checkpoint(path.parent, path.name)
    for name in ("fc.weight", "fc.bias"):
        saved["model"][name] *= 30
    torch.save(saved, path)
    return path


def run_here(*words: object) -> None:
    assert predict.main([*map(str, (*words, "--workers", 1))]) == 0


def read_rows(folder: Path, name: str = "predictions.csv") -> list[Row]:
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[Row], name: str) -> NDArray[np.float64]:
    """Of each class in label order, (N, 3)."""
    found = [{row["label" + k]: float(row[name + k]) for k in ("", "_2", "_3")} for row in rows]
    return np.array([[row[each] for each in CLASSES] for row in found])


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits)
    return np.asarray(powers / powers.sum(1, keepdims=True))


def pixels(rows: list[Row], config: dict[str, Any]) -> NDArray[np.uint8]:
    """uint8 (N, height, width, 3) as the evaluation has them."""
    transform = torch_val_transform(ResolvedConfig.from_dict(config))
    images = [transform(upright_rgb(Path(row["path"]).read_bytes())) for row in rows]
    return np.asarray(torch.stack(images).permute(0, 2, 3, 1))


def test_a_temperature_is_fitted_used_and_exported(
    data: Path, best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """predict.py, the ONNX file and timm's network with config.json's temperature give the same probabilities."""
    before = read_checkpoint(best.parent, "best.pt")
    (data / "val" / "red" / "broken.jpg").write_text("no image")
    try:
        run_here(best.parent, data / "val", "--calibrate", "--output-dir", tmp_path / "figures")
    finally:
        (data / "val" / "red" / "broken.jpg").unlink()
    found = json.loads((tmp_path / "figures" / "calibration.json").read_text())
    assert_keys("calibration.json", found)
    assert os.listdir(tmp_path / "figures") == ["calibration.json"]
    temperature = read_checkpoint(best.parent, "best.pt")["temperature"]
    assert temperature == {"model": found["temperature"]}
    assert (found["count"], temperature["model"] != 1) == (41, True)
    assert found["calibrated_nll"] < found["nll"]
    assert f"{best}: 41 images, 1 cannot be read; each half" in (out := capsys.readouterr().out)
    assert f"temperature {found['temperature']:.3g}: ECE {found['ece']:.4f} -> " in out

    run_here(best, data / "val", "--output-dir", tmp_path / "logits", "--output-type", "logit")
    run_here(best, data / "val", "--output-dir", tmp_path / "probs")
    logits, rows = column(read_rows(tmp_path / "logits"), "logit"), read_rows(tmp_path / "probs")
    probabilities = column(rows, "prob")
    np.testing.assert_allclose(probabilities, softmax(logits / found["temperature"]), rtol=1e-5)
    assert [row["label"] for row in rows] == [row["label"] for row in read_rows(tmp_path / "logits")]
    targets = [CLASSES.index(row["target"]) for row in rows]
    assert found["nll"] == pytest.approx(-np.log(softmax(logits)[range(41), targets]).mean(), rel=1e-5)

    out_dir = tmp_path / "exported"
    for words in (("onnx", "--input", "uint8"), ("timm",)):
        assert export.main([*map(str, (best, "--output-dir", out_dir, "--no-check", "--format", *words))]) == 0
    images = pixels(rows, before["config"])
    session = onnxruntime.InferenceSession(out_dir / "model.onnx")
    (of_onnx,) = session.run(["logits"], {"images": images})
    np.testing.assert_allclose(softmax(np.asarray(of_onnx, np.float64)), probabilities, rtol=1e-4, atol=1e-6)
    assert json.loads(session.get_modelmeta().custom_metadata_map["temperature"]) == found["temperature"]
    network = timm.create_model(f"local-dir:{out_dir}", pretrained=True).eval()
    mean, std = (torch.tensor(before["normalization"][name]) for name in ("mean", "std"))
    normalized = ((torch.from_numpy(images) / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.inference_mode():
        of_timm = network(normalized) / json.loads((out_dir / "config.json").read_text())["temperature"]
    np.testing.assert_allclose(of_timm.softmax(1).numpy(), probabilities, rtol=1e-4, atol=1e-6)


def test_a_temperature_that_is_none_is_written_again(data: Path, best: Path) -> None:
    torch.save(read_checkpoint(best.parent, "best.pt") | {"temperature": {"model": -1.0, "model_ema": 2.0}}, best)
    run_here(best, data / "val", "--calibrate")
    found = read_checkpoint(best.parent, "best.pt")["temperature"]
    assert found.pop("model_ema") == 2
    assert found.pop("model") > 1


def test_several_labels_have_a_temperature_each(data: Path, tmp_path: Path) -> None:
    """Labels stay the same, in predictions and in a pt2 file, and probabilities agree."""
    best = write_checkpoint(
        tmp_path / "best.pt",
        loader="torch",
        batch_size=7,
        task="multilabel",
        best_by="map",
        loss="bce",
        label_smoothing=0.0,
    )
    saved = read_checkpoint(tmp_path, "best.pt")
    run_here(best, data / "val", "--output-dir", tmp_path / "any")
    scores = [sorted(float(row[f"prob_{name}"]) for row in read_rows(tmp_path / "any")) for name in CLASSES]
    saved["result"] = {"epoch": 0, "step": 0, "val/thresholds": [(each[20] + each[21]) / 2 for each in scores]}
    torch.save(saved, best)
    run_here(best, data / "val", "--output-dir", tmp_path / "before")
    torch.save(saved | {"temperature": {"model": [0.5, 3.0, 1.5]}}, best)
    run_here(best, data / "val", "--output-dir", tmp_path / "after")
    rows = read_rows(tmp_path / "after")
    assert [row["labels"] for row in rows] == [row["labels"] for row in read_rows(tmp_path / "before")]
    assert len({row["labels"] for row in rows}) > 1
    words = (best, "--output-dir", tmp_path / "out", "--no-check", "--format", "pt2", "--input", "uint8")
    assert export.main([*map(str, words)]) == 0
    extra = {"metadata.json": ""}
    program = torch.export.load(tmp_path / "out" / "model.pt2", extra_files=extra).module()
    facts = json.loads(extra["metadata.json"])
    found = program(torch.from_numpy(pixels(rows, saved["config"]))).detach().numpy()
    expected = np.array([[float(row[f"prob_{name}"]) for name in CLASSES] for row in rows])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    labels = ["|".join(np.array(CLASSES)[row >= facts["thresholds"]]) for row in found]
    assert labels == [row["labels"] for row in rows]
    assert facts["temperature"] == [0.5, 3.0, 1.5]


def test_an_answer_needs_a_probability(
    data: Path, best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(best, data / "val", "--output-dir", tmp_path / "all")
    rows = read_rows(tmp_path / "all")
    least = sorted(row["prob"] for row in rows)[20]  # which is answered
    capsys.readouterr()
    run_here(best, data / "val", "--output-dir", tmp_path / "sure", "--min-prob", least)
    table = capsys.readouterr().out.partition("min-prob   answered   accuracy\n")[2].splitlines()
    for row, sure in zip(rows, read_rows(tmp_path / "sure"), strict=True):
        is_sure = float(row["prob"]) >= float(least)
        unknown = {} if is_sure else {"label": "unknown", "index": "", "correct": ""}
        assert sure == row | unknown
    sums = read_rows(tmp_path / "sure", "min_prob.csv")
    assert list(sums[0]) == CONTRACT["files"]["min_prob.csv"]
    (line,) = (each for each in sums if each["answered"] == f"{100 * 21 / 41:.2f}")
    right = sum(row["correct"] == "true" for row in rows if float(row["prob"]) >= float(least))
    assert line["accuracy"] == str(round(100 * right / 21, 2))
    assert [float(text.split()[1]) for text in table] == [float(each["answered"]) for each in sums]
    image = rows[[row["prob"] < least for row in rows].index(True)]
    run_here(best, image["path"], "--min-prob", 1, "--topk", 1)
    shown = f"{float(image['prob']):.1%}".replace("%", " %")
    assert f"{image['path']}: unknown; the best are {image['label']} {shown}\n" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    data: Path, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (best.parent / ".best.pt.tmp").mkdir()  # in the way of the new file, as nothing is that root may not write
    (best.parent / ".best.pt.tmp" / "file").touch()
    assert predict.main([*map(str, (best, data / "val", "--calibrate", "--workers", 1))]) == 2
    assert "best.pt or calibration.json cannot be written (" in capsys.readouterr().err
    assert "temperature" not in read_checkpoint(best.parent, "best.pt")


@pytest.mark.slow
@pytest.mark.dist
def test_several_processes_find_the_same_temperature(data: Path, best: Path, tmp_path: Path) -> None:
    found = []
    for processes in (1, 2, 3):
        words = (best, data / "val", "--calibrate", "--output-dir", tmp_path / f"{processes}")
        done = launch(*words, program=SCRIPT, processes=processes)
        assert done.status == 0, done.err
        found.append((tmp_path / f"{processes}" / "calibration.json").read_bytes())
    assert found == [found[0]] * 3


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_ends_with_a_temperature_the_same_on_several_processes(data: Path, tmp_path: Path) -> None:
    """A resume after it is that of a run without one, as last.pt has none."""
    flags = ("--data-dir", data, *TINY, "--epochs", 1, "--ema-decay", 0.5, "--report")
    alone = tmp_path / "1"
    (done,) = launch_series((*flags, "--output-dir", alone))
    assert done.status == 0, done.err
    saved, summary = read_checkpoint(alone, "best.pt"), json.loads((alone / "summary.json").read_text())
    ((network, temperature),) = saved["temperature"].items()
    assert network == ("model_ema" if summary["ema_top1"] > summary["top1"] else "model")
    assert temperature == summary["temperature"]
    assert "temperature" not in read_checkpoint(alone, "last.pt")
    assert f"temperature {temperature:.3g}: ECE {summary['ece']:.4f} -> {summary['calibrated_ece']:.4f}" in done.out
    prefix = "ema_" if network == "model_ema" else ""
    assert summary["nll"] == pytest.approx(saved["result"][f"val/{prefix}loss"], rel=1e-5)
    of_run = json.loads((alone / "report.json").read_text())["calibration"]
    again = ("--evaluate", "--report", "--resume", alone / "best.pt", "--output-dir")
    for ranks in (2, 3):
        ended = launch_ranks(*again, tmp_path / f"{ranks}", processes=ranks)
        assert [each.status for each in ended] == [0] * ranks, ended
        found = json.loads((tmp_path / f"{ranks}" / "report.json").read_text())["calibration"]
        for part in ("before", "after"):  # batches of other sizes compute other last digits
            assert found[part].pop("bins") == [pytest.approx(each, rel=1e-6) for each in of_run[part]["bins"]]
            assert found[part] == pytest.approx({name: of_run[part][name] for name in found[part]}, abs=1e-6)
        assert found["answered"] == of_run["answered"]
        assert found["temperature"] == pytest.approx(temperature, rel=1e-4)
