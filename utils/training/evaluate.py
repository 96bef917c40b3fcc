"""Exact evaluation: every validation image counts once, on any number of ranks and at any batch size."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from utils.distributed.collectives import all_reduce_sum
from utils.distributed.group import DistEnv


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    normalize: Callable[[Tensor], Tensor],
    num_images: int,
    env: DistEnv,
    amp_dtype: torch.dtype,
) -> dict[str, float | int]:
    """Top-1, top-5 and loss of `model` over all ranks' `batches`.

    Counts are summed over the ranks and divided once; a mean of the ranks' means would weigh images unequally. A rank
    without images takes part in the sum only.

    Args:
        model: maps images (N, 3, H, W) to logits (N, num_classes); neither compiled nor wrapped, as batches differ
            in size and a rank may have none.
        batches: this rank's uint8 images (N, 3, H, W) and int64 targets (N,) on `env.device`.
        normalize: uint8 images to floating point.
        num_images: validation images over all ranks.
        amp_dtype: of the forward pass; float32 is full precision.

    Returns:
        `top1` and `top5` in percent, `loss` (cross entropy without smoothing, mean over images), `count`.

    Raises:
        RuntimeError: images were lost or counted twice.
    """
    was_training = model.training
    # Until train() is called, timm before 1.0.30 keeps attention biases of an earlier evaluation, of other weights.
    model.train()
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=env.device)  # loss, top-1, top-5, images
    for images, targets in batches:
        if len(targets) == 0:
            continue
        with torch.autocast(env.device.type, dtype=amp_dtype, enabled=amp_dtype != torch.float32):
            logits = model(normalize(images))
        logits = logits.float()
        top5 = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        sums[0] += nn.functional.cross_entropy(logits, targets, reduction="sum")
        sums[1] += top5[:, 0].sum()
        sums[2] += top5.sum()
        sums[3] += len(targets)
    model.train(was_training)
    loss, top1, top5_count, count = all_reduce_sum(sums).tolist()
    if count != num_images:
        raise RuntimeError(f"evaluation saw {count:.0f} images, but val/ holds {num_images}; its result would be wrong")
    return {"top1": 100 * top1 / count, "top5": 100 * top5_count / count, "loss": loss / count, "count": int(count)}
