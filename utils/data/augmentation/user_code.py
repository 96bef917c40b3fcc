"""Users' own code in DALI's training graph: the function of `--transform` and the operators of `--dali-plugin`.

    check_user_code(config, env)                before a run: both load, and the function returns images
    apply_transform(images, config, device)     graph op, in the pipelines
    explain_failure(config, rank)               around a batch: names the function as the cause of an error
    code_identity(config)                       what a resume compares

The file and the library are read once, so that all batches of a launch come from the code that a resume compares.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali as dali
from nvidia.dali import fn, plugin_manager
from nvidia.dali.data_node import DataNode

from utils.data.dali import dali_device, on_device, pipeline_options
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError, first_line
from utils.options.remedies import accept_changes
from utils.options.resolved import ResolvedConfig
from utils.options.schedules import size_schedule
from utils.options.sizes import ImageSize, sides_of
from utils.options.validation import require_user_code, split_transform

TRIED_IMAGES = 64  # on which the function is tried: enough to see most of what it does at random
MODULE = "brisk_transform"  # name of the user's module; that of its file could hide another one
DIGITS = 16  # of a SHA-256, in hex
# DALI's message of an error while it runs an operator, and what it puts before an exception of a Python function.
_ENCOUNTERED, _PYTHON_ERROR = "encountered:\n\n", "DLTensorPythonFunction error: "


@dataclasses.dataclass(frozen=True)
class UserCode:
    """What a launch has loaded.

    Attributes:
        option: `--transform` as it was given, for messages.
        path: of the file, absolute.
        function: of `--transform`.
        identity: see `code_identity`.
    """

    option: str
    path: str
    function: Callable[[Any, ResolvedConfig], Any]
    identity: dict[str, str | None]

    def refusal(self, what: str) -> UserError:
        """The error to raise for the function; `what` is wrong with it."""
        return UserError(f"{self.option}: {what}; correct it, or leave --transform out")


_NONE: dict[str, str | None] = {"--transform": None, "--dali-plugin": None}
_loaded: dict[tuple[str, str | None], UserCode] = {}


@collective
def check_user_code(config: ResolvedConfig, env: DistEnv) -> None:
    """Load what `--transform` and `--dali-plugin` name, and try it on random images.

    Raises:
        UserError: on all ranks: a file is missing or does not load, the function fails or returns something else than
            uint8 HWC images of the same size, or the files are not the same on all ranks.
    """
    if config.transform is None:
        return
    with sync_errors(env):
        code = load_user_code(config)
        for size in sorted({config.image_size, *size_schedule(config).values()}, key=sides_of):
            _try_transform(code, dataclasses.replace(config, image_size=size), env)
    identities = all_gather_object(code_identity(config), env)
    for name, value in identities[0].items():
        other = next((rank for rank, identity in enumerate(identities) if identity[name] != value), None)
        if other is not None:
            raise UserError(
                f"{name}: not the same on rank 0 ({value}) and rank {other} ({identities[other][name]}); "
                "use a shared folder, or copy the file",
                on_all_ranks=True,
            )


def code_identity(config: ResolvedConfig) -> dict[str, str | None]:
    """What must be the same for a resume: name of the function, digests of its file and of the plugin; None if unused.

    By flag. Where the files lie does not matter.
    """
    return _NONE if config.transform is None else _code_of(config).identity


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _code_of(config: ResolvedConfig) -> UserCode:
    found = _loaded.get((str(config.transform), config.dali_plugin))
    return found or load_user_code(config)


def load_user_code(config: ResolvedConfig) -> UserCode:
    """Read both files again. `config.transform` is not None.

    Raises:
        UserError: a file is missing or does not load, or there is no such function in it.
    """
    require_user_code(config)
    identity = dict(_NONE)
    if config.dali_plugin is not None:
        identity["--dali-plugin"] = _load_plugin(config.dali_plugin)
    path, name = split_transform(str(config.transform))
    option = f"--transform {config.transform}"
    source = _read(path, option)
    module = _import_source(source, str(Path(path).absolute()), option)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{option}: {path} has no function {name}; give one that it has")
    try:
        inspect.signature(function).bind(None, config)
    except (TypeError, ValueError):
        raise UserError(f"{option}: {name} must take two arguments, images and config; change its definition") from None
    identity["--transform"] = f"{name} ({_digest(source)})"
    code = UserCode(option, str(Path(path).absolute()), function, identity)
    _loaded[str(config.transform), config.dali_plugin] = code
    return code


def _digest(content: bytes) -> str:
    return f"SHA-256 {hashlib.sha256(content).hexdigest()[:DIGITS]}"


def _read(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{option}: cannot be read ({error.strerror}); check its permissions") from None


def _load_plugin(path: str) -> str:
    """Load a library of operators; returns its digest."""
    option = f"--dali-plugin {path}"
    digest = _digest(_read(path, option))
    try:
        plugin_manager.load_library(str(Path(path).absolute()))
    except Exception as error:
        reason = first_line(error).rpartition(f"{path}: ")[2]
        raise UserError(f"{option}: does not load ({reason}); compile it for DALI {dali.__version__}") from None
    return digest


def _import_source(source: bytes, path: str, option: str) -> types.ModuleType:
    """Run a file's content as a module. Nothing is written beside the file, and no bytecode of an older one is used."""
    module = types.ModuleType(MODULE)
    module.__file__ = path
    sys.modules[MODULE] = module  # where dataclasses and pickle look for it
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise UserError(f"{option}: does not load, {_describe_error(error, path)}; correct it") from None
    return module


def _describe_error(error: BaseException, path: str) -> str:
    """`FILE:LINE: TYPE: MESSAGE` of an error that came out of the user's file, or of DALI running what it defines."""
    text = str(error)
    # AutoGraph and DALI run generated code. They name the user's lines in their messages: calls with the innermost
    # last, and an exception of a Python function with the innermost first.
    calls = re.findall(rf'File "{re.escape(path)}", line (\d+)', text)
    raised = re.findall(rf"{re.escape(path)}\((\d+)\)", text)
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line = raised[0] if raised else calls[-1] if calls else frames[-1] if frames else None
    if isinstance(error, SyntaxError) and error.filename == path:
        line, reason = error.lineno, f"{type(error).__name__}: {error.msg}"
    elif _ENCOUNTERED in text:
        reason = text.partition(_ENCOUNTERED)[2].partition("\n")[0].removeprefix(_PYTHON_ERROR)
    else:
        cause = error.__context__ if calls and error.__context__ is not None else error
        reason = f"{type(cause).__name__}: {first_line(cause)}"
    return f"{path}{f':{line}' if line is not None else ''}: {reason}"


# ---------------------------------------------------------------------------------------------------------------------
# In the graph


def apply_transform(images: Any, config: ResolvedConfig, device: str) -> Any:
    """Graph op: the user's function on uint8 HWC images of image_size, where there is one.

    Its images may come back on the CPU and without a layout, as those of fn.python_function do.
    """
    if config.transform is not None:
        code = _code_of(config)
        images = on_device(code.function(images, config), device)
        images = fn.reshape(images, shape=[*sides_of(config.image_size), 3], layout="HWC")
    return images


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _require_images(result: Any, code: UserCode) -> DataNode:
    if not isinstance(result, DataNode):
        what = "nothing" if result is None else f"a {type(result).__name__}"
        raise code.refusal(f"returns {what} instead of images, a single DataNode")
    return result


@dali.pipeline_def(exec_dynamic=True, enable_checkpointing=True, enable_conditionals=True)  # type: ignore[untyped-decorator]
def _trial_pipeline(code: UserCode, config: ResolvedConfig, device: str) -> Any:
    """What the user's function makes of random images."""
    images = fn.external_source(source=_random_images(config.image_size), batch=True, batch_info=True, layout="HWC")
    return _require_images(code.function(on_device(images, device), config), code)


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _random_images(size: ImageSize) -> Callable[[Any], Any]:
    images = np.random.default_rng(0).integers(0, 256, (TRIED_IMAGES, *sides_of(size), 3), dtype=np.uint8)
    return lambda info: images


def _try_transform(code: UserCode, config: ResolvedConfig, env: DistEnv) -> None:
    """Raise UserError unless the function makes uint8 HWC images of `config.image_size` out of such."""
    options = pipeline_options(config, env) | {"batch_size": TRIED_IMAGES, "prefetch_queue_depth": 1}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Checkpointing enabled in a pipeline with external source")
            pipeline = _trial_pipeline(code, config, dali_device(env), **options)
            pipeline.build()
        (images,) = pipeline.run()
        pipeline.checkpoint()
        kind, layout, shapes = images.dtype.name, images.layout(), set(images.shape())
    except UserWarning:
        what = "reads from a source whose position DALI's checkpoints do not hold, so that no resume would be exact"
        raise code.refusal(f"{what} (a function of SampleInfo has none)") from None
    except Exception as error:
        if isinstance(error.__context__, UserError):  # AutoGraph's wrapping of ours
            raise error.__context__ from None
        raise code.refusal(f"fails, {_describe_error(error, code.path)}") from None
    expected = (*sides_of(config.image_size), 3)
    if kind != "UINT8":
        raise code.refusal(f"returns {kind.lower()} images instead of uint8 (fn.cast changes that)")
    if layout not in ("", "HWC"):
        raise code.refusal(f"returns images with the layout {layout} instead of HWC (fn.transpose changes that)")
    if other := shapes - {expected}:
        raise code.refusal(f"returns images of shape {min(other)} instead of {expected}")


@contextlib.contextmanager
def explain_failure(config: ResolvedConfig, rank: int) -> Iterator[None]:
    """Around the next batch of a pipeline: an error that comes from the user's function is raised as UserError.

    Raises:
        UserError: instead of DALI's own error, on one rank.
    """
    try:
        yield
    except RuntimeError as error:
        if config.transform is None or f"in {apply_transform.__name__}" not in str(error):
            raise
        code = _code_of(config)
        what = f"fails, {_describe_error(error, code.path)}"
        if code.path not in str(error):
            what = f"returns images of another shape than {(*sides_of(config.image_size), 3)}"
        last = config.output_dir / "last.pt"
        resume = f", and go on by {accept_changes(config, last)}" if os.path.isfile(last) else ""
        raise UserError(f"rank {rank}: {code.option}: {what}; correct it{resume}") from error
