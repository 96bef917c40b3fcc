"""A figure of training, or of evaluations, is a class: it is then in every file and line that the others are in."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY, write_data
from tests.forked import launch_forked, launch_ranks
from tests.harness import read_metrics
from utils.report.output_folder import read_run
from utils.report.page import Story, create_charts
from utils.report.terminal import record_line, screen

PROGRAM = """
import sys
import torch
import train
from utils.inference import evaluate
from utils.inference.metrics import EvalMetric
from utils.training.state import meter
from utils.training.state.metrics import TrainMetric

class SquaredLoss(TrainMetric):
    key, label = "train/squared_loss", "squared"

    def after_batch(self, loss, num_images):
        self.add(loss.square(), num_images)

class BalancedAccuracy(EvalMetric):
    def __init__(self, num_classes, device):
        self.state = torch.zeros(2, num_classes, dtype=torch.float64, device=device)

    def update(self, logits, predicted, targets):
        hits = predicted[:, 0] == targets
        classes = self.state.shape[1]
        self.state += torch.stack([torch.bincount(targets[kept], minlength=classes) for kept in (hits, ...)])

    def compute(self, state, num_images):
        return {"balanced_accuracy": 100 * (state[0] / state[1]).nanmean().item()}  # of classes with images

meter.TRAIN_METRICS += (SquaredLoss,)
evaluate.EVAL_METRICS += (BalancedAccuracy,)
sys.exit(train.main(sys.argv[1:]))
"""
KEY = "balanced_accuracy"


@pytest.mark.dist
def test_own_metrics(tmp_path: Path) -> None:
    data, out = write_data(tmp_path / "data", train=(16, 16, 16), val=(17, 4, 2)), tmp_path / "out"
    flags = ("--data-dir", data, *TINY, "--output-dir", out, "--ema-decay", 0.5)
    ranks = launch_ranks(*flags, "--epochs", 1, "--batch-size", 12, "--log-steps", 2, program=PROGRAM)
    assert {done.status for done in ranks} == {0}, ranks
    records = read_metrics(out)
    trained, evaluated = records[0], records[-1]
    assert trained["train/squared_loss"] >= trained["train/loss"] ** 2
    assert f"squared {trained['train/squared_loss']:.4f}" in ranks[0].out
    text = f"balanced accuracy {evaluated[f'val/{KEY}']:.2f} %"
    assert text in ranks[0].out
    assert text in record_line(evaluated, "top1")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary[KEY], summary[f"ema_{KEY}"]) == (evaluated[f"val/{KEY}"], evaluated[f"val/ema_{KEY}"])
    run = read_run(out)
    assert run is not None
    assert any(line.startswith("balanced accuracy") for line in screen(run))
    assert "Validation balanced accuracy" in [chart.title for chart in create_charts([Story(0, "a", run, None)])]

    alone = launch_forked(*flags, "--evaluate", program=PROGRAM)  # one process, the same images
    assert alone.status == 0, alone.err
    result = json.loads((out / "evaluation.json").read_text())
    assert result[KEY] == evaluated[f"val/{KEY}"] != result["top1"]
