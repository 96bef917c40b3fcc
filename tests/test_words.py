"""The words of prose, help, messages and names: the field's terms, in American spelling as in torch and timm."""

import re
from pathlib import Path

import pytest

from tests.harness import offences, tracked_files

# Pattern -> what is written instead.
WORDS = {
    r"colour": "color",
    r"\b_?grey": "gray",
    r"centre|centring\b": "center",
    r"(behavi|neighb|fav|hon)our": "-or",
    r"(ptim|ormal|nitial|ynchron|qual|ecogn|ummar|eneral|rgan|erial|inim|axim|ategor|tandard|mphas)is(e[drs]?|ing|ation\w*)\b":
        "-ize",
    r"(labell|signall|modell|travell)(ed|ing)\b|(?-i:cancelled)\b": "one l",  # CANCELLED is a state of Slurm's
    r"\b(analyse[drs]?|towards|learnt|spelt|fulfil|whilst|amongst|licence|catalogue)\b": "American spelling",
    r"\bCollective: call\b": "@collective",
    r"\btells? \S+ classes apart\b": "has N classes",
    r"\bcannot be had\b": "is not available",
    r"\bgood checkpoint stands\b": "the last good checkpoint is kept",
    r"\bundisturbed\b": "uninterrupted run",
    r"\bwhat comes out\b": "outputs",
    r"\bin turns\b": "interleaved",
    r"\ban URL\b": "a URL",
    r"(?-i:\banew\b)": "again",
    r"\bbrings? a run back after\b": "restarts after a worker failure",
    r"\b(is|are) told\b": "is logged",
}  # fmt: skip
FILES = [path for path in tracked_files("*.py", "*.md", "*.sh", "*.yaml") if path != Path(__file__).resolve()]


def other_words(text: str) -> list[str]:
    """`found -> instead` in a text; a phrase may go on in the next line."""
    flowing = re.sub(r"\s*\n\s*(#+ |> |- )?", " ", text)
    return [f"{found[0]} -> {new}" for old, new in WORDS.items() for found in re.finditer(old, flowing, re.IGNORECASE)]


def test_words_are_the_fields() -> None:
    assert offences(FILES, other_words) == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Collective: call it. The user is told.", 2),
        ("    # as nobody is\n    # told", 1),
        ("> The last good\n> checkpoint stands.", 1),
        ("OPTIMISATION of the colour_jitter, as labelled.", 3),
        ("It tells 10 classes apart; another tells them apart.", 1),
        ("He is toldest; in turnstiles; an organism of promise.", 0),
    ],
)
def test_another_word_is_found(text: str, count: int) -> None:
    assert len(other_words(text)) == count
