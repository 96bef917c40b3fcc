"""torch.compile as we use it, and where it keeps its results, so that the next launch need not compile again."""

import hashlib
import os
from pathlib import Path
from typing import cast

import torch
import torch._functorch.config
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
LAYERS = Path(__file__).with_name("layers.py")


def compile_network(net: nn.Module) -> nn.Module:
    """`net` compiled; its results are kept (`keep_results`).

    Small kernels that do not depend on each other, as the casts of a hundred weights, become one each: a quarter of
    the kernels of a ResNet-50 step, and 1.7 % of its time at batch 128 (docs/experiments.md).
    """
    keep_results()
    return cast(nn.Module, torch.compile(net, options={"combo_kernels": True}))


def keep_results() -> None:
    """Keep compiled networks in the user's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another.

    torch's own default lies in the temporary folder, which a cluster empties after each job. A home that all machines
    share also shares the results; they are keyed by network, versions and GPU. A folder that cannot be written
    leaves torch's default.

    Networks with autograd functions of their own, as those of utils.layers, are left out of torch's cache unless it is
    told otherwise, since its key need not change with a function's source. The folder's name does.
    """
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "brisk" / f"compiled-{hashlib.sha256(LAYERS.read_bytes()).hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter from a user without a home
        return
    # Importing torch's compiler is enough for it to write its default into the environment.
    if os.access(folder, os.W_OK) and os.environ.get(VARIABLE) in (None, default_cache_dir()):
        os.environ[VARIABLE] = str(folder)
