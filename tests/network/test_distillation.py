"""The loss with a teacher is the formula, and the teacher sees the student's images by its own normalization."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from models import create_model
from tests.conftest import assert_same, resolved
from utils.distributed.group import DistEnv
from utils.network.augment import Normalize
from utils.network.distillation import Teacher
from utils.network.gradients import ForwardBackward
from utils.network.loss import create_criterion

CPU = torch.device("cpu")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OTHER = ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a student and of a teacher, one of which is very sure, and targets."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 6, 5, generator=generator)
    teacher[0, 0] = 200.0
    return student, teacher, torch.arange(6) % 5


def divergence(student: Sequence[float], teacher: Sequence[float], temperature: float) -> float:
    """KL(softmax(teacher / T) || softmax(student / T)) in float64, by its definition."""
    logs = []
    for values in (teacher, student):
        scaled = [value / temperature for value in values]
        most = max(scaled)
        total = most + math.log(sum(math.exp(value - most) for value in scaled))
        logs.append([value - total for value in scaled])
    return math.fsum(math.exp(p) * (p - q) for p, q in zip(*logs, strict=True))


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 4.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_formula(weight: float, temperature: float, dtype: torch.dtype) -> None:
    student, teacher, targets = batch()
    student, teacher = student.to(dtype), teacher.to(dtype)
    config: dict[str, Any] = {"teacher": "any", "teacher_weight": weight, "teacher_temperature": temperature}
    found = create_criterion(resolved(**config), CPU)(student, targets, teacher)
    own = float(create_criterion(resolved(), CPU)(student.float(), targets))
    pairs = zip(student.double().tolist(), teacher.double().tolist(), strict=True)
    mean = sum(divergence(*pair, temperature) for pair in pairs) / len(student)
    expected = (1 - weight) * own + weight * temperature**2 * mean
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(expected, rel=2e-6 if dtype == torch.float32 else 1e-2)
    if weight == 0 and dtype == torch.float32:
        assert float(found) == own


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_several_labels_are_questions_of_their_own(temperature: float) -> None:
    """The mean over images and classes, each with the two answers yes and no."""
    student, teacher, targets = batch()
    hot = nn.functional.one_hot(targets, 5).float()
    settings: dict[str, Any] = {"task": "multilabel", "loss": "bce", "label_smoothing": 0.0}
    of_teacher = {"teacher": "any", "teacher_weight": 1.0, "teacher_temperature": temperature}
    found = create_criterion(resolved(**settings, **of_teacher), CPU)(student, hot, teacher)
    pairs = zip(student.double().flatten().tolist(), teacher.double().flatten().tolist(), strict=True)
    parts = [divergence((one, 0.0), (other, 0.0), temperature) for one, other in pairs]
    assert float(found) == pytest.approx(temperature**2 * sum(parts) / len(parts), rel=2e-6)


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_a_student_that_answers_as_its_teacher_learns_nothing_more(task: Any) -> None:
    _, teacher, targets = batch()
    student = teacher.clone().requires_grad_()
    of_task = {"multiclass": {}, "multilabel": {"task": task, "loss": "bce", "label_smoothing": 0.0}}[task]
    criterion = create_criterion(resolved(teacher="any", teacher_weight=1.0, teacher_temperature=2.0, **of_task), CPU)
    loss = criterion(student, targets if task == "multiclass" else nn.functional.one_hot(targets, 5).float(), teacher)
    (gradient,) = torch.autograd.grad(loss, student)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6)
    assert float(gradient.abs().max()) < 1e-6


def teacher_network() -> nn.Module:
    torch.manual_seed(1)
    return create_model("test_resnet", 4).eval().requires_grad_(False)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_teacher_sees_its_own_normalization(compiled: bool) -> None:
    """The same pixels as its own program would give it; and its classes in the order of the run."""
    network, order = teacher_network(), [2, 0, 3, 1]
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    seen, wanted = (Normalize(*each, torch.float32, CPU)(pixels) for each in (OTHER, IMAGENET))
    teacher = Teacher(network, order, IMAGENET, OTHER, CPU, compiled)
    with torch.no_grad():
        torch.testing.assert_close(teacher(seen), network(wanted)[:, order], rtol=1e-4, atol=1e-5)
        plain = Teacher(network, None, OTHER, OTHER, CPU, False)
        assert torch.equal(plain(seen), network(seen))  # nothing is computed where nothing differs


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_a_teacher_is_that_of_autograd(cpu: DistEnv, amp_dtype: torch.dtype) -> None:
    """The gradients of the formula, none for the teacher, and no random number is drawn."""
    network, student = teacher_network(), create_model("test_resnet", 4)
    student.eval()  # so that the step below does not change it
    teacher = Teacher(network, None, OTHER, OTHER, CPU, False)
    criterion = create_criterion(resolved(teacher="any", num_classes=4, teacher_temperature=2.0), CPU)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = ForwardBackward(student, criterion, scaler, amp_dtype, 1, teacher=teacher)
    images, targets = torch.randn(4, 3, 32, 32), torch.arange(4)
    before, weights = torch.get_rng_state(), {name: value.clone() for name, value in network.state_dict().items()}
    loss = step(images, targets, 0)
    found = {name: value.grad for name, value in student.named_parameters()}
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(dict(network.state_dict()), weights)
    assert all(value.grad is None for value in network.parameters())

    with torch.autocast("cpu", amp_dtype, enabled=amp_dtype != torch.float32):
        logits, answers = student(images), network(images)
    own = nn.CrossEntropyLoss(label_smoothing=0.1)(logits.float(), targets)
    p, q = ((each.float() / 2).softmax(dim=1) for each in (answers, logits))
    expected = 0.5 * own + 0.5 * 4 * (p * (p.log() - q.log())).sum(dim=1).mean()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    student.zero_grad()
    expected.backward()
    for name, value in student.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-3, atol=1e-5, msg=name)
