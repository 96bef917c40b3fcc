"""Trial of a network on the images of a run."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from models import create_model
from tests.conftest import assert_same
from utils.errors import UserError
from utils.network.input_check import check_input

ARCH = "test_resnet"


class Peculiar(nn.Module):
    """Reads values, which the meta device does not have; in training updates a buffer and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 5), nn.BatchNorm2d(4), nn.Dropout(0.5))

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.body(images if images.sum().item() == 0 else -images))


@pytest.mark.parametrize("peculiar", [True, False])
def test_checking_the_input_leaves_no_trace(peculiar: bool) -> None:
    model = Peculiar() if peculiar else create_model(ARCH, 3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    check_input(model, ARCH, 32, 4)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_same(dict(model.state_dict()), weights)


def test_size_that_fits_evaluation_alone() -> None:
    model = create_model(ARCH, 3)
    with pytest.raises(UserError, match="--image-size 32: test_resnet cannot compute a batch of 1 such images"):
        check_input(model, ARCH, 32, 1)
    check_input(model.eval(), ARCH, 32, 1)
