"""Tables in Markdown."""

from collections.abc import Sequence


def markdown(*rows: Sequence[str]) -> str:
    """A table; the first row is its head."""
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"{'|---' * len(rows[0])}|", *others])
