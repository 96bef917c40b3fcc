"""Command line of train.py and of every script: Typer options, YAML recipes, error messages and exit statuses."""

import dataclasses
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer
import yaml

from utils.config import FlagInfo, TrainConfig, check_limits, choices, flag, flag_fields, flag_info, validate
from utils.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    RunFailed,
    Stopped,
    UserError,
)
from utils.log import print_error

# typer carries click under a private name; BadParameter is the public way to click's common base class.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
_GIVEN = ("COMMANDLINE", "DEFAULT_MAP")  # click's names of where a value came from; the second is a recipe's
LONGEST_RECIPE = 1_000_000  # characters
REQUIRED = inspect.Parameter.empty  # as the default of an option
Options = TypeVar("Options")


class EarlyExit(SystemExit):
    """The program ends before it has options: `--help` was printed, or Ctrl-C came."""


@dataclasses.dataclass(frozen=True)
class Program(Generic[Options]):
    """A program with a command line.

    Attributes:
        name: as messages begin with it: `train.py`.
        read_options: a function whose parameters are Typer's options. It checks them, and returns what the program
            works with, in any type but int.
        help: text of `--help`; None for the docstring of `read_options`.
    """

    name: str
    read_options: Callable[..., Options]
    help: str | None = None

    def command(self) -> Any:
        """Typer's command for `read_options`."""
        app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        app.command(help=self.help, context_settings=settings)(self.read_options)
        return typer.main.get_command(app)

    def parse(self, argv: Sequence[str]) -> Options:
        """Command line -> options.

        Raises:
            EarlyExit: `--help` was printed.
            UserError: an unknown flag, a value of the wrong type or out of range, or what `read_options` refuses. Every
                rank of a launch has the same command line.
        """
        try:
            result = self.command().main(list(argv), prog_name=self.name, standalone_mode=False)
        except _USAGE_ERROR as error:
            message = " ".join(error.format_message().split()).rstrip(".")
            raise UserError(f"{message}; {self.name} --help lists all flags", on_all_ranks=True) from None
        except UserError as error:
            raise UserError(str(error), on_all_ranks=True) from None
        if isinstance(result, int):
            raise EarlyExit(result)
        options: Options = result
        return options

    def print_error(self, text: str) -> None:
        """Print one line on stderr that begins with the program's name."""
        print_error(self.name, text)

    def run(
        self,
        argv: Sequence[str],
        work: Callable[[Options], int | None],
        on_error: Callable[[UserError | RunFailed], None] | None = None,
    ) -> int:
        """Parse the command line and call `work` with the options.

        Args:
            argv: the words after the program's name.
            work: returns an exit status, or None for 0.
            on_error: prints an error; None prints it on every process.

        Returns:
            The exit status. One line on stderr explains every status of `utils.errors` but 0.
        """
        try:
            return work(self.parse(argv)) or EXIT_DONE
        except EarlyExit as ended:
            return int(ended.code or EXIT_DONE)
        except (UserError, RunFailed) as error:
            if on_error is not None:
                on_error(error)
            else:
                self.print_error(str(error))
            return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED
        except Stopped as stopped:
            if str(stopped):
                self.print_error(str(stopped))
            return EXIT_STOPPED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


# ---------------------------------------------------------------------------------------------------------------------
# Options from the fields of TrainConfig


def train_flag(name: str, **changes: Any) -> inspect.Parameter:
    """The option of a script that means what the flag of train.py with this name means.

    Args:
        name: of the field of TrainConfig.
        changes: what differs: `default` (REQUIRED for none), and attributes of FlagInfo.
    """
    (field,) = (field for field in flag_fields() if field.name == name)
    default = changes.pop("default", field.default)
    return _parameter(field, dataclasses.replace(flag_info(field), **({"panel": "Options"} | changes)), default)


def with_train_flags(*flags: inspect.Parameter) -> Callable[[Callable[..., Options]], Callable[..., Options]]:
    """Put options made by `train_flag` before those of a function, which gets their values by keyword.

    The values are checked against the limits of the fields of TrainConfig before the function is called.
    """
    names = {option.name for option in flags}

    def decorate(function: Callable[..., Options]) -> Callable[..., Options]:
        @functools.wraps(function)
        def checked(**values: Any) -> Options:
            for name in names:
                check_limits(name, values[name])
            return function(**values)

        parameters = inspect.signature(function, eval_str=True).parameters
        others = [
            each.replace(kind=each.KEYWORD_ONLY)
            for name, each in parameters.items()
            if name not in names and each.kind is not each.VAR_KEYWORD
        ]
        _sign(checked, [*flags, *others])
        return checked

    return decorate


def number_option(kind: type[int] | type[float]) -> dict[str, Any]:
    """Typer's arguments for reading a number; its own messages leave out the value."""
    expected = "a whole number" if kind is int else "a number"

    def number(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {expected}") from None

    return {"parser": number, "metavar": kind.__name__.upper()}


def _parameter(field: dataclasses.Field[Any], info: FlagInfo, default: Any) -> inspect.Parameter:
    """The parameter of a function from which Typer makes the option of a field."""
    option = typer.Option(
        *_spelling(field),
        help=_help(field, info),
        rich_help_panel=info.panel,
        show_default=info.shown if default is not False else False,  # a switch is off
        callback=_load_recipe if field.name == "config" else None,
        is_eager=field.name == "config",
        **_reader(field, info),
    )
    annotation = Annotated[field.type, option]  # type: ignore[name-defined]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _sign(function: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Give a function the signature that Typer reads."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _kinds(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The types that a field admits, without None: `int | None` -> (int,)."""
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    return tuple(kind for kind in kinds if kind is not types.NoneType)


def _help(field: dataclasses.Field[Any], info: FlagInfo) -> str:
    # A wide column of choices would leave no room for the text on a terminal of 80 columns.
    names = choices(field.name)
    return f"{info.help} {', '.join(names)}." if names else info.help


def _spelling(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    # A recipe may turn any switch on, and the command line must be able to turn it off.
    both = bool in _kinds(field)
    return (f"{flag(field.name)}/--no-{flag(field.name)[2:]}",) if both else (flag(field.name),)


def _reader(field: dataclasses.Field[Any], info: FlagInfo) -> dict[str, Any]:
    """Typer's arguments for reading one value; our own parsers, because its messages leave out the value."""
    (kind,) = _kinds(field)
    if kind is bool:
        return {}
    if kind in (int, float):
        return number_option(kind)
    if names := choices(field.name):
        return {"parser": functools.partial(_choice, names), "metavar": "NAME"}
    return {"parser": _path, "metavar": "PATH"} if kind is Path else {"metavar": info.metavar or "NAME"}


def _choice(names: tuple[str, ...], text: str) -> str:
    if text not in names:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}")
    return text


def _path(text: str) -> Path:
    if not text:
        raise typer.BadParameter("'' is no path")  # an empty shell variable, which would mean this folder
    return Path(text)


# ---------------------------------------------------------------------------------------------------------------------
# Recipes


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
        if keys.count(key) > 1:  # YAML would use the last without an error
            raise UserError(f"--config {path}: '{key.replace('_', '-')}' is given twice; keep one")
    for key, value in (recipe or {}).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.0)
            raise UserError(f"--config {path}: unknown key '{key}'; the closest is '{close[0].replace('_', '-')}'")
        if value is not None and not (name == "pretrained" and value is False):
            as_written = dict(written).get(key, value)  # what "<<" merges is not at the top level
            values[name] = _recipe_value(path, key, value, as_written, _kinds(fields[name]))
    return values


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which a date is text: no flag has a date, and a folder may be called 2026-22-11, which is no date."""


_RecipeLoader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)  # type: ignore[type-var]


def _top_level(text: str) -> list[tuple[str, Any]]:
    """Keys and values as in the file, where a mapping would hold the last of two keys that are the same."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        return []
    return [(str(key.value), value.value) for key, value in node.value]


def _recipe_value(path: Path, key: str, value: Any, as_written: Any, kinds: tuple[Any, ...]) -> Any:
    if key == "pretrained" and value is True:
        return "timm"
    if not isinstance(value, str | int | float) or isinstance(value, bool) != (bool in kinds):
        expected = "true or false" if bool in kinds else "one value"
        raise UserError(f"--config {path}: {key}: {value!r:.80} is not allowed; give {expected}")
    # As text, so that a recipe is held to the same types as the command line (2.5 is no batch size), and as written:
    # YAML would make 83 of the folder 0123, and 90 of the seed 1:30.
    if isinstance(value, bool):
        return value
    # JSON writes a letter beyond U+FFFF as two escapes, which YAML reads as two letters.
    return str(as_written).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


# ---------------------------------------------------------------------------------------------------------------------
# train.py


class _Train(Program[TrainConfig]):
    """train.py: all fields of TrainConfig are options, and `--pretrained` may have no value."""

    def parse(self, argv: Sequence[str]) -> TrainConfig:
        # click options have a value always or never; `--pretrained` alone means timm's weights.
        following = [*argv, "--"][1:]
        words = [
            "--pretrained=timm" if word == "--pretrained" and after.startswith("-") else word
            for word, after in zip(argv, following, strict=True)
        ]
        return super().parse(words)


def _read_config(context: typer.Context, **values: Any) -> TrainConfig:
    sources = {name: context.get_parameter_source(name) for name in values}
    given = frozenset(name for name, source in sources.items() if source is not None and source.name in _GIVEN)
    config = TrainConfig(**values, given=given)
    validate(config)
    return config


_sign(
    _read_config,
    [
        inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *(_parameter(field, flag_info(field), field.default) for field in flag_fields()),
    ],
)
TRAIN = _Train(
    "train.py",
    _read_config,
    """Train an image classifier from a folder of images.

torchrun --nproc_per_node=8 train.py --data-dir /data/imagenet

One process: python train.py --data-dir DIR. The same command again resumes where it stopped.

Exit status: 0 done, 1 failed, 2 wrong usage, 143 stopped by SIGTERM after the checkpoint was written.""",
)


def parse(argv: Sequence[str]) -> TrainConfig:
    """Command line of train.py -> validated config.

    Raises:
        EarlyExit: `--help` was printed.
        UserError: an unknown flag, a value of the wrong type or out of range, or a bad recipe.
    """
    return TRAIN.parse(argv)
