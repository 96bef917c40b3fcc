"""Helpers of all DALI pipelines: device, options, outputs as torch tensors, what they leave in memory and on disk."""

import contextlib
import gc
import os
import sys
from typing import Any

import nvidia.dali as dali
import torch
from nvidia.dali import backend, fn, types
from torch.utils.dlpack import from_dlpack

from utils.data.images.batch import Batch
from utils.distributed.group import DistEnv
from utils.options.resolved import ResolvedConfig

NUM_PIPELINES = 2  # training pipelines, which make every other batch each
DALI_VERSION: str = dali.__version__


def dali_device(env: DistEnv) -> str:
    """Where the pipelines of this process decode and augment: "gpu" or "cpu"."""
    return "gpu" if env.device.type == "cuda" else "cpu"


def on_device(data: Any, device: str) -> Any:
    """Graph op: CPU output of another op on `device`, "gpu" or "cpu"."""
    return data.gpu() if device == "gpu" else data


def decoder_options(hw_decoder_load: float, device: str) -> dict[str, Any]:
    """Options of the image decoders in training pipelines."""
    return {
        "device": "mixed" if device == "gpu" else "cpu",
        "output_type": types.RGB,
        "hw_decoder_load": hw_decoder_load,
    }


def pipeline_options(config: ResolvedConfig, env: DistEnv) -> dict[str, Any]:
    """Options of a pipeline that decodes. Its seed is 0, for those that draw nothing."""
    return {
        "batch_size": config.batch_size,
        "num_threads": config.workers,
        "device_id": env.device.index,  # the GPU of this machine, where the data is sharded by global rank
        "seed": 0,
        "prefetch_queue_depth": config.prefetch,
    }


def train_pipeline_options(config: ResolvedConfig, env: DistEnv, seed: int) -> dict[str, Any]:
    """Options of a pipeline of training images.

    Conditionals only where images can be treated differently: for them DALI translates the Python code of the graph,
    which takes longer than everything else that builds it.
    """
    conditionals = config.augment != "none" or config.transform is not None or config.color_jitter > 0
    return pipeline_options(config, env) | {"seed": seed, "enable_conditionals": conditionals}


def interpolation_of(name: str) -> Any:
    """`interp_type` of DALI's resizing operators; "random" draws one for each image."""
    kinds = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
    return fn.random.choice(list(kinds.values())) if name == "random" else kinds[name]


def run_pipeline(pipeline: Any, device: torch.device) -> Batch:
    """One batch of a pipeline with the outputs uint8 NHWC images and int64 (N, 1) targets, without a copy."""
    images, targets = (from_dlpack(output.as_tensor()) for output in pipeline_outputs(pipeline, device))
    return Batch(images.permute(0, 3, 1, 2), targets.squeeze(-1))  # NHWC seen as NCHW is channels_last


def pipeline_outputs(pipeline: Any, device: torch.device) -> Any:
    """Run `pipeline` once. On CUDA its outputs are ordered on the current stream."""
    return pipeline.run(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else pipeline.run()


def release_memory() -> None:
    """End the threads of pipelines that nothing uses any more, and give back the memory that DALI keeps for others."""
    gc.collect()  # operators with a Python source are in reference cycles
    backend.ReleaseUnusedMemory()  # type: ignore[attr-defined]


def remove_generated_files() -> None:
    """Remove the Python files that DALI has made of conditional pipelines, in the temporary folder.

    DALI removes them only where a process comes to a regular end, and their bytecode never.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file") and module.__spec__ is not None:
            for path in (module.__spec__.origin, module.__spec__.cached):
                if path is not None:
                    with contextlib.suppress(OSError):
                        os.remove(path)
