"""Files of text: finding them and reading the documents of one."""

import contextlib
import glob
import gzip
import importlib
import io
import json
import os
import pathlib
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from depthgrow_jax.data.config import SourceConfig
from depthgrow_jax.errors import UserError

SUFFIXES = (".txt", ".jsonl", ".parquet")
LEGAL_FILES = "a .txt, .jsonl or .parquet file, each optionally .gz"
DATA_ROOT = "DEPTHGROW_DATA"
_ESCAPES = (("\\n", "\n"), ("\\t", "\t"), ("\\f", "\f"), ("\\r", "\r"))


def read_files(component: SourceConfig, field: str) -> Iterator[str]:
    """Documents of every file that `component.path` names; `field` prefixes error messages.

    A `.txt` file is one document, or as many as `document_separator` cuts it into; each line of a
    `.jsonl` and each row of a `.parquet` is one. Raises `UserError` naming the file, and the line
    or row, for anything that cannot be read.
    """
    for path in find_files(component.path, field):
        yield from _read_file(path, component, field)


def find_files(spec: str, field: str) -> list[pathlib.Path]:
    """Paths that the comma-separated files, directories and globs of `spec` name.

    Parts keep their order; below a directory or glob the paths are sorted, and hidden files and
    other suffixes are left out. Each file is taken once. Raises `UserError` where a part names no
    file that can be read.
    """
    found: dict[pathlib.Path, None] = {}
    for part in filter(None, (p.strip() for p in spec.split(","))):
        found |= dict.fromkeys(_find_part(part, field))
    if not found:
        raise UserError(f"{field}path={spec!r}: names no file")
    return list(found)


def resolve(part: str) -> pathlib.Path:
    """`part` with `~` expanded; below `$DEPTHGROW_DATA` if it is relative and exists only there."""
    path = pathlib.Path(part).expanduser()
    below_root = data_root() / path
    return below_root if not path.is_absolute() and not path.exists() and below_root.exists() else path


def data_root() -> pathlib.Path:
    """The directory in `$DEPTHGROW_DATA`, or the working directory."""
    return pathlib.Path(os.environ.get(DATA_ROOT) or ".").expanduser()


def text_of(record: Mapping[str, Any], component: SourceConfig, field: str, place: str) -> str:
    """The text of one record. Raises `UserError` naming `place` if there is none."""
    name = component.text_field
    if name not in record:
        raise no_field(component, field, place, record)
    value = record[name]
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    if not isinstance(value, str):
        raise UserError(f"{field}text_field={name!r}: {place} holds {type(value).__name__} there, not text")
    return value


def no_field(component: SourceConfig, field: str, place: str, names) -> UserError:
    """The error for records at `place` that have the fields `names` but not the text field."""
    has = ", ".join(sorted(names)) or "none"
    return UserError(f"{field}text_field={component.text_field!r}: {place} has no such field; it has {has}")


def optional_package(module: str, package: str, wanted_by: str) -> types.ModuleType:
    """Imports `module`. Raises `UserError` saying which package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UserError(f"{wanted_by}: needs the package {package} (pip install {package}): {e}") from e


def one_line(error: BaseException) -> str:
    """First line of an exception's message, or its type's name when it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _find_part(part: str, field: str) -> list[pathlib.Path]:
    path = resolve(part)
    if path.is_dir():
        files = _below(path)
    elif path.exists():
        if _format(path) not in SUFFIXES:
            raise UserError(f"{field}path={part!r}: must be {LEGAL_FILES}")
        return [path]
    elif glob.has_magic(part):
        pattern = str(pathlib.Path(part).expanduser())
        matches = glob.glob(pattern, recursive=True) or glob.glob(str(data_root() / pattern), recursive=True)
        files = sorted(f for match in matches for f in _below(pathlib.Path(match)))
    else:
        raise UserError(f"{field}path={part!r}: no such file or directory; must be a file, directory or glob")
    files = [f for f in files if _format(f) in SUFFIXES and not f.name.startswith(".")]
    if not files:
        raise UserError(f"{field}path={part!r}: holds no {LEGAL_FILES.removeprefix('a ')}")
    return files


def _below(directory: pathlib.Path) -> list[pathlib.Path]:
    """All files below `directory`, or itself if it is a file; links to directories aren't followed."""
    if directory.is_file():
        return [directory]
    return sorted(pathlib.Path(top, name) for top, _, names in os.walk(directory) for name in names)


def _format(path: pathlib.Path) -> str:
    """`.txt`, `.jsonl` or whatever suffix stands before an optional `.gz`."""
    return pathlib.Path(path.name.removesuffix(".gz")).suffix


def _read_file(path: pathlib.Path, component: SourceConfig, field: str) -> Iterator[str]:
    read = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}[_format(path)]
    with _named_errors(path), gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
        yield from read(stream, path, component, field)


@contextlib.contextmanager
def _named_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns what an unreadable file raises into a `UserError` that names it."""
    try:
        yield
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 text (byte {e.start})") from e
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{path}: cannot be read: {one_line(e)}") from e


def _read_txt(stream, path: pathlib.Path, component: SourceConfig, field: str) -> Iterator[str]:
    text = stream.read().decode("utf-8-sig")
    separator = component.document_separator
    for escape, character in _ESCAPES:
        separator = separator.replace(escape, character)
    yield from text.split(separator) if separator else [text]


def _read_jsonl(stream, path: pathlib.Path, component: SourceConfig, field: str) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        place = f"{path}:{number}"
        try:
            line = line.decode("utf-8-sig")
            record = json.loads(line) if line.strip() else None
        except UnicodeDecodeError as e:
            raise UserError(f"{place}: not UTF-8 text (byte {e.start} of the line)") from e
        except json.JSONDecodeError as e:
            raise UserError(f"{place}: not JSON: {e.msg} (column {e.colno})") from e
        except (ValueError, RecursionError) as e:  # numbers too long, nesting too deep
            raise UserError(f"{place}: not JSON that can be read: {e}") from e
        if not line.strip():
            continue
        if not isinstance(record, dict):
            raise UserError(f"{place}: holds {type(record).__name__}; each line must be a JSON object")
        yield text_of(record, component, field, place)


def _read_parquet(stream, path: pathlib.Path, component: SourceConfig, field: str) -> Iterator[str]:
    pyarrow = optional_package("pyarrow", "pyarrow", f"{field}path={str(path)!r}")
    parquet = importlib.import_module("pyarrow.parquet")
    row = 0
    try:
        # Parquet needs to seek; a gzip stream seeks by decompressing again from its start.
        table = parquet.ParquetFile(io.BytesIO(stream.read()) if path.suffix == ".gz" else stream)
        if component.text_field not in table.schema_arrow.names:
            raise no_field(component, field, str(path), table.schema_arrow.names)
        for batch in table.iter_batches(columns=[component.text_field]):
            for record in batch.to_pylist():
                row += 1
                yield text_of(record, component, field, f"{path} row {row}")
    except pyarrow.ArrowException as e:
        raise UserError(f"{path}: not readable as parquet after row {row}: {one_line(e)}") from e
