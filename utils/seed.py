"""Seeds, determinism switches, and the random state that a resume needs."""

import os
import random
from typing import Any

import numpy as np
import torch


def make_deterministic() -> None:
    """Ask torch for the same bits in every run. Call before the first use of CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's (CPU and CUDA) generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def derive_seed(*parts: int) -> int:
    """A seed that is another one for each tuple of numbers, less than 2**31."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) >> 1


def random_state(device: torch.device) -> dict[str, Any]:
    """State of all generators of this process, in types that `torch.load(weights_only=True)` reads."""
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    return {
        "python": random.getstate(),
        "numpy": (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Undo of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
