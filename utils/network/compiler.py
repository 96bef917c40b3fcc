"""torch.compile as we use it, and the folder that keeps its results, so that the next launch need not compile again."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from utils.network import fused_ops
from utils.network.folding import FoldNorms

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_network(net: nn.Module) -> nn.Module:
    """`net` compiled, in a way that torch can keep the results (see `enable_compile_cache`).

    Small kernels that do not depend on each other, as the casts of a hundred weights, become one each: a quarter of
    the kernels of a ResNet-50 step, and 1.7 % of its time at batch 128 (docs/internals/experiments.md).

    Each image size is compiled for itself: a batch of a run has one shape for whole epochs.

    torch leaves networks with functions that it does not know out of its cache, as its key need not change with their
    source. Those of utils.network.fused_ops are named to it, with a digest of that file, which it adds to the key. The
    pass over the graph (`FoldNorms`) has a part of the key of its own.
    """
    # Without a GPU, torch logs the folder of a CUDA toolkit that is not used.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_of_use)
    digest = hashlib.sha256(Path(fused_ops.__file__).read_bytes()).hexdigest()
    config.unsafe_marked_cacheable_functions.update(dict.fromkeys(fused_ops.ALLOWED_IN_GRAPH, digest))
    options: dict[str, Any] = {"combo_kernels": True, "joint_custom_pre_pass": FoldNorms()}
    return cast(nn.Module, torch.compile(net, dynamic=False, options=options))


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("No CUDA runtime is found")


def enable_compile_cache() -> None:
    """Keep what this process compiles in the user's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another.

    To be called by a program's main before anything is compiled. Sets that variable.

    torch's default is in the temporary folder, which a cluster empties after each job. Machines with a common home
    folder also share the results, whose key holds network, versions and GPU. If the folder cannot be written, torch's
    default is used.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "brisk" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter from a user without a home
        return
    # Importing torch's compiler is enough for it to write its default into the environment.
    if os.access(folder, os.W_OK) and os.environ.get(VARIABLE) in (None, default_cache_dir()):
        os.environ[VARIABLE] = str(folder)
