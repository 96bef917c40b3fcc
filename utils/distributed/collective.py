"""The mark of collective functions."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def collective(function: F) -> F:
    """Marks a function that every rank must call, in the same order: a rank that does not leaves the others waiting.

    Its callers are marked as well. tests/distributed/test_collective.py looks at them, and at what a call depends on.
    """
    return function
