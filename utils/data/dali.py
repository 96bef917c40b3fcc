"""What all DALI pipelines share: device, options, outputs, generated files."""

import contextlib
import os
import sys
from typing import Any

import nvidia.dali as dali
import torch
import torch.utils.data
from nvidia.dali import types
from torch.utils.dlpack import from_dlpack

from utils.config import ResolvedConfig
from utils.data.batch import Batch
from utils.distributed.group import DistEnv

NUM_PIPELINES = 2  # that feed training in turns
DALI_VERSION: str = dali.__version__


def _decoder_options(config: ResolvedConfig, device: str) -> dict[str, Any]:
    return {
        "device": "mixed" if device == "gpu" else "cpu",
        "output_type": types.RGB,
        "hw_decoder_load": config.hw_decoder_load,
    }


def _on_device(targets: Any, device: str) -> Any:
    return targets.gpu() if device == "gpu" else targets


def _remove_generated_files() -> None:
    """Remove the Python files that DALI has made of conditional pipelines, in the temporary folder.

    DALI removes them only where a process comes to a regular end, and their bytecode never.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file") and module.__spec__ is not None:
            for path in (module.__spec__.origin, module.__spec__.cached):
                if path is not None:
                    with contextlib.suppress(OSError):
                        os.remove(path)


def _dali_device(env: DistEnv) -> str:
    return "gpu" if env.device.type == "cuda" else "cpu"


def _pipeline_options(config: ResolvedConfig, env: DistEnv) -> dict[str, Any]:
    return {
        "batch_size": config.batch_size,
        "num_threads": config.workers,
        "device_id": env.device.index,  # the GPU of this machine, where the data is sharded by global rank
        "seed": 0,  # training pipelines have seeds of their own, the others draw nothing
        "prefetch_queue_depth": config.prefetch,
    }


def _run(pipeline: Any, device: torch.device) -> Batch:
    """One batch, without a copy."""
    images, targets = (from_dlpack(output.as_tensor()) for output in _outputs(pipeline, device))
    return Batch(images.permute(0, 3, 1, 2), targets.squeeze(-1))  # NHWC seen as NCHW is channels_last


def _outputs(pipeline: Any, device: torch.device) -> Any:
    """A run of `pipeline`; on CUDA its outputs are ordered on the current stream."""
    return pipeline.run(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else pipeline.run()
