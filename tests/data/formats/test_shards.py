"""Labels of shards: the same number is the same class in train and val, whatever lists and splits are there."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines import Feed
from tests.damage import encoded
from tests.data.formats.test_arrow_cache import write as write_arrow
from tests.data.formats.test_tfrecord import example, feature, field, framed
from tests.shards import write_tar
from utils.data.formats.shards import Shards, create_manifests, index_entries, join_indexes
from utils.data.formats.sources import class_names_of, find_source, read_given_names
from utils.data.images.manifest import Manifest
from utils.data.splits.selection import read_data
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig

COLORS = ("blue", "green", "red")
Lists = Mapping[str, str]  # path of a list -> its text


def write(root: Path, form: str, labels: Mapping[str, Sequence[int]], lists: Lists) -> Path:
    """A shard in a folder of each split. The image `NUMBER.jpg` has the label at that place."""
    for split, numbers in labels.items():
        (root / split).mkdir(parents=True, exist_ok=True)
        if form == "tar":
            members = {f"{at}.jpg": encoded(height=8, width=8) for at in range(len(numbers))}
            write_tar(root / split / "0.tar", members | {f"{at}.cls": b"%d" % n for at, n in enumerate(numbers)})
        elif form == "arrow":
            structs = [{"bytes": b"x", "path": f"{at}.jpg"} for at in range(len(numbers))]
            write_arrow(root / split / "0.arrow", pa.table({"image": structs, "label": list(numbers)}))
        else:
            records = [
                framed(
                    example(
                        feature("image", field(1, b"x"), 1),
                        feature("file_name", field(1, b"%d.jpg" % at), 1),
                        feature("label", field(1, number), 3),
                    )
                )
                for at, number in enumerate(numbers)
            ]
            (root / split / "0.tfrecord").write_bytes(b"".join(records))
    for name, text in lists.items():
        (root / name).write_text(text)
    return root


def listed(root: Path, splits: Sequence[str] = ("train", "val"), file: Path | None = None) -> dict[str, Manifest]:
    """The manifests of a data set, of which `splits` are read; as `read_data`, without processes."""
    source = find_source(TrainConfig(data_dir=root), splits)
    assert source.format is not None
    read = []
    for split in splits:
        indexes = [index_entries(path, source.format.scan(path)) for path in source.shards[split]]
        paths = tuple(map(str, source.shards[split]))
        counts = np.array(list(map(len, indexes)))
        read.append(Shards(split, root, paths, np.zeros(len(paths), dtype=np.int64), counts, join_indexes(indexes)))
    names = class_names_of(source, None if file is None else read_given_names(file), file)
    return create_manifests(read, names, source.format.NAME, skip_bad=False)


def classes_of(manifest: Manifest) -> list[str]:
    """The class of each image, by its number."""
    order = [int(name.rpartition("/")[2].partition(".")[0]) for name in manifest.names()]
    named = {number: manifest.classes[label] for number, label in zip(order, manifest.labels.tolist(), strict=True)}
    return [named[number] for number in sorted(named)]


def features(*names: str) -> str:
    """`dataset_info.json` with these names, in this order."""
    quoted = ", ".join(f'"{name}"' for name in names)
    return f'{{"features": {{"label": {{"_type": "ClassLabel", "names": [{quoted}]}}}}}}'


def lines(*names: str) -> str:
    return "".join(f"{name}\n" for name in names)


def slim(*names: str) -> str:
    return "".join(f"{number}:{name}\n" for number, name in enumerate(names, start=1))


LISTS = {
    "tar": ("classes.txt", lines, 0),
    "tfrecord": ("label.labels.txt", lines, 0),
    "tf-slim": ("labels.txt", slim, 1),
    "arrow": ("dataset_info.json", features, 0),
}
FORMS = pytest.mark.parametrize("form", LISTS)


@FORMS
def test_lists_in_another_order(tmp_path: Path, form: str) -> None:
    """Labels are those of train's list, also where val alone is read; and of val's where train has none."""
    name, text, first = LISTS[form]
    labels = {"train": [first, first + 1, first + 2, first], "val": [first, first + 1, first + 2]}
    lists = {f"train/{name}": text(*COLORS), f"val/{name}": text("red", "blue", "green")}
    root = write(tmp_path / "data", form, labels, lists)
    found = listed(root)
    assert [found[split].classes for split in ("train", "val")] == [COLORS, COLORS]
    assert classes_of(found["train"]) == ["blue", "green", "red", "blue"]
    assert classes_of(found["val"]) == ["red", "blue", "green"]
    alone = listed(root, ["val"])["val"]
    assert (alone.classes, classes_of(alone)) == (COLORS, ["red", "blue", "green"])
    (tmp_path / "names").write_text("A\nB\nC\n")
    renamed = listed(root, file=tmp_path / "names")
    assert (renamed["val"].classes, classes_of(renamed["val"])) == (("A", "B", "C"), ["C", "A", "B"])
    (root / "train" / name).unlink()
    found = listed(root)
    assert [found[split].classes for split in ("train", "val")] == [("red", "blue", "green")] * 2
    assert classes_of(found["train"]) == ["red", "blue", "green", "red"]


@FORMS
@pytest.mark.parametrize(
    ("val", "message"),
    [
        (
            ("rouge", "blue", "green"),
            "and 'rouge' of val is not exactly once in each; give both the same names, in any",
        ),
        (
            ("blue", "green", "Red"),
            "the lists of classes of train and val differ, and 'Red' of val is not exactly once",
        ),
        (("red", "red", "blue"), "and 'red' of val is not exactly once in each"),
        (("red", "blue"), "data: label {last}, but the data's list of classes has 2 classes; give it a name for each"),
    ],
)
def test_lists_with_other_names_are_refused(tmp_path: Path, form: str, val: tuple[str, ...], message: str) -> None:
    name, text, first = LISTS[form]
    labels = {"train": [first, first + 1, first + 2], "val": [first, first + 1, first + 2]}
    root = write(tmp_path / "data", form, labels, {f"train/{name}": text(*COLORS), f"val/{name}": text(*val)})
    for splits in (("train", "val"), ("val",)):
        with pytest.raises(UserError) as error:
            listed(root, splits)
        assert message.format(last=first + 2) in str(error.value)


def test_lists_that_do_not_matter(tmp_path: Path) -> None:
    """Of labels that are names; a list in the folder above; a name that no image of val has; a mark of Windows."""
    root = write(tmp_path / "a", "tar", {"train": [0, 1], "val": [0, 1]}, {"classes.txt": "blue\nred\n"})
    assert classes_of(listed(root)["val"]) == ["blue", "red"]
    (root / "val/classes.txt").write_text("red\nblue\ngray\n")
    assert classes_of(listed(root)["val"]) == ["red", "blue"]
    (root / "val/classes.txt").write_bytes(b"\xef\xbb\xbfblue\r\nred\r\n")
    assert classes_of(listed(root)["val"]) == ["blue", "red"]
    for split in ("train", "val"):
        write_tar(
            root / split / "0.tar",
            {f"{n}.{s}": c for n in "01" for s, c in (("jpg", b"x"), ("cls", b"c" + n.encode()))},
        )
    (root / "classes.txt").write_text("c0\nc1\n")
    assert classes_of(listed(root)["val"]) == ["c0", "c1"]


def test_shards_of_one_split_with_two_lists(tmp_path: Path) -> None:
    root = write(tmp_path, "tar", {"train": [0, 1], "val": [0, 1], "more": [0, 1]}, {"train/classes.txt": "a\nb\n"})
    (root / "more/classes.txt").write_text("b\na\n")
    config = TrainConfig(data_dir=root, train_data="*r*/0.tar")
    source = find_source(config, ("train", "val"))
    assert [path.parent.name for path in source.shards["train"]] == ["more", "train"]
    with pytest.raises(
        UserError, match=r"train/classes.txt: has other classes than .*more/classes.txt, or the same in"
    ):
        class_names_of(source, None, None)


@pytest.mark.parametrize(
    ("labels", "split", "expected"),
    [
        ({"train": [0, 1, 2], "val": [1, 2]}, "val", [1, 2]),
        ({"train": [0, 1, 2], "val": [1, 2]}, "train", [0, 1, 2]),
        ({"train": [1, 2], "val": [0, 1, 2]}, "train", "1 of 3 classes has no image in train (0); add "),
        ({"train": [1, 2], "val": [0, 1, 2]}, "val", [0, 1, 2]),
        ({"train": [1, 2, 3], "val": [2, 3]}, "val", [1, 2]),
        ({"train": [1, 2, 3], "val": [1, 2, 3]}, "val", [0, 1, 2]),
        ({"val": [1, 2]}, "val", [0, 1]),
    ],
)
def test_one_split_alone_has_the_labels_of_both(
    tmp_path: Path, cpu: DistEnv, labels: Mapping[str, Sequence[int]], split: str, expected: list[int] | str
) -> None:
    config = TrainConfig(data_dir=write(tmp_path / "data", "tar", labels, {}), output_dir=tmp_path, workers=1)
    if isinstance(expected, str):
        with pytest.raises(UserError) as error:
            read_data(config, cpu, [split])
        assert expected in str(error.value)
    else:
        assert read_data(config, cpu, [split])[split].labels.tolist() == expected


def test_a_feed_of_val_has_the_classes_of_train(tmp_path: Path) -> None:
    """Of all forms, also where val lacks one. A feed of train needs no val; names that are given replace train's."""
    for color in COLORS:
        for split in ("train", "val"):
            (tmp_path / "folders" / split / color).mkdir(parents=True)
            (tmp_path / "folders" / split / color / "0.jpg").write_bytes(encoded(height=8, width=8))
    (tmp_path / "folders/val/blue/0.jpg").unlink()
    (tmp_path / "folders/val/blue").rmdir()
    write(tmp_path / "tars", "tar", {"train": [0, 1, 2], "val": [1, 2]}, {})
    for split, names in (("train", "abc"), ("val", "bc")):
        members = {f"{name}.jpg": encoded(height=8, width=8) for name in names}
        (tmp_path / "named" / split).mkdir(parents=True)
        write_tar(tmp_path / "named" / split / "0.tar", members | {f"{name}.cls": name.encode() for name in names})
    rows = {split: [f"{path},{path.parent.name}" for path in (tmp_path / "folders" / split).rglob("*.jpg")]
            for split in ("train", "val")}  # fmt: skip
    (tmp_path / "rows").mkdir()
    for split, lines in rows.items():
        (tmp_path / "rows" / f"{split}.csv").write_text("\n".join(["file,label", *lines]))
    for name in ("folders", "tars", "named", "rows"):
        with Feed(tmp_path / name, batch_size=1, image_size=8, workers=1, device="cpu") as feed:
            assert len(classes := feed.classes) == 3
        with Feed(tmp_path / name, "val", batch_size=1, image_size=8, workers=1, device="cpu") as feed:
            assert feed.classes == classes
            assert [batch.targets.tolist() for batch in feed] == [[1], [2]], name
    with pytest.raises(UserError, match="classes: the 3 of train are not the 2 given; both splits must have"):
        Feed(tmp_path / "folders", classes=("green", "red"), batch_size=1, image_size=8, workers=1, device="cpu")
    with Feed(
        tmp_path / "folders", "val", batch_size=1, image_size=8, workers=1, device="cpu", classes=("green", "red")
    ) as feed:
        assert feed.classes == ("green", "red")
