"""TrainConfig: every flag of the trainer in one flat frozen dataclass, each field with its own metadata.

The command line, the keys of a recipe (`--config recipe.yaml`), `config.json`, `--help`, the checks of single values
and the rules of a resume are derived from the fields below and those of `DataFlags`, so a new flag is one new field.
"""

import dataclasses
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from utils.figures import FIGURES, Task
from utils.files import write_json
from utils.options.data_flags import DataFlags
from utils.options.flags import MODEL, OPTIMIZATION, PRECISION, RUN, SWITCHES, flag_info, kinds
from utils.options.flags import define_flag as _flag
from utils.options.limits import ABOVE_0, BELOW_1, MIN_0, MIN_1, Limit
from utils.options.losses import LOSSES
from utils.options.store_url import store_url

MAX_KEEP = 20  # spare checkpoints
RUNS = Path("runs")  # holds the output folders that have no --output-dir


@dataclasses.dataclass(frozen=True)
class TrainConfig(DataFlags):
    """One run, fully described. Frozen, so that `config.json` is what ran.

    Attributes:
        given: names of the fields that the command line or a recipe has set; the others hold defaults.
        data_url: of an object store whose copy `data_dir` is; "" for none.
        recipe_chosen: what the run whose config.json is the recipe has chosen, by field, or may have: it is in `given`.
    """

    pretrained: str | None = _flag(
        None, MODEL, "Start from timm's weights, or from those in FILE.", shown="off", metavar="[FILE]", is_path=True
    )
    pretrained_ema: bool | None = _flag(None, MODEL, "Take the moving average of the weights in FILE.", shown="if any")
    pretrained_head: Literal["auto", "keep", "new"] = _flag(
        "auto", MODEL, "Keep the head of the weights, or begin with a new one."
    )
    num_classes: int | None = _flag(
        None, MODEL, "Outputs of the head.", MIN_1, shown="the folders", role="fixed", from_checkpoint=True,
        chosen=True,
    )  # fmt: skip
    task: Task | None = _flag(
        None, MODEL, "One class an image, or any number.", shown="by the labels", role="fixed",
        from_checkpoint=True, chosen=True,
    )  # fmt: skip
    model_args: str | None = _flag(
        None, MODEL, "Arguments of the architecture, such as a=1,b=[2,3].", shown=False, metavar="K=V", role="fixed",
        from_checkpoint=True,
    )  # fmt: skip
    drop_rate: float | None = _flag(
        None, MODEL, "Dropout rate, in place of the architecture's.", BELOW_1, shown=False, role="logged",
        from_checkpoint=True,
    )  # fmt: skip
    drop_path: float | None = _flag(
        None, MODEL, "Stochastic depth rate, in place of the architecture's.", BELOW_1, shown=False, role="logged",
        from_checkpoint=True,
    )  # fmt: skip
    compile: bool | None = _flag(
        None, MODEL, "Compile the network with torch.compile.", shown="long GPU runs", role="logged", chosen=True
    )
    fused_layers: bool | None = _flag(
        None, MODEL, "Use Brisk's kernels for norms, pooling and convolutions.", shown="where compiled on CUDA",
        role="logged", chosen=True,
    )  # fmt: skip
    cuda_graph: bool | None = _flag(
        None, MODEL, "Launch the training step as one CUDA graph.", shown="on CUDA", role="logged", chosen=True
    )

    grad_accum_steps: int = _flag(1, OPTIMIZATION, "Batches per optimizer step.", MIN_1)
    optimizer: str = _flag(
        "sgd", OPTIMIZATION, "Optimizer: any name that timm knows; sgd has Nesterov momentum.", role="fixed"
    )
    momentum: float | None = _flag(
        None, OPTIMIZATION, "Momentum, where the optimizer has one.", BELOW_1, shown="by optimizer; 0.875 for sgd",
        role="fixed", chosen=True,
    )  # fmt: skip
    weight_decay: float | None = _flag(
        None, OPTIMIZATION, "Weight decay of all weights but biases and 1-D ones.", MIN_0,
        shown="by optimizer; 1/32768 for sgd", role="fixed", chosen=True,
    )  # fmt: skip
    optimizer_args: str | None = _flag(
        None, OPTIMIZATION, "More arguments of the optimizer, such as a=1,b=[2,3].", shown=False, metavar="K=V",
        role="fixed",
    )  # fmt: skip
    layer_decay: float | None = _flag(
        None, OPTIMIZATION, "Factor of the learning rate from a layer to that below.", Limit(above=0, maximum=1),
        shown=False, role="fixed",
    )  # fmt: skip
    head_lr_scale: float | None = _flag(
        None, OPTIMIZATION, "Factor of the learning rate for the head.", ABOVE_0, shown="1", role="fixed"
    )
    freeze_epochs: int = _flag(
        0, OPTIMIZATION, "Epochs in which only the head is trained.", MIN_0, unit="epochs", role="logged"
    )
    warmup_epochs: float | None = _flag(
        None, OPTIMIZATION, "Epochs of linear warmup.", MIN_0, shown="a tenth, at most 5", unit="epochs", role="logged",
        chosen=True,
    )  # fmt: skip
    lr_scaling: Literal["auto", "linear", "sqrt", "none"] = _flag(
        "auto", OPTIMIZATION, "How --lr grows with the global batch.", shown="by optimizer; linear for sgd",
        role="logged", chosen=True,
    )  # fmt: skip
    schedule: Literal["cosine", "linear", "step", "constant"] = _flag(
        "cosine", OPTIMIZATION, "Decay of the learning rate.", role="logged"
    )
    min_lr: float = _flag(0.0, OPTIMIZATION, "Final learning rate, for 256 images like --lr.", MIN_0, role="logged")
    cooldown_epochs: int = _flag(0, OPTIMIZATION, "Last epochs, at --min-lr.", MIN_0, unit="epochs", role="logged")
    decay_epochs: float | None = _flag(
        None, OPTIMIZATION, "Epochs between two decays of --schedule step.", ABOVE_0, shown="30", unit="epochs",
        role="logged",
    )  # fmt: skip
    decay_rate: float | None = _flag(
        None, OPTIMIZATION, "Factor of each decay of --schedule step.", Limit(above=0, below=1), shown="0.1",
        role="logged",
    )  # fmt: skip
    loss: str | None = _flag(
        None, OPTIMIZATION, "Loss of training.", names=tuple(LOSSES), shown="by task", role="logged", chosen=True
    )
    bce_target_thresh: float | None = _flag(
        None, OPTIMIZATION, "With --loss bce, targets above this become 1, others 0.", BELOW_1, shown="off",
        role="logged",
    )  # fmt: skip
    focal: float = _flag(
        0.0, OPTIMIZATION, "Power of (1 - p) in the loss: focal loss.", MIN_0,
        shown="0, off", role="logged",
    )  # fmt: skip
    class_weights: str = _flag(
        "none", OPTIMIZATION, "Class weights in the loss; auto: the rarer, the larger.",
        metavar="auto|FILE", shown="none", role="fixed", is_path=True,
    )  # fmt: skip
    label_smoothing: float | None = _flag(
        None, OPTIMIZATION, "Share of the target that is spread over all classes.", BELOW_1, shown="by task; 0.1 or 0",
        role="logged", chosen=True,
    )  # fmt: skip
    teacher: str | None = _flag(
        None, OPTIMIZATION, "Network to distill: a run, a weights file, a timm name.", metavar="FILE|NAME", shown=False,
        role="fixed", is_path=True,
    )  # fmt: skip
    teacher_weight: float = _flag(
        0.5, OPTIMIZATION, "Share of the teacher in the loss.", Limit(minimum=0, maximum=1), role="logged"
    )
    teacher_temperature: float = _flag(
        4.0, OPTIMIZATION, "Divisor of the logits in that share.", ABOVE_0, role="logged"
    )
    ema_decay: float = _flag(
        0.0, OPTIMIZATION, "Decay of the moving average of the weights; 0 is off.", BELOW_1, role="logged"
    )
    clip_grad: float = _flag(0.0, OPTIMIZATION, "Largest norm of the gradients; 0 is off.", MIN_0, role="logged")
    max_bad_steps: int = _flag(
        10, OPTIMIZATION, "Steps in a row without a finite loss that end the run; 0 never ends it.", MIN_0
    )

    grad_exchange: Literal["auto", "ddp", "flat"] = _flag(
        "auto", PRECISION, "When gradients are exchanged: within the backward pass (ddp), or after it (flat).",
        shown="flat on NVLink", role="logged_if_several", chosen=True,
    )  # fmt: skip
    grad_compression: Literal["none", "bf16"] = _flag(
        "none", PRECISION, "Type in which gradients are exchanged.", role="logged_if_several"
    )
    amp: Literal["auto", "bf16", "fp16", "none"] = _flag(
        "auto", PRECISION, "Mixed precision.", role="logged", from_checkpoint=True, chosen=True
    )
    device: str = _flag("auto", PRECISION, "Device to train on.", names=("auto", "cuda", "cuda:N", "cpu"), chosen=True)

    resume: str = _flag(
        "auto", RUN, "Checkpoint to go on from; auto is last.pt of the output folder, if it is there.",
        metavar="auto|none|PATH", of_launch=True, is_path=True,
    )  # fmt: skip
    checkpoint_steps: int = _flag(0, RUN, "Steps between two checkpoints; 0 saves once an epoch.", MIN_0, unit="steps")
    keep: int = _flag(2, RUN, "Spare checkpoints, last-1.pt and so on.", Limit(minimum=0, maximum=MAX_KEEP))
    eval_every: int = _flag(1, RUN, "Epochs between two evaluations.", MIN_1, unit="epochs", role="logged")
    patience: int = _flag(
        0, RUN, "Evaluations without a better one that end the run.", MIN_0, shown="0, off", role="logged"
    )
    best_by: str | None = _flag(
        None, RUN, "Figure that chooses best.pt.", names=tuple(FIGURES), shown="by task", role="logged",
        from_checkpoint=True, chosen=True,
    )  # fmt: skip
    processes: int | Literal["auto"] = _flag(
        1, RUN, "Processes to start on this machine; auto starts one for each GPU.", MIN_1, metavar="N|auto"
    )
    max_restarts: int = _flag(0, RUN, "Restarts after a failure, with --processes.", MIN_0, of_launch=True)
    accept_changes: bool = _flag(
        False, SWITCHES, "Go on from --resume PATH although the flags differ from those of its run.", of_launch=True
    )
    overwrite: bool = _flag(
        False, SWITCHES, "Replace files of another run that --resume does not continue.", of_launch=True
    )
    evaluate: bool = _flag(
        False, SWITCHES, "Evaluate best.pt, or the checkpoint of --resume, and do not train.", of_launch=True
    )
    eval_flip: bool = _flag(
        False, SWITCHES, "Average the logits of each image and its mirror image, with --evaluate.", of_launch=True
    )
    eval_classes: Literal["all", "present"] = _flag(
        "all", RUN, "Classes that an answer of --evaluate may be.", of_launch=True
    )
    real_labels: Path | None = _flag(
        None, RUN, "Right labels of each image for --evaluate: real.json, or a label file.", shown=False,
        of_launch=True,
    )  # fmt: skip
    bce_loss: bool = _flag(False, SWITCHES, "The same as --loss bce.", stands_for=("loss", "bce"))
    grad_checkpointing: bool = _flag(
        False, SWITCHES, "Compute activations again in the backward pass: less memory, more time.", role="logged"
    )
    sync_bn: bool = _flag(False, SWITCHES, "Batch norm over the images of all processes.", role="logged_if_several")
    seed: int = _flag(
        0, RUN, "Seed of the weights, the order of images and the augmentation.", MIN_0, Limit(below=2**31),
        role="fixed",
    )  # fmt: skip
    deterministic: bool = _flag(False, SWITCHES, "Compute the same bits in every run; slower.", role="logged")
    log_steps: int = _flag(50, RUN, "Steps between two lines of metrics.jsonl.", MIN_1, unit="steps")
    report: bool = _flag(False, SWITCHES, "Also write report.html and report.json.")
    tensorboard: bool = _flag(False, SWITCHES, "Also write TensorBoard events.")
    track: Literal["none", "trackio", "wandb", "mlflow"] = _flag("none", RUN, "Tracker that gets the metrics.")
    track_project: str | None = _flag(None, RUN, "Project of the tracker.", shown="brisk")
    track_checkpoint: bool = _flag(False, SWITCHES, "Also send best.pt to the tracker.")
    time_limit: float = _flag(
        0.0, RUN, "Seconds after which the run saves and stops; 0 is off.", MIN_0, unit="seconds", of_launch=True
    )
    # A store that waits for much longer than this maximum does not wait at all.
    timeout: float = _flag(
        600.0, RUN, "Seconds that a process waits for another.", ABOVE_0, Limit(maximum=1e6), unit="seconds"
    )
    config: Path | None = _flag(None, RUN, "Recipe (YAML); the command line wins over it.", shown=False, of_launch=True)
    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)
    data_url: str = dataclasses.field(default="", repr=False, compare=False)
    recipe_chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.resume not in ("auto", "none") and os.path.isdir(self.resume):
            name = "best.pt" if self.evaluate else "last.pt"
            object.__setattr__(self, "resume", str(Path(self.resume, name)))
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
        paths = {"data_dir", "output_dir", "class_names", "stage_dir", "real_labels"} & known.keys()
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
