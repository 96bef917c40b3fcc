"""A cut image is found without a word from the decoder."""

import os

import pytest

from tests import damage
from utils.data.reading.decoding import DecodeError, check_end


@pytest.mark.parametrize("kind", ["cut in the middle", "cut in the tables", "cut PNG"])
def test_the_check_prints_nothing(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DecodeError):
        check_end(damage.CONTENTS[kind])
    check_end(damage.JPEG)
    os.write(2, b"after it, standard error is as before")
    assert capfd.readouterr() == ("", "after it, standard error is as before")
