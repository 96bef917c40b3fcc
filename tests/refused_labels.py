"""Label files that train.py refuses: damaged, odd, and of another data set."""

import json
from collections.abc import Sequence

from tests.damage import ARITHMETIC as JPEG
from tests.refused_folders import Case, Make, files

NAMES = [f"images/{name}-{number}.jpg" for name in ("blue", "green", "red") for number in range(2)]
ROWS = [f"{name},{name[7:].partition('-')[0]}" for name in NAMES]
VAL = "file,label\n" + "\n".join(row.replace("images/", "images/val-") for row in ROWS)
FORM = "label file"
NAMED, WEIGHTED = "--class-names DATA/names.txt", "--class-weights DATA/weights.csv"


def labeled(text: str | bytes, name: str = "train.csv", **more: str | bytes) -> Make:
    """A label file beside its images, and a good val.csv; more files with `_` for the dot of their names."""
    images = dict.fromkeys((*NAMES, *(path.replace("images/", "images/val-") for path in NAMES)), JPEG)
    others = {file.replace("_", "."): content for file, content in ({"val_csv": VAL} | more).items()}
    return files({**images, **others, name: text})


def rows(*changed: str, heading: str = "file,label", kept: int = 6) -> str:
    """A good file whose last rows are these."""
    return "\n".join([heading, *ROWS[:kept], *changed]) + "\n"


def json_rows(*changed: str) -> str:
    """A good file of JSON lines, and these."""
    good = [json.dumps({"file": file, "label": label}) for file, label in (row.split(",") for row in ROWS)]
    return "\n".join([*good, *changed])


def split_rows(*words: str) -> str:
    """A file of all splits, with these words in turn."""
    return "file,label,split\n" + "\n".join(f"{row},{words[at % len(words)]}" for at, row in enumerate(ROWS))


def column(name: str, values: Sequence[str]) -> str:
    """A file with one more column."""
    return f"file,label,{name}\n" + "\n".join(f"{row},{value}" for row, value in zip(ROWS, values, strict=True))


OTHER_NAMES = files({**dict.fromkeys(NAMES, JPEG), "labels.csv": rows(heading="picture,label")})
SEVERAL = rows("images/red-1.jpg,red|blue", kept=5)
NO_LABELS = "file,label\n" + "".join(f"{name},\n" for name in NAMES)
LABELS = [
    Case(FORM, "empty", labeled("")),
    Case(FORM, "only a heading", labeled("file,label\n")),
    Case(FORM, "no column file", labeled(rows(heading="picture,label"))),
    Case(FORM, "no column label", labeled(rows(heading="file,color"))),
    Case(FORM, "one file of all, no column file", OTHER_NAMES),
    Case(FORM, "no heading and three columns", labeled("\n".join(f"{row},1" for row in ROWS))),
    Case(FORM, "two columns of one name", labeled(rows(heading="label,label"))),
    Case(FORM, "UTF-16, as Excel writes Unicode text", labeled(rows().encode("utf-16"))),
    Case(FORM, "a name in Latin-1", labeled(rows("images/red-1.jpg,\xe9cru").encode("latin-1"))),
    Case(FORM, "a quote without an end", labeled(rows('"images/red-2.jpg,red'))),
    Case(FORM, "a comma in a name without quotes", labeled(rows("images/red,2.jpg,red"))),
    Case(FORM, "a row without a label", labeled(rows("images/red-1.jpg,", kept=5))),
    Case(FORM, "a row without a file", labeled(rows(",red"))),
    Case(FORM, "a label with a slash", labeled(rows("images/red-1.jpg,red/dark", kept=5))),
    Case(FORM, "a label with a line break", labeled(rows('images/red-1.jpg,"red\ndark"', kept=5))),
    Case(FORM, "several labels", labeled(rows("images/red-1.jpg,red|dark", kept=5)), "--task multiclass"),
    Case(FORM, "several labels, one only in val", labeled(SEVERAL, val_csv=VAL.replace(",red", ",red|pink"))),
    Case(FORM, "several labels, one with a slash", labeled(rows("images/red-1.jpg,red|a/b", kept=5))),
    Case(FORM, "several labels, a row twice", labeled(SEVERAL + "images/red-1.jpg,blue\n")),
    Case(FORM, "several labels, none in train", labeled(NO_LABELS), "--task multilabel"),
    Case(FORM, "several labels, none in val", labeled(SEVERAL, val_csv=NO_LABELS.replace("images/", "images/val-"))),
    Case(FORM, "several labels, cross entropy", labeled(SEVERAL), "--loss cross-entropy"),
    Case(FORM, "several labels, a flag of cross entropy", labeled(SEVERAL), "--focal 2"),
    Case(FORM, "several labels, the figure of one", labeled(SEVERAL), "--best-by top1"),
    Case(FORM, "one label, the loss of several", labeled(rows()), "--loss asymmetric"),
    Case(FORM, "one label, the figure of several", labeled(rows()), "--best-by map"),
    Case(FORM, "a file that is missing", labeled(rows("images/gone.jpg,red"))),
    Case(FORM, "all files of another folder", labeled(rows().replace("images/", "pictures/"))),
    Case(FORM, "a folder as a file", labeled(rows("images,red"))),
    Case(FORM, "an empty file", files({
        **dict.fromkeys(NAMES, JPEG), "images/empty.jpg": "", "train.csv": rows("images/empty.jpg,red"),
    }), "--val-fraction 0.5"),
    Case(FORM, "a row twice", labeled(rows("images/red-1.jpg,red"))),
    Case(FORM, "a file with two labels", labeled(rows("images/red-1.jpg,blue"))),
    Case(FORM, "a file twice by another path", labeled(rows("images/../images/red-1.jpg,red"))),
    Case(FORM, "an image in both splits", labeled(rows("images/val-red-1.jpg,red"))),
    Case(FORM, "a class only in val", labeled(rows(), val_csv=VAL.replace("red-1.jpg,red", "red-1.jpg,pink"))),
    Case(FORM, "a class only in val that looks the same", labeled(rows(), val_csv=VAL.replace(",red", ",Red"))),
    Case(FORM, "a weight that is no number", labeled(column("weight", ["1", "1", "1", "1", "1", "much"]))),
    Case(FORM, "a negative weight", labeled(column("weight", ["1", "1", "1", "1", "1", "-1"]))),
    Case(FORM, "all weights 0", labeled(column("weight", "000000"))),
    Case(FORM, "weights with --loader stock", labeled(column("weight", "111112")), "--loader stock --batch-size 1"),
    Case(
        FORM, "weights with repeated augmentation", labeled(column("weight", "111112")),
        "--repeated-augmentation 2 --batch-size 1",
    ),
    Case(FORM, "a row without a group", labeled(column("group", ["a", "b", "c", "d", "e", ""]))),
    Case(FORM, "one group", files({
        **dict.fromkeys(NAMES, JPEG), "train.csv": column("group", "aaaaaa"),
    }), "--val-fraction 0.5"),
    Case(FORM, "an unknown split", files({
        **dict.fromkeys(NAMES, JPEG), "labels.csv": split_rows("train", "tune"),
    })),
    Case(FORM, "no rows of val", files({**dict.fromkeys(NAMES, JPEG), "labels.csv": split_rows("train")})),
    Case(FORM, "no rows of train", files({**dict.fromkeys(NAMES, JPEG), "labels.csv": split_rows("val")})),
    Case(FORM, "no val", files({**dict.fromkeys(NAMES, JPEG), "train.csv": rows()})),
    Case(FORM, "train.csv and train.jsonl", labeled(rows(), train_jsonl=json_rows())),
    Case(FORM, "JSON that is cut", labeled(json_rows('{"file": "images/red-2.jpg", "la'), "train.jsonl")),
    Case(FORM, "JSON of many brackets", labeled(json_rows("[" * 100_000), "train.jsonl")),
    Case(FORM, "JSON that is no object", labeled(json_rows('["images/red-2.jpg", "red"]'), "train.jsonl")),
    Case(FORM, "a label file that is not there", labeled(rows()), "--train-data new.csv"),
    Case(FORM, "a label file beside shards", labeled(rows()), "--train-data train.csv --val-data val-*.tar"),
    Case(FORM, "val, and --val-fraction", labeled(rows()), "--val-fraction 0.5"),
    Case(
        FORM, "val, and --fold", files({**dict.fromkeys(NAMES, JPEG), "train.csv": rows(), "more.csv": rows()}),
        "--fold 1/2 --val-data more.csv",
    ),
    Case(FORM, "fewer groups than parts", labeled(column("group", "aabbaa")), "--fold 1/3"),
    Case(FORM, "a class of one group", labeled(column("group", "aaabbb")), "--fold 1/2"),
    Case(
        FORM, "two sources of val", files({**dict.fromkeys(NAMES, JPEG), "train.csv": rows(), "more.csv": rows()}),
        "--val-fraction 0.5 --val-data more.csv",
    ),
    Case(FORM, "a test.csv without labels", files({
        **dict.fromkeys(NAMES, JPEG), "train.csv": rows(), "test.csv": "id\nimages/red-1\n",
    })),
    Case(FORM, "a class name without images", labeled(rows(), names_txt="blue\ngreen\nred\npink\n"), NAMED),
    Case(FORM, "a label that --class-names lacks", labeled(rows(), names_txt="blue\ngreen\n"), NAMED),
    Case(FORM, "a pattern of groups that matches nothing", labeled(rows()), r"--val-group 'patient(\d+)'"),
    Case(FORM, "a pattern that is none", labeled(rows()), "--val-group '(red'"),
    Case(FORM, "class weights without a class", labeled(rows(), weights_csv="class,weight\nred,2\n"), WEIGHTED),
    Case(FORM, "class weights of another class", labeled(rows(), weights_csv="class,weight\npink,2\n"), WEIGHTED),
    Case(FORM, "class weights that are no numbers", labeled(rows(), weights_csv="class,weight\nred,x\n"), WEIGHTED),
    Case(FORM, "class weights without columns", labeled(rows(), weights_csv="red,2\n"), WEIGHTED),
    Case(FORM, "class weights that are not there", labeled(rows()), "--class-weights DATA/none.csv"),
]  # fmt: skip
