"""The files of an export: written beside their final names, compared with torch, and then renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from utils import __version__
from utils.errors import UserError, escape_control_chars
from utils.files import check_writable, rename
from utils.inference.export.check import HALF_TOLERANCE, TOLERANCE, check_images, compare
from utils.inference.export.classifier import INPUTS, Classifier, Input
from utils.inference.export.formats import FORMATS, LABELS
from utils.inference.export.trained import Trained
from utils.training.state.checkpoint import BEST, LAST


def label_lines(classes: Sequence[str]) -> str:
    """Content of labels.txt: a class a line, in label order."""
    return "".join(f"{escape_control_chars(name)}\n" for name in classes)


def check_output(folder: Path, files: Sequence[str], labels: str, overwrite: bool) -> None:
    """Raise UserError if the folder is a run's, or has what would be replaced, unless `overwrite`.

    A folder may hold several formats of one network, so a labels.txt with the same classes is no obstacle. With other
    classes it is, also with `overwrite`, if the files of another format stay there.
    """
    for name in (LAST, BEST):
        if os.path.lexists(folder / name):
            raise UserError(f"--output-dir {folder}: the folder of a run ({name}); give another one")
    present = [name for name in files if os.path.lexists(folder / name)]
    path = folder / LABELS
    if os.path.lexists(path) and not (path.is_file() and path.read_bytes() == labels.encode()):
        present.append(LABELS)
    if present[-1:] == [LABELS]:
        stale = [name for each in FORMATS.values() for name in each.files if name not in files]
        for name in stale:
            if os.path.lexists(folder / name):
                raise UserError(
                    f"--output-dir {folder}: has {name} of other classes; give another folder, or remove it"
                )
    if present and not overwrite:
        other = " of other classes" if present[0] == LABELS else ""
        raise UserError(
            f"--output-dir {folder}: has {present[0]}{other}; give another folder, or --overwrite to replace it"
        )


@contextlib.contextmanager
def staged(folder: Path, files: Sequence[str]) -> Iterator[Path]:
    """A new folder in `folder` for the files, which get their final names, each whole, when the block has ended.

    If it raises, `folder` is as it was. What a killed process left is removed by the next one.

    Raises:
        UserError: files cannot be written there.
    """
    is_new = not folder.exists()
    check_writable(folder)
    temporary = folder / f".{files[-1]}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        for name in files:
            with (temporary / name).open("rb") as file:
                os.fsync(file.fileno())
        for name in files:
            rename(temporary / name, folder / name)
    except OSError as error:
        raise UserError(
            f"--output-dir {folder}: cannot be written ({error.strerror or error}); make room, or give another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty


def write_and_compare(
    trained: Trained, name: str, takes: Input, half: bool, folder: Path, check: bool, check_data: Path | None
) -> str:
    """Write the files of a format into a folder, read them back, and compare what they compute with torch in float32.

    Args:
        name: of the format.
        takes, half: see `Classifier`.
        folder: has none of the files.
        check: whether they are read and compared.
        check_data: images for that; see `check_images`.

    Returns:
        How they compare, for the user.

    Raises:
        UserError: there are no images in `check_data`, or the format does not hold such a network.
        RunFailed: the files compute something else.
        Exception: the exporter or the runtime failed; they have no common error.
    """
    is_bare = name == "timm"
    form, classifier = FORMATS[name], Classifier(trained, takes, half, is_bare)
    dtype, layout, pixels = INPUTS[takes]
    facts = {"input": dtype, "layout": layout, "pixels": pixels, "precision": "float16" if half else "float32"}
    facts |= {} if classifier.output == "logits" else {"output": classifier.output}
    form.write(trained, classifier, trained.metadata | facts | {"brisk": __version__}, folder)
    if not check:
        return "not compared with torch (--no-check)"
    images, source = check_images(trained.config, check_data)
    reference = Classifier(trained, takes, is_bare=is_bare)
    compared = compare(reference, form.read(folder), reference.prepare(images), reference.output)
    compared.require(HALF_TOLERANCE if half else TOLERANCE, form.files[-1])
    return f"{len(images)} {source}: {compared}"
