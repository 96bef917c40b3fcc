"""Which network of a checkpoint is exported, and its geometry."""

from pathlib import Path

import pytest

from scripts import export
from tests.conftest import CLASSES, assert_same
from tests.harness import read_checkpoint
from tests.inference.exported import MEAN, STD, write_checkpoint
from utils.errors import UserError
from utils.inference.export.hub import model_card
from utils.inference.export.trained import load_trained
from utils.inference.weights import find_best_checkpoints


@pytest.mark.parametrize(
    ("result", "ema", "weights", "top1"),
    [
        ({"val/top1": 50.0, "val/ema_top1": 60.0}, None, "model_ema", 60.0),
        ({"val/top1": 60.0, "val/ema_top1": 60.0}, None, "model", 60.0),
        ({"val/top1": 50.0, "val/ema_top1": 60.0}, False, "model", 50.0),
        ({"val/top1": 50.0, "val/ema_top1": 40.0}, True, "model_ema", 40.0),
        ({}, None, "model", None),
    ],
)
def test_weights(tmp_path: Path, result: dict[str, float], ema: bool | None, weights: str, top1: float | None) -> None:
    path = write_checkpoint(tmp_path / "best.pt", result=result, with_ema=True)
    trained = load_trained(path, ema)
    assert (trained.weights, trained.figure) == (weights, top1 and ("top1", top1))
    assert_same(dict(trained.model.state_dict()), dict(read_checkpoint(tmp_path, "best.pt")[weights]))
    assert (trained.classes, trained.normalization) == (CLASSES, (MEAN, STD))
    assert not trained.model.training


@pytest.mark.parametrize("position", [{"step": -1}, {"epoch": -1}])
def test_an_evaluation_of_other_weights(
    tmp_path: Path, position: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """That of an earlier step chooses the network; its top-1 is stated nowhere."""
    result = {"val/top1": 50.0, "val/ema_top1": 60.0} | position
    path = write_checkpoint(tmp_path / "last.pt", result=result, with_ema=True)
    trained = load_trained(path)
    assert (trained.weights, trained.figure, trained.metadata["top1"]) == ("model_ema", None, None)
    assert "top-1" not in model_card(trained)
    arguments = (path, "--format", "timm", "--output-dir", tmp_path / "out", "--no-check")
    assert export.main([str(word) for word in arguments]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: test_resnet, 3 classes, EMA weights, not evaluated\n")


def test_an_average_that_is_not_there(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "last.pt", result={"val/top1": 50.0})
    assert load_trained(path).weights == "model"
    with pytest.raises(UserError, match=r"^--ema: .*last.pt has no EMA weights; leave --ema out$"):
        load_trained(path, ema=True)


def test_a_folder_means_its_best_then_its_newest(tmp_path: Path) -> None:
    for name in ("last-1.pt", "last.pt", "best.pt"):
        (tmp_path / name).touch()
        assert find_best_checkpoints(tmp_path)[0] == tmp_path / name
        assert find_best_checkpoints(tmp_path / "last-1.pt") == [tmp_path / "last-1.pt"]
