#!/usr/bin/env python3
"""Write scikit-learn's handwritten digits as a folder of JPEG files.

    scripts/make_digits.py runs/quickstart/digits

The data set is part of scikit-learn, so nothing is downloaded. It has 1,797 gray 8 x 8 digits, which become 64 x 64 RGB
files under train/CLASS/ (1,437 images) and val/CLASS/ (360 images). The same command always chooses the same split.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import typer
from PIL import Image

from utils.errors import UserError
from utils.options.cli import Program

NUM_TRAIN = 1437
NUM_VAL = 360
IMAGE_SIZE = 64
LARGEST_VALUE = 16  # load_digits counts the dark pixels of a 4 x 4 cell
SPLIT_SEED = 0


def is_complete(directory: Path) -> bool:
    """Return whether ``directory`` holds both splits with every image."""
    counts = {split: len(list((directory / split).glob("[0-9]/*.jpg"))) for split in ("train", "val")}
    return counts == {"train": NUM_TRAIN, "val": NUM_VAL}


def write_digits(directory: Path) -> None:
    """Write ``train/`` and ``val/`` into an existing, empty ``directory``."""
    from sklearn.datasets import load_digits  # slow to import
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.round(digits.images * (255 / LARGEST_VALUE)).astype(np.uint8)
    train, val = train_test_split(
        np.arange(len(pixels)),
        train_size=NUM_TRAIN,
        test_size=NUM_VAL,
        stratify=digits.target,
        random_state=SPLIT_SEED,
    )
    for split, indices in (("train", train), ("val", val)):
        for index in indices:
            path = directory / split / str(digits.target[index]) / f"{index:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(pixels[index]).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
            image.convert("RGB").save(path, quality=95)


def read_options(
    directory: Annotated[Path, typer.Argument(help="The folder to make; it may exist only if it is empty.")],
) -> Path:
    """Write the digits data set, unless DIRECTORY already holds all of it."""
    return directory


def make_digits(directory: Path) -> None:
    """Make the data set completely, or not at all.

    Raises:
        UserError: the folder holds something else, or cannot be made.
    """
    if is_complete(directory):
        print(f"{directory}: complete, nothing to do")
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not the digits data set: remove it or name another folder")

    # Written beside the target, then renamed: a run that dies on the way makes no incomplete data set.
    try:
        target = Path(os.path.realpath(directory))  # a link to a folder stays one
        if target.is_symlink():
            target.stat()  # fails, as it leads to itself
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{directory}: cannot be made ({error.strerror}); name another folder") from None
    try:
        write_digits(temporary)
        temporary.chmod(0o755)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{directory}: {NUM_TRAIN:,} images in train/, {NUM_VAL:,} in val/")


PROGRAM = Program("make_digits.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, make_digits)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
