"""The network as it is exported: what it takes, its precision, and normalization inside if it takes uint8."""

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from utils.inference.export.trained import Trained
from utils.network.augment import Normalize

Input = Literal["float", "uint8"]
INPUTS: dict[Input, tuple[str, str, str]] = {  # dtype, layout, and what the pixels are
    "float": ("float32", "NCHW", "normalized"),
    "uint8": ("uint8", "NHWC", "0 to 255"),
}


class Classifier(nn.Module):
    """Images to float32 logits (N, num_classes); probabilities where an image has any number of classes.

    Logits are divided by the temperature of the checkpoint, if it has one, so that their softmax is calibrated.

    Args:
        trained: the network, which stays as it is.
        takes: float: normalized float32 (N, 3, H, W), as timm's and torchvision's transforms give them; uint8: pixels
            (N, H, W, 3), as image libraries give them, which are normalized inside.
        half: whether weights and layers are float16. Input, normalization and output are not.
        is_bare: whether the output is logits in any case, without the temperature, as timm's own network gives them.

    Attributes:
        output: logits or probabilities.
    """

    scale: Tensor
    shift: Tensor
    temperature: Tensor | None

    def __init__(self, trained: Trained, takes: Input, half: bool = False, is_bare: bool = False) -> None:
        super().__init__()
        self.model = copy.deepcopy(trained.model).half() if half else trained.model
        self.takes_uint8, self.dtype = takes == "uint8", torch.float16 if half else torch.float32
        self.output = "logits" if is_bare or trained.config.task == "multiclass" else "probabilities"
        normalize = Normalize(*trained.normalization, dtype=torch.float32, device=torch.device("cpu"))
        self.register_buffer("scale", normalize.scale)
        self.register_buffer("shift", normalize.shift)
        temperature = None if is_bare or trained.temperature is None else torch.tensor(trained.temperature)
        self.register_buffer("temperature", temperature)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        if self.takes_uint8:
            images = images.permute(0, 3, 1, 2) * self.scale - self.shift
        logits: Tensor = self.model(images.to(self.dtype)).float()
        if self.temperature is not None:
            logits = logits / self.temperature
        return logits if self.output == "logits" else logits.sigmoid()

    def prepare(self, pixels: Tensor) -> Tensor:
        """uint8 (N, H, W, 3) as the network takes it."""
        return pixels if self.takes_uint8 else (pixels.permute(0, 3, 1, 2) * self.scale - self.shift).contiguous()
