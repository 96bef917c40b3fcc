"""Atomic writes leave the old content or the new one, JSON has no nan, and an error has a first line."""

import json
import math
import os
from pathlib import Path

import pytest

from utils.errors import UserError, first_line
from utils.files import atomic_write_bytes, atomic_write_text, check_writable, json_text, write_json


def test_json_has_null_for_what_is_not_finite_at_any_depth(tmp_path: Path) -> None:
    value = {"loss": math.inf, "top1": 0.5, "name": "best.pt", "none": None, "rates": [math.nan, (1, -math.inf)]}
    expected = {"loss": None, "top1": 0.5, "name": "best.pt", "none": None, "rates": [None, [1, None]]}
    write_json(tmp_path / "values.json", value)
    assert json.loads((tmp_path / "values.json").read_text()) == expected
    assert json.loads(json_text(value)) == expected
    assert "\n" not in json_text(value)


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    atomic_write_text(path, "a long first text\n")
    atomic_write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("concurrent", [False, True])
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, concurrent: bool) -> None:
    path = tmp_path / "folder"
    path.mkdir()  # which no file replaces
    with pytest.raises(OSError, match="directory"):
        atomic_write_bytes(path, b"content", concurrent)
    assert list(tmp_path.iterdir()) == [path]
    assert list(path.iterdir()) == []


def test_concurrent_writers_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    half = tmp_path / f".manifest.json.{os.getpid() + 1}.tmp"  # another process is writing it
    half.write_text("half")
    atomic_write_text(path, "whole", concurrent=True)
    assert (path.read_text(), half.read_text()) == ("whole", "half")


def test_check_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"--output-dir {tmp_path}/file: cannot be written \\(File exists\\); give"):
        check_writable(tmp_path / "file")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n one\r\ntwo"), "one"),
        (ValueError(""), "ValueError"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_first_line(error: Exception, line: str) -> None:
    assert first_line(error, 200) == line
