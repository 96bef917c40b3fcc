"""The PNG files of `scripts/predict.py --heatmap`: named by the rows, in a folder that is filled at the end.

They say in themselves whose they are, so that the next call replaces these alone.
"""

import contextlib
import io
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from utils.errors import UserError
from utils.files import rename, temporary_of

FOLDER = "heatmaps"
MAX_STEM = 80  # characters of a name that are kept: file systems allow 255 bytes
HEAD = 256  # bytes in which a file's mark is: Pillow writes it before the pixels
_MARK = ("Software", "Brisk heat map")  # PNG's word for what made a file


def heatmap_name(row: int, path: str) -> str:
    """Name of the file for the image of a row of predictions, counted from 1: `007-photo.png` of `photos/photo.jpg`."""
    stem = re.sub(r"[^\w.-]", "_", Path(path.rpartition(":")[2]).stem, flags=re.ASCII)
    return f"{row:03}-{stem[:MAX_STEM]}.png"


def encode_png(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    content, facts = io.BytesIO(), PngInfo()
    facts.add_text(*_MARK)
    image.save(content, format="PNG", pnginfo=facts)
    return content.getvalue()


def _is_ours(path: Path) -> bool:
    if path.suffix != ".png" or not path.is_file():
        return False
    with path.open("rb") as file:
        return "\0".join(_MARK).encode() in file.read(HEAD)


def check_heatmap_folder(output_dir: Path) -> None:
    """Raise UserError if something else has the name of the folder."""
    path = output_dir / FOLDER
    if path.exists() and not path.is_dir():
        raise UserError(f"--heatmap: {path} is a file, not a folder; move it or give another --output-dir")


class HeatmapFolder:
    """The folder `heatmaps` of an output folder. What is written before `publish` is in a temporary one beside it.

    Raises:
        OSError: it cannot be written; as every method.
    """

    def __init__(self, output_dir: Path) -> None:
        self._path, self._temporary = output_dir / FOLDER, temporary_of(output_dir / FOLDER)
        remove_unfinished(output_dir)  # of a run that was killed

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files by name."""
        for name, content in files.items():
            self._temporary.mkdir(exist_ok=True)
            (self._temporary / name).write_bytes(content)

    def publish(self) -> None:
        """Replace the heat maps of an earlier run with those that were written; other files there stay."""
        for path in self._path.iterdir() if self._path.is_dir() else ():
            if _is_ours(path):
                path.unlink()
        if self._temporary.is_dir():
            self._path.mkdir(exist_ok=True)
            for path in self._temporary.iterdir():
                rename(path, self._path / path.name)
            self._temporary.rmdir()
        else:
            with contextlib.suppress(OSError):  # there is none, or it has other files
                self._path.rmdir()


def remove_unfinished(output_dir: Path) -> None:
    """Remove what was written and is not published."""
    shutil.rmtree(temporary_of(output_dir / FOLDER), ignore_errors=True)
