"""Staging of objects from a real server of S3, in this process: what is copied, kept, verified and refused."""

import errno
import hashlib
import json
import os
import re
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.object_server import BUCKET, GoogleServer, ObjectServer
from utils.data.staging import object_store
from utils.data.staging import stage as staging
from utils.data.staging.stage import stage
from utils.data.staging.staged_files import RECORD, STAGE, StagedFiles
from utils.distributed.group import DistEnv
from utils.errors import Stopped, UserError
from utils.options.config import TrainConfig

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
ALONE = DistEnv.single(torch.device("cpu"))
Stage = Callable[..., Path]


@pytest.fixture
def prefix(object_server: ObjectServer, request: pytest.FixtureRequest) -> str:
    """Of this test, with three objects below it."""
    name = re.sub(r"\W+", "-", request.node.name)
    object_server.put({f"{name}/{key}": content for key, content in CONTENTS.items()})
    return name


CONTENTS = {"train-0000.tar": bytes(range(256)) * 9000, "sub/val.tar": b"val" * 1000, "empty": b""}


@pytest.fixture
def run(object_server: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Stages the objects of this test; returns the folder."""
    for name, value in object_server.env.items():
        monkeypatch.setenv(name, value)

    def run(url: str = f"s3://{BUCKET}/{prefix}", stopped_by: Callable[[], str] = str) -> Path:
        config = stage(TrainConfig(data_dir=Path(url), stage_dir=tmp_path / "stage"), ALONE, stopped_by)
        assert config.data_dir is not None
        assert config.to_dict()["data_dir"] == url  # config.json names the URL, which works on every machine
        return config.data_dir

    return run


def contents(folder: Path) -> dict[str, bytes]:
    """The files that are no part of the staging itself."""
    files = [path for path in folder.rglob("*") if path.is_file() and STAGE not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_objects_become_files(run: Stage, object_server: ObjectServer, prefix: str, tmp_path: Path) -> None:
    object_server.put({f"{prefix}/.hidden": b"1", f"{prefix}/train.index.npz": b"1", f"{prefix}-other/x": b"1"})
    folder = run()
    assert folder == tmp_path / "stage" / BUCKET / prefix
    assert contents(folder) == CONTENTS
    assert [path.name for path in (folder / STAGE).iterdir()] == [RECORD]


def test_the_whole_bucket_has_the_prefixes_as_folders(run: Stage, prefix: str) -> None:
    assert contents(run(f"s3://{BUCKET}") / prefix) == CONTENTS


def test_what_is_there_is_not_copied_again(run: Stage, object_server: ObjectServer, prefix: str) -> None:
    folder = run()
    (folder / "train.index.npz").write_bytes(b"of the run")
    before = object_server.gets(prefix)
    assert before == 2  # an empty object needs none
    run()
    assert object_server.gets(prefix) == before
    times = {name: os.stat(folder / name).st_mtime_ns for name in CONTENTS}
    object_server.put({f"{prefix}/train-0000.tar": b"new", f"{prefix}/more.tar": b"more"})
    object_server.delete(f"{prefix}/sub/val.tar")
    os.truncate(folder / "empty", 1)
    run()
    assert contents(folder) == {
        "train-0000.tar": b"new", "more.tar": b"more", "empty": b"", "train.index.npz": b"of the run"
    }  # fmt: skip
    assert object_server.gets(prefix) == before + 2
    assert os.stat(folder / "train-0000.tar").st_mtime_ns > times["train-0000.tar"] - 1


def test_the_record_names_the_etag(run: Stage) -> None:
    lines = [json.loads(line) for line in (run() / STAGE / RECORD).read_text().splitlines()]
    assert {line["name"]: (line["size"], line["tag"]) for line in lines} == {
        "train-0000.tar": (2_304_000, hashlib.md5(CONTENTS["train-0000.tar"]).hexdigest()),
        "sub/val.tar": (3000, hashlib.md5(CONTENTS["sub/val.tar"]).hexdigest()),
        "empty": (0, "d41d8cd98f00b204e9800998ecf8427e"),
    }


def test_half_a_line_of_the_record_is_one_object_to_copy(run: Stage, object_server: ObjectServer, prefix: str) -> None:
    folder = run()
    record = folder / STAGE / RECORD
    lines = sorted(record.read_text().splitlines(), key=lambda line: "train" in line)
    record.write_text("\n".join(lines)[:-20])
    before = object_server.gets(prefix)
    run()
    assert object_server.gets(prefix) == before + 1
    assert contents(folder) == CONTENTS


def test_objects_are_read_in_ranges(
    run: Stage, object_server: ObjectServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "RANGE_BYTES", 1_000_000)
    assert contents(run()) == CONTENTS
    assert object_server.gets(prefix) == 4


def test_a_damaged_object_is_read_again(
    run: Stage, object_server: ObjectServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged on its way: here, between the store and the disk."""
    damaged: list[int] = []
    write = os.pwrite

    def damage(file: int, block: memoryview, at: int) -> int:
        if not damaged and len(block) > 10_000:
            damaged.append(at)
            return write(file, bytes(len(block)), at)
        return write(file, block, at)

    monkeypatch.setattr(os, "pwrite", damage)
    assert contents(run()) == CONTENTS
    assert damaged
    assert object_server.gets(prefix) == 3


def test_an_object_that_changes_is_named(
    run: Stage, object_server: ObjectServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_after_listing(monkeypatch, lambda: object_server.put({f"{prefix}/sub/val.tar": b"other"}))
    with pytest.raises(UserError, match=rf"^s3://{BUCKET}/{prefix}/sub/val.tar: has changed while it was copied; "):
        run()
    monkeypatch.undo()


def test_an_object_that_vanishes_is_named(
    run: Stage, object_server: ObjectServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_after_listing(monkeypatch, lambda: object_server.delete(f"{prefix}/sub/val.tar"))
    with pytest.raises(UserError, match=rf"^s3://{BUCKET}/{prefix}/sub/val.tar: has vanished while it was copied; "):
        run()


def change_after_listing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    listing = object_store.ObjectStore.list_objects

    def list_and_change(store: object_store.ObjectStore) -> object:
        found = listing(store)
        change()
        return found

    monkeypatch.setattr(object_store.ObjectStore, "list_objects", list_and_change)


def test_google_cloud_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GoogleServer(tmp_path) as server:
        server.put({f"here/{key}": content for key, content in CONTENTS.items()})
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        config = TrainConfig(data_dir=Path(f"gs://{BUCKET}/here"), stage_dir=tmp_path / "stage")
        folder = stage(config, ALONE).data_dir
        assert folder is not None
        assert contents(folder) == CONTENTS
        versions = [json.loads(line)["version"] for line in (folder / STAGE / RECORD).read_text().splitlines()]
        assert sorted(map(bool, versions)) == [False, True, True]  # an empty object is not read
        written = os.stat(folder / "sub/val.tar").st_ino
        stage(config, ALONE)
        assert os.stat(folder / "sub/val.tar").st_ino == written


def test_a_full_disk_is_found_before(run: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedFiles, "free_bytes", lambda files: 1_000_000)
    with pytest.raises(UserError, match=r"^--stage-dir: 1\.0 MB are free at .*, 2\.3 MB are to be copied; free some"):
        run()


def test_a_disk_that_fills_up(run: Stage, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, block: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(UserError, match=r"^--stage-dir: the disk of .* is full; free some room, the same command "):
            run()
    assert contents(run()) == CONTENTS


def test_no_bucket_and_no_objects(run: Stage, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^s3://nothing/x: no such bucket; check its name, and the endpoint$"):
        run("s3://nothing/x")
    with pytest.raises(UserError, match=rf"^s3://{BUCKET}/nothing: no object below it; check bucket and prefix$"):
        run(f"s3://{BUCKET}/nothing")
    assert not (tmp_path / "stage").exists()


def test_a_name_that_is_no_path(run: Stage, object_server: ObjectServer, prefix: str) -> None:
    run()
    folder = run()
    (folder / "sub" / "val.tar").unlink()
    (folder / "sub").rmdir()
    (folder / "sub").write_bytes(b"a file where a folder must be")
    with pytest.raises(
        UserError, match=r"^--stage-dir: .*/sub cannot be written \(File exists\); give another folder$"
    ):
        run()


@pytest.mark.parametrize("name", ["a//b.jpg", "a/../../b.jpg"])
def test_an_object_with_no_name_of_a_file(run: Stage, object_server: ObjectServer, prefix: str, name: str) -> None:
    address = f"{object_server.env['AWS_ENDPOINT_URL']}/{BUCKET}/{prefix}/{name}"
    key = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request"}
    urllib.request.urlopen(urllib.request.Request(address, b"b", key, method="PUT")).close()
    with pytest.raises(
        UserError, match=r": an object has no name of a file \(.*\); rename it, or give another prefix$"
    ):
        run()


def test_no_credentials(run: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"no credentials \(.*\); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "):
        run()


def test_an_endpoint_that_does_not_answer(run: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(object_store, "FIRST_ANSWER_SECONDS", 0.5)
    with pytest.raises(UserError, match=r": the store does not answer, 0\.5 s long \(Connection refused\); check endp"):
        run()


def test_an_endpoint_that_is_no_url(run: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore panics, which is no Exception."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "::bad")
    with pytest.raises(UserError, match=r": .*InvalidUri.*; check endpoint and other variables of the environment$"):
        run()


def test_another_process_is_waited_for(
    run: Stage, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = StagedFiles(tmp_path / "stage" / BUCKET / prefix)
    assert other.try_lock()
    threading.Timer(1.0, other.close).start()
    assert contents(run()) == CONTENTS
    assert ": another process stages there; waiting for its end\n" in capsys.readouterr().out


def test_a_stop_ends_the_wait(run: Stage, prefix: str, tmp_path: Path) -> None:
    other = StagedFiles(tmp_path / "stage" / BUCKET / prefix)
    assert other.try_lock()
    with pytest.raises(Stopped, match=r"^SIGTERM$"):
        run(stopped_by=lambda: "SIGTERM")
    other.close()
