"""Random numbers: seeds of independent streams, determinism, and the state that a resume needs."""

import enum
import os
import random
from typing import Any

import numpy as np
import torch


class Stream(enum.Enum):
    """What a stream of random numbers is for, and the names of the numbers that distinguish its streams.

    The value is the first part of every seed, so that no two purposes share a stream. A checkpoint relies on all of
    it: a change here must raise `utils.training.state.checkpoint.FORMAT`.
    """

    WEIGHTS = (1, ("seed",))  # of a new network, the same on all ranks
    ORDER = (2, ("seed", "epoch"))  # of the training images
    PROCESS = (3, ("seed", "rank", "step"))  # Python's, NumPy's and torch's generators from that step on
    DALI = (4, ("seed", "rank", "pipeline", "step"))  # a DALI pipeline's operators from that step on
    PROXY = (5, ("seed", "rank", "epoch", "batch"))  # a DALI server from that batch of the epoch on
    IMAGE = (6, ("seed", "draw", "image"))  # of `--loader torch`; see `BatchSampler` for the draw
    CROPS = (7, ("seed", "epoch"))  # of all images that stay on the GPU; see utils.data.augmentation.crop_draws
    WEIGHTED_ORDER = (8, ("seed", "epoch"))  # of training images that come unequally often


def make_deterministic() -> None:
    """Let torch compute the same bits in every run. To be called before the first use of CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's (CPU and CUDA) generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_sequence(stream: Stream, *parts: int) -> np.random.SeedSequence:
    """Entropy of one stream.

    Args:
        parts: the numbers that `Stream` names, each in [0, 2**32). All are needed: NumPy pads with zeros, so that fewer
            parts could name the same stream.
    """
    number, names = stream.value
    assert len(parts) == len(names), f"{stream} needs {names}"
    return np.random.SeedSequence([number, *parts])


def derive_seed(stream: Stream, *parts: int) -> int:
    """A seed in [0, 2**31), which NumPy's old generator and DALI take; see `seed_sequence`."""
    return int(seed_sequence(stream, *parts).generate_state(1)[0]) >> 1


def seed_weights(seed: int) -> None:
    """Seed all generators for the initial weights, which are the same on all ranks."""
    seed_all(derive_seed(Stream.WEIGHTS, seed))


def seed_process(seed: int, rank: int, step: int) -> None:
    """Seed all generators of a rank for training (mixup, CutMix, erasing, dropout) from `step` on."""
    seed_all(derive_seed(Stream.PROCESS, seed, rank, step))


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
    """Set all generators of this process to a state of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
