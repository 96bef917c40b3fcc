"""Functions for `--transform`: what DALI does to training images after crop and flip, before `--augment`.

    train.py --data-dir DIR --transform examples/transform.py:grayscale

Each takes the images of a DALI graph, uint8 HWC of one size, and the configuration of the run, and returns images of
the same kind and size. It is called once, to define the graph. So it holds DALI operators, arithmetic, and an `if` on
what DALI draws.
"""

from typing import Any

from nvidia.dali import fn, types


def grayscale(images: Any, config: Any) -> Any:
    """A fifth of the images without color."""
    saturation = 1 - fn.random.coin_flip(probability=0.2)
    return fn.saturation(images, saturation=fn.cast(saturation, dtype=types.FLOAT))


def blur(images: Any, config: Any) -> Any:
    """Half of the images blurred by a Gaussian, whose standard deviation is 0.1 to 2 pixels."""
    if fn.random.coin_flip(probability=0.5):
        images = fn.gaussian_blur(images, sigma=fn.random.uniform(range=[0.1, 2.0]))
    return images


def grayscale_and_blur(images: Any, config: Any) -> Any:
    """Both."""
    return blur(grayscale(images, config), config)
