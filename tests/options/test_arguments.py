"""Arguments of timm's networks and optimizers in a flag: `betas=[0.9,0.95],eps=1e-6`."""

from typing import Any

import pytest

from tests.conftest import resolved
from utils.errors import UserError
from utils.options.arguments import model_arguments, model_options, parse_arguments
from utils.options.validation import validate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("", {}),
        ("a=1", {"a": 1}),
        ("a=1, b = 2.5", {"a": 1, "b": 2.5}),
        ("eps=1e-6,lr=1E3,x=-.5", {"eps": 1e-6, "lr": 1000.0, "x": -0.5}),
        ("betas=[0.9,0.95],eps=1e-8", {"betas": [0.9, 0.95], "eps": 1e-8}),
        ("block={a: 1, b: [x,y]},on=true,none=null", {"block": {"a": 1, "b": ["x", "y"]}, "on": True, "none": None}),
        ("name=a=b,kind=gelu,s='1'", {"name": "a=b", "kind": "gelu", "s": "1"}),
        ("name=a,b,c=1", {"name": "a,b", "c": 1}),
    ],
)
def test_values_are_yaml(text: str | None, expected: dict[str, Any]) -> None:
    assert parse_arguments("--x", text, {}) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "--model-args a: 'a' is not NAME=VALUE; write it as a=1,b=[2,3]"),
        ("a=", "--model-args a=: 'a=' is not NAME=VALUE"),
        ("1=a", "--model-args 1=a: '1=a' is not NAME=VALUE"),
        ("=a", "--model-args =a: '=a' is not NAME=VALUE"),
        ("a=1,a=2", "--model-args a=1,a=2: a is given twice; keep one"),
        ("a=[1", "--model-args a=[1: '[1' is not YAML ("),
        ("in_chans=1", "--model-args in_chans=1: images have 3 channels of 8 bits, gray ones three equal ones, which"),
        (
            "a=!!python/name:os.system",
            "--model-args a=!!python/name:os.system: '!!python/name:os.system' is not YAML (",
        ),
        ("num_classes=3", "--model-args num_classes=3: num_classes has a flag of its own; give --num-classes"),
        (
            "drop_path_rate=0.1",
            "--model-args drop_path_rate=0.1: drop_path_rate has a flag of its own; give --drop-path",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(resolved(data_dir="x", model_args=text))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_rates_of_dropout_are_options_of_the_network() -> None:
    config = resolved(model_args="act_layer=gelu", drop_rate=0.0, drop_path=0.2)
    assert model_options(config) == {"act_layer": "gelu", "drop_rate": 0.0, "drop_path_rate": 0.2}
    assert model_arguments(config) == {"act_layer": "gelu"}
    assert model_options(resolved()) == {}
