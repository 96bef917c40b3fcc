"""Augmentation of a batch on the device: normalization, mixup, CutMix, random erasing."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.nn.functional import one_hot
from torchvision.transforms import v2

from utils.distributed.group import DistEnv
from utils.network.gradients import AMP_DTYPES
from utils.options.resolved import ResolvedConfig
from utils.targets import Targets


class Normalize:
    """uint8 images to floating point with zero mean and unit variance per channel.

    Args:
        mean, std: per channel, of images in [0, 1].
        dtype: of the result; bfloat16 or float16 under mixed precision saves the network a conversion pass.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype, device: torch.device) -> None:
        self.scale = (1 / (255 * torch.tensor(std, device=device))).view(1, -1, 1, 1)
        self.shift = (torch.tensor(mean, device=device) / torch.tensor(std, device=device)).view(1, -1, 1, 1)
        self.dtype = dtype

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (N, 3, H, W) -> `dtype` (N, 3, H, W), same memory format."""
        return (images * self.scale - self.shift).to(self.dtype)

    def inverse(self, images: Tensor) -> Tensor:
        """Normalized images (N, 3, H, W) -> float32, 0 to 255."""
        return (images.float() + self.shift) / self.scale


class Samples(NamedTuple):
    """Some training images, on the CPU.

    Attributes:
        images: uint8 (N, 3, H, W), as the loader gives them.
        targets: int64 (N,), labels.
        augmented: float32 (N, 3, H, W), 0 to 255, as the network sees them.
        mixed: int64 (N,), or float32 (N, num_classes) in a run that mixes, or whose images have any number of classes.
    """

    images: Tensor
    targets: Tensor
    augmented: Tensor
    mixed: Tensor


class BatchAugment:
    """Training's augmentation of a whole batch, on the device.

    Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899), one of them per batch where both are on; random erasing
    (arXiv:1708.04896).

    Attributes:
        targets: what the labels stand for.
        samples: the first images of the batch after `keep_samples`; None before it.
    """

    def __init__(self, config: ResolvedConfig, normalize: Normalize, targets: Targets, device: torch.device) -> None:
        self.normalize, self.targets = normalize, targets
        num_classes = targets.num_classes
        # One pass over the batch instead of three. Evaluation stays eager: its last batch has another size.
        self._normalize = torch.compile(normalize, dynamic=False) if config.compile else normalize
        mixes: list[torch.nn.Module] = []
        if config.mixup > 0:
            mixes.append(v2.MixUp(alpha=config.mixup, num_classes=num_classes))
        if config.cutmix > 0:
            mixes.append(v2.CutMix(alpha=config.cutmix, num_classes=num_classes))
        self.mix = v2.RandomChoice(mixes) if mixes else None
        self._off_epoch = config.mixup_off_epoch
        self._mixes = True  # in the epoch under way
        self.samples: Samples | None = None
        self._num_samples = 0  # to keep of the next batch
        self.erase = RandomErasing(config.random_erase, device=device) if config.random_erase > 0 else None

    def start_epoch(self, epoch: int) -> None:
        """Turn mixup and CutMix off where `--mixup-off-epoch` is reached; `epoch` counts from 0."""
        self._mixes = not 0 < self._off_epoch <= epoch

    def keep_samples(self, count: int) -> None:
        """Keep this number of images of the next batch, which waits for the device."""
        self._num_samples = count

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Augment one batch.

        Args:
            images: uint8 (N, 3, H, W).
            targets: int64 (N,), labels of the split.

        Returns:
            Images as floating point (N, 3, H, W); targets int64 (N,), or float32 (N, num_classes) in a run that mixes,
            or whose images have any number of classes.
        """
        before = images[: self._num_samples], targets[: self._num_samples]
        images, targets = self._normalize(images), self.targets(targets)
        if self.mix is not None and not self._mixes:
            if targets.dim() == 1:
                targets = one_hot(targets, self.targets.num_classes).float()  # the captured step takes no other type
        elif self.mix is not None:
            images, targets = self.mix(images, targets)
            images = images.contiguous(memory_format=torch.channels_last)  # which roll and lerp need not keep
        if self.erase is not None:
            images = self.erase(images)
        if self._num_samples:
            augmented = self.normalize.inverse(images[: self._num_samples])
            found = (*before, augmented, targets[: self._num_samples])
            self.samples, self._num_samples = Samples(*(tensor.cpu() for tensor in found)), 0
        return images, targets


def create_augment(
    config: ResolvedConfig, normalization: tuple[Sequence[float], Sequence[float]], targets: Targets, env: DistEnv
) -> BatchAugment:
    """The augmentation of a run.

    Args:
        normalization: mean and standard deviation per channel, of images in [0, 1].
        targets: of the training images.
    """
    mean, std = normalization
    normalize = Normalize(mean, std, AMP_DTYPES[config.amp], env.device)
    return BatchAugment(config, normalize, targets, env.device)
