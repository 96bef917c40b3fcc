"""The documentation as data: fenced blocks, commands, links and headings of its Markdown pages."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.harness import ROOT, tracked_files

USER_PAGES = [ROOT / "README.md", *tracked_files("docs/*.md")]
USER_PAGES = [path for path in USER_PAGES if "internals" not in path.parts]
_FENCE = re.compile(r"```(\w*)$")
_COMMENT = re.compile(r"<!-- (.*) -->$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")
_VARIABLE = re.compile(r"[A-Z_]+=\S*")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        where: page and line, for messages.
        language: after the fence; "" for none.
        text: its lines.
        comment: text of the HTML comment above the fence; "" for none.
    """

    where: str
    language: str
    text: str
    comment: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line of a block.

    Attributes:
        where: page and line, for messages.
        words: as a shell splits them, without comments and assignments of variables in front.
        is_run: whether nothing says that it does not run here.
    """

    where: str
    words: tuple[str, ...]
    is_run: bool


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = path.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start, language = number, fence[1]
            continue
        comment = _COMMENT.match(lines[start - 1])
        text = "\n".join(lines[start + 1 : number])
        yield Block(f"{path.relative_to(ROOT)}:{start + 2}", language, text, comment[1] if comment else "")
        start = None


def commands(block: Block) -> Iterator[Command]:
    """The commands of a `bash` block."""
    page, first = block.where.split(":")
    text = block.text.replace("\\\n", "  ")
    for number, line in enumerate(text.splitlines()):
        words = shlex.split(line, comments=True)
        while words and _VARIABLE.fullmatch(words[0]):
            del words[0]
        if words:
            yield Command(f"{page}:{int(first) + number}", tuple(words), not block.comment.startswith("not run: "))


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    outside, is_inside = [], False
    for line in path.read_text().splitlines():
        if _FENCE.match(line):
            is_inside = not is_inside
        elif not is_inside:
            outside.append(line)
    return "\n".join(outside)


def links(path: Path) -> list[str]:
    """Targets of a page's links and images within the project."""
    return [target for target in _LINK.findall(prose(path)) if not target.startswith(("https://", "http://"))]


def anchors(path: Path) -> set[str]:
    """Names of a page's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def code_spans(path: Path) -> list[str]:
    """What a page has between backticks, outside of blocks; a line may end within."""
    return [" ".join(span.split()) for span in _CODE.findall(prose(path))]
