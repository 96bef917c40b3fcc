"""Words of messages: counts with their nouns, and names that look the same but are not."""

import collections
import os
import unicodedata
from collections.abc import Callable, Iterable


def count(number: int, noun: str) -> str:
    """A number and what it counts: `1 class`, `2,000 classes`."""
    if number != 1:
        noun += "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}"


def data_size(number: float) -> str:
    """Bytes: `2.10 GB`, `60.0 MB`."""
    return f"{number / 1e9:,.2f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def describe_alike(names: Iterable[str], others: Iterable[str]) -> str:
    """A clause on two different names that look or read the same, with both in ASCII; "" if there are no such names.

    The first of `names` for which there is one is shown with the other: `'caf\\xe9' and 'cafe\\u0301' differ in their
    Unicode form alone`. A file system of macOS and one of Linux make these two of one name.
    """
    names, others = sorted(set(names)), sorted(set(others))
    for what, canonical in _FORMS.items():
        known = collections.defaultdict(list)
        for other in others:
            known[canonical(other)].append(other)
        for name in names:
            for other in known.get(canonical(name), ()):
                if other != name:
                    return f"{name!a} and {other!a} differ only in {what}"
    return ""


def _nfc(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _from_latin1(name: str) -> str:
    """A name whose bytes that are not UTF-8 are Latin-1, as in a ZIP archive of Windows."""
    return _nfc(os.fsencode(name).decode("latin-1") if any("\udc80" <= each <= "\udcff" for each in name) else name)


def _visible(name: str) -> str:
    """What is left without spaces, characters of no width and variants of a letter."""
    letters = unicodedata.normalize("NFKC", name).casefold()
    return "".join(each for each in letters if each.isprintable() and not each.isspace())


_FORMS: dict[str, Callable[[str], str]] = {
    "their Unicode form": _nfc,
    "their encoding": _from_latin1,
    "upper and lower case": lambda name: _nfc(name).casefold(),
    "spaces or look-alike characters": _visible,
}
