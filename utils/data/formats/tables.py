"""Tables in text files, CSV and JSON lines, as rows of named cells."""

import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from utils.data.images.codecs import is_image
from utils.errors import UserError, first_line

CSV_SUFFIXES, JSON_SUFFIXES = (".csv", ".tsv"), (".jsonl", ".ndjson")
SUFFIXES = CSV_SUFFIXES + JSON_SUFFIXES
_DELIMITERS = ",\t;"  # a spreadsheet of a country that writes 0,5 divides columns by semicolons


class Table(NamedTuple):
    """The rows of a file, without empty ones.

    Attributes:
        columns: their names in lower case, as the heading or the first object has them.
        lines: number of each row's line in the file, from 1.
        rows: a cell for each column, stripped of spaces; "" where a row has none.
    """

    columns: tuple[str, ...]
    lines: list[int]
    rows: list[tuple[str, ...]]

    def column(self, *names: str) -> int | None:
        """Index of the first of these columns that there is; None for none."""
        return next((self.columns.index(name) for name in names if name in self.columns), None)


def is_table(name: str) -> bool:
    """Whether a file of this name is read as a table."""
    return name.lower().endswith(SUFFIXES)


def read_table(path: Path, default: Sequence[str] = (), rows: int | None = None) -> Table:
    """The table in a file of UTF-8 text.

    A CSV is divided by tabs if it ends in .tsv, else by that of comma, tab and semicolon which is most frequent in its
    first line. That line is the heading.

    Args:
        path: ends in one of `SUFFIXES`.
        default: the columns of a CSV whose first line names an image, so that it is none.
        rows: how many are read; None for all.

    Raises:
        UserError: it cannot be read, is no such table, or has no row; names the line.
    """
    read = _read_json if path.name.lower().endswith(JSON_SUFFIXES) else _read_csv
    try:
        columns, found = read(path, default)
        table = Table(columns, [], [])
        for line, row in found:
            if len(table.rows) == rows:
                break
            table.lines.append(line)
            table.rows.append(row)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 from byte {error.start} on; save it as UTF-8") from None
    if not table.rows and rows is None:
        raise UserError(f"{path}: has no rows; write a line for each image")
    return table


def _read_csv(path: Path, default: Sequence[str]) -> tuple[tuple[str, ...], Iterator[tuple[int, tuple[str, ...]]]]:
    rows = csv_rows(path)
    line, heading = next(rows, (1, []))
    if default and heading and is_image(heading[0]):
        return tuple(default), _of_width(path, len(default), itertools.chain([(line, heading)], rows))
    columns = tuple(name.lower() for name in heading)
    twice = next((name for name in columns if name and columns.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: line {line} has two columns {twice}; give each a name of its own")
    return columns, _of_width(path, len(columns), rows)


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number of the line and stripped cells of each row that is not empty.

    Raises:
        UserError: a row is not well-formed.
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    line = 1
    with open(path, encoding="utf-8-sig", newline="") as file:
        first = next((text for text in file if text.strip()), "")
        delimiter = "\t" if path.name.lower().endswith(".tsv") else max(_DELIMITERS, key=first.count)
        file.seek(0)
        try:
            reader = csv.reader(file, delimiter=delimiter, strict=True, skipinitialspace=True)
            for row in reader:
                if any(cells := [cell.strip() for cell in row]):
                    yield line, cells
                line = reader.line_num + 1  # where the next row begins; quoted cells may have line breaks
        except csv.Error as error:
            raise UserError(f"{path}: line {line} is no row of a CSV ({first_line(error)}); close its quotes") from None


def _of_width(path: Path, width: int, rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, tuple[str, ...]]]:
    for line, row in rows:
        if len(row) > width and any(row[width:]):
            raise UserError(
                f"{path}: line {line} has {len(row)} columns instead of {width}; put a cell with a delimiter in it "
                "between double quotes"
            )
        yield line, (*row[:width], *[""] * (width - len(row)))


def _read_json(path: Path, default: Sequence[str]) -> tuple[tuple[str, ...], Iterator[tuple[int, tuple[str, ...]]]]:
    columns: list[str] = []
    objects: list[tuple[int, dict[str, str]]] = []
    with open(path, encoding="utf-8-sig") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                found = json.loads(text)
            except (ValueError, RecursionError) as error:  # the latter of a thousand brackets
                raise UserError(
                    f"{path}: line {line} is no JSON ({first_line(error)}); write an object a line"
                ) from None
            if not isinstance(found, dict):
                raise UserError(f'{path}: line {line} is no JSON object; write one such as {{"file": "a.jpg"}}')
            cells = {str(name).strip().lower(): _json_cell(value) for name, value in found.items()}
            columns += [name for name in cells if name not in columns]
            objects.append((line, cells))
    return tuple(columns), ((line, tuple(cells.get(name, "") for name in columns)) for line, cells in objects)


def _json_cell(value: object) -> str:
    if isinstance(value, list):
        return "|".join(map(_json_cell, value))
    return "" if value is None else str(value).strip()
