"""TrainConfig: every flag of the trainer, its default, unit and limits, in one flat frozen dataclass.

The command line, the keys of a recipe (`--config recipe.yaml`), `config.json` and `--help` are all derived from the
fields below, so a new flag is one new field.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from utils.errors import UserError
from utils.files import atomic_write_text

FIRST, DATA, MODEL = "First run", "Data", "Model"
OPTIMISATION, PRECISION, RUN, SWITCHES = "Optimisation", "Precision", "Run", "Switches"
BATCH_SIZE = 256  # images per process and step, of a new run
_AT_LEAST: dict[str, float] = {
    "epochs": 1, "batch_size": 1, "image_size": 8, "val_resize": 8, "workers": 1, "num_classes": 1,
    "grad_accum_steps": 1, "prefetch": 1, "checkpoint_steps": 0, "log_steps": 1, "seed": 0, "weight_decay": 0,
    "warmup_epochs": 0, "mixup": 0, "cutmix": 0, "clip_grad": 0, "time_limit": 0, "max_bad_steps": 0,
}  # fmt: skip
_BELOW_ONE = ("momentum", "label_smoothing", "ema_decay")
_ABOVE_ZERO = ("lr", "timeout")
LONGEST_TIMEOUT = 1e6  # seconds; a store that is told to wait for much longer does not wait at all


def _option(default: Any, panel: str, help: str, shown: str | bool = True, metavar: str | None = None) -> Any:
    return dataclasses.field(
        default=default, metadata={"panel": panel, "help": help, "shown": shown, "metavar": metavar}
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run, fully described. Frozen: what `config.json` says is what ran.

    Attributes:
        given: names of the fields that the command line or a recipe has set; the others hold defaults.
    """

    data_dir: Path | None = _option(None, FIRST, "Folder with train/ and val/, one folder of images per class.", False)
    output_dir: Path = _option(Path("runs/latest"), FIRST, "Where checkpoints, metrics and the summary go.")
    arch: str = _option("resnet50", FIRST, "Any timm architecture.")
    epochs: int = _option(90, FIRST, "Passes over the training images.")
    batch_size: int | None = _option(None, FIRST, "Images per process and step.", f"{BATCH_SIZE}, or as resumed")
    lr: float = _option(0.256, FIRST, "Learning rate per 256 images of the global batch.")

    loader: Literal["dali", "proxy", "torch", "synthetic"] = _option("dali", DATA, "What feeds the network.")
    decode: Literal["auto", "fused", "full"] = _option("auto", DATA, "What DALI decodes: the crop alone or all.")
    hw_decoder_load: float | None = _option(
        None, DATA, "Share of a batch that the GPU's JPEG engines decode.", "for --decode"
    )
    cache: Literal["auto", "none", "gpu", "host"] = _option("auto", DATA, "Where training images stay decoded.")
    prefetch: int | None = _option(None, DATA, "Batches that DALI prepares ahead.", "6")
    bad_files: Literal["error", "skip"] = _option("error", DATA, "On an unreadable image.")
    image_size: int = _option(224, DATA, "Side of the network's input, pixels.")
    val_resize: int | None = _option(None, DATA, "Shorter side before the centre crop, pixels.", "image size x 8/7")
    workers: int | None = _option(None, DATA, "CPU threads (torch: workers) per process.", "its share of the cores")
    augment: Literal["none", "autoaugment", "randaugment", "trivialaugment"] = _option(
        "none", DATA, "torchvision's policy, with any loader, after crop and flip."
    )
    crop_scale: float = _option(0.08, DATA, "Least share of the area in a random crop.")
    hflip: float = _option(0.5, DATA, "Probability of mirroring a training image.")
    mixup: float = _option(0.0, DATA, "Mixup alpha; 0 is off.")
    cutmix: float = _option(0.0, DATA, "CutMix alpha; 0 is off.")
    random_erase: float = _option(0.0, DATA, "Probability of erasing a rectangle.")

    pretrained: str | None = _option(None, MODEL, "timm's weights, or those in FILE.", "off", "[FILE]")
    pretrained_ema: bool | None = _option(None, MODEL, "FILE's EMA weights.", "if any")
    pretrained_head: Literal["auto", "keep", "new"] = _option("auto", MODEL, "The weights' head.")
    num_classes: int | None = _option(None, MODEL, "Outputs of the head.", "the folders")
    compile: bool | None = _option(None, MODEL, "torch.compile the step.", "on CUDA")
    fused_layers: bool | None = _option(
        None, MODEL, "Brisk's own kernels for norms, pooling and convolutions.", "where compiled on CUDA"
    )
    cuda_graph: bool | None = _option(None, MODEL, "Launch the training step as one CUDA graph.", "on CUDA")

    grad_accum_steps: int = _option(1, OPTIMISATION, "Batches per optimizer step.")
    optimizer: str = _option("sgd", OPTIMISATION, "Any timm optimizer; its sgd is Nesterov's.")
    momentum: float = _option(0.875, OPTIMISATION, "SGD momentum.")
    weight_decay: float = _option(1 / 32768, OPTIMISATION, "Not on biases and 1-D weights; as timm.", "1/32768")
    warmup_epochs: float | None = _option(
        None, OPTIMISATION, "Linear warmup, epochs; then cosine to 0.", "a tenth, at most 5"
    )
    label_smoothing: float = _option(0.1, OPTIMISATION, "Share of the target spread over all classes.")
    ema_decay: float = _option(0.0, OPTIMISATION, "Moving average of the weights; 0 is off.")
    clip_grad: float = _option(0.0, OPTIMISATION, "Largest norm of the gradient; 0 is off.")

    max_bad_steps: int = _option(10, OPTIMISATION, "Steps with no finite loss that end the run; 0: none.")

    grad_exchange: Literal["auto", "ddp", "flat"] = _option(
        "auto", PRECISION, "ddp: with the backward pass; flat: after it.", "flat on NVLink"
    )
    grad_compression: Literal["none", "bf16"] = _option("none", PRECISION, "Gradients travel in this type.")
    amp: Literal["auto", "bf16", "fp16", "none"] = _option("auto", PRECISION, "Mixed precision.")
    device: Literal["auto", "cuda", "cpu"] = _option("auto", PRECISION, "Where to train.")

    resume: str = _option("auto", RUN, "auto: from last.pt, if there is one.", True, "auto|none|PATH")
    checkpoint_steps: int = _option(0, RUN, "Steps between saves; 0: an epoch.")
    overwrite: bool = _option(False, SWITCHES, "Replace what --resume does not continue.")
    evaluate: bool = _option(False, SWITCHES, "Only evaluate: best.pt, or --resume PATH.")
    seed: int = _option(0, RUN, "Of weights, order and augmentation.")
    deterministic: bool = _option(False, SWITCHES, "Same bits in every run; slower.")
    log_steps: int = _option(50, RUN, "Steps between lines of metrics.jsonl.")
    tensorboard: bool = _option(False, SWITCHES, "Also write TensorBoard events.")
    time_limit: float = _option(0.0, RUN, "Seconds until a save and stop; 0 is off.")
    timeout: float = _option(600.0, RUN, "Seconds to wait for another process.")
    config: Path | None = _option(None, RUN, "Recipe (YAML); the command line wins.", False)
    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary of all fields, without the recipe that they came from."""
        values = dataclasses.asdict(self)
        del values["config"], values["given"]
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Undo of `to_dict`: unknown names are ignored, absent ones get their defaults."""
        known = {field.name: value for field in flag_fields() if (value := values.get(field.name)) is not None}
        known |= {name: Path(known[name]) for name in ("data_dir", "output_dir") if name in known}
        return cls(**known)

    def save(self, path: Path) -> None:
        """Write the fields as JSON; the file is itself a valid `--config`, on a machine of the same kind."""
        atomic_write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """What a run uses: every value that TrainConfig may leave open is chosen (`utils.training.autotune.resolve`).

    Only the types of those fields change. Three stay as they were given: `data_dir` and `pretrained`, where None means
    that there is none, and `grad_exchange`, which is "auto" for a single process, as that exchanges nothing.
    """

    batch_size: int
    decode: Literal["fused", "full"]
    hw_decoder_load: float
    cache: Literal["none", "gpu", "host"]
    prefetch: int
    val_resize: int
    workers: int
    num_classes: int
    compile: bool
    fused_layers: bool
    cuda_graph: bool
    warmup_epochs: float
    amp: Literal["bf16", "fp16", "none"]
    device: Literal["cuda", "cpu"]

    def __post_init__(self) -> None:
        left_open = [name for name in ResolvedConfig.__annotations__ if getattr(self, name) in (None, "auto")]
        assert not left_open, f"not resolved: {', '.join(left_open)}"


def flag_fields() -> list[dataclasses.Field[Any]]:
    """The fields of TrainConfig that are flags."""
    return [field for field in dataclasses.fields(TrainConfig) if field.metadata]


def flag(name: str) -> str:
    """The command-line spelling of a field: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def validate(config: TrainConfig) -> None:
    """Check every value and combination that needs neither the data nor the device.

    Raises:
        UserError: naming the flag, its value and the remedy.
    """
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and not least <= value < float("inf"):
            finite = " and finite" if isinstance(value, float) else ""
            raise UserError(f"{flag(name)} {value}: must be {least:g} or more{finite}")
    for name in _BELOW_ONE:
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{flag(name)} {getattr(config, name)}: must be at least 0 and less than 1")
    for name in _ABOVE_ZERO:
        if not 0 < getattr(config, name) < float("inf"):
            raise UserError(f"{flag(name)} {getattr(config, name)}: must be more than 0 and finite")
    if config.timeout > LONGEST_TIMEOUT:
        raise UserError(f"--timeout {config.timeout:g}: must be at most {LONGEST_TIMEOUT:.0f} seconds")
    if not 0 < config.crop_scale <= 1:
        raise UserError(f"--crop-scale {config.crop_scale}: must be more than 0 and at most 1")
    for name, meaning in (("random_erase", "probability"), ("hflip", "probability"), ("hw_decoder_load", "share")):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"{flag(name)} {value}: a {meaning}, from 0 to 1")
    if config.seed >= 2**31:
        raise UserError(f"--seed {config.seed}: must be less than 2147483648")
    if config.val_resize is not None and config.val_resize < config.image_size:
        raise UserError(
            f"--val-resize {config.val_resize}: smaller than --image-size {config.image_size}; the centre crop "
            f"must fit, try --val-resize {round(config.image_size * 8 / 7)}"
        )
    if config.warmup_epochs is not None and config.warmup_epochs >= config.epochs:
        raise UserError(
            f"--warmup-epochs {config.warmup_epochs:g}: must be less than --epochs {config.epochs}; lower it"
        )
    if not config.evaluate or config.pretrained == "timm":  # a checkpoint has one
        require_data(config)
    if config.evaluate and config.resume == "none" and config.pretrained is None:
        raise UserError("--evaluate with --resume none: nothing to evaluate; give --resume PATH or --pretrained")
    if config.overwrite and config.resume == "auto":
        raise UserError("--overwrite with --resume auto: nothing is replaced; add --resume none, or leave it out")
    if config.pretrained_head != "auto" and config.pretrained is None:
        raise UserError(
            f"--pretrained-head {config.pretrained_head} without --pretrained: there are no weights; give --pretrained"
        )
    if config.pretrained_ema is not None and config.pretrained in (None, "timm"):
        name = "--pretrained-ema" if config.pretrained_ema else "--no-pretrained-ema"
        raise UserError(f"{name} without --pretrained FILE: there is no EMA; give a checkpoint's path")
    if config.cache in ("gpu", "host") and config.loader != "dali":
        raise UserError(f"--cache {config.cache} with --loader {config.loader}: only --loader dali keeps images")
    if config.cache in ("gpu", "host") and config.decode == "fused":
        raise UserError(f"--cache {config.cache} with --decode fused: whole images are kept; leave --decode out")
    if config.cache == "gpu" and config.device == "cpu":
        raise UserError("--cache gpu with --device cpu: there is no GPU to keep images on; use --cache host")
    if config.cuda_graph and config.device == "cpu":
        raise UserError("--cuda-graph with --device cpu: there is no GPU to launch it on; use --no-cuda-graph")
    if config.cuda_graph and config.grad_accum_steps > 1:
        raise UserError(
            f"--cuda-graph with --grad-accum-steps {config.grad_accum_steps}: a graph holds one batch; "
            "use --no-cuda-graph"
        )
    if config.amp == "fp16" and config.device == "cpu":
        raise UserError("--amp fp16 with --device cpu: the CPU has no fast float16; use --amp none or bf16")


def require_data(config: TrainConfig) -> None:
    """Raise UserError unless there are images to read."""
    if config.data_dir is None and config.loader != "synthetic":
        raise UserError(
            f"--data-dir is missing: give the folder that holds train/ and val/ (--loader {config.loader} "
            "reads images; --loader synthetic needs none)"
        )
