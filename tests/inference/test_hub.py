"""An upload to a server that speaks as the Hugging Face hub does, and its files loaded from there by timm."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT, Finished, launch
from tests.inference.exported import write_checkpoint

COMMIT = "0" * 40
LOADED = """
import sys, timm, torch
model = timm.create_model("hf-hub:me/net", pretrained=True)
saved = torch.load(sys.argv[1], weights_only=True)["model"]
assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
print(model.pretrained_cfg["label_names"], model.pretrained_cfg["crop_pct"])
"""


class Hub(ThreadingHTTPServer):
    """Holds one repository.

    Attributes:
        files: name -> content.
        token: that it wants.
        is_private: as the repository was made.
        status: of every answer; None for the right one.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.token, self.status = "hf_right", 0
        self.made_with: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *values: Any) -> None:
        pass

    def answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if "/resolve/" in self.path and name in self.server.files:
            self.answer(200, self.server.files[name], ETag=f'"{name}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(404, b"{}", X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status or self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.answer(self.server.status or 401, json.dumps({"error": "no"}).encode())
            return
        reply: dict[str, Any] = {"errors": [], "warnings": []}  # of the model card
        if self.path == "/api/repos/create":
            self.server.made_with = json.loads(body)
            reply = {"url": f"{self.server.url}/me/net", "name": "me/net", "id": "1"}
        elif self.path == "/api/models/me/net/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            reply = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        elif self.path == "/api/models/me/net/commit/main":
            values = [each["value"] for each in map(json.loads, body.splitlines()) if each["key"] == "file"]
            self.server.files |= {each["path"]: base64.b64decode(each["content"]) for each in values}
            reply = {"commitUrl": f"{self.server.url}/me/net/commit/{COMMIT}", "commitOid": COMMIT}
        self.answer(200, json.dumps(reply).encode(), Content_Type="application/json")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def push(best: Path, out: Path, url: str, repo: str = "me/net", token: str = "hf_right") -> Finished:
    env = {"HF_ENDPOINT": url, "HF_HOME": out.parent / "home", "HF_TOKEN": token}
    flags = (best, "--format", "timm", "--output-dir", out, "--overwrite", "--no-check", "--push", repo)
    return launch(*flags, program=ROOT / "scripts" / "export.py", env=env)


@pytest.mark.slow  # several processes
def test_push(hub: Hub, tmp_path: Path) -> None:
    best, out = write_checkpoint(tmp_path / "run" / "best.pt", result={"val/top1": 50.0}), tmp_path / "out"
    done = push(best, out, hub.url)
    assert (done.status, done.err) == (0, ""), done
    assert done.out.endswith(f"uploaded: {hub.url}/me/net/commit/{COMMIT}\n")
    card = hub.files.pop("README.md").decode()
    assert card.startswith("---\nlibrary_name: timm\n")
    assert "test_resnet of timm with 3 classes" in card
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.made_with == {"name": "net", "organization": "me", "visibility": "private"}

    env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path / "other"}
    loaded = launch(best, program=LOADED, env=env)
    assert loaded.out == f"['blue', 'green', 'red'] {32 / 36}\n", loaded

    hub.files |= {"README.md": b"mine"}
    assert push(best, out, hub.url).status == 0
    assert hub.files["README.md"] == b"mine"


@pytest.mark.slow  # several processes
def test_an_upload_that_fails(hub: Hub, tmp_path: Path) -> None:
    """One line; the files are there."""
    best, out = write_checkpoint(tmp_path / "run" / "best.pt"), tmp_path / "out"
    done = push(best, out, hub.url, token="hf_wrong")
    assert done.status == 2
    assert done.err.startswith("export.py: --push me/net: the hub refuses it (")
    assert done.err.count("\n") == 1
    assert len(list(out.iterdir())) == 3
    done = push(best, out, hub.url, repo="a/b/c")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert done.err.startswith("export.py: --push a/b/c: ")
    done = push(best, out, "http://127.0.0.1:9")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("export.py: --push me/net: the hub cannot be reached (")
    assert hub.files == {}
