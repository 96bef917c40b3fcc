"""TrainConfig: every flag of the trainer in one flat frozen dataclass, each field with its own metadata.

The command line, the keys of a recipe (`--config recipe.yaml`), `config.json`, `--help`, the checks of single values
and the rules of a resume are derived from the fields below, so a new flag is one new field.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from utils.files import write_json
from utils.options.flags import (
    AUGMENTATION,
    DATA,
    FIRST,
    MODEL,
    OPTIMISATION,
    PRECISION,
    RUN,
    SWITCHES,
    flag,
    flag_info,
    kinds,
)
from utils.options.flags import define_flag as _flag
from utils.options.limits import ABOVE_0, MIN_0, MIN_1, MIN_8, Limit
from utils.options.losses import LOSSES
from utils.options.policies import POLICIES
from utils.options.store_url import store_url

BATCH_SIZE = 256  # images per process and step, of a new run
PREFETCH = 6  # batches
RUNS = Path("runs")  # holds the output folders that have no --output-dir

_BELOW_1 = Limit(minimum=0, below=1)
_PROBABILITY = Limit(minimum=0, maximum=1, noun="probability")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run, fully described. Frozen, so that `config.json` is what ran.

    Attributes:
        given: names of the fields that the command line or a recipe has set; the others hold defaults.
        data_url: of an object store whose copy `data_dir` is; "" for none.
        recipe_chosen: what the run whose config.json is the recipe has chosen, by field, or may have: it is in `given`.
    """

    data_dir: Path | None = _flag(
        None, FIRST, "Folder, or s3:// URL, with train/CLASS/ and val/CLASS/ or shards.",
        shown=False, from_checkpoint=True,
    )  # fmt: skip
    output_dir: Path = _flag(  # None stands for the default, which __post_init__ sets
        None, FIRST, "Where checkpoints, metrics and the summary go.", shown="runs/DATA-ARCH", chosen=True
    )
    name: str | None = _flag(None, FIRST, "Name of the output folder in runs/.", shown="DATA-ARCH")
    arch: str = _flag("resnet50", FIRST, "Any timm architecture.", role="fixed", from_checkpoint=True)
    epochs: int = _flag(90, FIRST, "Passes over the training images.", MIN_1, role="logged")
    batch_size: int | None = _flag(
        None, FIRST, "Images per process and step.", MIN_1,
        shown=f"{BATCH_SIZE}, or as resumed", from_checkpoint=True,
    )  # fmt: skip
    lr: float | None = _flag(
        None, FIRST, "Learning rate for 256 images of the global batch.", ABOVE_0,
        shown="by optimizer; 0.256 for sgd", role="logged", chosen=True,
    )  # fmt: skip

    loader: Literal["dali", "stock", "proxy", "torch", "synthetic"] = _flag(
        "dali", DATA, "Data-loading backend.", role="fixed", from_checkpoint=True
    )
    decode: Literal["auto", "fused", "full"] = _flag(
        "auto", DATA, "What DALI decodes: the crop alone or all.", chosen=True
    )
    hw_decoder_load: float | None = _flag(
        None, DATA, "Share of a batch that the GPU's JPEG engines decode.", Limit(minimum=0, maximum=1, noun="share"),
        shown="for --decode and the images", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    cache: Literal["auto", "none", "gpu", "host"] = _flag(
        "auto", DATA, "Where training images stay decoded.", chosen=True
    )
    prefetch: int | None = _flag(None, DATA, "Batches that DALI prepares ahead.", MIN_1, shown=str(PREFETCH))
    bad_files: Literal["error", "skip"] = _flag("error", DATA, "For undecodable images.", from_checkpoint=True)
    image_size: int = _flag(
        224, DATA, "Side of the network's input, pixels.", MIN_8,
        unit="pixels", role="fixed", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    val_resize: int | None = _flag(
        None, DATA, "Shorter side before the centre crop, pixels.", MIN_8,
        shown="val image size x 8/7, or by the weights", unit="pixels", role="fixed", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    val_image_size: int | None = _flag(
        None, DATA, "Evaluated side, pixels.", MIN_8,
        shown="image size", unit="pixels", role="fixed", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    val_crop: Literal["center", "squash"] | None = _flag(
        None, DATA, "Evaluated crop.", shown="center", role="fixed", from_checkpoint=True, chosen=True
    )
    interpolation: Literal["bilinear", "bicubic", "random"] | None = _flag(
        None, DATA, "Of each resize.", shown="bilinear, or by the weights",
        role="fixed", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    val_split: str = _flag(
        "val", DATA, "Folder of the validation images, beside train/.", role="logged", from_checkpoint=True
    )
    train_data: str | None = _flag(
        None, DATA, "Training shards, below --data-dir.", shown="found", metavar="GLOB", is_path=True
    )
    val_data: str | None = _flag(
        None, DATA, "Validation shards, likewise.", shown="found", metavar="GLOB", is_path=True,
        from_checkpoint=True,
    )  # fmt: skip
    class_names: Path | None = _flag(
        None, DATA, "File of class names, a line each, for shards.", shown=False, from_checkpoint=True
    )
    stage_dir: Path | None = _flag(
        None, DATA, "Where --data-dir s3://... or gs://... is copied to.", shown=False, from_checkpoint=True
    )
    val_fraction: float = _flag(
        0.0, DATA, "Share of train/ to validate on.", _BELOW_1,
        shown="0, off", role="fixed", from_checkpoint=True,
    )  # fmt: skip
    workers: int | None = _flag(
        None, DATA, "CPU threads (torch: workers) per process.", MIN_1, shown="its share of the cores", chosen=True
    )
    augment: str = _flag("none", AUGMENTATION, "Policy, with any loader.", names=tuple(POLICIES), role="fixed")
    randaugment_magnitude: int = _flag(
        9, AUGMENTATION, "Of 30; timm's m9 is 27.", Limit(minimum=0, maximum=30), role="fixed"
    )
    randaugment_ops: int = _flag(2, AUGMENTATION, "Operations per image.", Limit(minimum=1, maximum=14), role="fixed")
    randaugment_std: float = _flag(0.0, AUGMENTATION, "Its noise: 3 x timm's mstd.", MIN_0, role="fixed")
    color_jitter: float = _flag(
        0.0, AUGMENTATION, "As timm's, with no policy.", Limit(minimum=0, maximum=1),
        shown="0, off", role="fixed",
    )  # fmt: skip
    repeated_augmentation: int = _flag(
        1, AUGMENTATION, "Copies of an image, as timm.", Limit(minimum=1, maximum=100),
        shown="1, off", role="fixed",
    )  # fmt: skip
    transform: str | None = _flag(
        None, AUGMENTATION, "Your DALI graph, before --augment.", shown="off", metavar="FILE.py:NAME", is_path=True
    )
    dali_plugin: str | None = _flag(
        None, AUGMENTATION, "Compiled operators for --transform.", shown="off", metavar="LIB.so", is_path=True
    )
    resize_schedule: str = _flag(
        "", AUGMENTATION, "Training sizes from epochs on, as 0:128,10:192.",
        shown="off", metavar="EPOCH:PX,...", role="logged",
    )  # fmt: skip
    augment_schedule: str = _flag(
        "", AUGMENTATION, "Policies from epochs on.",
        shown="off", metavar="EPOCH:NAME,...", role="logged",
    )  # fmt: skip
    crop_scale: float = _flag(
        0.08, AUGMENTATION, "Minimum crop area fraction.", Limit(above=0, maximum=1), role="fixed"
    )
    hflip: float = _flag(0.5, AUGMENTATION, "Probability of mirroring.", _PROBABILITY, role="fixed")
    mixup: float = _flag(0.0, AUGMENTATION, "Mixup alpha; 0 is off.", MIN_0, role="fixed")
    cutmix: float = _flag(0.0, AUGMENTATION, "CutMix alpha; 0 is off.", MIN_0, role="fixed")
    mixup_off_epoch: int = _flag(0, AUGMENTATION, "Epochs with both; 0: all.", MIN_0, unit="epochs", role="logged")
    random_erase: float = _flag(0.0, AUGMENTATION, "Probability of erasing.", _PROBABILITY, role="fixed")

    pretrained: str | None = _flag(
        None, MODEL, "timm's weights, or those in FILE.", shown="off", metavar="[FILE]", is_path=True
    )
    pretrained_ema: bool | None = _flag(None, MODEL, "FILE's EMA weights.", shown="if any")
    pretrained_head: Literal["auto", "keep", "new"] = _flag("auto", MODEL, "The weights' head.")
    num_classes: int | None = _flag(
        None, MODEL, "Outputs of the head.", MIN_1, shown="the folders", role="fixed", from_checkpoint=True, chosen=True
    )
    model_args: str | None = _flag(
        None, MODEL, "Arguments of the architecture: a=1,b=[2,3].", shown=False, metavar="K=V",
        role="fixed", from_checkpoint=True,
    )  # fmt: skip
    drop_rate: float | None = _flag(
        None, MODEL, "Dropout, if not the architecture's.", _BELOW_1,
        shown=False, role="logged", from_checkpoint=True,
    )  # fmt: skip
    drop_path: float | None = _flag(
        None, MODEL, "Stochastic depth, likewise.", _BELOW_1, shown=False, role="logged", from_checkpoint=True
    )
    compile: bool | None = _flag(None, MODEL, "torch.compile it.", shown="long GPU runs", role="logged", chosen=True)
    fused_layers: bool | None = _flag(
        None, MODEL, "Brisk's own kernels for norms, pooling and convolutions.",
        shown="where compiled on CUDA", role="logged", chosen=True,
    )  # fmt: skip
    cuda_graph: bool | None = _flag(
        None, MODEL, "Launch the training step as one CUDA graph.", shown="on CUDA", role="logged", chosen=True
    )

    grad_accum_steps: int = _flag(1, OPTIMISATION, "Batches per optimizer step.", MIN_1)
    optimizer: str = _flag("sgd", OPTIMISATION, "Any timm optimizer; its sgd is Nesterov's.", role="fixed")
    momentum: float | None = _flag(
        None, OPTIMISATION, "Momentum, where the optimizer has one.", _BELOW_1,
        shown="by optimizer; 0.875 for sgd", role="fixed", chosen=True,
    )  # fmt: skip
    weight_decay: float | None = _flag(
        None, OPTIMISATION, "Not on biases and 1-D weights; as timm.", MIN_0,
        shown="by optimizer; 1/32768 for sgd", role="fixed", chosen=True,
    )  # fmt: skip
    optimizer_args: str | None = _flag(
        None, OPTIMISATION, "More arguments of it: a=1,b=[2,3].", shown=False, metavar="K=V", role="fixed"
    )
    layer_decay: float | None = _flag(
        None, OPTIMISATION, "Factor of --lr from layer to layer below.", Limit(above=0, maximum=1),
        shown=False, role="fixed",
    )  # fmt: skip
    head_lr_scale: float | None = _flag(
        None, OPTIMISATION, "Factor of --lr for the head.", ABOVE_0, shown="1", role="fixed"
    )
    freeze_epochs: int = _flag(
        0, OPTIMISATION, "Epochs in which only the head trains.", MIN_0, unit="epochs", role="logged"
    )
    warmup_epochs: float | None = _flag(
        None, OPTIMISATION, "Epochs of linear warmup.", MIN_0,
        shown="a tenth, at most 5", unit="epochs", role="logged", chosen=True,
    )  # fmt: skip
    lr_scaling: Literal["auto", "linear", "sqrt", "none"] = _flag(
        "auto", OPTIMISATION, "How --lr grows with the global batch.",
        shown="by optimizer; linear for sgd", role="logged", chosen=True,
    )  # fmt: skip
    schedule: Literal["cosine", "linear", "step", "constant"] = _flag("cosine", OPTIMISATION, "Decay.", role="logged")
    min_lr: float = _flag(0.0, OPTIMISATION, "Its end, for 256 images as --lr.", MIN_0, role="logged")
    cooldown_epochs: int = _flag(0, OPTIMISATION, "Epochs at --min-lr at the end.", MIN_0, unit="epochs", role="logged")
    decay_epochs: float | None = _flag(
        None, OPTIMISATION, "Epochs between decays of step.", ABOVE_0, shown="30", unit="epochs", role="logged"
    )
    decay_rate: float | None = _flag(
        None, OPTIMISATION, "Factor of each.", Limit(above=0, below=1), shown="0.1", role="logged"
    )
    loss: str = _flag("cross-entropy", OPTIMISATION, "What training minimizes.", names=tuple(LOSSES), role="logged")
    bce_target_thresh: float | None = _flag(
        None, OPTIMISATION, "--loss bce: targets above are 1, others 0.", _BELOW_1, shown="off", role="logged"
    )
    label_smoothing: float = _flag(
        0.1, OPTIMISATION, "Share of the target spread over all classes.", _BELOW_1, role="logged"
    )
    ema_decay: float = _flag(0.0, OPTIMISATION, "Moving average of the weights; 0 is off.", _BELOW_1, role="logged")
    clip_grad: float = _flag(0.0, OPTIMISATION, "Largest norm of the gradient; 0 is off.", MIN_0, role="logged")
    max_bad_steps: int = _flag(10, OPTIMISATION, "Steps with no finite loss that end the run; 0: none.", MIN_0)

    grad_exchange: Literal["auto", "ddp", "flat"] = _flag(
        "auto", PRECISION, "ddp: with the backward pass; flat: after it.",
        shown="flat on NVLink", role="logged_if_several", chosen=True,
    )  # fmt: skip
    grad_compression: Literal["none", "bf16"] = _flag(
        "none", PRECISION, "Gradients travel in this type.", role="logged_if_several"
    )
    amp: Literal["auto", "bf16", "fp16", "none"] = _flag(
        "auto", PRECISION, "Mixed precision.", role="logged", from_checkpoint=True, chosen=True
    )
    device: Literal["auto", "cuda", "cpu"] = _flag("auto", PRECISION, "Where to train.", chosen=True)

    resume: str = _flag(
        "auto", RUN, "auto: from last.pt, if there is one.", metavar="auto|none|PATH", of_launch=True, is_path=True
    )
    checkpoint_steps: int = _flag(0, RUN, "Steps between saves; 0: an epoch.", MIN_0, unit="steps")
    eval_every: int = _flag(1, RUN, "Epochs between evaluations.", MIN_1, unit="epochs", role="logged")
    patience: int = _flag(
        0, RUN, "Evaluations without a better top-1 that end the run.", MIN_0,
        shown="0, off", role="logged",
    )  # fmt: skip
    processes: int | Literal["auto"] = _flag(
        1, RUN, "Processes to start here; auto: one a GPU.", MIN_1, metavar="N|auto"
    )
    max_restarts: int = _flag(0, RUN, "Restarts after a failure, with --processes.", MIN_0, of_launch=True)
    accept_changes: bool = _flag(
        False, SWITCHES, "Go on from --resume PATH although the run differs from its own.", of_launch=True
    )
    overwrite: bool = _flag(False, SWITCHES, "Replace what --resume does not continue.", of_launch=True)
    evaluate: bool = _flag(False, SWITCHES, "Only evaluate best.pt or --resume.", of_launch=True)
    eval_flip: bool = _flag(False, SWITCHES, "Evaluates mirror images, too.", of_launch=True)
    bce_loss: bool = _flag(False, SWITCHES, "The same as --loss bce.", stands_for=("loss", "bce"))
    grad_checkpointing: bool = _flag(False, SWITCHES, "Less memory, slower.", role="logged")
    sync_bn: bool = _flag(False, SWITCHES, "Batch norm over all processes.", role="logged_if_several")
    seed: int = _flag(0, RUN, "Of weights, order and augmentation.", MIN_0, Limit(below=2**31), role="fixed")
    deterministic: bool = _flag(False, SWITCHES, "Same bits in every run; slower.", role="logged")
    log_steps: int = _flag(50, RUN, "Steps between lines of metrics.jsonl.", MIN_1, unit="steps")
    report: bool = _flag(False, SWITCHES, "Also report.html and report.json.")
    tensorboard: bool = _flag(False, SWITCHES, "Also TensorBoard events.")
    track: Literal["none", "trackio", "wandb", "mlflow"] = _flag("none", RUN, "Tracker.")
    track_project: str | None = _flag(None, RUN, "Project of the tracker.", shown="brisk")
    track_checkpoint: bool = _flag(False, SWITCHES, "The tracker gets best.pt, too.")
    time_limit: float = _flag(
        0.0, RUN, "Seconds until a save and stop; 0 is off.", MIN_0, unit="seconds", of_launch=True
    )
    # A store that waits for much longer than this maximum does not wait at all.
    timeout: float = _flag(
        600.0, RUN, "Seconds to wait for another process.", ABOVE_0, Limit(maximum=1e6), unit="seconds"
    )
    config: Path | None = _flag(None, RUN, "Recipe (YAML); the command line wins.", shown=False, of_launch=True)
    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)
    data_url: str = dataclasses.field(default="", repr=False, compare=False)
    recipe_chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.output_dir is None:
            object.__setattr__(self, "output_dir", self._default_output_dir())
        for field in flag_fields():
            if (meant := flag_info(field).stands_for) and getattr(self, field.name):
                object.__setattr__(self, *meant)
                object.__setattr__(self, field.name, False)

    def _default_output_dir(self) -> Path:
        if self.evaluate and self.name is None and self.resume not in ("auto", "none"):
            return Path(self.resume).parent  # of the checkpoint
        data = "synthetic" if self.data_dir is None else self.data_dir.absolute().name or "data"
        return RUNS / (self.name or re.sub(r"[^\w.+-]+", "-", f"{data}-{self.arch}"))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary of all flags of the run; `name` is in `output_dir`."""
        values = {name: getattr(self, name) for name in flags_with(of_launch=False, stands_for=None) if name != "name"}
        values["data_dir"] = self.data_url or store_url(self.data_dir) or self.data_dir
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Undo of `to_dict`: unknown names are ignored, absent ones get their defaults."""
        known = {field.name: value for field in flag_fields() if (value := values.get(field.name)) is not None}
        paths = {"data_dir", "output_dir", "class_names", "stage_dir"} & known.keys()
        return cls(**known | {name: Path(known[name]) for name in paths})

    def save(self, path: Path) -> None:
        """Write the flags of the run as JSON; the file is itself a valid `--config`."""
        write_json(path, self.to_dict())


def flag_fields() -> list[dataclasses.Field[Any]]:
    """The fields of TrainConfig that are flags."""
    return [field for field in dataclasses.fields(TrainConfig) if field.metadata]


def choices(name: str) -> tuple[str, ...]:
    """The words that a field admits, if it names them; () if not."""
    if names := flag_info(TrainConfig.__dataclass_fields__[name]).names:
        return names
    found = (typing.get_args(kind) for kind in kinds(TrainConfig.__dataclass_fields__[name]))
    return next((words for words in found if words), ())


def flags_with(**facts: Any) -> tuple[str, ...]:
    """Names of the fields whose FlagInfo has these values, as `flags_with(of_launch=True)`."""
    return tuple(field.name for field in flag_fields() if facts.items() <= vars(flag_info(field)).items())


def check_limits(name: str, value: Any) -> None:
    """Raise UserError unless the value of the field `name` is within its limits."""
    info = flag_info(TrainConfig.__dataclass_fields__[name])
    for limit in info.limits if value not in choices(name) else ():
        limit.check(flag(name), value, info.unit)
