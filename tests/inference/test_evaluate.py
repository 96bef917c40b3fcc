"""Every validation image counts once, whatever the ranks and the batch size."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import pipelines
from tests.conftest import TINY, resolved
from tests.forked import launch_ranks, launch_series
from tests.inference.exported import write_checkpoint
from utils.data.formats.folder import scan_splits
from utils.distributed.group import DistEnv
from utils.inference.evaluate import FlipAverage, compute_logits, describe_result, evaluate
from utils.inference.mistakes import Mistakes
from utils.targets import Targets
from utils.training.optimization.optim import create_ema

CONFIG = resolved(batch_size=4, image_size=32, val_resize=36, workers=1, hw_decoder_load=0.65, prefetch=2)


@pytest.mark.dist
@pytest.mark.parametrize(
    "layouts", [[(1, 20), (3, 4)], pytest.param([(1, 4), (2, 20), (2, 4), (3, 20)], marks=pytest.mark.slow)]
)
def test_41_images_on_1_2_3_processes(data: Path, tmp_path: Path, layouts: list[tuple[int, int]]) -> None:
    flags = ("--data-dir", data, *TINY, "--output-dir", tmp_path)
    write_checkpoint(tmp_path / "best.pt", data=data)
    results = []
    for processes, batch_size in layouts:
        words = (*flags, "--evaluate", "--batch-size", batch_size)
        ranks = launch_series(words) if processes == 1 else launch_ranks(*words, processes=processes)
        assert {done.status for done in ranks} == {0}, ranks
        results.append(json.loads((tmp_path / "evaluation.json").read_text()))
    assert {result["count"] for result in results} == {41}
    assert len({(result["top1"], result["top5"]) for result in results}) == 1
    assert max(result["loss"] for result in results) == pytest.approx(min(result["loss"] for result in results))


class Brightest(nn.Module):
    """Classifies the images of the fixture `data` by their brightest channel; blue, green, red are 0, 1, 2."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3)).flip(1)


class Small(Brightest):
    """As on a GPU that has memory for `most` images at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.sizes = most, list[int]()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.most:
            raise torch.OutOfMemoryError
        self.sizes.append(len(images))
        return super().forward(images)


def test_images_that_need_too_much_memory_are_computed_in_parts(cpu: DistEnv) -> None:
    images = torch.randint(0, 256, (11, 3, 8, 8), dtype=torch.uint8)
    expected = compute_logits(Brightest(), images, torch.Tensor.float, cpu, torch.float32)
    model = Small(most=3)
    assert torch.equal(compute_logits(model, images, torch.Tensor.float, cpu, torch.float32), expected)
    assert model.sizes == [3, 3, 3, 2]
    with pytest.raises(torch.OutOfMemoryError):
        compute_logits(Small(most=0), images, torch.Tensor.float, cpu, torch.float32)


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_counts_are_right(data: Path, cpu: DistEnv, loader: str) -> None:
    _, val = scan_splits(data)
    config = dataclasses.replace(CONFIG, loader=loader)  # type: ignore[arg-type]
    batches = pipelines.create_val_loader(config, val, cpu)
    result = evaluate(Brightest(), batches, lambda images: images.float() / 255, 41, Targets(3), cpu, torch.float32)
    assert result["top1"] == 100.0
    wrong = evaluate(
        nn.Sequential(Brightest(), Shift()), batches, lambda x: x.float() / 255, 41, Targets(3), cpu, torch.float32
    )
    assert wrong["top1"] == 0.0
    assert wrong["top5"] == 100.0  # of three classes, all are among the top five
    assert wrong["count"] == 41


class Shift(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(1, dims=1)


class Rounded(nn.Module):
    """Logits with many equal ones, as of half precision; those of one image are not finite."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = torch.randn(len(images), 3, generator=torch.Generator().manual_seed(0)).round()
        logits[0] = math.nan
        return logits


def test_mistakes_are_those_of_top1(data: Path, cpu: DistEnv) -> None:
    _, val = scan_splits(data)
    batches = pipelines.create_val_loader(CONFIG, val, cpu)
    mistakes = Mistakes(CONFIG, val, cpu)
    top1 = evaluate(Rounded(), batches, lambda images: images.float(), 41, Targets(3), cpu, torch.float32, [mistakes])[
        "top1"
    ]
    pictures = mistakes.pictures({})
    assert pictures is not None
    assert sum(each["correct"] for each in pictures.classes) == round(top1 * 41 / 100)
    assert all(0 <= each["probability"] <= 1 for each in pictures.worst)


CLASSES = 12
RANKS = (1, 5, 2, 6, 1, 12, 4, 6, 1, 5)  # of the target among the logits of each image


def known_images(order: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uint8 (10, 3, 2, 2), the 12 pixels of each the numbers 11 to 0 in another order, and targets with `RANKS`."""
    pixels = torch.arange(CLASSES - 1, -1, -1, dtype=torch.uint8).expand(len(RANKS), CLASSES)
    places = torch.stack([torch.randperm(CLASSES, generator=torch.Generator().manual_seed(order)) for _ in RANKS])
    images = torch.empty_like(places, dtype=torch.uint8).scatter_(1, places, pixels)
    return images.view(-1, 3, 2, 2), places[torch.arange(len(RANKS)), torch.tensor(RANKS) - 1]


def copying_network() -> nn.Module:
    """The logits of an image are its 12 pixels; only in training does it drop some."""
    linear = nn.Linear(CLASSES, CLASSES)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(CLASSES))
        linear.bias.zero_()
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), linear)


@pytest.mark.parametrize("batch_sizes", [[10], [1] * 10, [4, 4, 2], [3, 0, 7]])
def test_known_logits_of_twelve_classes(cpu: DistEnv, batch_sizes: list[int]) -> None:
    images, targets = known_images(0)
    batches = zip(torch.split(images, batch_sizes), torch.split(targets, batch_sizes), strict=True)
    result = evaluate(
        copying_network(), batches, lambda images: images.float() / 4, 10, Targets(CLASSES), cpu, torch.float32
    )
    all_exps = sum(math.exp(number / 4) for number in range(CLASSES))
    loss = sum(math.log(all_exps) - (CLASSES - rank) / 4 for rank in RANKS) / len(RANKS)
    shown = {name: value for name, value in result.items() if not name.startswith("macro_")}
    assert shown == {"top1": 30.0, "top5": 70.0, "loss": pytest.approx(loss, rel=1e-6), "count": 10}


@pytest.mark.parametrize(("dtype", "spacing"), [(torch.float32, 512), (torch.bfloat16, 64)])
def test_precision_of_the_forward_pass(cpu: DistEnv, dtype: torch.dtype, spacing: int) -> None:
    """Logits from 2 to 2 + 11 / 512, which bf16 rounds to 2 and 2 + 1 / 64."""
    images, targets = known_images(1)
    result = evaluate(
        copying_network(), [(images, targets)], lambda x: 2 + x.float() / 512, 10, Targets(CLASSES), cpu, dtype
    )
    logits = [2 + round(number / 512 * spacing) / spacing for number in range(CLASSES - 1, -1, -1)]
    loss = math.log(sum(map(math.exp, logits))) - sum(logits[rank - 1] for rank in RANKS) / len(RANKS)
    assert result["loss"] == pytest.approx(loss, rel=1e-6)


@torch.no_grad()
def test_logits_of_mirror_images_are_averaged(cpu: DistEnv) -> None:
    images, targets = known_images(0)
    network = copying_network().eval()
    mirrored = images.flip(3)
    logits = (network(images.float()) + network(mirrored.float())) / 2
    found = evaluate(
        FlipAverage(network), [(images, targets)], torch.Tensor.float, 10, Targets(CLASSES), cpu, torch.float32
    )
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, targets)))
    assert found["top1"] == 100 * float((logits.argmax(1) == targets).double().mean())


def test_lost_images_fail_the_run(data: Path, cpu: DistEnv) -> None:
    _, val = scan_splits(data)
    batches = list(pipelines.create_val_loader(CONFIG, val, cpu))
    with pytest.raises(RuntimeError, match="saw 37 of 41 validation images"):
        evaluate(Brightest(), batches[1:], lambda images: images.float(), 41, Targets(3), cpu, torch.float32)


def test_the_model_keeps_its_mode(data: Path, cpu: DistEnv) -> None:
    model = Brightest().train()
    images, targets = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    evaluate(model, [(images, targets)], lambda images: images.float(), 2, Targets(3), cpu, torch.float32)
    assert model.training


@pytest.mark.parametrize(
    ("arch", "size"),
    [
        ("levit_128s", 64),
        ("efficientformerv2_s0", 64),
        pytest.param("tiny_vit_5m_224", 224, marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_depends_on_the_weights_alone(cpu: DistEnv, arch: str, size: int) -> None:
    """Not on an earlier one: in evaluations these networks keep what they have computed from their weights."""
    torch.manual_seed(0)
    batch = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8), torch.tensor([0, 2])
    reused, fresh = (models.create_model(arch, 3, image_size=size) for _ in range(2))
    change_weights(fresh)
    results = []

    def same_loss(one: nn.Module, other: nn.Module) -> bool:
        losses = [
            evaluate(m, [batch], lambda x: x.float() / 255, 2, Targets(3), cpu, torch.float32)["loss"]
            for m in (one, other)
        ]
        results.append(losses[0])
        return bool(losses[0] == losses[1])

    reused.eval()  # as with --evaluate, which loads one network after the other
    assert not same_loss(reused, fresh)
    reused.load_state_dict(fresh.state_dict())
    assert same_loss(reused, fresh)
    average = create_ema(reused, decay=0.9)
    assert same_loss(average.module, fresh)
    change_weights(reused)
    average.update(reused, step=9)
    fresh.load_state_dict(average.module.state_dict())
    assert same_loss(average.module, fresh)
    assert len(set(results)) == 3


@torch.no_grad()
def change_weights(model: nn.Module) -> None:
    """Make attention matter, which does not in a network at its start, and change what is computed from it."""
    for name, parameter in model.named_parameters():
        if name.endswith("attention_biases"):
            parameter.add_(torch.randn_like(parameter))
        elif parameter.ndim == 1 and name.endswith("weight"):
            parameter.fill_(1)


def test_numbers_are_rounded_on_the_screen() -> None:
    result = {"checkpoint": "last.pt", "image_size": 32, "top1": 100 / 3, "ema_top5": 100.0, "ema_loss": 1.12646596}
    shown = describe_result(result, num_classes=6)
    assert shown == "checkpoint last.pt  image_size 32  top1 33.33  ema_top5 100.00  ema_loss 1.1265"


def test_top5_of_five_classes_is_left_out() -> None:
    result = {"top1": 60.0, "top5": 100.0, "ema_top5": 100.0, "real_top5": 100.0, "count": 10}
    assert describe_result(result, num_classes=5) == "top1 60.00  count 10"
