"""Counts with their nouns, and names that look the same."""

import os
import unicodedata

import pytest

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
        assert describe_alike([one], [two]) == f"{one!a} and {two!a} differ in {what} alone"
        assert describe_alike(["a", one], ["b", one, two]) == f"{one!a} and {two!a} differ in {what} alone"
    assert describe_alike([name, other], [name, other]).endswith(f"differ in {what} alone"), "in one split"


def test_names_that_differ() -> None:
    assert describe_alike(["cat", "caf\u00e9"], ["cat", "dog", "cafe", "cats"]) == ""
    assert describe_alike([], ["cat"]) == ""
