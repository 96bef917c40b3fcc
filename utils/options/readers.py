"""How values on the command line are read: our own parsers, because Typer's messages leave out the value."""

import copy
import functools
import inspect
import os
import re
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from utils.options.sizes import ImageSize, read_image_size

_OPTION = type(typer.Option())


def number_option(kind: type[int] | type[float]) -> dict[str, Any]:
    """Typer's arguments for reading a number; its own messages leave out the value."""
    expected = "a whole number" if kind is int else "a number"

    def number(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {expected}") from None

    return {"parser": number, "metavar": kind.__name__.upper()}


def choice_option(words: Any) -> dict[str, Any]:
    """Typer's arguments for reading one of the words of a Literal, as train.py reads them."""
    names = typing.get_args(words)
    return {"parser": functools.partial(read_choice, names), "metavar": "|".join(names)}


def read_choice(names: tuple[str, ...], text: str) -> str:
    """One of the words `names`; the N of `cuda:N` stands for a number."""
    if text.endswith(":N") or re.sub(r":\d+$", ":N", text) not in names:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}")
    return text


def read_size(text: str) -> ImageSize:
    """The size of images."""
    try:
        return read_image_size(str(text))  # a default is no text
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not {error}") from None


def read_path(text: str) -> Path:
    """A path, with `~/` as the home folder, which a shell replaces neither behind `=` nor in a recipe."""
    if not text:
        raise typer.BadParameter("'' is no path")  # an empty shell variable, which would mean this folder
    return Path(os.path.expanduser(text))


def with_path_reader(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter, read by `read_path` if its type is Path, one or several, and nothing else reads it."""
    kind, *infos = typing.get_args(parameter.annotation) or (None,)
    if not infos or Path not in (kind, *typing.get_args(kind), *map(_first_argument, typing.get_args(kind))):
        return parameter
    info = copy.copy(infos[0])
    if info.parser is None:
        info.parser = read_path
        if info.metavar is None and isinstance(info, _OPTION):  # an argument shows its name
            info.metavar = "PATH"
    return parameter.replace(annotation=Annotated[kind, info])


def _first_argument(kind: Any) -> Any:
    return next(iter(typing.get_args(kind)), None)
