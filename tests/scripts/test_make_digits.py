"""scripts/make_digits.py: where it writes, and where it does not."""

from pathlib import Path

import pytest

from scripts import make_digits
from tests.conftest import Refused


@pytest.mark.parametrize("exists", [True, False], ids=["to an empty folder", "to nowhere"])
def test_a_link_is_followed_and_remains(tmp_path: Path, exists: bool) -> None:
    link, target = tmp_path / "here" / "digits", tmp_path / "disk" / "digits"
    link.parent.mkdir()
    link.symlink_to("../disk/digits")
    if exists:
        target.mkdir(parents=True)
    assert make_digits.main([str(link)]) == 0
    assert link.is_symlink()
    assert make_digits.is_complete(target)
    assert [path.name for path in target.parent.iterdir()] == ["digits"]
    assert [path.name for path in link.parent.iterdir()] == ["digits"]


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("round", "cannot be made ("), ("/proc/digits", "cannot be made ("), ("full", "exists and is not")],
)
def test_refusals(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("round").symlink_to("round")
    Path("full", "mine").mkdir(parents=True)
    refused(folder, main=make_digits.main, program="make_digits.py")(folder, reason)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "round"]
