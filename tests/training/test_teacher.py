"""Which network a `--teacher` is, of a run, of a file or of timm, and what is known of its classes."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import models
from tests.conftest import CLASSES, resolved
from tests.harness import read_checkpoint
from tests.inference.exported import MEAN, STD, write_checkpoint
from tests.network.test_published_weights import VARIANT, Proxy, proxy  # noqa: F401
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.resolved import ResolvedConfig
from utils.training.resume.compatibility import run_fingerprint
from utils.training.settings.teacher import TrainedTeacher, create_teacher, read_teacher

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def config_for(teacher: object, **values: Any) -> ResolvedConfig:
    return resolved(**{"image_size": 32, "val_resize": 36} | values, teacher=str(teacher))


def read(teacher: object, cpu: DistEnv, classes: tuple[str, ...] = CLASSES, **values: Any) -> TrainedTeacher:
    found = read_teacher(config_for(teacher, **values), classes, cpu)
    assert found is not None
    return found


def network_of(path: Path, name: str = "model", arch: str = "test_resnet") -> nn.Module:
    """A network of a checkpoint, as timm builds it."""
    network: nn.Module = timm.create_model(arch, num_classes=3)
    network.load_state_dict(read_checkpoint(path.parent, path.name)[name])
    return network.eval()


def answers(network: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = network.to(memory_format=torch.channels_last)(IMAGES)
    return logits


@pytest.mark.parametrize(
    ("result", "name", "shown"),
    [
        ({"val/top1": 50.0, "val/ema_top1": 60.0}, "model_ema", "EMA weights of {}; top-1 60.00 %"),
        ({"val/top1": 50.0, "val/ema_top1": 40.0}, "model", "weights of {}; top-1 50.00 %"),
    ],
)
def test_the_better_network_of_a_run(
    cpu: DistEnv, tmp_path: Path, result: dict[str, Any], name: str, shown: str
) -> None:
    best = write_checkpoint(tmp_path / "run" / "best.pt", result=result, with_ema=True)
    shutil.copy(best, best.parent / "last.pt")
    torch.save(read_checkpoint(best.parent, "last.pt") | {"model": {}}, best.parent / "last.pt")
    for given in (best.parent, best):
        found = read(given, cpu)
        assert torch.equal(answers(found.network), answers(network_of(best, name)))
        assert found.facts == f"test_resnet, 0.37 M parameters, {shown.format(best)}"
        assert (found.normalization, found.order) == ((MEAN, STD), None)
    assert not any(weight.requires_grad for weight in found.network.parameters())
    assert not any(module.training for module in found.network.modules())


def test_classes_in_another_order_are_taken_by_name(cpu: DistEnv, tmp_path: Path) -> None:
    best = write_checkpoint(tmp_path / "best.pt")
    names = ("red", "blue", "green")
    same, other = read(best, cpu), read(best, cpu, names)
    assert other.order == [2, 0, 1]
    assert other.facts.endswith("its classes in another order, taken by name")
    config = config_for(best)
    teachers = [create_teacher(each, config, (MEAN, STD), cpu, None)[0] for each in (same, other)]
    assert teachers[0] is not None
    assert teachers[1] is not None
    found = {name: teachers[1](IMAGES)[:, at] for at, name in enumerate(names)}
    expected = {name: teachers[0](IMAGES)[:, at] for at, name in enumerate(CLASSES)}
    assert all(torch.equal(found[name], expected[name]) for name in CLASSES)
    assert same.identity != other.identity  # the order is a part of the answers


def test_outputs_without_a_class_stay_in_their_place(cpu: DistEnv, tmp_path: Path) -> None:
    best = write_checkpoint(tmp_path / "best.pt", num_classes=5)
    assert read(best, cpu, ("red", "blue", "green"), num_classes=5).order == [2, 0, 1, 3, 4]


def test_a_folder_of_timm(cpu: DistEnv, tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    settings = {"label_names": list(CLASSES), "mean": list(MEAN), "std": list(STD), "input_size": [3, 64, 64]}
    save_for_hf(model, tmp_path, model_config=settings, safe_serialization=True)
    found = read(tmp_path, cpu)
    assert torch.equal(answers(found.network), answers(model.eval()))


def test_a_file_that_is_named_after_its_network(cpu: DistEnv, tmp_path: Path) -> None:
    """As the line of a machine without a network says it; the tag has the normalization."""
    model = timm.create_model(VARIANT, num_classes=3)
    torch.save(model.state_dict(), tmp_path / f"{VARIANT}.pth")
    found = read(tmp_path / f"{VARIANT}.pth", cpu)
    assert torch.equal(answers(found.network), answers(model.eval()))
    assert found.normalization == models.normalization(model)
    assert "its class names are not known to be those of the run" in found.facts
    assert "sees the run's images of 32 px, and was made for 160 px" in found.facts


def test_a_transformer_is_built_for_the_size_of_the_run(cpu: DistEnv, tmp_path: Path) -> None:
    best = write_checkpoint(tmp_path / "best.pt", arch="vit_tiny_patch16_224", image_size=32)
    assert read(best, cpu, image_size=64).facts.endswith("sees the run's images of 64 px, and was made for 32 px")
    with pytest.raises(
        UserError, match=r"^--teacher .*best.pt, image size 48: vit_tiny_patch16_224 cannot compute a batch"
    ):
        read(best, cpu, resize_schedule="0:32,1:48")


def test_the_identity_is_of_what_it_answers(cpu: DistEnv, tmp_path: Path) -> None:
    """Not of where the file lies, nor of what else is in it."""
    best = write_checkpoint(tmp_path / "a" / "best.pt")
    saved = read_checkpoint(best.parent, "best.pt")
    copy, other, moved = (tmp_path / f"{name}.pt" for name in ("copy", "other", "moved"))
    torch.save(saved | {"temperature": {"model": 2.0}}, copy)
    weights = {name: value.clone() for name, value in saved["model"].items()}
    weights["fc.bias" if "fc.bias" in weights else "head.fc.bias"][0] += 1e-3
    torch.save(saved | {"model": weights}, other)
    torch.save(saved | {"normalization": {"mean": list(MEAN), "std": [0.5, 0.5, 0.5]}}, moved)
    identities = [read(each, cpu).identity for each in (best, copy, other, moved)]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 3
    assert identities[0].startswith("test_resnet (SHA-256 ")
    trained = read(best, cpu)
    splits: Any = {name: dataclasses.make_dataclass("Split", ["fingerprint", "classes"])(name, CLASSES)
                   for name in ("train", "val")}  # fmt: skip
    assert run_fingerprint(config_for(best), splits, cpu, trained)["--teacher"] == trained.identity
    assert run_fingerprint(resolved(), splits, cpu)["--teacher"] is None


def test_timing_draws_nothing_and_changes_nothing(cpu: DistEnv, tmp_path: Path) -> None:
    trained = read(best := write_checkpoint(tmp_path / "best.pt"), cpu)
    before, state = torch.get_rng_state(), trained.network.state_dict()
    state = {name: value.clone() for name, value in state.items()}
    _, line = create_teacher(trained, config_for(best), (MEAN, STD), cpu, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in trained.network.state_dict().items())
    assert line.startswith(f"{trained.facts}; 0.5 of the loss, temperature 4; a pass takes ")
    assert line.endswith(" ms for 8 images of 32 px")


def test_timms_weights_are_asked_for_once(cpu: DistEnv, proxy: Proxy) -> None:  # noqa: F811
    with pytest.raises(UserError) as caught:
        read(VARIANT, cpu, tuple(map(str, range(1000))), num_classes=1000)
    assert proxy.connections == 1
    assert str(caught.value).startswith(f"--teacher: timm's weights {VARIANT} are not in the cache")
    assert str(caught.value).endswith(f"give --teacher {VARIANT}.safetensors")


def test_timms_weights_from_its_cache(
    cpu: DistEnv,
    proxy: Proxy,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ImageNet's 1,000 classes, whose names a run may spell otherwise."""
    repository = tmp_path / f"models--timm--{VARIANT}"
    (repository / "snapshots" / "0").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    model = timm.create_model(VARIANT)
    torch.save(model.state_dict(), repository / "snapshots" / "0" / "pytorch_model.bin")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names = timm.data.ImageNetInfo().label_names()
    found = read(VARIANT, cpu, tuple(names), num_classes=1000)
    assert torch.equal(answers(found.network), answers(model.eval()))
    assert "its class names" not in found.facts
    assert "not known" in read(VARIANT, cpu, tuple(map(str, range(1000))), num_classes=1000).facts
