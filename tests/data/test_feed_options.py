"""Options of feeds: they are flags of train.py, and a mistake is one line that names only options."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import Feed
from tests.refusals import written
from tests.refused_folders import FOLDERS
from tests.refused_labels import LABELS
from utils.data.feed.options import OPTIONS, DataOptions
from utils.errors import UserError
from utils.options.config import TrainConfig, flag_fields

SMALL: dict[str, Any] = {"batch_size": 8, "image_size": 32, "device": "cpu", "workers": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"^batch_size 0: must be 1 or more"),
        ({"batch_size": 64}, r"^batch_size 64: .* more than the 41 training images; give at most 41"),
        ({"batch_size": "8"}, r"^batch_size '8': must be int or None"),
        ({"image_size": 4}, r"^image_size 4: must be 8 or more"),
        ({"image_size": True}, r"^image_size True: must be int or \(height, width\)"),
        ({"val_resize": 16}, r"^val_resize 16: smaller than image_size 32"),
        ({"val_resize": 16, "split": "val"}, r"^val_resize 16: smaller than image_size 32"),
        ({"interpolation": "nearest"}, r"^interpolation 'nearest': must be bilinear or bicubic or random or None"),
        ({"augment": "strong"}, r"^augment 'strong': must be none or autoaugment or randaugment or trivialaugment"),
        ({"decode": "fused", "cache": "host"}, r"^cache host with decode fused"),
        ({"cache": "gpu", "device": "auto", "decode": "full"}, r"cache gpu without a GPU: .*; use cache none"),
        ({"hflip": 1.5}, r"^hflip 1.5: a probability, from 0 to 1"),
        ({"mixup": 0.2}, r"^mixup: no such option; there are workers, augment"),
        ({"split": "test"}, r"^split 'test': must be train or val"),
        ({"split": "val", "val_split": "valid"}, r"has no valid/ folder.*give val_split val"),
        ({"data_dir": "/nowhere"}, r"^data_dir /nowhere: no such folder"),
        ({"device": "tpu"}, r"^device tpu: must be auto, cpu, cuda"),
        ({"rank": 1}, r"^rank 1 with world_size None: give both or neither"),
        ({"rank": 2, "world_size": 2}, r"^rank 2 with world_size 2: must be 0 or more and less"),
        ({"classes": ["a", "b", "c"]}, r"^classes: the 3 of train are not the 3 given"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a message for machines without a GPU")
def test_a_mistake_is_one_line_that_names_the_option(data: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Feed(**{"data_dir": data} | SMALL | options)
    assert "--" not in str(caught.value)


def test_no_refused_data_set_names_what_a_feed_lacks() -> None:
    """Of all folders and label files that a run refuses without a flag."""
    others = {name for field in flag_fields() if (name := field.name) not in OPTIONS and "_" in name}
    messages = []
    for case in (case for case in (*FOLDERS, *LABELS) if not case.flags and not case.unprivileged):
        with written(case) as folder:
            for split in ("train", "val"):
                try:
                    Feed(folder / "data", split, **SMALL).close()
                except UserError as error:
                    messages.append(str(error))
    assert [text for text in messages if "--" in text or others & {*re.findall(r"\w+", text)}] == []
    assert len(messages) > 50
    assert any(text.endswith("has no val/ folder; it must hold train/ and val/") for text in messages)


def test_options_are_flags() -> None:
    assert DataOptions.__annotations__.keys() <= TrainConfig.__dataclass_fields__.keys()
    assert DataOptions.__doc__ is not None
    assert all(f"        {name}: " in DataOptions.__doc__ for name in DataOptions.__annotations__)
