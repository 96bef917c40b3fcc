"""What every format gives: the images of a split, with a name for each and where its bytes are.

A format is a module beside this one, as `folder.py`: a table, and a `scan` that lists a split and returns a `Manifest`.
`utils.data.splits.read_data` calls it. Labels ascend, and names begin with the class, as `CLASS/NAME`.

Only the formats and `utils.data.reader` look at a location. So a format whose images are ranges of bytes within shards
adds a table, a kind of location and its reading. The loaders, the decode pool and the verification do not change.
"""

from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Location = str  # path of a file that is one image


class Record(NamedTuple):
    """One image.

    Attributes:
        name: of the image in messages, as a path.
        location: where its bytes are, for `utils.data.reader`.
    """

    name: str
    location: Location


class ImageTable(Protocol):
    """The images of a split, in arrays: a data set can have millions."""

    @property
    def names(self) -> NDArray[np.bytes_]:
        """Paths relative to the split, in the file system's encoding: (num_images,)."""

    def record(self, index: int) -> Record:
        """One image."""

    def locations(self, indices: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """Locations of a batch in the file system's encoding: (len(indices),)."""

    def select(self, indices: NDArray[np.int64]) -> Self:
        """The table of these images, in this order."""
