"""Where compiled results are kept."""

import os
from pathlib import Path

import pytest
import torch

from utils.compiler import keep_results


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # put back what keep_results sets
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return monkeypatch


def test_compiled_kernels_land_in_the_users_cache(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_results()
    torch.compile(lambda images: images.sin() + images.cos())(torch.ones(7))
    assert list((tmp_path / "brisk" / "compiled").rglob("*.py")), "no generated code"


def test_the_users_own_choice_stays(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    environment.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_results()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


def test_unwritable_home_leaves_torchs_default(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_results()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
