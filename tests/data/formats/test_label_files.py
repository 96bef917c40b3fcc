"""Label files: every usual way to write one gives the same images; mistakes are in tests/refused_labels.py."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines import Feed
from scripts.convert_dataset import splits_of
from tests.damage import ARITHMETIC as JPEG
from tests.refused_folders import files
from utils.data.formats.sources import find_source
from utils.data.images.manifest import Manifest
from utils.data.splits.selection import read_data
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.training.resume.restore import settings_of_checkpoint

ROWS = {"a.jpg": "red", "b.png": "blue", "sub/c.jpg": "red", "d.jpg": "blue", "e.jpg": "red"}
VAL = {"v.jpg": "red", "w.jpg": "blue"}


def text_of(rows: dict[str, str], heading: str = "file,label\n") -> str:
    return heading + "".join(f"{name},{label}\n" for name, label in rows.items())


def read(root: Path, **given: object) -> dict[str, Manifest]:
    config = TrainConfig(data_dir=root, output_dir=root / "run", **given)  # type: ignore[arg-type]
    return read_data(config, DistEnv.single(torch.device("cpu")))


def found_in(manifest: Manifest, root: Path) -> dict[str, str]:
    """Path of each image relative to the data set -> its class."""
    paths = [Path(str(manifest.record(index).location)) for index in range(len(manifest))]
    assert all(path.read_bytes() for path in paths)
    labels = [manifest.classes[label] for label in manifest.labels.tolist()]
    return {str(path.relative_to(root)): label for path, label in zip(paths, labels, strict=True)}


GOOD = text_of(ROWS)
SPLIT = (
    "file,label,split\n"
    + "".join(f"{n},{c},train\n" for n, c in ROWS.items())
    + "".join(f"{n},{c},val\n" for n, c in VAL.items())
)
FORMS = {
    "commas": ("train.csv", GOOD),
    "tabs": ("train.tsv", GOOD.replace(",", "\t")),
    "tabs in a csv": ("train.csv", GOOD.replace(",", "\t")),
    "semicolons": ("train.csv", GOOD.replace(",", ";")),
    "a mark in front, line ends of Windows": ("train.csv", "\ufeff" + GOOD.replace("\n", "\r\n")),
    "quotes and spaces": ("train.csv", 'file , label\n' + "".join(f'"{n}", {label} \n' for n, label in ROWS.items())),
    "empty lines and cells behind": ("train.csv", GOOD.replace("\n", ",,\n\n,,\n").replace("label,,", "label,note,by")),
    "no heading": ("train.csv", GOOD.removeprefix("file,label\n")),
    "a heading in other words": ("Train.CSV", GOOD.replace("file,label", "Image_Path,Class")),
    "columns in another order": ("train.csv", "label,file\n" + "".join(f"{c},{n}\n" for n, c in ROWS.items())),
    "paths of Windows": ("train.csv", GOOD.replace("sub/", "sub\\")),
    "paths with dots": ("train.csv", GOOD.replace("sub/", "./sub/../sub/")),
    "json lines": ("train.jsonl", "".join(json.dumps({"file_name": n, "label": c}) + "\n" for n, c in ROWS.items())),
    "of all splits": ("labels.csv", "file,label,split\n" + "".join(f"{n},{c},Train\n" for n, c in ROWS.items())
                      + "".join(f"{n},{c},valid\n" for n, c in VAL.items()) + "x.jpg,red,test\n"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path: Path, form: str) -> None:
    name, text = FORMS[form]
    images = dict.fromkeys([*ROWS, *VAL, "x.jpg"], JPEG)
    val = {} if "labels" in name else {"val.csv": text_of(VAL)}
    files({**images, "extra.jpg": JPEG, "notes.txt": "", ".hidden.jpg": JPEG, name: text, **val})(tmp_path)
    splits = read(tmp_path)
    assert found_in(splits["train"], tmp_path) == ROWS
    assert found_in(splits["val"], tmp_path) == VAL
    assert splits["train"].classes == splits["val"].classes == ("blue", "red")
    assert (splits["train"].title, splits["val"].title) == ("train/", "val/")
    extra = 1 if "labels" in name else 2  # extra.jpg, and x.jpg, which the former has in its rows of test
    assert splits["train"].ignored == {"without a row in the label file": extra}
    assert splits["train"].labels.tolist() == sorted(splits["train"].labels.tolist())


@pytest.mark.parametrize("folder", ["labels", "images"])
def test_files_in_a_folder_beside_and_without_suffixes(tmp_path: Path, folder: str) -> None:
    rows = {"a": "red", "b.x": "blue", "c": "red", "d": "blue"}
    files({f"{folder}/{name}.jpg": JPEG for name in rows} | {"labels.csv": text_of(rows, "id,target\n")})(tmp_path)
    (train,) = read(tmp_path, val_fraction=0.5).values()
    assert found_in(train, tmp_path) == {f"{folder}/{name}.jpg": label for name, label in rows.items()}


def test_absolute_paths(tmp_path: Path) -> None:
    files({f"here/{name}": JPEG for name in ROWS})(tmp_path)
    files({"train.csv": text_of({str(tmp_path / "here" / name): label for name, label in ROWS.items()})})(
        tmp_path / "to"
    )
    (train,) = read(tmp_path / "to", val_fraction=0.5).values()
    assert found_in(train, tmp_path / "here") == ROWS


def test_named_files(tmp_path: Path) -> None:
    """The flags name label files in any folder; paths are relative to the file."""
    files({f"lists/{name}": JPEG for name in (*ROWS, *VAL)})(tmp_path)
    files({"lists/one.csv": text_of(ROWS), "lists/two.tsv": text_of(VAL).replace(",", "\t")})(tmp_path)
    named = {"train_data": "lists/one.csv", "val_data": "lists/two.tsv"}
    splits = read(tmp_path, **named)
    assert found_in(splits["train"], tmp_path / "lists") == ROWS
    assert found_in(splits["val"], tmp_path / "lists") == VAL
    (val,) = read(tmp_path, val_data="lists/two.tsv", evaluate=True).values()
    assert found_in(val, tmp_path / "lists") == VAL
    assert splits_of(TrainConfig(data_dir=tmp_path, **named)) == ("train", "val")  # type: ignore[arg-type]


def test_the_split_that_no_flag_names_is_found(tmp_path: Path) -> None:
    files({**dict.fromkeys([*ROWS, *VAL], JPEG), "one.csv": text_of(ROWS), "val.csv": text_of(VAL)})(tmp_path)
    assert found_in(read(tmp_path, train_data="one.csv")["val"], tmp_path) == VAL
    files({"labels.csv": text_of(ROWS), "two.csv": text_of(VAL)})(tmp_path)
    (tmp_path / "train.tsv").touch()
    (tmp_path / "train.jsonl").touch()
    (val,) = read(tmp_path, val_data="two.csv", evaluate=True).values()
    assert found_in(val, tmp_path) == VAL
    (tmp_path / "train.tsv").unlink()
    (tmp_path / "train.jsonl").unlink()
    splits = read(tmp_path, val_data="two.csv")
    assert [found_in(splits[split], tmp_path) for split in ("train", "val")] == [ROWS, VAL]


def test_an_evaluation_finds_the_validation_images_of_the_training_file(tmp_path: Path) -> None:
    """Also beside class folders, which other data sets than the run's may have."""
    images = {**dict.fromkeys([*ROWS, *VAL], JPEG), "val/red/a.jpg": JPEG}
    files({**images, "all.csv": SPLIT})(tmp_path)
    (val,) = read(tmp_path, train_data="all.csv", evaluate=True).values()
    assert found_in(val, tmp_path) == VAL
    (other,) = read(tmp_path, train_data="none.csv", evaluate=True).values()
    assert other.names() == ["red/a.jpg"]


def test_rows_of_val_come_before_a_test_file(tmp_path: Path) -> None:
    other = {"labels.csv": SPLIT, "test.csv": text_of({"x.jpg": "red"})}
    files({**dict.fromkeys([*ROWS, *VAL, "x.jpg"], JPEG), **other})(tmp_path)
    assert found_in(read(tmp_path)["val"], tmp_path) == VAL
    (waiting,) = read(tmp_path, evaluate=True, val_split="test").values()
    assert found_in(waiting, tmp_path) == {"x.jpg": "red"}
    files({"labels.csv": SPLIT + "y.jpg,red,test\n", "y.jpg": JPEG})(tmp_path)
    with pytest.raises(
        UserError, match=r"holds labels\.csv with a column split and test\.csv; name one of them by --val"
    ):
        read(tmp_path, evaluate=True, val_split="test")
    files({"test.csv": "id\nx\n"})(tmp_path)
    (waiting,) = read(tmp_path, evaluate=True, val_split="test").values()
    assert found_in(waiting, tmp_path) == {"y.jpg": "red"}
    with pytest.raises(UserError, match=r"labels\.csv lists validation images, which would not be used"):
        read(tmp_path, val_fraction=0.5)
    files({"valid.csv": text_of(VAL)})(tmp_path)
    with pytest.raises(UserError, match=r"holds labels\.csv with a column split and valid\.csv; name one of "):
        read(tmp_path)


def test_a_table_of_another_program_does_no_harm(tmp_path: Path) -> None:
    """Where val has its own; and a row without a label is named, not the table passed over."""
    files({**dict.fromkeys([*ROWS, *VAL], JPEG), "val.csv": text_of(VAL), "metadata.csv": b"\xe9"})(tmp_path)
    (val,) = read(tmp_path, evaluate=True).values()
    assert found_in(val, tmp_path) == VAL
    (tmp_path / "val.csv").unlink()
    files({"metadata.csv": text_of({"a.jpg": "", "b.png": "red"})})(tmp_path)
    with pytest.raises(UserError, match=r"line 2 has no label for a\.jpg"):
        read(tmp_path, val_fraction=0.5)
    files({"metadata.csv": "file,label,split\n" + "".join(f"{n},{c},train\n" for n, c in ROWS.items())})(tmp_path)
    files({"test.csv": text_of(VAL)})(tmp_path)
    assert found_in(read(tmp_path)["val"], tmp_path) == VAL


def test_an_evaluation_of_other_data_takes_nothing_of_the_runs(tmp_path: Path) -> None:
    """Neither its label file by an absolute path, nor its patterns; a folder that --val-split names is found, too."""
    old, new = tmp_path / "old", tmp_path / "new"
    files({**dict.fromkeys([*ROWS, *VAL], JPEG), "all.csv": SPLIT})(old)
    files({"test/blue/t.jpg": JPEG, "test/red/t.jpg": JPEG, "part.csv": text_of(ROWS)})(old)
    files({f"val/{label}/n.jpg": JPEG for label in ("blue", "red")})(new)
    alone = DistEnv.single(torch.device("cpu"))
    runs = {str(old / "all.csv"): 0.0, str(old / "part.csv"): 0.5, "part.csv": 0.5, "a-*.tar": 0.5}
    for train_data, fraction in runs.items():
        before = TrainConfig(data_dir=old, train_data=train_data, val_fraction=fraction)
        for given, expected in (({"data_dir": new}, "n.jpg"), ({"val_split": "test"}, "t.jpg")):
            asked = TrainConfig(evaluate=True, given=frozenset(given), **given)
            config, _ = settings_of_checkpoint(asked, before, "best.pt", alone)
            listed = read_data(dataclasses.replace(config, output_dir=tmp_path), alone)
            assert listed["val"].names() == [f"blue/{expected}", f"red/{expected}"], (train_data, given)
    # A copy: class folders come before a table without val; a name that leads out of it is another file there.
    files({"part.csv": text_of(ROWS)})(new)
    files({"lists.csv": text_of(VAL)})(tmp_path)
    (tmp_path / "copy").mkdir()
    files({"lists.csv": text_of(VAL), "data/val/red/n.jpg": JPEG})(tmp_path / "copy")
    asked = TrainConfig(evaluate=True, data_dir=new, given=frozenset({"data_dir"}))
    before = TrainConfig(data_dir=old, train_data="part.csv", val_fraction=0.5)
    config, _ = settings_of_checkpoint(asked, before, "best.pt", alone)
    listed = read_data(dataclasses.replace(config, output_dir=tmp_path), alone)
    assert listed["val"].names() == ["blue/n.jpg", "red/n.jpg"]
    for folder, pattern in {tmp_path / "copy" / "data": "../lists.csv", new: None}.items():
        asked = TrainConfig(evaluate=True, data_dir=folder, given=frozenset({"data_dir"}))
        before = TrainConfig(data_dir=old, val_data="../lists.csv")
        assert settings_of_checkpoint(asked, before, "best.pt", alone)[0].val_data == pattern
    # With a fraction, which may be of the run's own file at another place; other names are not looked for there.
    asked = TrainConfig(evaluate=True, data_dir=old, val_fraction=0.5, given=frozenset({"data_dir", "val_fraction"}))
    before = TrainConfig(data_dir=new, train_data="part.csv", val_data=str(old / "all.csv"), val_fraction=0.5)
    config, _ = settings_of_checkpoint(asked, before, "best.pt", alone)
    assert (config.train_data, config.val_data) == ("part.csv", None)
    url = TrainConfig(evaluate=True, data_dir=Path("s3://new/data"), stage_dir=tmp_path, given=frozenset({"data_dir"}))
    with pytest.raises(UserError, match="held out a part of its images; add --val-split val for the"):
        settings_of_checkpoint(url, TrainConfig(data_dir=old, val_fraction=0.2), "best.pt", alone)


def test_an_evaluation_of_another_split_is_not_of_val(tmp_path: Path) -> None:
    """Where the run has named its label files; with a column `split`, too, that the other split is not in."""
    files({**dict.fromkeys([*ROWS, *VAL, "x.jpg"], JPEG), "test.csv": text_of({"x.jpg": "red"})})(tmp_path)
    files({"one.csv": text_of(ROWS), "two.csv": text_of(VAL), "all.csv": SPLIT})(tmp_path)
    alone = DistEnv.single(torch.device("cpu"))
    for names in ({"train_data": "one.csv", "val_data": "two.csv"}, {"train_data": "all.csv"}):
        before = TrainConfig(data_dir=tmp_path, **names)  # type: ignore[arg-type]
        for val_split, expected in (("test", {"x.jpg": "red"}), ("val", VAL)):
            asked = TrainConfig(evaluate=True, val_split=val_split, given=frozenset({"val_split"}))
            config, _ = settings_of_checkpoint(asked, before, "best.pt", alone)
            (val,) = read_data(dataclasses.replace(config, output_dir=tmp_path / "out"), alone).values()
            assert found_in(val, tmp_path) == expected, names


def test_a_feed_of_val_has_the_labels_of_the_training_file(tmp_path: Path) -> None:
    val = {"v.jpg": "red"}
    files({**dict.fromkeys([*ROWS, *val], JPEG), "labels.csv": text_of(ROWS), "val.csv": text_of(val)})(tmp_path)
    with Feed(tmp_path, "val", batch_size=1, image_size=32, device="cpu", workers=1) as feed:
        assert feed.classes == ("blue", "red")
        assert [targets.tolist() for _, targets in feed] == [[1]]


def test_a_competitions_list_of_test_images_is_not_val(tmp_path: Path) -> None:
    files({**dict.fromkeys(ROWS, JPEG), "train.csv": text_of(ROWS), "test.csv": "id\na\n"})(tmp_path)
    (train,) = read(tmp_path, val_fraction=0.5).values()
    assert found_in(train, tmp_path) == ROWS
    for text in ("a.jpg\nb.jpg\n", "0,0\n1,2\n", b"file,label\n\xe9"):
        files({"test.csv": text})(tmp_path)
        (train,) = read(tmp_path, val_fraction=0.5).values()
        assert found_in(train, tmp_path) == ROWS
    files({"test.csv": text_of(VAL), **dict.fromkeys(VAL, JPEG)})(tmp_path)
    assert found_in(read(tmp_path)["val"], tmp_path) == VAL


def test_images_of_test_may_wait(tmp_path: Path) -> None:
    """Beside --val-fraction, in a column or in a file; --val-split names them."""
    splits = {"train": ROWS, "test": VAL}
    rows = [f"{file},{label},{split}\n" for split, part in splits.items() for file, label in part.items()]
    tables = {
        "column": {"labels.csv": "file,label,split\n" + "".join(rows)},
        "file": {f"{split}.csv": text_of(part) for split, part in splits.items()},
    }
    for name, written in tables.items():
        files({**dict.fromkeys([*ROWS, *VAL], JPEG), **written})(tmp_path / name)
        (train,) = read(tmp_path / name, val_fraction=0.5).values()
        assert found_in(train, tmp_path / name) == ROWS
        (val,) = read(tmp_path / name, evaluate=True, val_split="Test").values()
        assert found_in(val, tmp_path / name) == VAL


def test_an_evaluation_of_a_held_out_run_takes_the_images_that_are_named(tmp_path: Path) -> None:
    before = TrainConfig(data_dir=tmp_path / "old", val_fraction=0.2)
    files({"train.csv": text_of(ROWS), "val.csv": text_of(VAL)})(tmp_path / "new")
    files({"train.csv": text_of(ROWS), "test.csv": text_of(VAL)})(tmp_path / "wait")
    files({"train-0000.tar": b"", "val-0000.tar": b""})(tmp_path / "shards")
    files({f"{split}/red/a.jpg": JPEG for split in ("train", "val")})(tmp_path / "folders")
    for given, expected in (
        ({"data_dir": tmp_path / "shards"}, 0.0),
        ({"data_dir": tmp_path / "folders"}, 0.0),
        ({"data_dir": tmp_path / "new"}, 0.0),
        ({"data_dir": tmp_path / "wait"}, 0.2),
        ({"val_data": "val.csv"}, 0.0),
        ({}, 0.2),
    ):
        config = TrainConfig(evaluate=True, given=frozenset(given), **given)
        found, _ = settings_of_checkpoint(config, before, "best.pt", DistEnv.single(torch.device("cpu")))
        assert found.val_fraction == expected, given


def test_numbers_are_sorted_as_numbers_and_get_names(tmp_path: Path) -> None:
    rows = {f"{number}.jpg": str(number) for number in (10, 9, 2, 0, 1, 3, 4, 5, 6, 7, 8)}
    files(dict.fromkeys(rows, JPEG) | {"train.csv": text_of(rows), "names.txt": "\n".join("abcdefghijk")})(tmp_path)
    (train,) = read(tmp_path, train_data="train.csv", evaluate=True, val_data="train.csv").values()
    assert train.classes == tuple(map(str, range(11)))
    (named,) = read(tmp_path, evaluate=True, val_data="train.csv", class_names=tmp_path / "names.txt").values()
    assert named.classes == tuple("abcdefghijk")
    assert found_in(named, tmp_path) == {f"{number}.jpg": "abcdefghijk"[number] for number in range(11)}


def test_weights_and_groups_follow_their_images(tmp_path: Path) -> None:
    rows = "".join(f"{name},{label},{at / 2},p{at}\n" for at, (name, label) in enumerate(ROWS.items()))
    files(dict.fromkeys(ROWS, JPEG) | {"train.csv": "file,label,weight,group\n" + rows})(tmp_path)
    (train,) = read(tmp_path, val_fraction=0.5).values()
    numbers = {name: at for at, name in enumerate(ROWS)}
    order = [numbers[name] for name in found_in(train, tmp_path)]
    assert train.weights is not None
    assert train.groups is not None
    assert train.weights.tolist() == [at / 2 for at in order]
    assert train.groups.tolist() == [f"p{at}" for at in order]
    part = train.select(np.array([3, 1]))
    assert part.weights is not None
    assert part.groups is not None
    assert (part.weights.tolist(), part.groups.tolist()) == (
        [order[3] / 2, order[1] / 2],
        [f"p{order[3]}", f"p{order[1]}"],
    )
    files({"train.csv": "file,label,weight,group\n" + rows.replace(",0.5,", ",0.25,")})(tmp_path)
    (changed,) = read(tmp_path, val_fraction=0.5).values()
    assert changed.fingerprint != train.fingerprint, "a run with other weights has another order"


def test_bad_files_are_skipped(tmp_path: Path) -> None:
    rows = ROWS | {"gone.jpg": "red", "empty.jpg": "blue"}
    files(dict.fromkeys(ROWS, JPEG) | {"empty.jpg": b"", "train.csv": text_of(rows)})(tmp_path)
    (train,) = read(tmp_path, val_fraction=0.5, bad_files="skip").values()
    assert found_in(train, tmp_path) == ROWS
    assert [train.path(name) for name in train.names()] == ["b.png", "d.jpg", "a.jpg", "e.jpg", "sub/c.jpg"]
    assert train.bad == {
        "blue/empty.jpg": "an empty file",
        "red/gone.jpg": "cannot be read (No such file or directory)",
    }
    files({"train.csv": text_of(ROWS | {"gone.jpg": "pink"})})(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}: pink of train: a class without a readable image, its 1 file is"):
        read(tmp_path, val_fraction=0.5, bad_files="skip")


def test_class_folders_and_shards_come_before_label_files(tmp_path: Path) -> None:
    """A table beside them may be anything; one of all splits without such columns is none."""
    files({f"train/{label}/{at}.jpg": JPEG for at, label in enumerate("ab")} | {"train.csv": "x,y\n1,2\n"})(tmp_path)
    assert find_source(TrainConfig(data_dir=tmp_path), ()).has_class_folders
    files({"train-0000.tar": b"", "metadata.csv": text_of(ROWS)})(tmp_path / "shards")
    assert find_source(TrainConfig(data_dir=tmp_path / "shards"), ()).format is not None
    files({"metadata.csv": "a,b\n1,2\n"})(tmp_path / "other")
    assert find_source(TrainConfig(data_dir=tmp_path / "other"), ()).has_class_folders
