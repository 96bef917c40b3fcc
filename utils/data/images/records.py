"""What every format gives: the images of a split, with a name for each and where its bytes are.

`folder.py` lists images that are files. A format of shards, files that hold many images each, is a module beside this
one with the functions of `ShardFormat`; `shards.py` makes the table of its images, and `index.py` saves it.

Only the formats and `utils.data.reading.reader` look at a location. The loaders, decode pool and verification do not.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray


class Span(NamedTuple):
    """Where an image is within a shard.

    Attributes:
        ranges: (offset, length) of its parts in bytes, in their order; more than one only where a format splits images.
    """

    path: str
    ranges: tuple[tuple[int, int], ...]


Location = str | Span  # path of a file that is one image, or a part of a shard


class Record(NamedTuple):
    """One image.

    Attributes:
        name: of the image in messages: a path, or `SHARD:KEY`.
        location: where its bytes are, for `utils.data.reading.reader`.
    """

    name: str
    location: Location


class Entry(NamedTuple):
    """One image, as its shard describes it.

    Attributes:
        key: its name in the shard, as the format gives it: the path of a tar's member, the key in a database, a
            file name in the record. Where the format gives none, the number of the record, as 8 digits or more.
        label: number of the class, from 0 or from 1 on in the whole data set, or its name.
        ranges: see `Span`.
    """

    key: str
    label: int | str
    ranges: tuple[tuple[int, int], ...]


class ShardFormat(Protocol):
    """A format of shards: a module with these names."""

    NAME: str  # in messages, such as "WebDataset tars"

    def is_shard(self, name: str) -> bool:
        """Whether a file or folder of this name, without its folder, can be a shard of this format."""

    def find(self, data_dir: Path) -> dict[str, list[Path]]:
        """The shards of each split, "train" and "val", sorted; {} if the folder does not hold this format.

        Only names are looked at, and no shard is opened.

        Raises:
            UserError: the folder holds this format, but one shard of a numbered series is missing.
        """

    def scan(self, shard: Path) -> Iterator[Entry]:
        """The images of a shard in stored order, without decoding them.

        Raises:
            UserError: the shard is damaged or cannot be read as this format; names it and the remedy.
            OSError: it cannot be opened or read.
        """

    def class_names(self, shards: Sequence[Path]) -> tuple[str, ...] | None:
        """Names of all classes in label order, where the data has them beside the images of a split.

        Raises:
            UserError: the list cannot be read, or two shards have different ones.
        """


class ImageTable(Protocol):
    """The images of a split, in arrays: a data set can have millions."""

    @property
    def names(self) -> NDArray[np.bytes_]:
        """Names that begin with the class, as CLASS/NAME, in the file system's encoding: (num_images,)."""

    def record(self, index: int) -> Record:
        """One image."""

    def select(self, indices: NDArray[np.int64]) -> Self:
        """The table of these images, in this order."""


class FilesTable(ImageTable, Protocol):
    """Images that are files of their own."""

    def locations(self, indices: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """Paths of a batch in the file system's encoding: (len(indices),)."""
