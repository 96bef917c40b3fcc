"""Runs whose data is staged from a real server of S3: the bits of local shards, over dead servers and dead trainers."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines import Feed
from scripts import check_dataset, convert_dataset
from tests.conftest import TINY, Refused, assert_same_run
from tests.forked import launch_series
from tests.harness import error_line, launch, start
from tests.object_server import BUCKET, ObjectServer, objects_of
from tests.shards import write_webdataset
from utils.data.staging.staged_files import RECORD, STAGE, StagedFiles

URL = f"s3://{BUCKET}/sets/tiny"
FLAGS = (*TINY, "--batch-size", "4", "--loader", "torch")
MANY, BYTES = 150, 400_000  # objects besides the shards, so that a staging lasts


@pytest.fixture(scope="module")
def shards(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_webdataset(data, tmp_path_factory.mktemp("shards") / "tiny", per_shard=7)


@pytest.fixture
def env(object_server: ObjectServer, shards: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    object_server.put(objects_of(shards, "sets/tiny"))
    for name, value in object_server.env.items():
        monkeypatch.setenv(name, value)
    return object_server.env


@pytest.mark.slow  # five launches
def test_a_run_may_go_on_from_the_url_to_the_folder_and_back(env: dict[str, str], shards: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--checkpoint-steps", 3, "--epochs", 2)
    staged = ("--data-dir", URL, "--stage-dir", tmp_path / "stage", "--output-dir", tmp_path / "staged", *flags)
    folder = tmp_path / "stage" / BUCKET / "sets" / "tiny"
    local = ("--data-dir", folder, "--output-dir", tmp_path / "staged", *flags)
    whole, *parts, evaluated = launch_series(
        ("--data-dir", shards, "--output-dir", tmp_path / "local", *flags),
        (*staged, "--time-limit", 0.001),
        (*local, "--time-limit", 0.001),
        staged,
        ("--evaluate", "--output-dir", tmp_path / "staged"),  # takes URL and folder from the checkpoint
    )
    assert [done.status for done in (whole, *parts, evaluated)] == [0, 143, 143, 0, 0], parts[-1].err + evaluated.err
    assert_same_run(tmp_path / "local", tmp_path / "staged", without=["files"])
    assert ": 0 of 13 objects are there, " in parts[0].out
    assert ": 13 of 13 objects are there\n" in parts[2].out
    assert (folder / "train.index.npz").is_file()
    assert json.loads((tmp_path / "staged" / "config.json").read_text())["data_dir"] == URL
    assert f"note: --data-dir {URL}" not in evaluated.out


def test_a_feed_and_the_commands_stage_too(
    env: dict[str, str], refused: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = tmp_path / "stage"
    with Feed(URL, "val", batch_size=41, image_size=32, device="cpu", stage_dir=stage) as feed:
        assert [len(batch.targets) for batch in feed] == [41]
    flags = ["--stage-dir", str(stage)]
    assert check_dataset.main([URL, "--output-dir", str(tmp_path / "check"), "--workers", "1", *flags]) == 0
    assert "82 files: 0 bad" in capsys.readouterr().out
    assert convert_dataset.main([URL, str(tmp_path / "folder"), "--to", "folder", "--workers", "1", *flags]) == 0
    assert len(list((tmp_path / "folder").glob("*/*/*"))) == 82
    refused(URL, "--output-dir", tmp_path / "x", main=check_dataset.main, program="check_dataset.py")(
        f"{URL} without --stage-dir: "
    )


def test_refused(refused: Refused, env: dict[str, str], tmp_path: Path) -> None:
    flags = ("--output-dir", tmp_path / "run", "--stage-dir", tmp_path / "stage", *FLAGS)
    refused("--data-dir", URL)(f"--data-dir {URL} without --stage-dir: ", "; give --stage-dir DIR, a folder on a local")
    for url in ("https://host/x", "hf://datasets/x"):
        refused("--data-dir", url, *flags)(f"--data-dir {url}: ", ":// is not read; give a folder, or s3://BUCKET/")
    refused("--data-dir", URL, "--val-data", "s3://x/val-*.tar", *flags)("--val-data s3://x/val-*.tar: is a pattern")
    refused("--data-dir", "s3://nothing/x", *flags)("s3://nothing/x: no such bucket; ")
    (tmp_path / "file").write_text("")
    refused("--data-dir", URL, *flags, "--stage-dir", tmp_path / "file")(
        f"--stage-dir: {tmp_path}/file/{BUCKET}/sets/tiny cannot be written (Not a directory); give another"
    )


@pytest.mark.slow  # each starts processes and a server
@pytest.mark.dist
class TestDeaths:
    """Of the server, of the trainer, of both."""

    @pytest.fixture
    def objects(self, shards: Path, tmp_path: Path) -> Path:
        """All objects of the server, as files."""
        folder = tmp_path / "objects"
        shutil.copytree(shards, folder / "sets/tiny")
        (folder / "sets/tiny/extra").mkdir()
        for number in range(MANY):
            (folder / f"sets/tiny/extra/{number:04}").write_bytes(bytes([number]) * BYTES)
        return folder

    @pytest.fixture
    def server(self, objects: Path) -> Iterator[ObjectServer]:
        with ObjectServer(objects) as server:
            yield server

    @staticmethod
    def staged(folder: Path) -> Callable[[], int]:
        """How many objects are there."""
        record = folder / BUCKET / "sets/tiny" / STAGE / RECORD
        return lambda: len(record.read_text().splitlines()) if record.exists() else 0

    def test_of_the_server(self, server: ObjectServer, objects: Path, shards: Path, tmp_path: Path) -> None:
        """Two processes wait for it, and then train as on the local shards."""
        flags = (*FLAGS, "--epochs", 1)
        count = self.staged(tmp_path / "stage")
        with start(
            "--data-dir", URL, "--stage-dir", tmp_path / "stage", "--output-dir", tmp_path / "staged", *flags,
            processes=2, env=server.env,
        ) as run:  # fmt: skip
            run.wait_for(lambda: count() >= 30)
            server.kill()
            assert 30 <= count() < MANY
            run.wait_for(lambda: "the store does not answer (Connection refused); trying again for 300 s\n" in run.out)
            before, there = server.gets("sets/tiny"), count()
            server.start(objects)
            done = run.end()
        assert done.status == 0, done.err
        assert f"{URL}: the store answers again\n" in done.out
        assert count() == MANY + 13
        # Those that were in progress are read again, at most 16.
        assert server.gets("sets/tiny") - before <= MANY + 13 - there + 16
        assert launch("--data-dir", shards, "--output-dir", tmp_path / "local", *flags, processes=2).status == 0
        assert_same_run(tmp_path / "local", tmp_path / "staged", without=["files"])

    def test_of_the_trainer(self, server: ObjectServer, tmp_path: Path) -> None:
        flags = ("--data-dir", URL, "--stage-dir", tmp_path / "stage", *FLAGS, "--epochs", 1)
        count = self.staged(tmp_path / "stage")
        folder = tmp_path / "stage" / BUCKET / "sets/tiny"
        for number, status, least in (
            (signal.SIGKILL, -9, 20), (signal.SIGTERM, 143, 50), (signal.SIGINT, 143, 80)
        ):  # fmt: skip
            with start(*flags, "--output-dir", tmp_path / "run", env=server.env) as run:
                run.wait_for(lambda least=least: count() >= least)  # type: ignore[misc]
                run.send(number, run.pid)
                assert run.end().status == status
            sizes = {path.stat().st_size for path in (folder / "extra").iterdir()}
            assert sizes == {BYTES}  # no half object has its name
        there, before = count(), server.gets("sets/tiny")
        done = launch(*flags, "--output-dir", tmp_path / "run", env=server.env)
        assert done.status == 0, done.err
        assert server.gets("sets/tiny") - before == MANY + 13 - there
        assert [path.name for path in (folder / STAGE).iterdir()] == [RECORD]

    def test_two_runs_share_what_is_staged(self, server: ObjectServer, tmp_path: Path) -> None:
        """A third one that is at it makes both wait, so that they go on at the same time."""
        flags = ("--data-dir", URL, "--stage-dir", tmp_path / "stage", *FLAGS, "--epochs", 1)
        third = StagedFiles(tmp_path / "stage" / BUCKET / "sets/tiny")
        assert third.try_lock()
        with (
            start(*flags, "--output-dir", tmp_path / "one", env=server.env) as one,
            start(*flags, "--output-dir", tmp_path / "two", env=server.env) as two,
        ):
            for run in (one, two):
                run.wait_for(lambda run=run: ": another process stages there; waiting for its end\n" in run.out)  # type: ignore[misc]
            third.close()
            first, second = one.end(), two.end()
        assert [first.status, second.status] == [0, 0], first.err + second.err
        assert server.gets("sets/tiny") == MANY + 13

    def test_an_object_that_changes_ends_all_ranks(self, server: ObjectServer, tmp_path: Path) -> None:
        count = self.staged(tmp_path / "stage")
        with start(
            "--data-dir", URL, "--stage-dir", tmp_path / "stage", "--output-dir", tmp_path / "run", *FLAGS,
            "--epochs", 1, processes=2, env=server.env,
        ) as run:  # fmt: skip
            run.wait_for(lambda: count() >= 20)
            server.put({f"sets/tiny/extra/{number:04}": b"other" for number in reversed(range(MANY))})
            done = run.end()
        assert "exitcode  : 2" in done.err
        assert error_line(done).startswith(f"train.py: {URL}/extra/")
        assert ": has changed while it was copied; " in error_line(done)
