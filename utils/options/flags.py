"""What a field of TrainConfig knows as a flag: its panel of `--help`, its text, its limits, its role on a resume."""

import dataclasses
import shlex
import types
import typing
from typing import Any, Literal

from utils.errors import UserError
from utils.options.limits import Limit

FIRST, DATA, AUGMENTATION, MODEL = "First run", "Data", "Augmentation", "Model"
OPTIMIZATION, PRECISION, RUN, SWITCHES = "Optimization", "Precision", "Run", "Switches"

# What a resume with another value of a flag does: it is refused, or the change is logged (always, or only with several
# processes), or nothing happens, as the flag does not touch what is computed.
Role = Literal["fixed", "logged", "logged_if_several", "free"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagInfo:
    """What is known of a flag besides its name, type and default; see `flag_info`.

    Attributes:
        panel: heading of its part of `--help`.
        help: one sentence.
        shown: the default as `--help` shows it: as it is (True), not at all (False), or these words.
        short: its short spelling, such as `-b`; "" for none.
        metavar: name of its value in `--help`; "" for that of its type.
        limits: ranges, each with its own message, that the value must be in.
        names: the words that the value can be, where its type does not name them.
        role: what a resume with another value does.
        is_path: whether the value can be a path, though its type is not one; then `~` stands for the home folder.
        from_checkpoint: whether `--evaluate` takes the value from the checkpoint where it is not given.
        of_launch: whether it says how one launch begins or ends, not what the run is: config.json, checkpoints and
            trackers do not have it, so that a recipe made of them cannot repeat it.
        stands_for: of a switch that is another spelling of a flag: its field and value. TrainConfig, config.json
            and checkpoints have only the flag.
        chosen: whether a value that was not given is chosen from other flags, the weights, the data or the machine:
            config.json as a recipe has it chosen again.
    """

    panel: str
    help: str
    shown: str | bool = True
    short: str = ""
    metavar: str = ""
    unit: str = ""
    limits: tuple[Limit, ...] = ()
    names: tuple[str, ...] = ()
    role: Role = "free"
    is_path: bool = False
    from_checkpoint: bool = False
    of_launch: bool = False
    stands_for: tuple[str, str] | None = None
    chosen: bool = False


def define_flag(default: Any, panel: str, help: str, *limits: Limit, **metadata: Any) -> Any:
    """A field of TrainConfig; `metadata` as in FlagInfo."""
    info = FlagInfo(panel=panel, help=help, limits=limits, **metadata)
    return dataclasses.field(default=default, metadata={"flag": info})


def flag_info(field: dataclasses.Field[Any]) -> FlagInfo:
    """What is known of a flag besides its name, type and default."""
    info: FlagInfo = field.metadata["flag"]
    return info


def kinds(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The types that a field admits, without None: `int | None` -> (int,)."""
    is_union = isinstance(field.type, types.UnionType) or typing.get_origin(field.type) is typing.Union
    admitted = typing.get_args(field.type) if is_union else (field.type,)
    return tuple(kind for kind in admitted if kind is not types.NoneType)


def flag(name: str) -> str:
    """The command-line spelling of a field: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def split_flags(named: str, text: str) -> list[str]:
    """The words of flags that were given as one text, as a shell reads them.

    `named` is what the user gave, for the message.

    Raises:
        UserError: a quotation in it has no end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{named}: {str(error).lower()}; quote the whole, and close what is quoted in it") from None
