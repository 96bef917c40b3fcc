"""What the fork server of `tests.forked` imports before it forks: train.py, and what a run imports when it needs it.

`FOUND` says what importing train.py changed in this process, which was fresh (tests/test_imports.py).
"""

import atexit
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch._inductor.config  # the first import writes its cache folder into the environment
import torch.distributed as dist

_hooks: list[str] = []
_register = atexit.register


def _record_hook(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
    _hooks.append(function.__module__.partition(".")[0])
    return _register(function, *arguments, **options)


def _state() -> list[Any]:
    return [
        dict(os.environ),
        repr(random.getstate()),
        repr(np.random.get_state()),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        [repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)],
        sys.argv[:],
    ]


atexit.register = _record_hook  # type: ignore[assignment]
_before, _threads = _state(), threading.active_count()
with tempfile.TemporaryDirectory() as _folder, contextlib.chdir(_folder):
    import train

    _files = os.listdir()

FOUND = {
    "changed": [number for number, (old, new) in enumerate(zip(_before, _state(), strict=True)) if old != new],
    "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
    "nvimgcodec": "nvidia.nvimgcodec" in sys.modules,  # whose import starts CUDA
    "distributed": dist.is_initialized(),
    "hooks": sorted({"train", "utils", "models", "pipelines"} & set(_hooks)),
    "threads": threading.active_count() - _threads,
    "files": _files,
}
atexit.register = _register

import scipy.optimize  # noqa: E402
from PIL import Image  # noqa: E402

from utils.options.cli import parse  # noqa: E402

parse(["--loader", "synthetic"])  # with all of typer
Image.init()
assert train
assert scipy.optimize
