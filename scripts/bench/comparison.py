"""The flags that comparisons of loaders have in common, and their checks."""

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated

import typer

from utils.errors import UserError
from utils.options.cli import train_flag
from utils.options.config import TrainConfig
from utils.options.limits import ABOVE_0
from utils.options.readers import number_option
from utils.options.validation import validate

MIN_WINDOWS = 5
Windows = Annotated[int, typer.Option(help="Measurements of each, 5 or more.", **number_option(int))]
Seconds = Annotated[float, typer.Option(help="Length of one, seconds.", **number_option(float))]


def loader_flags(name: str) -> tuple[inspect.Parameter, ...]:
    """Those of train.py; the results go to runs/NAME/NAME.json."""
    return (
        train_flag("arch"),
        train_flag("output_dir", default=Path("runs", name), shown=True, help=f"Where {name}.json goes."),
        train_flag("batch_size", help="Images per step.", shown="256, 32 on the CPU"),
        train_flag("image_size"),
        train_flag("workers", help="CPU threads per loader.", shown="the cores"),
        train_flag("device"),
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A command line; `config` is that of the training run whose step is timed.

    Raises:
        UserError: a value is out of range.
    """

    config: TrainConfig
    windows: int
    window_seconds: float

    def __post_init__(self) -> None:
        if self.windows < MIN_WINDOWS:
            raise UserError(f"--windows {self.windows}: a median needs {MIN_WINDOWS} or more")
        ABOVE_0.check("--window-seconds", self.window_seconds)
        validate(self.config)
