"""Command line of train.py and of every script: Typer options, YAML recipes, error messages and exit statuses."""

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer

from utils import __version__
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
from utils.log import accept_all_characters, emit, print_error
from utils.options.aliases import PAGE, VALUES, explain
from utils.options.config import TrainConfig, choices, flag_fields
from utils.options.flags import FlagInfo, flag, flag_info, kinds
from utils.options.readers import number_option, read_choice, read_path, read_size, with_path_reader
from utils.options.recipes import read_run_recipe
from utils.options.resolved import CHOSEN
from utils.options.schedules import unused_by
from utils.options.validation import (
    check_limits,
    find_weights,
    require_source,
    require_teacher,
    require_tracker,
    require_user_code,
    validate,
)

# typer carries click under a private name; BadParameter is the public way to click's common base class.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
_GIVEN = ("COMMANDLINE", "DEFAULT_MAP")  # click's names of where a value came from; the second is a recipe's
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
        """Typer's command for `read_options`, made once."""
        return self._command

    @functools.cached_property
    def _command(self) -> Any:
        app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

        def read(*values: Any, version: bool, **named: Any) -> Options:
            return self.read_options(*values, **named)

        options = inspect.signature(self.read_options, eval_str=True).parameters.values()
        _sign(read, [*map(with_path_reader, options), self._version_option()])
        app.command(help=self.help or inspect.getdoc(self.read_options), context_settings=settings)(read)
        return typer.main.get_command(app)

    def _version_option(self) -> inspect.Parameter:
        def show(given: bool) -> None:
            if given:
                emit(f"{self.name} of Brisk {__version__}")
                raise typer.Exit

        option = typer.Option("--version", help="Show the version and exit.", callback=show, is_eager=True)
        annotation = Annotated[bool, option]
        return inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)

    def parse(self, argv: Sequence[str]) -> Options:
        """Command line -> options.

        Raises:
            EarlyExit: `--help` or `--version` was printed.
            UserError: an unknown flag, a value of the wrong type or out of range, or what `read_options` refuses. Every
                rank of a launch has the same command line.
        """
        try:
            result = self.command().main(list(argv), prog_name=self.name, standalone_mode=False)
        except _USAGE_ERROR as error:
            raise UserError(_explain(error, argv, self.name), on_all_ranks=True) from None
        except UserError as error:
            raise UserError(str(error), on_all_ranks=True) from None
        if isinstance(result, int):
            raise EarlyExit(result)
        options: Options = result
        return options

    def check_early(self, options: Options) -> None:
        """Raise UserError for a mistake that shows before the imports that take seconds."""

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
        accept_all_characters()
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


def _explain(error: Any, argv: Sequence[str], program: str) -> str:
    """The message of a usage error, with the names here for those of other trainers."""
    message = " ".join(error.format_message().split()).rstrip(".")
    option = getattr(error, "param", None)
    name = option.opts[0] if option is not None else getattr(error, "option_name", "")
    if note := VALUES.get(name.lstrip("-")):
        return f"{message}; {note}"
    if (context := error.ctx) is not None:  # it is None where the last flag lacks its value
        flags = {each for option in context.command.params for each in (*option.opts, *option.secondary_opts)}
        parser, words = context.command.make_parser(context), [name]
        parser.ignore_unknown_options = True
        with contextlib.suppress(_USAGE_ERROR):  # one more mistake, which is answered after this one
            _, words, _ = parser.parse_args(list(argv))
        if explained := explain(words, flags):
            return f"other names here: {explained}; {PAGE} has more"
    return f"{message}; {program} --help lists all flags"


# ---------------------------------------------------------------------------------------------------------------------
# Options from the fields of TrainConfig


def train_flag(name: str, **changes: Any) -> inspect.Parameter:
    """The option of a script that means what the flag of train.py with this name means.

    Args:
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
    kind = field.type if len(kinds(field)) == 1 else str  # Typer knows no other unions
    annotation = Annotated[kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _sign(function: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Give a function the signature that Typer reads."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _help(field: dataclasses.Field[Any], info: FlagInfo) -> str:
    # A wide column of choices would leave no room for the text on a terminal of 80 columns.
    names = () if info.metavar else choices(field.name)
    return f"{info.help} {', '.join(names)}." if names else info.help


def _spelling(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    # A recipe may turn any switch on, and the command line must be able to turn it off.
    both = bool in kinds(field)
    name = f"{flag(field.name)}/--no-{flag(field.name)[2:]}" if both else flag(field.name)
    return (name, short) if (short := flag_info(field).short) else (name,)


def _reader(field: dataclasses.Field[Any], info: FlagInfo) -> dict[str, Any]:
    """Typer's arguments for reading one value; our own parsers, because its messages leave out the value."""
    kind, *words = kinds(field)
    if str in words:
        return {"parser": read_size, "metavar": info.metavar}
    if words:
        read_number = number_option(kind)["parser"]
        read = lambda text: text if text in choices(field.name) else read_number(text)  # noqa: E731
        return {"parser": read, "metavar": info.metavar}
    if kind is bool:
        return {}
    if kind in (int, float):
        return number_option(kind)
    if names := choices(field.name):
        return {"parser": functools.partial(read_choice, names), "metavar": "NAME"}
    if kind is Path:
        return {"parser": read_path, "metavar": "PATH"}
    return {"metavar": info.metavar or "NAME"} | ({"parser": os.path.expanduser} if info.is_path else {})


# ---------------------------------------------------------------------------------------------------------------------
# Recipes


def _load_recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Make the recipe's values the defaults of this command line."""
    if path is not None:
        context.default_map, context.meta[CHOSEN] = read_run_recipe(path)
    return path


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

    def check_early(self, options: TrainConfig) -> None:
        if options.data_dir is not None:
            require_source(options.data_dir, options.stage_dir)
        is_resumed = not options.evaluate and options.resume == "auto" and (options.output_dir / "last.pt").exists()
        if options.pretrained not in (None, "timm") and not is_resumed:  # a checkpoint needs them no more
            find_weights(options.pretrained)
        if not options.evaluate:
            require_teacher(options, resumes=is_resumed or options.resume not in ("auto", "none"))
            require_user_code(options)
            require_tracker(options.track)


def _read_config(context: typer.Context, **values: Any) -> TrainConfig:
    found = {name: context.get_parameter_source(name) for name in values}
    sources = {name: "" if source is None else source.name for name, source in found.items()}
    given = frozenset(name for name, source in sources.items() if source in _GIVEN)
    for name, other in (("name", "output_dir"), ("output_dir", "name")):  # of two, the command line wins over a recipe
        if {name, other} <= given and (sources[name], sources[other]) == _GIVEN:
            values[other], given = None, given - {other}
    defaults: dict[str, Any] = {field.name: field.default for field in flag_fields()}
    given = _resolve_spellings(values, sources, given)
    for name in _replaced_in_recipe(values, sources, {**defaults, **(context.default_map or {})}):
        values[name], given = defaults[name], given - {name}
    given |= {"output_dir"} if "name" in given else set()
    unsure = {name: value for name, value in context.meta.get(CHOSEN, {}).items() if sources[name] != _GIVEN[0]}
    config = TrainConfig(**values, given=given, recipe_chosen=unsure)
    validate(config)
    return config


def _resolve_spellings(values: dict[str, Any], sources: Mapping[str, str], given: frozenset[str]) -> frozenset[str]:
    """Put what switches say that are spellings of flags into these; returns `given` with the flags' names instead."""
    for field in flag_fields():
        meant = flag_info(field).stands_for
        if meant is None or field.name not in given:
            continue
        (name, word), is_on = meant, values[field.name]
        if name not in given or (sources[field.name], sources[name]) == _GIVEN:  # the command line wins over a recipe
            values[name] = word if is_on else TrainConfig.__dataclass_fields__[name].default
        elif sources[field.name] == sources[name] and is_on != (values[name] == word):
            switch = flag(field.name) if is_on else f"--no-{flag(field.name)[2:]}"
            raise UserError(f"{switch} with {flag(name)} {values[name]}: they contradict each other; give one of them")
        values[field.name], given = False, given - {field.name} | {name}
    return given


def _replaced_in_recipe(values: Mapping[str, Any], sources: Mapping[str, str], recipe: Mapping[str, Any]) -> list[str]:
    """What a recipe says of its own schedule and optimizer, where the command line gives others.

    And of a teacher, where the command line evaluates: a run's config.json is a recipe, too.
    """
    names = [*unused_by(values["schedule"])] if values["schedule"] != recipe["schedule"] else []
    names += ["optimizer_args"] if values["optimizer"] != recipe["optimizer"] else []
    names += ["teacher", "teacher_weight", "teacher_temperature"] if values["evaluate"] else []
    return [name for name in names if sources[name] == _GIVEN[1]]


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

python train.py --processes auto --data-dir /data/imagenet

One process without --processes; torchrun and srun work as well. The same command again resumes where it stopped.

Exit status: 0 done, 1 failed, 2 wrong usage or a bad file, 143 stopped by a signal or --time-limit.""",
)
parse = TRAIN.parse
