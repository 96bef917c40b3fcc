"""Arrow files, as the package `datasets` caches and saves them: labels and offsets of the encoded images.

The image column holds the bytes of files, which lie in the Arrow file as they are. `pyarrow`, which is optional, maps
the file, so the address of an image in memory gives its offset in the file.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.data.formats.naming import find_shards
from utils.data.images.records import Entry
from utils.errors import UserError, first_line, some
from utils.text import count

NAME = "Arrow files"
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels")  # where the file does not say which they are
_STATE, _INFO = "state.json", "dataset_info.json"  # that `datasets` writes
_FILE_MAGIC = b"ARROW1"  # at both ends of a file; a stream has none
_FILE_HEAD = 8  # bytes before the stream in a file, behind which are a footer, its length, 4 bytes, and the magic
_CONTINUATION = b"\xff\xff\xff\xff"  # before each message of a stream since Arrow 0.15
_END = bytes(4)  # of a stream, behind a continuation marker if it has such
_SAVE_ANEW = "save the data set again with save_to_disk of the package datasets"


class _Columns(NamedTuple):
    image: str
    label: str


def is_shard(name: str) -> bool:
    """Whether a file of this name can be a shard: not the result of a `map`, which `datasets` keeps beside them."""
    return name.lower().endswith(".arrow") and not name.startswith("cache-")


def find(data_dir: Path) -> dict[str, list[Path]]:
    """Folders of `save_to_disk`, folders `train` and `val` of Arrow files, or NAME-train-00000-of-00002.arrow here.

    Raises:
        UserError: a shard is missing, or a folder of `save_to_disk` is a selection of its records; see `find_shards`.
    """
    splits = find_shards(data_dir, is_shard)
    for split, shards in splits.items():
        if (shards[0].parent / _STATE).is_file():
            splits[split] = _saved_shards(shards[0].parent / _STATE)
    return splits


def scan(shard: Path) -> Iterator[Entry]:
    """The images in stored order.

    Raises:
        UserError: `pyarrow` is missing, the file is damaged or compressed, it has no column of images or labels, or an
            image or label is missing.
        OSError: it cannot be opened.
    """
    number = 0
    with _open(shard) as (mapped, read):
        size = mapped.size()
        base = mapped.read_buffer(size).address
        columns = choose_columns(shard, read().schema)
        for batch in _batches(read(columns)):
            batch.validate()
            images, labels = batch.column(columns.image), batch.column(columns.label).to_pylist()
            names = _file_names(images)
            ranges = _ranges(shard, number, images, names, range(base, base + size))
            for name, label, (start, length) in zip(names, labels, ranges.tolist(), strict=True):
                if label is None or (isinstance(label, int) and label < 0):
                    raise UserError(f"{shard}: record {number} has no label; remove it and {_SAVE_ANEW}")
                yield Entry(name or f"{number:08}", label, ((start, length),))
                number += 1
        _refuse_rest(shard, mapped)


def class_names(shards: Sequence[Path]) -> tuple[str, ...] | None:
    """Names of the column's `ClassLabel`, in the file or in `dataset_info.json` beside it.

    Raises:
        UserError: two shards have different ones; and as `scan`.
    """
    names: tuple[str, ...] | None = None
    for index, shard in enumerate(shards):
        found = _names_in(shard)
        if index and found != names:
            raise UserError(
                f"{shard}: has other classes than {shards[0]}, so the same number would be two classes; give both the "
                f"same ClassLabel and {_SAVE_ANEW}"
            )
        names = found
    return names


def _saved_shards(state: Path) -> list[Path]:
    """The shards that `save_to_disk` names. A selection has shards of its own, but for old versions of `datasets`."""
    content = _read_json(state)
    if content.get("_indices_data_files"):
        raise UserError(
            f"{state}: the data set is a selection of the records of its shards; load it, call flatten_indices() and "
            f"{_SAVE_ANEW}"
        )
    try:
        shards = [state.parent / file["filename"] for file in content["_data_files"]]
    except (KeyError, TypeError):
        raise UserError(f"{state}: does not name the shards; {_SAVE_ANEW}") from None
    for shard in shards:
        if not shard.is_file():
            raise UserError(f"{shard}: missing, {state} names it; copy the data set again")
    return shards


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: no JSON ({first_line(error)}); copy the data set again") from None
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def _open(shard: Path) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """The file's memory map, and a function that makes a reader of it, for these columns alone if they are given."""
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError:
        raise UserError(f"{shard}: an Arrow file is read by the package pyarrow; pip install pyarrow") from None
    with open(shard, "rb") as file:
        head = file.read(8)
        is_file = head.startswith(_FILE_MAGIC)
        end = _CONTINUATION + _END if head.startswith(_CONTINUATION) else _END
        size = os.fstat(file.fileno()).st_size
        if not is_file and os.pread(file.fileno(), len(end), max(0, size - len(end))) != end:
            raise UserError(f"{shard}: no Arrow file, or cut off, its end is missing; copy it again")

    def read(columns: _Columns | None = None) -> Any:
        mapped.seek(0)
        options = pa.ipc.IpcReadOptions(use_threads=False)
        if columns is not None and not is_file:  # of a file, a choice of columns would be copied
            options.included_fields = sorted(read().schema.get_field_index(name) for name in columns)
            mapped.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(mapped, options=options)

    try:
        with pa.memory_map(str(shard)) as mapped:
            yield mapped, read
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{shard}: no readable Arrow file ({first_line(error)}); copy it again") from None


def _batches(reader: Any) -> Iterator[Any]:
    """Record batches of a stream or a file."""
    if hasattr(reader, "num_record_batches"):
        return map(reader.get_batch, range(reader.num_record_batches))
    return iter(reader)


def _refuse_rest(shard: Path, mapped: Any) -> None:
    """Raise UserError if there is more behind the stream than the footer of a file: pyarrow would not read it."""
    import pyarrow as pa

    mapped.seek(0)
    is_file, rest = mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC, 0
    mapped.seek(_FILE_HEAD if is_file else 0)
    with contextlib.suppress(pa.ArrowException, OSError):  # a file is readable without its stream's end, too
        for _ in pa.ipc.open_stream(mapped, options=pa.ipc.IpcReadOptions(use_threads=False)):
            pass
        rest = mapped.read_buffer().size
    if is_file:
        mapped.seek(max(0, mapped.size() - len(_FILE_MAGIC) - 4))
        rest -= int.from_bytes(mapped.read(4), "little") + 4 + len(_FILE_MAGIC)
    if rest > 0:
        raise UserError(
            f"{shard}: has {count(rest, 'byte')} behind its end, as files that were joined by cat; take them apart, or "
            f"{_SAVE_ANEW}"
        )


def _features(schema: Any) -> dict[str, Any]:
    """What `datasets` has written of the columns: name -> description; {} if it has not written the file."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return dict(json.loads(schema.metadata[b"huggingface"])["info"]["features"])
    return {}


def choose_columns(shard: Path, schema: Any) -> _Columns:
    """The columns of images and labels.

    Raises:
        UserError: there is none, or more than one, or its type is another.
    """
    import pyarrow as pa

    features = _features(schema)

    def choose(feature: str, usual: tuple[str, ...]) -> str:
        marked = [name for name in schema.names if (features.get(name) or {}).get("_type") == feature]
        named = [name for name in marked or schema.names if name in usual]
        found = marked if len(marked) == 1 else named
        if len(found) == 1:
            return str(found[0])
        if marked or found:
            names = some(marked or found)
            raise UserError(f"{shard}: several columns are {usual[0]}s ({names}); remove all but one and {_SAVE_ANEW}")
        raise UserError(
            f"{shard}: no column of {usual[0]}s, but {some(schema.names)}; call it {usual[0]} and {_SAVE_ANEW}"
        )

    image, label = choose("Image", IMAGE_COLUMNS), choose("ClassLabel", LABEL_COLUMNS)
    kind = schema.field(image).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise UserError(f"{shard}: column {image} holds {kind}, not encoded images; cast it to Image and {_SAVE_ANEW}")
    kind = schema.field(label).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{shard}: column {label} holds {kind}, not a class; cast it to ClassLabel and {_SAVE_ANEW}")
    return _Columns(image, label)


def _file_names(images: Any) -> list[str]:
    """Base names of the files that the images were, "" where it is not known."""
    import pyarrow as pa

    if not pa.types.is_struct(images.type) or images.type.get_field_index("path") < 0:
        return [""] * len(images)
    # Of zip://IMAGE::ARCHIVE only the first part is the image's.
    return [os.path.basename((path or "").split("::")[0]) for path in images.field("path").to_pylist()]


def _ranges(shard: Path, first: int, images: Any, names: Sequence[str], mapped: range) -> NDArray[np.int64]:
    """Offset and length of each image in the file: (num_images, 2).

    Args:
        first: number of the first image.
        names: as `_file_names` gives them.
        mapped: addresses of the file's map.
    """
    import pyarrow as pa

    content = images.field("bytes") if pa.types.is_struct(images.type) else images
    _, offsets_buffer, values = content.buffers()
    dtype = np.int64 if pa.types.is_large_binary(content.type) else np.int32
    if not len(content):
        return np.zeros((0, 2), dtype=np.int64)
    offsets = np.frombuffer(offsets_buffer, dtype)[content.offset :][: len(content) + 1].astype(np.int64)
    lengths = np.diff(offsets)
    is_missing = (lengths == 0) | content.is_null().to_numpy(False) | images.is_null().to_numpy(False)
    if is_missing.any():
        index = int(is_missing.argmax())
        if names[index]:
            raise UserError(
                f"{shard}: record {first + index} holds only the path of {names[index]}; {_SAVE_ANEW}, which embeds it"
            )
        raise UserError(f"{shard}: record {first + index} has no image; remove it and {_SAVE_ANEW}")
    if offsets[0] < 0 or (lengths < 0).any() or offsets[-1] > values.size:
        raise UserError(f"{shard}: damaged, images beyond the end of their column; copy it again")
    if values.address not in mapped:
        raise UserError(f"{shard}: is compressed, so no image can be read alone; {_SAVE_ANEW}, which does not compress")
    return np.stack([offsets[:-1] + values.address - mapped.start, lengths], axis=1)


def _names_in(shard: Path) -> tuple[str, ...] | None:
    with _open(shard) as (_, read):
        schema = read().schema
    label = choose_columns(shard, schema).label
    info = shard.parent / _INFO
    described = (_features(schema), _read_json(info).get("features") if info.is_file() else None)
    for features in described:
        with contextlib.suppress(LookupError, TypeError):
            return tuple(map(str, features[label]["names"]))  # type: ignore[index]
    return None
