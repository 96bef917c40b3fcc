"""Command line: Typer options from TrainConfig, YAML recipes, and what all commands share (errors, exit statuses)."""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from utils.config import TrainConfig, flag, flag_fields, flag_info, validate
from utils.errors import UserError

# typer carries click under a private name; BadParameter is the public way to click's common base class.
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
LONGEST_RECIPE = 1_000_000
_HELP = """Train an image classifier from a folder of images.

torchrun --nproc_per_node=8 train.py --data-dir /data/imagenet

One process: python train.py --data-dir DIR. The same command again resumes where it stopped.

Exit status: 0 done, 1 failed, 2 wrong usage, 143 stopped by SIGTERM after the checkpoint was written."""
_GIVEN = ("COMMANDLINE", "DEFAULT_MAP")  # click's names of where a value came from; the second is a recipe's


def parse(argv: Sequence[str]) -> TrainConfig:
    """Command line -> validated config; prints `--help` and exits where asked to.

    Raises:
        UserError: for an unknown flag, a value of the wrong type or out of range, or a bad recipe.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})(
        _command_function()
    )
    try:
        result = typer.main.get_command(app).main(_bare_pretrained(argv), prog_name="train.py", standalone_mode=False)
        if not isinstance(result, TrainConfig):
            raise SystemExit(result)  # --help
        validate(result)
    except USAGE_ERROR as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        raise UserError(f"{message}; train.py --help lists all flags", on_all_ranks=True) from None
    except UserError as error:
        raise UserError(str(error), on_all_ranks=True) from None
    return result


def _bare_pretrained(argv: Sequence[str]) -> list[str]:
    # click options take a value always or never; `--pretrained` alone means timm's weights.
    following = [*argv, "--"][1:]
    return [
        "--pretrained=timm" if word == "--pretrained" and after.startswith("-") else word
        for word, after in zip(argv, following, strict=True)
    ]


def _command_function() -> Any:
    """A function whose signature is TrainConfig's fields, which is what Typer reads."""

    def train(context: typer.Context, **values: Any) -> TrainConfig:
        sources = {name: context.get_parameter_source(name) for name in values}
        given = frozenset(name for name, source in sources.items() if source is not None and source.name in _GIVEN)
        return TrainConfig(**values, given=given)

    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in flag_fields():
        option = typer.Option(
            *_spelling(field),
            help=_help(field),
            rich_help_panel=flag_info(field).panel,
            show_default=flag_info(field).shown if field.default is not False else False,  # a switch is off
            callback=_load_recipe if field.name == "config" else None,
            is_eager=field.name == "config",
            **_reader(field),
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        annotation = Annotated[field.type, option]  # type: ignore[name-defined]
        parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=annotation))
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return train


def _kinds(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The types that a field admits, without None: `int | None` -> (int,)."""
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    return tuple(kind for kind in kinds if kind is not types.NoneType)


def _help(field: dataclasses.Field[Any]) -> str:
    # A wide column of choices would leave no room for the text on a terminal of 80 columns.
    choices = typing.get_args(_kinds(field)[0])
    return " ".join([flag_info(field).help, *([", ".join(choices) + "."] if choices else [])])


def _spelling(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    # A recipe may turn any switch on, and the command line must be able to turn it off.
    both = bool in _kinds(field)
    return (f"{flag(field.name)}/--no-{flag(field.name)[2:]}",) if both else (flag(field.name),)


def number_option(kind: type[int] | type[float]) -> dict[str, Any]:
    """Typer's arguments for reading a number; its own messages leave out the value."""
    wanted = "a whole number" if kind is int else "a number"

    def number(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {wanted}") from None

    return {"parser": number, "metavar": kind.__name__.upper()}


def _reader(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Typer's arguments for reading one value; our own parsers, because its messages leave out the value."""
    (kind,) = _kinds(field)
    if kind is bool:
        return {}
    if kind in (int, float):
        return number_option(kind)
    choices = typing.get_args(kind)
    if choices:

        def choice(text: str) -> str:
            if text not in choices:
                raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}")
            return text

        return {"parser": choice, "metavar": "NAME"}
    if kind is Path:

        def path(text: str) -> Path:
            if not text:
                raise typer.BadParameter("'' is no path")  # an empty shell variable, which would mean this folder
            return Path(text)

        return {"parser": path, "metavar": "PATH"}
    return {"metavar": flag_info(field).metavar or "NAME"}


def _load_recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Make the recipe's values the defaults of this command line."""
    if path is not None:
        context.default_map = read_recipe(path)
    return path


def read_recipe(path: Path) -> dict[str, Any]:
    """Field name -> value of a YAML (or JSON) recipe; keys may use dashes or underscores.

    A value means what the same text means on the command line; only booleans and null are YAML's.

    Raises:
        UserError: unreadable file, unknown key (the closest one is named), a key given twice, or a value that is no
            scalar.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST_RECIPE + 1)  # not more: /dev/zero has no end
        if len(text) > LONGEST_RECIPE:
            raise ValueError(f"more than {LONGEST_RECIPE:,} characters")
        recipe = yaml.load(text, Loader=_RecipeLoader)
        written = _top_level(text)
    except Exception as error:  # PyYAML raises what its constructors meet, from KeyError to RecursionError
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--config {path}: cannot be read ({reason}); give a YAML file of flags") from None
    if not isinstance(recipe, dict | None):
        raise UserError(f"--config {path}: must be a mapping like 'lr: 0.5', not {type(recipe).__name__}")
    fields = {field.name: field for field in flag_fields() if field.name != "config"}
    values: dict[str, Any] = {}
    keys = [key.replace("-", "_") for key, _ in written]
    for key in keys:
        if keys.count(key) > 1:  # YAML would take the last and say nothing
            raise UserError(f"--config {path}: '{key.replace('_', '-')}' is given twice; keep one")
    for key, value in (recipe or {}).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.0)
            raise UserError(f"--config {path}: unknown key '{key}'; the closest is '{close[0].replace('_', '-')}'")
        if value is not None and not (name == "pretrained" and value is False):
            as_written = dict(written).get(key, value)  # what "<<" merges does not stand at the top level
            values[name] = _recipe_value(path, key, value, as_written, _kinds(fields[name]))
    return values


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which a date is text: no flag takes a date, and a folder may be called 2026-22-11, which is none."""


_RecipeLoader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)  # type: ignore[type-var]


def _top_level(text: str) -> list[tuple[str, Any]]:
    """Keys and values as they stand in the file, where a mapping would hold the last of two keys that are the same."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        return []
    return [(str(key.value), value.value) for key, value in node.value]


def _recipe_value(path: Path, key: str, value: Any, as_written: Any, kinds: tuple[Any, ...]) -> Any:
    if key == "pretrained" and value is True:
        return "timm"
    if not isinstance(value, str | int | float) or isinstance(value, bool) != (bool in kinds):
        wanted = "true or false" if bool in kinds else "one value"
        raise UserError(f"--config {path}: {key}: {value!r:.80} is not allowed; give {wanted}")
    # As text, so that a recipe is held to the same types as the command line (2.5 is no batch size), and as written:
    # YAML would make 83 of the folder 0123, and 90 of the seed 1:30.
    if isinstance(value, bool):
        return value
    # JSON writes a letter beyond U+FFFF as two escapes, which YAML takes for two letters.
    return str(as_written).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
