"""scripts/download.py against a real HTTP server: whole, cut off, without ranges, damaged, missing."""

import functools
import hashlib
import signal
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import download
from tests.conftest import Refused
from tests.harness import start

COUNTS = {"train": 3, "val": 2}
PROGRAM = """
import json, sys
from scripts import download
download.BLOCK = 64
download.IMAGENETTE["160"] = download.Archive("", sys.argv.pop(), {"train": 3, "val": 2})
sys.exit(download.main(sys.argv[1:]))
"""


class Server(ThreadingHTTPServer):
    """Serves one archive.

    Attributes:
        content: of the archive.
        ranges: the Range headers of the requests so far; "" for none.
        limit: bytes after which an answer is cut off; 0 for none.
        has_ranges: whether a Range header is heeded.
        open_gate: an answer waits for it after `limit` bytes, instead of being cut off.
        kind: the Content-Type of answers; "" for none.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.limit, self.has_ranges, self.kind = content, 0, True, ""
        self.ranges: list[str] = []
        self.open_gate: threading.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/imagenette2-160.tgz"

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no error here."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range", "")
        server.ranges.append(asked)
        if self.path != "/imagenette2-160.tgz":
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.has_ranges else 0
        body = server.content[start:]
        if start and not body:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if server.kind:
            self.send_header("Content-Type", server.kind)
        self.end_headers()
        first = body[: server.limit] if server.limit else body
        self.wfile.write(first)
        self.wfile.flush()
        if server.open_gate is not None:
            server.open_gate.wait()
            self.wfile.write(body[len(first) :])

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    """A .tgz with a folder that holds three and two files, which do not compress."""
    source = tmp_path / "source" / "imagenette2-160"
    for split, count in COUNTS.items():
        for number in range(count):
            path = source / split / f"n0{number}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True)
            path.write_bytes(b"".join(hashlib.sha256(bytes([number, at])).digest() for at in range(200)))
    path = tmp_path / "source" / "archive.tgz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(source, source.name)
    return path.read_bytes()


@pytest.fixture
def server(archive: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    known = download.Archive("", hashlib.md5(archive).hexdigest(), COUNTS)
    monkeypatch.setitem(download.IMAGENETTE, "160", known)
    monkeypatch.setattr(download, "PAUSE", 0.001)
    server = Server(archive)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def flags_for(server: Server, folder: Path) -> list[str]:
    return ["imagenette", "--size", "160", "--output-dir", str(folder), "--url", server.url]


def assert_complete(folder: Path, source: Path) -> None:
    """The data set is there with its content, and nothing else beside it."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.JPEG"))
    assert len(names) == 5
    assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in names)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_data_set_is_downloaded_once(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data" / "imagenette"
    assert download.main(flags_for(server, folder)) == 0
    assert capsys.readouterr().out == f"{folder}: 3 images in train/, 2 images in val/\n"
    assert_complete(folder, tmp_path / "source" / "imagenette2-160")
    assert download.main(flags_for(server, folder)) == 0
    assert capsys.readouterr().out == f"{folder}: complete, nothing to do\n"
    assert server.ranges == [""]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_connection_that_breaks_is_taken_up_again(server: Server, tmp_path: Path, has_ranges: bool) -> None:
    folder = tmp_path / "data" / "imagenette"
    server.limit, server.has_ranges = len(server.content) // 3, has_ranges
    status = download.main(flags_for(server, folder))
    if has_ranges:
        third = len(server.content) // 3
        assert server.ranges[:3] == ["", f"bytes={third}-", f"bytes={2 * third}-"]
    else:  # each attempt begins again, until they are given up
        assert status == 2
        server.limit = 0
        status = download.main(flags_for(server, folder))
    assert status == 0
    assert_complete(folder, tmp_path / "source" / "imagenette2-160")


def test_the_same_command_goes_on_after_a_kill(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "imagenette"
    server.limit, server.open_gate = len(server.content) // 2, threading.Event()
    part = folder.with_name(f".imagenette.{download.IMAGENETTE['160'].md5[:8]}.tgz")
    with start(*flags_for(server, folder), download.IMAGENETTE["160"].md5, program=PROGRAM) as started:
        started.wait_for(lambda: part.exists() and part.stat().st_size > 0)
        started.send(signal.SIGKILL, started.pid)
        started.end()
    server.open_gate.set()
    size = part.stat().st_size
    server.limit, server.open_gate = 0, None
    assert download.main(flags_for(server, folder)) == 0
    assert server.ranges == ["", f"bytes={size}-"]
    assert_complete(folder, tmp_path / "source" / "imagenette2-160")


def test_a_kill_after_the_last_byte_is_taken_up(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "imagenette"
    folder.parent.mkdir()
    part = folder.with_name(f".imagenette.{download.IMAGENETTE['160'].md5[:8]}.tgz")
    part.write_bytes(server.content)
    assert download.main(flags_for(server, folder)) == 0
    assert_complete(folder, tmp_path / "source" / "imagenette2-160")


def test_a_web_page_does_not_replace_what_has_come(server: Server, tmp_path: Path, refused: Refused) -> None:
    folder = tmp_path / "data" / "imagenette"
    folder.parent.mkdir()
    part = folder.with_name(f".imagenette.{download.IMAGENETTE['160'].md5[:8]}.tgz")
    part.write_bytes(server.content[:1000])
    server.has_ranges, server.kind = False, "text/html; charset=utf-8"
    refuse = functools.partial(refused, main=download.main, program="download.py")
    refuse(*flags_for(server, folder))(f"download.py: {server.url}: a web page came instead of the archive, as of a")
    assert part.read_bytes() == server.content[:1000]


def test_a_damaged_archive_is_refused_and_downloaded_anew(server: Server, tmp_path: Path, refused: Refused) -> None:
    folder = tmp_path / "data" / "imagenette"
    whole, server.content = server.content, server.content[:-1] + b"x"
    refuse = functools.partial(refused, main=download.main, program="download.py")
    refuse(*flags_for(server, folder))("damaged or changed, its MD5 is ", "; the same command downloads it again")
    assert list(folder.parent.iterdir()) == []
    server.content = whole
    assert download.main(flags_for(server, folder)) == 0
    assert_complete(folder, tmp_path / "source" / "imagenette2-160")


def test_addresses_without_an_answer_are_refused(server: Server, tmp_path: Path, refused: Refused) -> None:
    refuse = functools.partial(refused, main=download.main, program="download.py")
    words = ("imagenette", "--output-dir", tmp_path / "data", "--url")
    missing = server.url.replace("imagenette2", "other")
    refuse(*words, missing)(f"download.py: {missing}: cannot be downloaded (HTTP Error 404: Not")
    refuse(*words, "http://127.0.0.1:9/a")("cannot be downloaded (<urlopen error [Errno 111]")


def test_an_archive_can_be_a_file(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "imagenette"
    flags = ["imagenette", "--size", "160", "--output-dir", str(folder)]
    assert download.main([*flags, "--url", f"file://{tmp_path}/source/archive.tgz"]) == 0
    assert_complete(folder, tmp_path / "source" / "imagenette2-160")
