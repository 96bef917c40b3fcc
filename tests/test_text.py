"""Counts with their nouns, and names that look the same."""

import ast
import itertools
import os
import re
import unicodedata
from collections.abc import Iterator

import pytest

from tests.harness import ROOT, offences, tracked_files
from utils.text import count, describe_alike


def test_count() -> None:
    assert [count(number, "class") for number in (0, 1, 2, 2000)] == [
        "0 classes",
        "1 class",
        "2 classes",
        "2,000 classes",
    ]
    assert [count(2, noun) for noun in ("process", "index", "batch", "image", "such label")] == [
        "2 processes", "2 indexes", "2 batches", "2 images", "2 such labels",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "other", "what"),
    [
        ("caf\u00e9", "cafe\u0301", "their Unicode form"),
        ("\u1112\u1161\u11ab", unicodedata.normalize("NFC", "\u1112\u1161\u11ab"), "their Unicode form"),  # Korean
        ("caf\u00e9", os.fsdecode(b"caf\xe9"), "their encoding"),
        ("Cat", "cat", "upper and lower case"),
        ("\u00c9t\u00e9", "e\u0301te\u0301", "upper and lower case"),
        ("STRASSE", "stra\u00dfe", "upper and lower case"),
        ("red", " red", "spaces or look-alike characters"),
        ("red fox", "red\u00a0fox", "spaces or look-alike characters"),
        ("red", "red\u200b", "spaces or look-alike characters"),
        ("\uff52\uff45\uff44", "red", "spaces or look-alike characters"),
    ],
)
def test_names_that_look_the_same(name: str, other: str, what: str) -> None:
    for one, two in ((name, other), (other, name)):
        assert describe_alike([one], [two]) == f"{one!a} and {two!a} differ only in {what}"
        assert describe_alike(["a", one], ["b", one, two]) == f"{one!a} and {two!a} differ only in {what}"
    assert describe_alike([name, other], [name, other]).endswith(f"differ only in {what}"), "in one split"


def test_names_that_differ() -> None:
    assert describe_alike(["cat", "caf\u00e9"], ["cat", "dog", "cafe", "cats"]) == ""
    assert describe_alike([], ["cat"]) == ""


NOUNS = (
    "batches", "bytes", "checkpoints", "classes", "columns", "decoders", "epochs", "evaluations", "files", "folders",
    "GPUs", "images", "intervals", "labels", "lines", "objects", "processes", "records", "runs", "shards", "steps",
    "threads", "values", "weights",
)  # fmt: skip
PLURAL = re.compile(rf" (?:[\w/]+ )?(?:{'|'.join(NOUNS)})\b(?!/s)")
# Expressions in front of a plural that are never 1, or not a number.
NEVER_1 = {
    "MIN_IMAGES", "NUM_TRAIN", "NUM_VAL", "all_epochs", "batch_size", "by_other.median", "config.cooldown_epochs",
    "config.freeze_epochs", "config.grad_accum_steps", "decay_epochs(config)", "facts['windows']", "kind.lower()",
    "launch.local_world_size", "len(paths)", "len(sample)", "len(train.classes)", "line", "number", "num_labels",
    "run.config.epochs", "self.grad_accum_steps", "state.epoch", "world_size", "counts[label]", "config.num_classes",
    "self._steps", "num_images", "val.title", "config.data_dir", "config.loader", "count", "int(count)",
    "run.config.get('epochs')", "IMAGE.size", "len(row)", "member.size", "needed", "total",
}  # fmt: skip


def plurals(source: str) -> Iterator[str]:
    """Expressions of f-strings in front of a plural, such as `len(images)` of f"{len(images)} images"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for value, text in itertools.pairwise(node.values):
                if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                    called = value.value.func if isinstance(value.value, ast.Call) else None
                    is_count = isinstance(called, ast.Name) and called.id == "count"
                    if PLURAL.match(str(text.value)) and not is_count:
                        yield ast.unparse(value.value)


MESSAGES = [path for path in tracked_files("*.py") if ROOT / "tests" not in path.parents]


def test_no_message_says_1_files() -> None:
    assert offences(MESSAGES, lambda source: sorted(set(plurals(source)) - NEVER_1)) == {}, "use utils.text.count"
    others = [path for path in MESSAGES if path.name != "text.py"]
    assert offences(others, lambda source: re.findall(r"""(['"]e?s['"]) if """, source)) == {}, "use utils.text.count"


def test_a_plural_is_found() -> None:
    for found in ("{len(images):,} images", "{n} training images; {x}"):
        assert list(plurals(f'f"{found}"')), found
    for text in ("{count(n, 'image')} of it", "{rate:,.0f} images/s", "{n} image"):
        assert not list(plurals(f'f"{text}"')), text
