"""timm's weights are asked for once; without them one line says how to get them."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch

from tests.training.test_preprocessing import filled, pixels
from utils.errors import UserError
from utils.network.published_weights import require_published

ARCH, VARIANT, VIT, OF_GITHUB = "test_resnet", "test_resnet.r160_in1k", "test_vit.r160_in1k", "gcvit_tiny.in1k"


class Proxy:
    """A network that ends every connection.

    Attributes:
        connections: that were tried.
    """

    def __init__(self) -> None:
        self.connections = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._refuse, daemon=True).start()

    def _refuse(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            self.connections += 1
            connection.close()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """No other network, and empty caches."""
    proxy = Proxy()
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    huggingface_hub.close_session()  # which knows the proxy of before, as urllib does
    monkeypatch.setattr(urllib.request, "_opener", None)
    with contextlib.suppress(Exception):  # the first request of a process also asks for a list
        huggingface_hub.get_hf_file_metadata("https://huggingface.co")
    proxy.connections = 0
    yield proxy
    proxy.close()
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("arch", "variant", "suffix"), [(ARCH, VARIANT, ".safetensors"), (OF_GITHUB, OF_GITHUB, ".pth")]
)
def test_one_try_and_one_line(proxy: Proxy, arch: str, variant: str, suffix: str) -> None:
    with pytest.raises(UserError) as caught:
        require_published(arch)
    assert proxy.connections == 1
    message, file = str(caught.value), variant + suffix
    assert message.startswith(
        f"--pretrained: timm's weights {variant} are not in the cache, and cannot be downloaded ("
    )
    assert f"curl -fLo {file} https://" in message
    assert message.endswith(f"give --arch {variant} --pretrained {file}")
    assert len(message.splitlines()) == 1


def test_what_the_message_says_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without its config.json, with the preprocessing of the variant."""
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("test_vit").state_dict(), f"{VIT}.pt")
    found = pixels(filled("--arch", VIT, "--pretrained", f"{VIT}.pt"))
    assert found == pixels(filled("--arch", "test_vit", "--pretrained"))
    assert found != pixels(filled("--arch", "test_vit"))


def test_what_is_in_a_cache_needs_no_network(proxy: Proxy, tmp_path: Path) -> None:
    repository = tmp_path / f"models--timm--{VARIANT}"
    (repository / "snapshots" / "0").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    (repository / "snapshots" / "0" / "pytorch_model.bin").write_bytes(b"")
    require_published(ARCH)
    settings = timm.get_pretrained_cfg(OF_GITHUB)
    assert settings is not None
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    (tmp_path / "hub" / "checkpoints" / str(settings.url).rpartition("/")[2]).write_bytes(b"")
    require_published(OF_GITHUB)
    assert proxy.connections == 0


def test_an_architecture_without_weights() -> None:
    with pytest.raises(UserError, match=r"^--pretrained: timm has no weights for coatnet_0_224; leave it out"):
        require_published("coatnet_0_224")
