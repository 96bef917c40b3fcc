"""Whether an exported network computes what torch computes: the images of the comparison, and its verdict."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from utils.data.formats.folder import file_record, list_images
from utils.data.images.records import Record
from utils.data.loaders.torch_loader import torch_val_transform
from utils.data.reading.decoding import upright_rgb
from utils.data.reading.reader import read_image
from utils.data.reading.shard_reader import ShardFiles
from utils.data.splits.selection import read_data
from utils.distributed.group import DistEnv
from utils.errors import RunFailed, UserError
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import ImageSize, sides_of

NUM_IMAGES = 100
BATCH_SIZES = (1, 2, 32)  # the last one again and again; one shows a batch size that became a constant
# Of the largest logit. float32: sums in another order; measured were up to 8e-7. float16: rounding to 11 bits in each
# layer; up to 2e-3. docs/internals/experiments.md, 2026-11-25.
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What an exported network gives beside torch's.

    Attributes:
        count: images.
        difference: largest absolute difference of a logit.
        largest: largest absolute logit of torch.
        same_class: images with the same most likely class.
        output: logits or probabilities.
    """

    count: int
    difference: float
    largest: float
    same_class: int
    output: str = "logits"

    def require(self, tolerance: float, name: str) -> None:
        """Raise RunFailed if the difference is above this share of the largest logit, or not a number."""
        if not self.difference <= tolerance * self.largest:
            raise RunFailed(
                f"{name}: its {self.output} differ from torch's by up to {self.difference:.2g}, the largest is "
                f"{self.largest:.3g} and {tolerance:g} of that is allowed; nothing was written, --no-check writes it "
                "nevertheless"
            )

    def __str__(self) -> str:
        return (
            f"{self.output} differ from torch's by at most {self.difference:.2g} (the largest is {self.largest:.3g}), "
            f"same class for {self.same_class} of {self.count}"
        )


@torch.inference_mode()
def compare(
    reference: Callable[[Tensor], Tensor], exported: Callable[[Tensor], Tensor], images: Tensor, output: str = "logits"
) -> Comparison:
    """Run two networks on the same images, in batches of several sizes.

    Args:
        reference, exported: what the networks take to outputs (N, num_classes).
        images: what they take, (N, ...).
    """
    batches = list(_batches(images))
    expected = torch.cat([reference(batch) for batch in batches])
    found = torch.cat([exported(batch) for batch in batches])
    return Comparison(
        count=len(images),
        difference=float((expected - found).abs().max()),
        largest=float(expected.abs().max()),
        same_class=int((expected.argmax(1) == found.argmax(1)).sum()),
        output=output,
    )


def _batches(images: Tensor) -> Iterator[Tensor]:
    start = 0
    for size in (*BATCH_SIZES, *[BATCH_SIZES[-1]] * len(images)):
        if start < len(images):
            yield images[start : start + size]
            start += size


def check_images(config: ResolvedConfig, folder: Path | None) -> tuple[Tensor, str]:
    """Images for a comparison, in the geometry of the evaluation.

    Args:
        folder: that has images; None for the validation images of the run, and generated ones where they are missing.

    Returns:
        At most `NUM_IMAGES` pixels, uint8 (N, height, width, 3), and what they are, for the user.

    Raises:
        UserError: the folder that was given has no image, or cannot be read.
    """
    if folder is not None:
        images = _decode(config, _records_below(folder))
        if not len(images):
            raise UserError(f"--check-data {folder}: no image that can be read; give a folder of images")
        return images, f"images of {folder}"
    images = _decode(config, _records_of_run(config))
    if len(images):
        return images, f"images of {config.data_dir}"
    return _generate(config.val_image_size), "generated images, as those of the run are not here"


def _records_below(folder: Path) -> list[Record]:
    """Image files below a folder, in the order of their names."""
    found, _ = list_images(folder)
    return [file_record(os.path.join(folder, found[index].name)) for index in spread(len(found), NUM_IMAGES)]


def _records_of_run(config: ResolvedConfig) -> list[Record]:
    """Validation images of the run; [] where they cannot be listed."""
    if config.data_dir is None or not config.data_dir.is_dir():
        return []
    alone = DistEnv.single(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as scratch:  # for an index of shards
        listed = dataclasses.replace(config, output_dir=Path(scratch), evaluate=True, bad_files="skip")
        try:
            manifest = next(iter(read_data(listed, alone).values()))  # of train, if a part is held out
        except UserError:
            return []
    return [manifest.record(index) for index in spread(len(manifest), NUM_IMAGES)]


def spread(count: int, most: int) -> list[int]:
    """At most `most` of so many indices, from the first to the last, so of all classes."""
    return [int(index) for index in np.linspace(0, count - 1, min(count, most)).round()]


def _decode(config: ResolvedConfig, records: list[Record]) -> Tensor:
    """uint8 (N, height, width, 3) of those that can be read."""
    transform, shards = torch_val_transform(config), ShardFiles()
    found: list[Tensor] = []
    for record in records:
        try:
            found.append(transform(upright_rgb(read_image(record, shards))).permute(1, 2, 0))
        except Exception:  # Pillow has many kinds; bad files are named by a scan, not by an export
            continue
    return torch.stack(found) if found else torch.empty(0, dtype=torch.uint8)


def _generate(size: ImageSize) -> Tensor:
    """uint8 (N, height, width, 3): soft spots of color, always the same."""
    generator = torch.Generator().manual_seed(0)
    spots = torch.rand(NUM_IMAGES, 3, 8, 8, generator=generator)
    images = torch.nn.functional.interpolate(spots, sides_of(size), mode="bilinear", antialias=True)
    return (255 * images).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
