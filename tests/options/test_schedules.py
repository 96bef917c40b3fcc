"""Schedules of flags: `0:128,10:192`."""

import pytest

from tests.conftest import resolved
from utils.errors import UserError
from utils.options.schedules import parse_schedule, policy_schedule, size_schedule, value_at
from utils.options.validation import validate


def test_a_value_holds_from_its_epoch_on() -> None:
    schedule = parse_schedule("--x", "0:a, 2:b,10:c", str)
    assert schedule == {0: "a", 2: "b", 10: "c"}
    assert [value_at(schedule, epoch, "x") for epoch in (0, 1, 2, 9, 10, 99)] == ["a", "a", "b", "b", "c", "c"]
    assert [value_at({3: "a"}, epoch, "x") for epoch in (0, 2, 3)] == ["x", "x", "a"]
    assert parse_schedule("--x", "", str) == {}


def test_values_are_read() -> None:
    config = resolved(resize_schedule="0:128,3:192", augment_schedule="0:randaugment,4:none", data_dir="x")
    assert size_schedule(config) == {0: 128, 3: 192}
    assert policy_schedule(config) == {0: "randaugment", 4: "none"}
    validate(config)
    validate(resolved(augment="randaugment", augment_schedule="4:none", data_dir="x"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"resize_schedule": "128"}, "--resize-schedule 128: '128' is not EPOCH:VALUE; write it as 0:A,10:B"),
        ({"resize_schedule": "0:128,x:4"}, "'x:4' is not EPOCH:VALUE"),
        ({"resize_schedule": "0:128,"}, "'' is not EPOCH:VALUE"),
        ({"resize_schedule": "0:128,5:160,5:192"}, "epochs must rise"),
        ({"resize_schedule": "0:128,5:160,3:192"}, "epochs must rise"),
        ({"resize_schedule": "0:7"}, "'7' is not a size of 8 pixels or more"),
        ({"resize_schedule": "0:big"}, "'big' is not a size"),
        ({"augment_schedule": "0:mixup"}, "'mixup' is not one of none, autoaugment, randaugment, trivialaugment, "),
        ({"augment_schedule": "0:none", "randaugment_std": 0.5}, "--randaugment-std 0.5 without --augment randaugment"),
        (
            {"augment_schedule": "0:trivialaugment", "color_jitter": 0.4},
            "--color-jitter 0.4 with the policy trivialaug",
        ),
        ({"augment_schedule": "0:none", "augment": "randaugment"}, "--augment randaugment with --augment-schedule"),
        ({"accept_changes": True}, "--accept-changes with --resume auto: give --resume PATH"),
        ({"accept_changes": True, "resume": "none"}, "--accept-changes with --resume none: give --resume PATH"),
    ],
)
def test_what_is_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(resolved(data_dir="x", **flags))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        # The last one, an evaluation, augments nothing.
        {"augment_schedule": "5:randaugment", "randaugment_magnitude": 20, "randaugment_ops": 3},
        {"augment_schedule": "0:none,5:three-augment", "color_jitter": 0.3},
        {"augment": "autoaugment", "color_jitter": 0.3, "randaugment_std": 0.5, "evaluate": True},
    ],
)
def test_what_fits(flags: dict[str, object]) -> None:
    validate(resolved(data_dir="x", **flags))
