"""Files of records, and fields of a record: every error names the file, the record and what is legal."""

import contextlib
import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from depthgrow_jax.data.readers import one_line
from depthgrow_jax.errors import UserError


class Record(NamedTuple):
    """`fields` of a record, and its `place`, `FILE:LINE` or `FILE: record N`, counted from 1."""

    place: str
    fields: dict[str, Any]

    def error(self, name: str, value: object, legal: str) -> UserError:
        """What is wrong with a field, in one line; long values are cut."""
        found = repr(value)
        return UserError(f"{self.place}: {name}={found if len(found) <= 80 else found[:77] + '...'}: {legal}")

    def text(self, name: str, *, strip: bool = True) -> str:
        """A text that is not empty, white space at its ends left out."""
        value = self._field(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(name, value, "must be a text, not empty")
        return value.strip() if strip else value

    def texts(self, name: str, *, least: int = 0) -> tuple[str, ...]:
        """A list of at least `least` texts, none empty, white space at their ends left out."""
        values = self._field(name)
        if not isinstance(values, list) or len(values) < least:
            raise self.error(name, values, f"must be a list of at least {least} texts")
        if not all(isinstance(value, str) and value.strip() for value in values):
            raise self.error(name, values, "must hold texts, none empty")
        return tuple(value.strip() for value in values)

    def index(self, name: str, count: int) -> int:
        """An integer from 0 to `count - 1`."""
        value = self._field(name)
        if type(value) is not int or not 0 <= value < count:
            raise self.error(name, value, f"must be an integer from 0 to {count - 1}")
        return value

    def _field(self, name: str) -> Any:
        if name not in self.fields:
            raise UserError(f"{self.place}: has no {name}; it has {', '.join(self.fields) or 'no fields'}")
        return self.fields[name]


def text_lines(path: pathlib.Path) -> Iterator[Record]:
    """Every line that is not blank, as the field `line`; a `.gz` is unpacked."""
    with _named_errors(path), gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError as e:
                raise UserError(f"{place}: not UTF-8 text (byte {e.start} of the line)") from e
            if text:
                yield Record(place, {"line": text})


def json_lines(path: pathlib.Path) -> Iterator[Record]:
    """The object on every line that is not blank."""
    for place, fields in text_lines(path):
        yield _record(place, _parse(place, fields["line"]))


def json_list(path: pathlib.Path) -> Iterator[Record]:
    """The objects of the one list that a file holds."""
    whole = "\n".join(record.fields["line"] for record in text_lines(path))
    values = _parse(str(path), whole)
    if not isinstance(values, list):
        raise UserError(f"{path}: holds {type(values).__name__}; must be a list of JSON objects")
    for number, value in enumerate(values, 1):
        yield _record(f"{path}: record {number}", value)


def _record(place: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{place}: holds {type(value).__name__}; must be a JSON object")
    return Record(place, value)


def _parse(place: str, text: str) -> Any:
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # an escape of half a character, perhaps without the other half
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as e:
        raise UserError(f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff), not text") from e
    except json.JSONDecodeError as e:
        raise UserError(f"{place}: not JSON: {e.msg} (line {e.lineno}, column {e.colno})") from e
    except (ValueError, RecursionError) as e:  # numbers too long, nesting too deep
        raise UserError(f"{place}: not JSON that can be read: {one_line(e)}") from e


@contextlib.contextmanager
def _named_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{path}: cannot be read: {one_line(e)}") from e
