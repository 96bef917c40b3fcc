"""The flags of a run's images: where they are, how they are read and augmented; `TrainConfig` has them, too."""

import dataclasses
from pathlib import Path
from typing import Literal

from utils.options.flags import AUGMENTATION, DATA, FIRST
from utils.options.flags import define_flag as _flag
from utils.options.folds import Fold, read_fold
from utils.options.limits import ABOVE_0, BELOW_1, MIN_0, MIN_1, MIN_8, Limit
from utils.options.policies import POLICIES
from utils.options.sizes import ImageSize

BATCH_SIZE = 256  # images per process and step, of ImageNet's recipe
EPOCHS = 90  # of it
PREFETCH = 6  # batches

_SHARE = Limit(minimum=0, maximum=1)
_PROBABILITY = Limit(minimum=0, maximum=1, noun="probability")


@dataclasses.dataclass(frozen=True)
class DataFlags:
    """The first flags of `--help`, those of the data and of its augmentation, a field each."""

    data_dir: Path | None = _flag(
        None, FIRST, "Folder, or s3:// or gs:// URL, with train/CLASS/ and val/CLASS/, or with shards.", shown=False,
        from_checkpoint=True,
    )  # fmt: skip
    output_dir: Path = _flag(  # None stands for the default, which __post_init__ sets
        None, FIRST, "Folder for checkpoints, metrics and the summary.", shown="runs/DATA-ARCH", chosen=True
    )
    name: str | None = _flag(None, FIRST, "Name of the output folder within runs/.", shown="DATA-ARCH")
    arch: str = _flag("resnet50", FIRST, "Architecture: any name that timm knows.", role="fixed", from_checkpoint=True)
    epochs: int | None = _flag(
        None, FIRST, "Passes over the training images.", MIN_1, shown=f"{EPOCHS}, or by the images", role="logged",
        chosen=True,
    )  # fmt: skip
    batch_size: int | None = _flag(
        None, FIRST, "Images per process and step.", MIN_1, shown=f"{BATCH_SIZE}, or by the images", short="-b",
        from_checkpoint=True, chosen=True,
    )  # fmt: skip
    lr: float | None = _flag(
        None, FIRST, "Peak learning rate for a global batch of 256 images; see --lr-scaling.", ABOVE_0,
        shown="by optimizer; 0.256 for sgd", role="logged", chosen=True,
    )  # fmt: skip

    loader: Literal["dali", "stock", "proxy", "torch", "synthetic"] = _flag(
        "dali", DATA, "Data-loading backend.", role="fixed", from_checkpoint=True
    )
    decode: Literal["auto", "fused", "full"] = _flag(
        "auto", DATA, "What DALI decodes of a training image: only the crop (fused), or all of it (full).", chosen=True
    )
    hw_decoder_load: float | None = _flag(
        None, DATA, "Share of a batch that the JPEG engines of the GPU decode.",
        Limit(minimum=0, maximum=1, noun="share"), shown="for --decode and the images", from_checkpoint=True,
        chosen=True,
    )  # fmt: skip
    cache: Literal["auto", "none", "gpu", "host"] = _flag(
        "auto", DATA, "Where decoded training images stay.", chosen=True
    )
    prefetch: int | None = _flag(None, DATA, "Batches that DALI prepares ahead.", MIN_1, shown=str(PREFETCH))
    bad_files: Literal["error", "skip"] = _flag(
        "error", DATA, "What an image that cannot be decoded does: it ends the run, or is left out.",
        from_checkpoint=True,
    )  # fmt: skip
    image_size: ImageSize = _flag(
        224, DATA, "Size of training images, pixels: N, or HxW.", MIN_8, metavar="SIZE", unit="pixels", role="fixed",
        from_checkpoint=True, chosen=True,
    )  # fmt: skip
    val_resize: int | None = _flag(
        None, DATA, "Shorter side of validation images before the crop, pixels.", MIN_8,
        shown="val image size x 8/7, or by crop or weights", unit="pixels", role="fixed", from_checkpoint=True,
        chosen=True,
    )  # fmt: skip
    val_image_size: ImageSize | None = _flag(
        None, DATA, "Size of validation images, pixels.", MIN_8, metavar="SIZE", shown="image size", unit="pixels",
        role="fixed", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    val_crop: Literal["center", "squash", "pad"] | None = _flag(
        None, DATA, "Validation crop: the center, or all, squashed or padded to a square.",
        shown="center, or as --train-crop", role="fixed", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    interpolation: Literal["bilinear", "bicubic", "random"] | None = _flag(
        None, DATA, "Interpolation of every resize; random draws one for each training image.",
        shown="bilinear, or by the weights", role="fixed", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    train_split: str = _flag(
        "train", DATA, "Folder of the training images.", shown="train, or alike", role="logged", from_checkpoint=True
    )
    val_split: str = _flag(
        "val", DATA, "Folder of the validation images.", shown="val, or alike", role="logged",
        from_checkpoint=True,
    )  # fmt: skip
    train_data: str | None = _flag(
        None, DATA, "Training shards or label file, below --data-dir.", shown="found", metavar="GLOB",
        is_path=True, from_checkpoint=True,
    )  # fmt: skip
    val_data: str | None = _flag(
        None, DATA, "Validation shards or label file, below --data-dir.", shown="found", metavar="GLOB",
        is_path=True, from_checkpoint=True,
    )  # fmt: skip
    class_names: Path | None = _flag(
        None, DATA, "File with the name of each class, a line each, for shards.", shown=False, from_checkpoint=True
    )
    stage_dir: Path | None = _flag(
        None, DATA, "Folder to which the objects of an s3:// or gs:// URL are copied.", shown=False,
        from_checkpoint=True,
    )  # fmt: skip
    val_fraction: float | None = _flag(
        None, DATA, "Share of train/ that is held out to validate on.", BELOW_1,
        shown="0.1 without train/, else 0", role="fixed", from_checkpoint=True, chosen=True,
    )  # fmt: skip
    fold: str | None = _flag(
        None, DATA, "Hold out the K-th of N parts of train/.", shown="off", metavar="K/N", role="fixed",
        from_checkpoint=True,
    )  # fmt: skip
    val_group: str | None = _flag(
        None, DATA, "What stays whole: a label file's column or a path pattern.",
        shown="column group", metavar="GROUPS", role="fixed", from_checkpoint=True,
    )  # fmt: skip
    balance: float = _flag(0.0, DATA, "How evenly classes come; 1: all alike.", _SHARE, shown="0, off", role="fixed")
    workers: int | None = _flag(
        None, DATA, "CPU threads per process that load data; with --loader torch, worker processes.", MIN_1,
        shown="its share of the cores", short="-j", chosen=True,
    )  # fmt: skip
    augment: str = _flag("none", AUGMENTATION, "Augmentation policy.", names=tuple(POLICIES), role="fixed")
    randaugment_magnitude: int = _flag(
        9, AUGMENTATION, "Magnitude of RandAugment, 0 to 30; timm's m9 is 27.", Limit(minimum=0, maximum=30),
        role="fixed",
    )  # fmt: skip
    randaugment_ops: int = _flag(
        2, AUGMENTATION, "Operations of RandAugment per image.", Limit(minimum=1, maximum=14), role="fixed"
    )
    randaugment_std: float = _flag(
        0.0, AUGMENTATION, "Standard deviation of RandAugment's magnitude; 3 times timm's mstd.", MIN_0, role="fixed"
    )
    color_jitter: float = _flag(
        0.0, AUGMENTATION, "Range of brightness, contrast and saturation, as in timm.", Limit(minimum=0, maximum=1),
        shown="0, off", role="fixed",
    )  # fmt: skip
    repeated_augmentation: int = _flag(
        1, AUGMENTATION, "Copies of each image in an epoch, which then has so many times fewer images.",
        Limit(minimum=1, maximum=100), shown="1, off", role="fixed",
    )  # fmt: skip
    transform: str | None = _flag(
        None, AUGMENTATION, "Function of your own that adds DALI operators before --augment.", shown="off",
        metavar="FILE.py:NAME", is_path=True,
    )  # fmt: skip
    dali_plugin: str | None = _flag(
        None, AUGMENTATION, "Compiled DALI operators for --transform.", shown="off", metavar="LIB.so", is_path=True
    )
    resize_schedule: str = _flag(
        "", AUGMENTATION, "Training image sizes from epochs on, such as 0:128,10:192.", shown="off",
        metavar="EPOCH:PX,...", role="logged",
    )  # fmt: skip
    augment_schedule: str = _flag(
        "", AUGMENTATION, "Augmentation policies from epochs on, such as 0:none,5:trivialaugment.", shown="off",
        metavar="EPOCH:NAME,...", role="logged",
    )  # fmt: skip
    train_crop: Literal["random", "center", "squash", "pad"] = _flag(
        "random", AUGMENTATION, "Training crop, as --val-crop.", role="fixed"
    )
    crop_scale: float = _flag(
        0.08, AUGMENTATION, "Smallest area of a random crop, as a share of the image.", Limit(above=0, maximum=1),
        role="fixed",
    )  # fmt: skip
    hflip: float = _flag(0.5, AUGMENTATION, "Probability of a horizontal flip.", _PROBABILITY, role="fixed")
    vflip: float = _flag(
        0.0, AUGMENTATION, "Probability of a vertical flip.", _PROBABILITY, shown="0, off", role="fixed"
    )
    rot90: bool = _flag(False, AUGMENTATION, "Turn images by quarters.", role="fixed")
    mixup: float = _flag(0.0, AUGMENTATION, "Alpha of mixup; 0 is off.", MIN_0, role="fixed")
    cutmix: float = _flag(0.0, AUGMENTATION, "Alpha of CutMix; 0 is off.", MIN_0, role="fixed")
    mixup_off_epoch: int = _flag(
        0, AUGMENTATION, "Epoch from which mixup and CutMix are off; 0 keeps them on.", MIN_0, unit="epochs",
        role="logged",
    )  # fmt: skip
    random_erase: float = _flag(0.0, AUGMENTATION, "Probability of random erasing.", _PROBABILITY, role="fixed")

    @property
    def held_out(self) -> float:
        """Share of the training images that is held out to validate on; 0.0 for none."""
        return 1 / fold.parts if (fold := self.held_out_fold) else self.val_fraction or 0.0

    @property
    def held_out_fold(self) -> Fold | None:
        """`--fold`."""
        return None if self.fold is None else read_fold(self.fold)

    @property
    def held_out_by(self) -> str:
        """The flag that holds images out, for messages, with its value; "" for none."""
        if self.fold is not None:
            return f"--fold {self.fold}"
        return f"--val-fraction {self.val_fraction:g}" if self.val_fraction else ""
