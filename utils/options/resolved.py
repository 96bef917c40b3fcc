"""ResolvedConfig: a TrainConfig in which every open value is chosen."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from utils.figures import Task
from utils.files import write_json
from utils.options.config import TrainConfig, flags_with
from utils.options.sizes import ImageSize, Sides, sides_before_crop

CHOSEN = "chosen"  # key of config.json beside the flags: those that were not given, and their values


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """What a run uses: every open value of TrainConfig is chosen (`utils.training.settings.autotune.resolve`).

    Only the types of those fields change. Three keep the value that was given: `data_dir` and `pretrained`, where None
    means that there is none, and `grad_exchange`, which is "auto" for a single process, as that exchanges nothing.
    """

    epochs: int
    batch_size: int
    decode: Literal["fused", "full"]
    hw_decoder_load: float
    cache: Literal["none", "gpu", "host"]
    prefetch: int
    val_fraction: float
    val_resize: int
    val_image_size: ImageSize
    val_crop: Literal["center", "squash", "pad"]
    interpolation: Literal["bilinear", "bicubic", "random"]
    workers: int
    processes: int
    num_classes: int
    task: Task
    loss: str
    label_smoothing: float
    best_by: str
    compile: bool
    fused_layers: bool
    cuda_graph: bool
    warmup_epochs: float
    lr: float
    lr_scaling: Literal["linear", "sqrt", "none"]
    momentum: float
    weight_decay: float
    amp: Literal["bf16", "fp16", "none"]
    device: Literal["cuda", "cpu"]
    # No flag: the color beside images that do not fill their square, the mean of the network's input.
    padding: tuple[int, int, int] = (124, 116, 104)

    def __post_init__(self) -> None:
        super().__post_init__()
        unresolved = [name for name in ResolvedConfig.__annotations__ if getattr(self, name) in (None, "auto")]
        assert not unresolved, f"not resolved: {', '.join(unresolved)}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Undo of `to_dict`; a checkpoint without one of the keys below was trained so."""
        size = values.get("image_size", TrainConfig.image_size)
        before = {"val_image_size": size, "val_crop": "center", "interpolation": "bilinear", "lr_scaling": "linear"}
        before |= {"val_fraction": 0.0}
        before |= {"task": "multiclass", "loss": "cross-entropy", "label_smoothing": 0.1, "best_by": "top1"}
        return super().from_dict(before | dict(values))

    def padded_with(self, mean: Sequence[float]) -> Self:
        """With the color `mean`, of images in [0, 1], rounded as timm does."""
        red, green, blue = (round(255 * value) for value in mean)
        return dataclasses.replace(self, padding=(red, green, blue))

    def save(self, path: Path) -> None:
        """As `TrainConfig.save`, and under "chosen" the values that were not given, which a recipe has chosen again."""
        values, names = self.to_dict(), set(flags_with(chosen=True)) - self.given
        write_json(path, values | {CHOSEN: {name: values[name] for name in values if name in names}})

    @property
    def val_sides_before_crop(self) -> Sides:
        """What `--val-crop` resizes images to before it crops; the shorter side is `val_resize`."""
        return sides_before_crop(self.val_image_size, self.val_resize)

    @property
    def val_interpolation(self) -> Literal["bilinear", "bicubic"]:
        """Of evaluated images; as timm does it, "random" is of training crops alone."""
        return "bicubic" if self.interpolation == "bicubic" else "bilinear"
