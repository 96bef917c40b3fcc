"""Trains a small network with JAX on a Feed; DLPack hands over the batches without a copy.

python examples/jax_feed.py DATA_DIR
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Brisk is used from its checkout

import jax
import jax.numpy as jnp

from pipelines import Feed


def to_jax(images, targets) -> tuple[jax.Array, jax.Array]:
    """A batch as JAX arrays: uint8 (N, H, W, 3) and int32 (N,)."""
    nhwc = images.permute(0, 2, 3, 1)  # channels_last images are contiguous so
    return jax.dlpack.from_dlpack(nhwc), jax.dlpack.from_dlpack(targets.int())


def create_parameters(key: jax.Array, num_classes: int) -> dict[str, jax.Array]:
    """A convolution of 8 x 8 pixels and a linear layer."""
    first, second = jax.random.split(key)
    return {
        "filters": jax.random.normal(first, (8, 8, 3, 32)) * 0.05,
        "head": jax.random.normal(second, (32, num_classes)) * 0.1,
    }


def loss(parameters: dict[str, jax.Array], images: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    hidden = jax.lax.conv_general_dilated(
        images.astype(jnp.float32) / 128 - 1,
        parameters["filters"],
        (4, 4),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    logits = jax.nn.relu(hidden).mean(axis=(1, 2)) @ parameters["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1).mean()


@jax.jit
def train_step(parameters, images: jax.Array, targets: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent: the new parameters, and the loss before."""
    value, gradients = jax.value_and_grad(loss)(parameters, images, targets)
    return jax.tree.map(lambda weight, gradient: weight - 0.5 * gradient, parameters, gradients), value


def main(data_dir: str, epochs: int = 3, **options) -> list[float]:
    """Train, and return the mean loss of each epoch."""
    means = []
    with Feed(data_dir, "train", device="cpu", **options) as feed:
        parameters = create_parameters(jax.random.key(0), len(feed.classes))
        for epoch in range(epochs):
            losses = []
            for images, targets in feed:
                parameters, value = train_step(parameters, *to_jax(images, targets))
                losses.append(float(value))
            means.append(sum(losses) / len(losses))
            print(f"epoch {epoch}: loss {means[-1]:.3f}")
    return means


if __name__ == "__main__":
    main(sys.argv[1], batch_size=64, image_size=64)
