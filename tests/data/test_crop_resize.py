"""Crops of whole batches, resized: Pillow's pixels, in plain torch and in Triton's kernel.

Without a GPU, Triton's interpreter runs the kernel. Its indexing, though not its speed, is the same there.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from utils.data.augmentation import crop_resize
from utils.data.augmentation.crop_resize import resize_crops
from utils.options.sizes import ImageSize, sides_of

Size = tuple[int, int]
Box = tuple[int, int, int, int]  # top, left, height, width


class Images:
    """Random images, one after the other, and a crop of each."""

    def __init__(self, crops: list[tuple[Size, Box]], seed: int = 0, size: ImageSize = 8) -> None:
        random = np.random.default_rng(seed)
        self.images = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size, _ in crops]
        self.boxes = [box for _, box in crops]
        turns = 8 if isinstance(size, int) else 4  # a rectangle has no quarter turns
        self.turns = [number % turns for number in range(len(crops))]
        self.pixels = torch.from_numpy(np.concatenate([image.reshape(-1, 3) for image in self.images]))
        before = np.cumsum([0] + [image.shape[0] * image.shape[1] for image in self.images])
        starts = [
            at + top * image.shape[1] + left
            for at, image, (top, left, _, _) in zip(before, self.images, self.boxes, strict=False)
        ]
        strides = [image.shape[1] for image in self.images]
        heights, widths = ([box[side] for box in self.boxes] for side in (2, 3))
        self.crops = torch.tensor([starts, strides, heights, widths, self.turns])

    def torchvisions(self, number: int, size: ImageSize) -> Tensor:
        """Crop `number` by torchvision and Pillow: uint8 (3, height, width) of `size`."""
        image = Image.fromarray(self.images[number])
        image = functional.resized_crop(image, *self.boxes[number], size=list(sides_of(size)))
        transposes = Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.TRANSPOSE
        for bit, transpose in enumerate(transposes):
            image = image.transpose(transpose) if self.turns[number] >> bit & 1 else image
        turned: Tensor = functional.pil_to_tensor(image)
        return turned


def random_crops(count: int, longest: int, seed: int = 0) -> list[tuple[Size, Box]]:
    """Images of sides up to `longest`; the first crops are whole images, the next ones lie in corners."""
    random = np.random.default_rng(seed)
    crops = []
    for number in range(count):
        sides = random.integers(1, longest + 1, 2)
        height, width = sides if number < count // 3 else (random.integers(1, side + 1) for side in sides)
        top, left = sides[0] - height, sides[1] - width
        if number >= 2 * count // 3:
            top, left = random.integers(0, top + 1), random.integers(0, left + 1)
        crops.append(((int(sides[0]), int(sides[1])), (int(top), int(left), int(height), int(width))))
    return crops


@pytest.mark.parametrize(
    ("size", "longest"), [(32, 60), (64, 64), (9, 200), (100, 33), (8, 9), ("17x40", 60), ("40x8", 60)]
)
def test_pixels_are_torchvisions(size: ImageSize, longest: int) -> None:
    """Enlarged and shrunk, at borders and within, also of one row or column: within 1 of 255."""
    images = Images(random_crops(60, longest), size=size)
    found = resize_crops(images.pixels, images.crops, size)
    assert found.shape == (60, 3, *sides_of(size))
    assert found.dtype == torch.uint8
    assert found.is_contiguous(memory_format=torch.channels_last)
    differences = [(found[number].int() - images.torchvisions(number, size)).abs() for number in range(60)]
    assert max(int(each.max()) for each in differences) <= 1, [int(each.max()) for each in differences]
    # Pillow also rounds between rows and columns; a systematic error would show here.
    assert torch.stack(differences).float().mean() < 0.3


def test_a_crop_of_its_own_size_is_copied() -> None:
    images = Images([((40, 50), (3, 5, 16, 16)), ((16, 16), (0, 0, 16, 16))])
    found = resize_crops(images.pixels, images.crops, 16)
    for number in range(2):
        assert torch.equal(found[number], images.torchvisions(number, 16))


def test_pixels_do_not_depend_on_the_batch() -> None:
    """To the last bit: a resume on another number of processes has other batches."""
    images = Images(random_crops(24, 90))
    whole = resize_crops(images.pixels, images.crops, 20)
    for numbers in ([0], [23, 5], list(range(0, 24, 3))):
        assert torch.equal(resize_crops(images.pixels, images.crops[:, numbers].contiguous(), 20), whole[numbers])


def check_kernel(device: str, size: ImageSize, count: int, longest: int) -> None:
    """The kernel against plain torch; tests/network/test_kernels.py has that in Triton's interpreter."""
    from utils.data.augmentation.crop_kernel import launch_resize

    images = Images(random_crops(count, longest, seed=sum(sides_of(size))), size=size)
    expected = crop_resize._resize_plain(images.pixels, images.crops, size)
    pixels, crops = images.pixels.to(device), images.crops.to(device)
    found = launch_resize(pixels, crops, size)
    assert found.shape == expected.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    difference = (found.cpu().int() - expected.int()).abs()
    assert difference.max() <= 1, difference.amax((1, 2, 3))
    assert difference.float().mean() < 0.01, "they round alike but for the order of sums"
    some = [count - 1]
    assert torch.equal(launch_resize(pixels, crops[:, some].contiguous(), size), found[some])


def test_a_kernel_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = []
    for name in (None, "gcc"):
        if name:
            (tmp_path / name).touch(mode=0o755)
        crop_resize.can_compile_kernels.cache_clear()
        found.append(crop_resize.can_compile_kernels())
    crop_resize.can_compile_kernels.cache_clear()
    assert found == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "count", "longest"),
    [(64, 256, 64), (64, 64, 500), (224, 64, 500), (33, 65, 700), (224, 16, 64), (8, 3, 9), ("96x224", 64, 500)],
)
def test_the_kernel_on_the_gpu(size: ImageSize, count: int, longest: int) -> None:
    check_kernel("cuda", size, count, longest)


@pytest.mark.gpu
def test_the_kernel_is_what_cuda_uses() -> None:
    images = Images(random_crops(40, 100))
    found = resize_crops(images.pixels.cuda(), images.crops.cuda(), 48).cpu()
    for number in range(40):
        assert (found[number].int() - images.torchvisions(number, 48)).abs().max() <= 1
