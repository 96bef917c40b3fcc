"""scripts/make_digits.py: where it writes, and where it does not."""

from pathlib import Path

import pytest

from scripts import make_digits


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
    "words", ["round: cannot be made (", "/proc/digits: cannot be made (", "full exists and is not"]
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("round").symlink_to("round")
    Path("full", "mine").mkdir(parents=True)
    status = make_digits.main([words.split(":")[0].split(" ")[0]])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"make_digits.py: {words}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "round"]
