"""The operator of this folder in a function for `--transform`.

    examples/plugin/build.sh
    train.py --data-dir DIR --dali-plugin examples/plugin/libsolarize.so \\
        --transform examples/plugin/transform.py:solarize
"""

from typing import Any

from nvidia.dali import fn, types


def solarize(images: Any, config: Any) -> Any:
    """A tenth of the images with their brightest values inverted, from a threshold on that is drawn for each."""
    if fn.random.coin_flip(probability=0.1):
        threshold = fn.random.uniform(range=[128, 256], dtype=types.INT32)
        images = images.cpu()  # the operator is for the CPU
        images = fn.solarize(images, threshold=threshold)  # type: ignore[attr-defined]
        if config.device == "cuda":
            images = images.gpu()
    return images
