"""The teacher of `--teacher`: a run, a file of weights or timm's, as a network that answers for the run's classes."""

import dataclasses
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from models import base_arch, check_arch, create_model, load_weights, normalization, num_outputs
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.startup import show_startup
from utils.errors import UserError, some
from utils.figures import better_network, better_value, describe_figure
from utils.network.distillation import Teacher
from utils.network.gradients import AMP_DTYPES, on_stream, preserve_state, record
from utils.network.input_check import check_input
from utils.network.published_weights import published_weights, require_published
from utils.network.weight_files import Normalization, Weights, read_weights
from utils.network.weight_names import match_weights
from utils.options.arguments import model_arguments
from utils.options.resolved import ResolvedConfig
from utils.options.schedules import size_schedule, value_at
from utils.options.sizes import ImageSize, as_image_size, sides_of
from utils.options.validation import WEIGHTS_OF_A_FOLDER, names_file, require_teacher
from utils.text import count, describe_alike
from utils.training.state.checkpoint import BEST, LAST, Checkpoint
from utils.training.state.train_state import NETWORKS

OPTION = "--teacher"
DIGITS = 16  # of a SHA-256, in hex
TIMED_PASSES = {"cuda": 10, "cpu": 1}  # after one that is not timed


@dataclasses.dataclass(frozen=True)
class TrainedTeacher:
    """A teacher as its source has it, for the classes of the run.

    Attributes:
        network: on the CPU, for evaluation, its weights without gradients.
        order: of each class of the run, its output; None where they are the same.
        normalization: mean and standard deviation per channel that it was made for.
        identity: architecture and digest, which a resume compares.
        facts: for the user.
    """

    network: nn.Module
    order: list[int] | None
    normalization: Normalization
    identity: str
    facts: str


class _Found(NamedTuple):
    """What a source holds; `made_for` is the size of its images."""

    arch: str
    network: nn.Module
    weights: Weights
    made_for: ImageSize


@collective
def read_teacher(
    config: ResolvedConfig, classes: Sequence[str], env: DistEnv, resumes: bool = False
) -> TrainedTeacher | None:
    """The teacher of a run, None without one. Draws random numbers, so that it must come before the seeds.

    Args:
        classes: names of the run's classes in label order.
        resumes: whether the run goes on from a checkpoint.

    Raises:
        UserError: on all ranks: it cannot be read, has other classes, does not take the images, or is another one on
            other ranks.
    """
    if config.teacher is None:
        return None
    show_startup("reading the teacher")
    found: list[TrainedTeacher] = []
    with sync_errors(env):
        require_teacher(config, resumes)  # it may be missing on this machine only
        found.append(_read(config, classes))
    identities = all_gather_object(found[0].identity, env)
    for rank, identity in enumerate(identities):
        if identity != identities[0]:
            raise UserError(
                f"{OPTION} {config.teacher}: not the same on rank 0 ({identities[0]}) and rank {rank} ({identity}); "
                "use a shared folder, or copy the file",
                on_all_ranks=True,
            )
    return found[0]


def _read(config: ResolvedConfig, classes: Sequence[str]) -> TrainedTeacher:
    assert config.teacher is not None, "the run has one"
    named = f"{OPTION} {config.teacher}"
    found = (_of_file if names_file(config.teacher) else _of_timm)(config, named)
    network = found.network.eval().requires_grad_(False)
    order, note = _class_order(found.weights, classes, config.num_classes, named)
    schedule = size_schedule(config)
    sizes = dict.fromkeys([value_at(schedule, 0, config.image_size), *schedule.values()])
    for size in sizes:
        output = check_input(network, found.arch, size, config.batch_size, f"{named}, image size")
        shape: Any = getattr(output, "shape", ())  # features, with arguments that leave the head out
        _check_outputs(shape[1] if len(shape) == 2 else None, config, named)
    own = found.weights.normalization or normalization(network)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    weights = found.weights
    facts = [f"{found.arch}, {parameters / 1e6:.2f} M parameters, {weights.kind} of {weights.source}{weights.taken}"]
    by = (weights.settings or {}).get("best_by") or "top1"
    if (value := better_value(weights.result, by)) is not None:
        facts.append(describe_figure(by, value))
    facts += [note] if note else []
    if set(sizes) != {found.made_for}:
        shown = ", ".join(map(str, sizes))
        facts.append(f"sees the run's images of {shown} px, and was made for {found.made_for} px")
    identity = f"{base_arch(found.arch)} (SHA-256 {_digest(network, order, own, weights.model_args)})"
    return TrainedTeacher(network, order, own, identity, "; ".join(facts))


def _of_timm(config: ResolvedConfig, named: str) -> _Found:
    """timm's published weights."""
    arch = str(config.teacher)
    check_arch(arch, OPTION)
    settings = timm.get_pretrained_cfg(arch)
    if settings is not None and settings.has_weights:
        _check_outputs(settings.num_classes, config, named)
    require_published(arch, OPTION)
    network = create_model(arch, config.num_classes, True, config.image_size, option=OPTION)
    return _Found(arch, network, published_weights(arch), _made_for(network))


def _of_file(config: ResolvedConfig, named: str) -> _Found:
    """The output folder of a run, a checkpoint, or a file of weights whose architecture is known."""
    path = _find_file(str(config.teacher), named)
    weights = read_weights(path, OPTION)
    arch = weights.arch or _arch_of_name(path)
    if arch is None:
        raise UserError(
            f"{named}: says nothing of its architecture; give the output folder of a run, a folder with timm's "
            "config.json, or a file that is named after its network, such as resnet50.a1_in1k.pth"
        )
    settings = weights.settings or {}
    task = settings.get("task") or "multiclass"
    if settings and task != config.task:
        raise UserError(f"{named}: was trained with --task {task}, this run has {config.task}; give one of its task")
    options = model_arguments(dataclasses.replace(config, model_args=weights.model_args))
    network = create_model(arch, config.num_classes, image_size=config.image_size, options=options, option=OPTION)
    by = settings.get("best_by") or "top1"
    is_average = better_network(weights.result, by) == NETWORKS[1] if settings else None
    matched = match_weights(weights, network, arch, config.num_classes, is_average)
    _check_outputs(num_outputs(matched, network, config.num_classes), config, named)
    load_weights(network, matched, config.num_classes, keep_head=True)
    size = settings.get("image_size")
    if size is None and weights.timm_settings is not None:
        size = as_image_size(*weights.timm_settings.input_size[1:])
    return _Found(arch, network, matched, size or _made_for(network))


def _find_file(teacher: str, named: str) -> Path:
    """The best checkpoint of an output folder; else what `read_weights` takes."""
    if not os.path.isdir(teacher):
        return Path(teacher)
    names = [name for name in (BEST, LAST, *WEIGHTS_OF_A_FOLDER) if os.path.isfile(os.path.join(teacher, name))]
    if not names:
        raise UserError(
            f"{named}: a folder without {BEST} or {WEIGHTS_OF_A_FOLDER[0]}; give the output folder of a run, or a file "
            "of weights"
        )
    return Path(teacher, names[0]) if names[0] in (BEST, LAST) else Path(teacher)


def _arch_of_name(path: Path) -> str | None:
    """The network after which a file is named, as timm names its own: `resnet50.a1_in1k.pth`."""
    base = base_arch(path.stem)
    if not timm.is_model(base):
        return None
    return path.stem if path.stem in timm.list_pretrained(f"{base}.*") else base


def _made_for(network: nn.Module) -> ImageSize:
    settings: Any = network.pretrained_cfg
    return as_image_size(*settings["input_size"][1:])


def _check_outputs(outputs: int | None, config: ResolvedConfig, named: str) -> None:
    if outputs != config.num_classes:
        held = f"a head of {count(outputs, 'class')}" if outputs else "no head"
        raise UserError(
            f"{named}: has {held}, the run has {count(config.num_classes, 'class')}; give a teacher that was trained "
            "on the run's classes"
        )


def _class_order(
    weights: Weights, classes: Sequence[str], num_classes: int, named: str
) -> tuple[list[int] | None, str]:
    """`TrainedTeacher.order`, and a note for the user.

    Raises:
        UserError: the classes have other names.
    """
    if weights.classes == tuple(classes):
        return None, ""
    if weights.classes is not None and sorted(weights.classes) == sorted(classes):
        output = {name: index for index, name in enumerate(weights.classes)}
        unused = range(len(classes), num_classes)  # outputs without a class, by --num-classes
        return [*(output[name] for name in classes), *unused], "its classes in another order, taken by name"
    # timm's own weights name the classes of ImageNet in one of its spellings.
    if weights.classes is None or not weights.networks:
        return None, "its class names are not known to be those of the run; labels must be in its order"
    missing = [name for name in classes if name not in weights.classes]
    others = [name for name in weights.classes if name not in classes]
    what = describe_alike(classes, weights.classes) or f"it lacks {some(missing)}, and has {some(others)}"
    raise UserError(f"{named}: has other classes than the run ({what}); give a teacher that was trained on the run's")


def _digest(network: nn.Module, *others: object) -> str:
    """Of all that its answers follow from: weights, statistics, and `others`."""
    found = hashlib.sha256(repr(others).encode())
    for name, value in network.state_dict().items():
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:DIGITS]


def create_teacher(
    trained: TrainedTeacher | None,
    config: ResolvedConfig,
    given: Normalization,
    env: DistEnv,
    stream: torch.cuda.Stream | None,
    saved: Checkpoint | None = None,
) -> tuple[Teacher | None, str]:
    """The teacher on the device, and the line on it in the start-up block, with the time that a pass takes.

    None and "" for none. To be called before the loaders, whose threads would slow the pass that is timed, and after
    NCCL has connected the ranks, of which one may compile for longer than another. Compiled, if at all, for all image
    sizes of this launch, so that no later epoch waits for the compiler.

    Args:
        given: mean and standard deviation per channel of the run's images.
        stream: where the step is captured; None if it is not.
        saved: what this launch goes on from.

    Raises:
        UserError: the pass cannot be captured.
    """
    if trained is None:
        return None, ""
    show_startup("timing the teacher" + (", compiling" if config.compile else ""))
    network = trained.network.to(env.device)
    teacher = Teacher(network, trained.order, trained.normalization, given, env.device, config.compile)
    schedule, epoch = size_schedule(config), saved.state.epoch if saved else 0
    size = value_at(schedule, epoch, config.image_size)
    later = {each for first, each in schedule.items() if epoch < first < config.epochs} if config.compile else set()
    autocast = torch.autocast(env.device.type, AMP_DTYPES[config.amp], enabled=config.amp != "none")
    with preserve_state(network, env.device), autocast:  # the images of the passes are random
        for each in sorted(later - {size}, key=sides_of):
            teacher(_random_images(config, each, env))
        seconds = _seconds_of_pass(teacher, _random_images(config, size, env), stream)
    share = f"{config.teacher_weight:g} of the loss, temperature {config.teacher_temperature:g}"
    cost = f"a pass takes {1000 * seconds:.3g} ms for {count(config.batch_size, 'image')} of {size} px"
    return teacher, f"{trained.facts}; {share}; {cost}"


def _random_images(config: ResolvedConfig, size: ImageSize, env: DistEnv) -> Tensor:
    """A batch as the step has it: (N, 3, H, W)."""
    images = torch.randn(config.batch_size, 3, *sides_of(size), device=env.device, dtype=AMP_DTYPES[config.amp])
    return images.contiguous(memory_format=torch.channels_last)


def _seconds_of_pass(teacher: Teacher, images: Tensor, stream: torch.cuda.Stream | None) -> float:
    """Mean seconds of some passes, after one that is not timed; replayed as a CUDA graph where there is a stream."""

    def compute() -> None:
        teacher(images)

    with on_stream(stream):
        compute()
    graph = record(compute, stream, "the teacher's pass") if stream is not None else None
    replay, passes = graph.replay if graph else compute, TIMED_PASSES[images.device.type]
    _wait_for(images.device)
    began = time.perf_counter()
    for _ in range(passes):
        replay()
    _wait_for(images.device)
    seconds = time.perf_counter() - began
    if graph:
        graph.reset()
    return seconds / passes


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
