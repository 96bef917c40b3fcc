"""Checks of the configuration as the user gave it: single values, combinations of flags, and the data's folder."""

import importlib.util
import os
import stat
from pathlib import Path
from typing import Any

from utils.errors import UserError, readable
from utils.figures import Task
from utils.options.arguments import model_arguments, optimizer_arguments
from utils.options.config import RUNS, TrainConfig, choices, flag_fields
from utils.options.flags import flag, flag_info
from utils.options.losses import LOSSES, default_loss
from utils.options.policies import POLICIES
from utils.options.schedules import check_lr_schedule, policies, policy_schedule, size_schedule
from utils.options.sizes import sides_of
from utils.options.store_url import refuse_url, require_store, store_url

# In the order in which they are taken. An index names the shards of a file.
WEIGHTS_OF_A_FOLDER = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
)  # fmt: skip
WEIGHTS_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".tar", ".ckpt", ".json")


def check_limits(name: str, value: Any) -> None:
    """Raise UserError unless the value of the field `name` is within its limits."""
    info = flag_info(TrainConfig.__dataclass_fields__[name])
    if name in ("image_size", "val_image_size") and value is not None:
        value = min(sides_of(value))
    for limit in info.limits if value not in choices(name) else ():
        limit.check(flag(name), value, info.unit)


def validate(config: TrainConfig) -> None:
    """Check each value against the limits of its field, then the combinations of flags.

    What needs the data or the device is checked later, by `utils.training.settings.autotune.resolve` and the loaders.

    Raises:
        UserError: naming the flag, its value and the remedy.
    """
    for field in flag_fields():
        check_limits(field.name, getattr(config, field.name))
    _check_schedule_and_sizes(config)
    _check_augmentation(config)
    model_arguments(config)
    optimizer_arguments(config)
    _check_sources(config)
    _check_teacher(config)
    _check_val_images(config)
    _check_cache(config)
    _check_user_code(config)
    _check_tracker(config)
    _check_device(config)


def _check_schedule_and_sizes(config: TrainConfig) -> None:
    """Numbers that limit each other, and schedules."""
    size_schedule(config)
    check_sizes(config, is_final=not (config.evaluate or config.pretrained))
    if 0 in policy_schedule(config) and config.augment != "none":
        raise UserError(
            f"--augment {config.augment} with --augment-schedule {config.augment_schedule}: two policies in epoch 0; "
            "leave --augment out"
        )
    check_lr_schedule(config)
    check_loss(config, config.loss or default_loss(config.task or "multiclass"), config.task)


def check_loss(config: TrainConfig, name: str, task: Task | None) -> None:
    """Raise UserError where a loss is not for the task, or has not the flags that are given; `task` is None if open."""
    loss = LOSSES[name]
    if task is not None and task not in loss.tasks:
        raise UserError(f"--loss {name} with --task {task}: is for another task; give --loss {default_loss(task)}")
    of_losses = {name: each for each in LOSSES.values() for name in each.arguments.values()}
    for field in sorted(of_losses.keys() - set(loss.arguments.values())):
        value = getattr(config, field)
        if value != TrainConfig.__dataclass_fields__[field].default and (field, value) != ("label_smoothing", 0):
            other = of_losses[field]
            remedy = f", or give --loss {other.name}" if task is None or task in other.tasks else ""
            raise UserError(f"{flag(field)} {value:g} with --loss {name}: not used; leave it out{remedy}")


def check_sizes(config: TrainConfig, is_final: bool) -> None:
    """Raise UserError unless a crop without border fits; `is_final`: no weights or checkpoint will change the sizes."""
    size = config.val_image_size or (config.image_size if is_final or "image_size" in config.given else 0)
    shorter = min(sides_of(size))
    pads = (config.val_crop or config.train_crop) == "pad"
    if config.val_resize is not None and config.val_resize < shorter and not pads:
        name = "--val-image-size" if config.val_image_size else "--image-size"
        raise UserError(
            f"--val-resize {config.val_resize}: smaller than {name} {size}; the center crop must fit, try "
            f"--val-resize {round(shorter * 8 / 7)}"
        )
    others = [size for size in (config.image_size, *size_schedule(config).values()) if isinstance(size, str)]
    if config.rot90 and others and not config.evaluate:
        raise UserError(
            f"--rot90 with images of {others[0]} px: a quarter turn exchanges height and width; leave --rot90 out"
        )


def _check_augmentation(config: TrainConfig) -> None:
    """What the policies or the loader exclude; an evaluation augments nothing."""
    for name in ("eval_flip", "eval_classes", "real_labels"):
        value = getattr(config, name)
        if value != TrainConfig.__dataclass_fields__[name].default and not config.evaluate:
            given = flag(name) if value is True else f"{flag(name)} {value}"
            raise UserError(f"{given} without --evaluate: a run does not use it; add --evaluate, or leave it out")
    if config.evaluate:
        return
    used = policies(config)
    for name in ("randaugment_magnitude", "randaugment_ops", "randaugment_std"):
        value = getattr(config, name)
        if (
            not any(POLICIES[each].draw == "several" for each in used)
            and value != TrainConfig.__dataclass_fields__[name].default
        ):
            raise UserError(f"{flag(name)} {value:g} without --augment randaugment: nothing uses it; give that policy")
    _check_geometry(config)
    changing_colors = {name for name in used if POLICIES[name].changes_colors}
    if config.color_jitter and changing_colors:
        raise UserError(
            f"--color-jitter {config.color_jitter:g} with the policy {min(changing_colors)}: it changes the colors "
            "itself; leave one of them out"
        )
    if config.repeated_augmentation > 1 and config.loader == "stock":
        raise UserError(
            f"--repeated-augmentation {config.repeated_augmentation} with --loader stock: DALI's own reader gives each "
            "image once; use --loader dali"
        )
    if config.balance and config.loader == "stock":
        raise UserError(
            f"--balance {config.balance:g} with --loader stock: DALI's own reader gives each image once; use --loader "
            "dali"
        )
    if config.balance and config.repeated_augmentation > 1:
        raise UserError(
            f"--balance {config.balance:g} with --repeated-augmentation {config.repeated_augmentation}: both say how "
            "often an image comes; leave one of them out"
        )


def _check_geometry(config: TrainConfig) -> None:
    """What excludes each other of crops and turns."""
    if config.train_crop != "random" and config.crop_scale != TrainConfig.__dataclass_fields__["crop_scale"].default:
        raise UserError(
            f"--crop-scale {config.crop_scale:g} with --train-crop {config.train_crop}: only random crops have a "
            f"scale; leave it out, or give --crop-scale {TrainConfig.__dataclass_fields__['crop_scale'].default:g}"
        )
    if config.train_crop != "random" and config.decode == "fused":
        raise UserError(
            f"--decode fused with --train-crop {config.train_crop}: that needs whole images; use --decode full"
        )
    for text in (f"--train-crop {config.train_crop}", f"--vflip {config.vflip:g}", "--rot90"):
        is_default = text.endswith((" random", " 0")) or (text == "--rot90" and not config.rot90)
        if config.loader == "stock" and not is_default:
            raise UserError(f"{text} with --loader stock: its graph has no such step; use --loader dali")


def _check_sources(config: TrainConfig) -> None:
    """Where images and weights come from, and where results go."""
    if config.name is not None and (not config.name or "/" in config.name):
        raise UserError(f"--name {config.name}: must be one word without /; --output-dir takes a path")
    if config.name is not None and config.output_dir != RUNS / config.name:
        raise UserError(f"--name {config.name} with --output-dir {config.output_dir}: two folders; give one of them")
    if config.tensorboard and (shown := readable(str(config.output_dir))) != str(config.output_dir):
        raise UserError(
            f"--tensorboard with --output-dir {shown}: its package needs a name in UTF-8; give another folder, or "
            "leave --tensorboard out"
        )
    if not config.evaluate or config.pretrained == "timm":  # a checkpoint has one
        require_data(config)
    for name in ("train_data", "val_data"):
        if url := store_url(getattr(config, name)):
            raise UserError(f"{flag(name)} {url}: is a pattern below --data-dir; give the URL as --data-dir")
    if config.evaluate and config.resume == "none" and config.pretrained is None:
        raise UserError("--evaluate with --resume none: nothing to evaluate; give --resume PATH or --pretrained")
    if config.accept_changes and config.resume in ("auto", "none"):
        raise UserError(
            f"--accept-changes with --resume {config.resume}: give --resume PATH, the checkpoint to go on from"
        )
    if config.overwrite and config.resume == "auto":
        raise UserError("--overwrite with --resume auto: nothing is replaced; add --resume none, or leave it out")
    if config.pretrained_head != "auto" and config.pretrained is None:
        raise UserError(
            f"--pretrained-head {config.pretrained_head} without --pretrained: there are no weights; give --pretrained"
        )
    if config.pretrained_ema is not None and config.pretrained in (None, "timm"):
        name = "--pretrained-ema" if config.pretrained_ema else "--no-pretrained-ema"
        raise UserError(f"{name} without --pretrained FILE: there is no EMA; give a checkpoint's path")


def _check_teacher(config: TrainConfig) -> None:
    """Whether a training has a use for the teacher, and the flags of one have a teacher."""
    if config.teacher is None:
        for name in ("teacher_weight", "teacher_temperature"):
            value = getattr(config, name)
            if value != TrainConfig.__dataclass_fields__[name].default:
                raise UserError(f"{flag(name)} {value:g} without --teacher: nothing uses it; give --teacher")
        return
    if config.evaluate:
        raise UserError(f"--teacher {config.teacher} with --evaluate: only training has a teacher; leave it out")
    folder = config.teacher if os.path.isdir(config.teacher) else os.path.dirname(os.path.abspath(config.teacher))
    if os.path.exists(config.teacher) and os.path.realpath(folder) == os.path.realpath(str(config.output_dir)):
        raise UserError(
            f"--teacher {config.teacher}: lies in --output-dir, where this run writes; give another --output-dir or "
            "--name"
        )


def names_file(teacher: str) -> bool:
    """Whether a value of `--teacher` is a path, not the name of a network; no name of timm's has such an end."""
    return os.path.exists(teacher) or os.sep in teacher or teacher.endswith(WEIGHTS_SUFFIXES)


def require_teacher(config: TrainConfig, resumes: bool) -> None:
    """Raise UserError unless the file that `--teacher` names is there, if it names one; `resumes` a run with it."""
    teacher = config.teacher
    if teacher is None or os.path.exists(teacher) or not names_file(teacher):
        return
    if resumes:
        remedy = "no such file, and the run goes on with it; put it back, or give the path of a copy"
    else:
        remedy = "no such file; give the output folder of a run, a file of weights, or a name of timm's"
    raise UserError(f"--teacher {teacher}: {remedy}")


def _check_val_images(config: TrainConfig) -> None:
    """Which images validate."""
    name, fraction, held_out_by = config.val_split, config.val_fraction, config.held_out_by
    for split, folder in {"train": config.train_split, "val": name}.items():
        if not folder.strip(".") or "/" in folder:
            raise UserError(f"--{split}-split {folder}: must be the name of a folder in --data-dir, such as {split}")
    if name == config.train_split and not config.evaluate:
        raise UserError(
            f"--val-split {name}: the training images; --val-split val --val-fraction 0.1 holds out a tenth of them"
        )
    if config.held_out_fold and fraction:  # which also reads --fold
        raise UserError(f"{held_out_by} with --val-fraction {fraction:g}: both hold images out; give one of them")
    if held_out_by and config.val_data:
        raise UserError(
            f"{held_out_by} with --val-data {config.val_data}: two sources of validation images; give one of them"
        )
    if held_out_by and config.data_dir is None and not config.evaluate:
        raise UserError(f"{held_out_by} without --data-dir: there are no images to hold out; leave it out")


def _check_cache(config: TrainConfig) -> None:
    """Which images can stay decoded, and where."""
    if config.cache not in ("gpu", "host"):
        return
    if config.loader != "dali":
        raise UserError(
            f"--cache {config.cache} with --loader {config.loader}: only --loader dali keeps images; use --loader dali"
        )
    if config.decode == "fused":
        raise UserError(f"--cache {config.cache} with --decode fused: whole images are kept; leave --decode out")
    if config.cache == "gpu" and config.device == "cpu":
        raise UserError("--cache gpu with --device cpu: there is no GPU to keep images on; use --cache host")


def _check_user_code(config: TrainConfig) -> None:
    """Whether users' own code has a place in the loader's work."""
    if config.dali_plugin is not None and config.transform is None:
        raise UserError(f"--dali-plugin {config.dali_plugin} without --transform: nothing uses it; give --transform")
    if config.transform is None:
        return
    split_transform(config.transform)
    if config.loader not in ("dali", "proxy") and not config.evaluate:
        raise UserError(
            f"--transform {config.transform} with --loader {config.loader}: it is made of DALI's operators; use "
            "--loader dali or proxy"
        )


def _check_tracker(config: TrainConfig) -> None:
    """Whether there is a tracker for what it is to get."""
    if config.track != "none":
        return
    for name, value in (("track_project", config.track_project), ("track_checkpoint", config.track_checkpoint)):
        if value:
            given = flag(name) + (f" {value}" if isinstance(value, str) else "")
            raise UserError(f"{given} without --track: nothing is sent; give --track NAME")


def require_tracker(name: str) -> None:
    """Raise UserError unless the tracker's package is installed; `none` needs none."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"--track {name}: the package {name} is missing; pip install {name}")


def _check_device(config: TrainConfig) -> None:
    """What needs a GPU, and what a CUDA graph excludes."""
    if ":" in config.device and config.processes != 1:
        raise UserError(
            f"--device {config.device} with --processes {config.processes}: it is the GPU of one process; give "
            "--processes 1, or --device cuda"
        )
    if config.cuda_graph and config.device == "cpu":
        raise UserError("--cuda-graph with --device cpu: there is no GPU to launch it on; use --no-cuda-graph")
    if config.cuda_graph and config.grad_accum_steps > 1:
        raise UserError(
            f"--cuda-graph with --grad-accum-steps {config.grad_accum_steps}: a graph holds one batch; "
            "use --no-cuda-graph"
        )
    if config.sync_bn and config.device == "cpu":
        raise UserError("--sync-bn with --device cpu: torch has it only on GPUs; leave it out")
    if config.sync_bn and config.fused_layers:
        raise UserError("--sync-bn with --fused-layers: these norms know only one process; leave --fused-layers out")
    if config.amp == "fp16" and config.device == "cpu":
        raise UserError("--amp fp16 with --device cpu: the CPU has no fast float16; use --amp none or bf16")


def require_data(config: TrainConfig) -> None:
    """Raise UserError unless there are images to read."""
    if config.data_dir is None and config.loader != "synthetic":
        raise UserError(
            f"--data-dir is missing: give the folder that holds train/ and val/ (--loader {config.loader} "
            "reads images; --loader synthetic needs none)"
        )


def require_checkpoint(config: TrainConfig) -> None:
    """Raise UserError unless the checkpoint that `--resume PATH` names is there."""
    # Unlike Path.is_file, os.path.isfile is False for what may not be looked at.
    if config.resume not in ("auto", "none") and not os.path.isfile(config.resume):
        raise UserError(f"--resume {config.resume}: no such checkpoint; give a file, the folder of a run, auto or none")


def find_weights(path: str | Path, option: str = "--pretrained") -> Path:
    """The file that `--pretrained FILE` means: itself, or of a folder the one that the Hugging Face hub names so.

    `option` is the flag, for messages.

    Raises:
        UserError: there is none.
    """
    if not os.path.isdir(path):
        files = [Path(path)]
        remedy = "no such file; give a weights file"
        remedy += ", or no value for timm's weights" if option == "--pretrained" else ""
    else:
        files = [Path(path) / name for name in WEIGHTS_OF_A_FOLDER]
        best = os.path.join(path, "best.pt")
        remedy = f"a folder without {' or '.join(WEIGHTS_OF_A_FOLDER[::2])}; give "
        remedy += best if os.path.isfile(best) else "a weights file"
    found = next((file for file in files if os.path.isfile(file)), None)
    if found is None:
        raise UserError(f"{option} {path}: {remedy}")
    if found.suffix == ".safetensors" and readable(str(found)) != str(found):
        raise UserError(f"{option} {found}: the package safetensors needs a path in UTF-8; rename it")
    return found


def split_transform(text: str) -> tuple[str, str]:
    """`--transform FILE.py:NAME` -> path and name of the function.

    Raises:
        UserError: one of them is missing.
    """
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise UserError(f"--transform {text}: must be FILE.py:NAME, such as examples/transform.py:grayscale")
    return path, name


def require_user_code(config: TrainConfig) -> None:
    """Raise UserError unless the files that `--transform` and `--dali-plugin` name are there."""
    if config.transform is not None and not os.path.isfile(path := split_transform(config.transform)[0]):
        raise UserError(f"--transform {config.transform}: no such file {path}; give FILE.py:NAME")
    if config.dali_plugin is not None and not os.path.isfile(config.dali_plugin):
        raise UserError(f"--dali-plugin {config.dali_plugin}: no such file; give a compiled library of operators")


def require_source(data_dir: Path, stage_dir: Path | None) -> None:
    """Raise UserError unless there is such a folder, or a URL that can be staged."""
    if store_url(data_dir):
        require_store(data_dir, stage_dir)
    else:
        require_folder(data_dir)


def require_folder(data_dir: Path) -> None:
    """Raise UserError unless there is such a folder."""
    refuse_url(data_dir, "--data-dir ")
    try:
        is_folder = stat.S_ISDIR(os.stat(data_dir).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_folder = False
    except OSError as error:
        raise UserError(f"--data-dir {data_dir}: cannot be read ({error.strerror}); check its permissions") from None
    if not is_folder:
        raise UserError(f"--data-dir {data_dir}: no such folder; give the one that holds train/ and val/")
