"""URLs of object stores in the place of a data folder: which they are, and where their objects are staged."""

import importlib.util
import re
from pathlib import Path

from utils.errors import UserError

SCHEMES = ("s3", "gs")
PACKAGE = "obstore"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9.+-]*):/+(.*)", re.DOTALL)


def store_url(path: str | Path | None) -> str:
    """The URL that a path is, such as `s3://BUCKET/PREFIX`; "" for a folder. pathlib keeps one slash of the two."""
    found = _URL.fullmatch(str(path)) if path is not None else None
    return f"{found[1].lower()}://{found[2].strip('/')}" if found else ""


def split_url(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix; the prefix has no slash at its ends, and may be empty."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    return scheme, bucket, prefix


def stage_folder(url: str, stage_dir: Path) -> Path:
    """Where the objects of a URL lie on this machine: `STAGE_DIR/BUCKET/PREFIX`."""
    _, bucket, prefix = split_url(url)
    return (stage_dir / bucket / prefix).absolute()


def require_store(data_dir: Path, stage_dir: Path | None, flag: str = "--data-dir ") -> None:
    """Raise UserError unless the URL `data_dir` can be staged, as far as the command line alone says so.

    Args:
        flag: in front of the URL, in messages.
    """
    url = store_url(data_dir)
    scheme, bucket, prefix = split_url(url)
    if scheme not in SCHEMES:
        known = " and ".join(f"{each}://BUCKET/PREFIX" for each in SCHEMES)
        raise UserError(f"{flag}{url}: {scheme}:// is not read; give a folder, or {known}")
    if not bucket or ".." in (bucket, *prefix.split("/")):
        raise UserError(f"{flag}{url}: names no bucket or prefix; give {scheme}://BUCKET/PREFIX")
    if stage_dir is None:
        raise UserError(
            f"{flag}{url} without --stage-dir: its objects are copied before they are read; give --stage-dir DIR, a "
            "folder on a local disk with room for all"
        )
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(f"{flag}{url}: is read by the package {PACKAGE}; pip install -r requirements-cloud.txt")


def refuse_url(path: Path | str, flag: str) -> None:
    """Raise UserError for a URL where a folder is needed."""
    if url := store_url(path):
        raise UserError(f"{flag}{url}: must be a folder; train.py --data-dir {url} --stage-dir DIR copies it to one")
