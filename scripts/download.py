#!/usr/bin/env python3
"""Download a data set of photographs, ready for train.py: Imagenette, ten classes of ImageNet.

    scripts/download.py imagenette --output-dir data/imagenette
    python train.py --data-dir data/imagenette --config configs/imagenette_5epochs.yaml

9,469 training and 3,925 validation images in train/CLASS/ and val/CLASS/. The archive's checksum is checked. The same
command goes on with a download that was cut off, and does nothing where the data set is complete.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError, URLError

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from tqdm import tqdm

from utils.errors import UserError, first_line
from utils.options.cli import Program

BLOCK = 1 << 20
TIMEOUT = 30.0  # seconds without a byte
NOTHING_LEFT = 416  # HTTP status: the file ends where the request begins
FINAL = (400, 401, 403, 404, 410)  # HTTP statuses that another attempt would not change
ATTEMPTS, PAUSE = 5, 2.0  # in a row that bring no byte; seconds before the second, twice as long before each other


@dataclass(frozen=True)
class Archive:
    """A .tgz file that holds one folder with train/ and val/."""

    url: str
    md5: str
    counts: dict[str, int]  # images by split


_BASE = "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2"
_COUNTS = {"train": 9469, "val": 3925}
IMAGENETTE = {  # by the shorter side of the images; URLs and checksums are those of torchvision.datasets.Imagenette
    "160": Archive(f"{_BASE}-160.tgz", "e793b78cc4c9e9a4ccc0c1155377a412", _COUNTS),
    "320": Archive(f"{_BASE}-320.tgz", "3df6f0d01a2c9592104656642f5e78a3", _COUNTS),
    "full": Archive(f"{_BASE}.tgz", "fe2fc210e6bb7c5664d602c3cd71e612", _COUNTS),
}
DATA_SETS = {"imagenette": IMAGENETTE}


@dataclass(frozen=True)
class Options:
    """The command line."""

    archive: Archive
    output_dir: Path
    url: str


def is_complete(folder: Path, archive: Archive) -> bool:
    """Whether a folder holds all images of the data set."""
    return {split: len(list((folder / split).glob("*/*.JPEG"))) for split in archive.counts} == archive.counts


def download(url: str, path: Path) -> None:
    """Write the content of a URL to `path`, from where the file ends on.

    Raises:
        UserError: it cannot be reached, or has ended too early several times.
    """
    failures = 0
    while True:
        before = _size(path)
        try:
            _append(url, path)
            return
        except (HTTPException, OSError) as error:  # urllib's errors are OSErrors
            if isinstance(error, HTTPError) and error.code == NOTHING_LEFT and before:
                return  # a kill came after the last byte; its MD5 says whether it is whole
            failures = 1 if _size(path) > before else failures + 1
            if failures == ATTEMPTS or _is_final(error):
                raise UserError(
                    f"{url}: cannot be downloaded ({first_line(error)}); the same command goes on with it, and --url "
                    "takes another address, also file:///PATH of a copy"
                ) from None
            time.sleep(PAUSE * 2 ** (failures - 1))


def _is_final(error: Exception) -> bool:
    """Whether another attempt would end likewise."""
    if isinstance(error, HTTPError):
        return error.code in FINAL
    return isinstance(error, URLError) and isinstance(error.reason, FileNotFoundError)  # of file:///PATH


def _append(url: str, path: Path) -> None:
    """One attempt: what the server sends is appended to `path`.

    Raises:
        HTTPException, OSError: the attempt has failed; `path` has what came.
        UserError: `path` cannot be written, or a web page came, as of a login; `path` is as it was.
    """
    done = _size(path)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if answer.headers.get_content_type() == "text/html":
            raise UserError(
                f"{url}: a web page came instead of the archive, as of a proxy or a login; open the address in a "
                "browser, or give --url file:///PATH of a copy"
            )
        is_partial = getattr(answer, "status", None) == 206  # not with file:, and not of every server
        start = done if is_partial else 0
        length = answer.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with tqdm(total=total, initial=start, desc="downloading", unit="B", unit_scale=True, disable=None) as bar:
            with explain_write_errors(path):
                path.touch()
                os.truncate(path, start)
            while block := answer.read(BLOCK):
                with explain_write_errors(path), path.open("ab") as file:
                    file.write(block)
                bar.update(len(block))
    if total is not None and _size(path) < total:
        raise OSError(f"ended after {_size(path):,} of {total:,} bytes")


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise UserError for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); make room or name another folder") from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def check_md5(path: Path, expected: str) -> None:
    """Raise UserError, and remove the file, unless its MD5 is the expected one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != expected:
        path.unlink()
        raise UserError(
            f"{path.name}: damaged or changed, its MD5 is {found}, not {expected}; the same command downloads it again"
        )


def unpack(archive: Path, folder: Path) -> None:
    """Make `folder`, which is not there or empty, of the only folder in the archive: wholly, or not at all.

    Raises:
        UserError: the archive cannot be read.
        OSError: there is no room.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a command that was killed
    try:
        with tarfile.open(archive) as tar:
            for member in tqdm(tar, desc="unpacking", unit=" files", disable=None):
                tar.extract(member, temporary, filter="data")
        (inner,) = temporary.iterdir()
        inner.replace(folder)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UserError(f"{archive}: cannot be unpacked ({first_line(error)}); remove it and try again") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_options(
    name: Annotated[str, typer.Argument(help="The data set: imagenette.")],
    output_dir: Annotated[Path, typer.Option(help="The folder to make.")],
    size: Annotated[str, typer.Option(help="Shorter side of its images, pixels: 160, 320, full.")] = "320",
    url: Annotated[str | None, typer.Option(help="Address of the same archive elsewhere.", show_default=False)] = None,
) -> Options:
    """Download a data set of photographs, ready for train.py."""
    if name not in DATA_SETS:
        raise UserError(f"{name}: no known data set; give one of {', '.join(DATA_SETS)}")
    if size not in DATA_SETS[name]:
        raise UserError(f"--size {size}: not one of {', '.join(DATA_SETS[name])}")
    archive = DATA_SETS[name][size]
    if url is not None and not url.startswith(("https://", "http://", "file://")):
        raise UserError(f"--url {url}: no address; give https://..., http://... or file:///PATH")
    return Options(archive, output_dir, url or archive.url)


def make_data_set(options: Options) -> None:
    """Download and unpack the data set, unless it is there.

    Raises:
        UserError: it cannot be downloaded or written, or the folder holds something else.
    """
    folder, archive = options.output_dir, options.archive
    if is_complete(folder, archive):
        print(f"{folder}: complete, nothing to do")
        return
    folder = Path(os.path.realpath(folder))  # a link to a folder stays one
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output-dir {options.output_dir}: exists and is not this data set; name another folder")
    with explain_write_errors(options.output_dir):
        folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{archive.md5[:8]}.tgz")
    download(options.url, part)
    check_md5(part, archive.md5)
    with explain_write_errors(folder):
        unpack(part, folder)
        part.unlink()
    counts = ", ".join(f"{count:,} images in {split}/" for split, count in archive.counts.items())
    print(f"{options.output_dir}: {counts}")


PROGRAM = Program("download.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, make_data_set)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
