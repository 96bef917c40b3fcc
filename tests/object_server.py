"""A server of S3 in a process of its own, filled over HTTP, which can die and come back."""

import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from obstore.store import S3Store

from tests.processes import free_port

BUCKET = "images"


class ObjectServer:
    """moto's server. At the end of the `with` block it is killed.

    Attributes:
        env: the variables with which a program finds it.
    """

    def __init__(self) -> None:
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
        self.start()

    def start(self) -> None:
        """Start it, without objects."""
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=self._log)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                bucket = urllib.request.Request(f"{self.env['AWS_ENDPOINT_URL']}/{BUCKET}", method="PUT")
                urllib.request.urlopen(bucket).close()
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
