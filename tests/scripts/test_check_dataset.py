"""scripts/check_dataset.py as a command; with --bad-files, thirty kinds of bad files and more among 2,000 good ones."""

import json
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from scripts import check_dataset
from tests import damage, harness
from tests.conftest import TINY, Refused, write_data
from tests.contract import CONTRACT, assert_keys
from tests.data.test_verification import dali_accepts
from tests.forked import launch_forked, start_forked
from tests.harness import Finished, launch
from tests.processes import alive, identify
from tests.shards import write_webdataset
from utils.data.reading.decoding import decoder_of
from utils.data.reading.verification import load_manifest

SCRIPT = "import sys; from scripts import check_dataset; sys.exit(check_dataset.main(sys.argv[1:]))"


def check(*words: object, timeout: float = harness.LIMIT) -> Finished:
    """Run the program to its end."""
    return launch_forked(*words, program=SCRIPT, timeout=timeout)


def named_bad(output_dir: Path) -> dict[str, str]:
    return {entry["path"]: entry["reason"] for entry in json.loads((output_dir / "bad_files.json").read_text())}


def test_a_good_data_set(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_dataset.main([str(data), "--output-dir", str(tmp_path / "new" / "out")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("82 files: 0 bad, 0 suspicious; ")
    assert err == ""
    assert named_bad(tmp_path / "new" / "out") == {}
    manifest = json.loads((tmp_path / "new" / "out" / "manifest.json").read_text())
    assert len(manifest["files"]) == 82
    path = data / "train" / "blue" / "blue-000.jpg"
    size, mtime, bad, codec, *_ = manifest["files"]["train/blue/blue-000.jpg"]
    assert (size, mtime, bad, codec) == (path.stat().st_size, path.stat().st_mtime_ns, None, "jpeg")
    assert manifest["suspicious"] == []


def test_shards(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(data, folder)
    (folder / "train" / "red" / "red-003.jpg").write_text("no image")
    root = write_webdataset(folder, tmp_path / "shards")
    assert check_dataset.main([str(root), "--output-dir", str(tmp_path / "out")]) == 1
    assert "\n82 files: 1 bad, 0 suspicious; " in capsys.readouterr().out
    assert list(named_bad(tmp_path / "out")) == ["train/red/red-003.jpg"]


def test_label_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file the rows, by the paths of the files; of one that training refuses all images of the folder."""
    root, out = tmp_path / "data", tmp_path / "out"
    (root / "images").mkdir(parents=True)
    for name in "abc":
        (root / "images" / f"{name}.jpg").write_bytes(damage.JPEG + name.encode())
    (root / "images" / "b.jpg").write_text("no image")
    rows = "file,label\nimages/a.jpg,red\nimages/b.jpg,blue\nimages/gone.jpg,red\n"
    (root / "train.csv").write_text(rows)
    assert check_dataset.main([str(root), "--output-dir", str(out)]) == 1
    assert named_bad(out) == {
        "images/b.jpg": "a text file, not an image",
        "images/gone.jpg": "cannot be read (No such file or directory)",
    }
    (root / "train.csv").rename(root / "metadata.csv")
    (root / "metadata.csv").write_text(rows.replace("red", "red/dark"))
    capsys.readouterr()
    assert check_dataset.main([str(root), "--output-dir", str(out)]) == 1
    assert "as train.py refuses its label file: " in (printed := capsys.readouterr().out)
    assert "\nnot decoded, as no image is named so: 1 file .csv\n3 files: 1 bad, " in printed
    (root / "train.csv").touch()
    (root / "train.tsv").touch()
    assert check_dataset.main([str(root), "--output-dir", str(out)]) == 1
    assert "holds train.csv and train.tsv; name one " in capsys.readouterr().out
    for name in ("train-00000-of-00002.tfrecord", "train.csv", "train.tsv"):  # shards are refused as ever
        (root / name).touch()
    assert check_dataset.main([str(root), "--output-dir", str(out)]) == 2
    assert "train-00001-of-00002.tfrecord" in capsys.readouterr().err


def test_any_tree_with_bad_and_suspicious_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / "tree" / "of" / "any" / "depth"
    deep.mkdir(parents=True)
    (deep / "up").symlink_to(tmp_path / "tree")  # without end, if each were followed
    names = damage.write_unusual_names(deep, damage.CONTENTS["text"])
    irregular = damage.write_not_regular(deep)
    (deep / "good.jpg").write_bytes(damage.JPEG)
    (deep / "other name.png").write_bytes(damage.JPEG)
    (deep / ".hidden.jpg").write_bytes(b"")
    (deep / "notes.txt").write_bytes(b"")
    for name in ("a.jfif", "b.JFIF", "README"):
        (tmp_path / "tree" / name).write_bytes(damage.JPEG)
    out = tmp_path / "out"
    done = check(tmp_path / "tree", "--output-dir", out, "--rows", "100")
    assert (done.status, done.err) == (1, "")
    manifest = json.loads((out / "manifest.json").read_text())
    assert {"keys": sorted(manifest), "fields": manifest["fields"]} == CONTRACT["files"]["manifest.json"]
    assert_keys("bad_files.json", json.loads((out / "bad_files.json").read_text()))
    bad = named_bad(out)
    assert set(bad) == {str(path.relative_to(tmp_path / "tree")) for path in [*names, *irregular]}
    assert bad["of/any/depth/two\nlines.jpg"] == "a text file, not an image"
    assert f"bad, training would end at them: {len(bad)}\n" in done.out
    assert "named .png, holds jpeg; the same content as of/any/depth/good.jpg  of/any/depth/other name.png" in done.out
    assert "of/any/depth/two\\nlines.jpg\n" in done.out  # a line for a file, and no escape sequence
    assert "\x1b" not in done.out
    assert len(done.out.splitlines()) == len(bad) + 7
    ignored = "not decoded, as no image is named so: 2 files .jfif, 1 file .txt, 1 file without a suffix\n"
    assert f"\n\n{ignored}{len(bad) + 2} files: " in done.out
    assert check_dataset.main([str(tmp_path / "tree"), "--output-dir", str(out), "--rows", "3"]) == 1
    assert f"  and {len(bad) - 3} more, see {out}/bad_files.json\n" in capsys.readouterr().out


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_it_with_the_results_written(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "one.jpg").write_bytes(damage.encoded(height=2000, width=2000))
    for index in range(3_000):  # far more than are decoded until the first results are written
        (tmp_path / "tree" / f"{index}.jpg").symlink_to("../one.jpg")
    words = (tmp_path / "tree", "--output-dir", tmp_path / "out", "--workers", 2)
    program = (
        "import os, sys; os.setsid(); from scripts import check_dataset; from utils.data.reading import verification; "
    )
    program += "verification.SAVE_SECONDS = 0; sys.exit(check_dataset.main(sys.argv[1:]))"
    with start_forked(*words, program=program) as started:
        started.wait_for((tmp_path / "out" / "manifest.json").exists)
        workers = identify(started.descendants())
        assert len(workers) >= 2
        for _ in range(2):  # as `timeout` does; a terminal signals the workers, too
            os.killpg(started.pid, number) if number == signal.SIGINT else started.send(number, started.pid)
            time.sleep(0.1)
        done = started.end()
        assert alive(workers) == []
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert (done.status, done.out) == (143, "")
    assert done.err == f"check_dataset.py: stopped by {name}; the same command goes on from there\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]
    assert 0 < len(load_manifest(tmp_path / "out" / "manifest.json", decoder_of("dali").name)) < 3_000


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("nowhere", "--output-dir", "{tmp}/out"), ("nowhere: no such folder", "give a data set")),
        (("{tmp}/file", "--output-dir", "{tmp}/out"), ("{tmp}/file: no such folder", "give a data set")),
        (("{tmp}/empty", "--output-dir", "{tmp}/out"), ("{tmp}/empty: no images in it; give a data set",)),
        (("{tmp}/other", "--output-dir", "{tmp}/out"), ("{tmp}/other: no images in it (1 file .jfif); give",)),
        (("{data}", "--output-dir", "/proc/brisk"), ("--output-dir /proc/brisk: cannot be written", "give another")),
        (("{data}", "--output-dir", "{tmp}/file"), ("--output-dir {tmp}/file: cannot be written", "give another")),
        (("{data}",), ("'--output-dir'", "--help")),
        (("{data}", "--output-dir", "{tmp}/out", "--workers", "0"), ("--workers 0:", "1 or more")),
        (("{data}", "--outputdir", "{tmp}/out"), ("--outputdir", "--help")),
    ],
    ids=[
        "missing",
        "file",
        "empty",
        "other files",
        "read-only",
        "output is a file",
        "no output",
        "no workers",
        "unknown flag",
    ],
)
def test_refusals(
    refused: Refused, data: Path, tmp_path: Path, words: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "1.jfif").write_bytes(damage.JPEG)
    flags = [word.format(data=data, tmp=tmp_path) for word in words]
    check = refused(*flags, main=check_dataset.main, program="check_dataset.py")
    check(*(fragment.format(data=data, tmp=tmp_path) for fragment in fragments))


# ---------------------------------------------------------------------------------------------------------------------
# Thirty kinds and more among 2,000 good files


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A data set with every kind of damage and 2,000 good images, and what is bad by a fresh pipeline for each file."""
    root = tmp_path_factory.mktemp("spoiled")
    write_data(root, train=(640, 630, 630), val=(40, 30, 30))
    kinds = list(damage.write_kinds(root / "train" / "green").values())
    kinds += damage.write_unusual_names(root / "train" / "blue", damage.CONTENTS["cut in the middle"])
    kinds += damage.write_unusual_names(root / "val" / "blue", damage.CONTENTS["WebP"])
    kinds += damage.write_kinds(root / "val" / "red").values()
    irregular = damage.write_not_regular(root / "train" / "red")
    files = [path for path in root.glob("*/*/*") if path not in irregular and not path.is_dir()]
    assert len(files) == 2000 + len(kinds)
    bad = {path for path in files if not dali_accepts(path)} | set(irregular)
    assert len(bad) > 60
    return root, {str(path.relative_to(root)) for path in bad}


@pytest.mark.slow
def test_the_scan_finds_what_dali_rejects(spoiled: tuple[Path, set[str]], tmp_path: Path) -> None:
    root, bad = spoiled
    done = check(root, "--output-dir", tmp_path)
    assert done.status == 1, done.err
    assert set(named_bad(tmp_path)) == bad
    repeated = check(root, "--output-dir", tmp_path)
    assert repeated.out == done.out


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("loader", ["dali", "proxy"])
def test_skip_trains_to_the_end(spoiled: tuple[Path, set[str]], tmp_path: Path, processes: int, loader: str) -> None:
    root, bad = spoiled
    flags = (*TINY, "--data-dir", root, "--output-dir", tmp_path, "--epochs", 2, "--batch-size", 16)
    done = launch(*flags, "--loader", loader, "--bad-files", "skip", processes=processes)
    assert done.status == 0, done.err
    assert set(named_bad(tmp_path)) == bad
    counts = Counter(tuple(name.split("/")[:2]) for name in bad)
    for (_, name), count in counts.items():
        assert f"{name} {count}" in done.out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["epochs"] == 2
    of_val = sum(count for (split, _), count in counts.items() if split == "val")
    files = sum(1 for path in root.glob("val/*/*"))
    assert f"on {files - of_val:,} images" in done.out


@pytest.mark.slow
@pytest.mark.dist
def test_skip_with_the_torch_loader_asks_pillow(spoiled: tuple[Path, set[str]], tmp_path: Path) -> None:
    root, bad = spoiled
    flags = (*TINY, "--data-dir", root, "--output-dir", tmp_path, "--epochs", 1, "--batch-size", 16)
    done = launch(*flags, "--loader", "torch", "--bad-files", "skip", processes=2)
    assert done.status == 0, done.err
    found = set(named_bad(tmp_path))
    assert "train/green/GIF.jpg" in bad - found
    assert "train/green/text.jpg" in bad & found
