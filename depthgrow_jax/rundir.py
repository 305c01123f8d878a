"""The run directory: which files a run leaves, and how they survive being killed.

config.json  plan.json  metrics.jsonl  events.out.tfevents.*  checkpoints/  DONE
"""

import contextlib
import json
import os
import pathlib
from typing import Any

from depthgrow_jax.errors import UserError, require

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes JSON so that the file is either the old one or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


def read_json(path: pathlib.Path) -> Any:
    """Reads JSON. Raises `UserError` naming a file that is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (
        ValueError,
        RecursionError,
        OSError,
    ) as error:  # not JSON, not UTF-8, numbers or nesting beyond all
        raise UserError(f"{path}: cannot be read ({error})") from None


def check_name(name: object) -> None:
    """Raises `UserError` unless `name` can be that of a directory of results."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and "/" not in name
    require(plain, "name", name, "must be the name of a directory")


def resolve_directory(path: str | pathlib.Path, field: str = "workdir") -> pathlib.Path:
    """The absolute path; nothing is created. Raises `UserError` if a file is in the way of `field`."""
    directory = pathlib.Path(path).expanduser().absolute()
    for part in (directory, *directory.parents):
        if part.exists() and not part.is_dir():
            raise UserError(f"{field}={str(path)!r}: {part} is a file; must be a directory or a new path")
    return directory


def open_directory(path: str | pathlib.Path, field: str = "workdir") -> pathlib.Path:
    """Creates the directory. Raises `UserError` naming `field` if it cannot be one."""
    directory = resolve_directory(path, field)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{field}={str(path)!r}: cannot be made a directory ({error.strerror})") from None
    if not os.access(directory, os.W_OK):
        raise UserError(f"{field}={str(path)!r}: not writable")
    return directory


def started(directory: pathlib.Path) -> bool:
    """Whether the directory holds anything of a run that a change of config would spoil."""
    begun = any((directory / name).exists() for name in ("metrics.jsonl", "DONE"))
    return begun or any((directory / "checkpoints").glob("[0-9]*"))


def check_config(directory: pathlib.Path, fields: dict[str, Any]) -> None:
    """Refuses to go on with a run that was started with other values of the binding `fields`.

    Raises `UserError` naming the fields that differ, with both values.
    """
    path = directory / "config.json"
    if not path.exists() or not started(directory):
        return
    content = read_json(path)
    stored = content.get("binding") if isinstance(content, dict) else None
    if not isinstance(stored, dict):
        raise UserError(f"{path}: is not the config of a run")
    differing = sorted(name for name in {*stored, *fields} if stored.get(name) != fields.get(name))
    if differing:
        shown = "; ".join(f"{n} was {stored.get(n)!r}, now {fields.get(n)!r}" for n in differing)
        raise UserError(f"{directory}: holds a run of another config ({shown}); use another workdir")


def bind_config(directory: pathlib.Path, fields: dict[str, Any], full: dict[str, Any]) -> None:
    """Writes `config.json`, after `check_config`.

    Args:
      fields: flat fields that must not change; stored under `binding`.
      full: the whole config, stored under `config` (the newest one: its free fields may differ).
    """
    check_config(directory, fields)
    write_json(directory / "config.json", {"binding": fields, "config": full})


class MetricsLog:
    """`metrics.jsonl` and TensorBoard events, continued at a step as if nothing had come after it."""

    def __init__(self, directory: pathlib.Path, step: int):
        """Opens the log; lines beyond `step` (of a run that was killed and is resumed there) are dropped."""
        from tensorboardX import SummaryWriter

        self._path = directory / "metrics.jsonl"
        kept = [line for line in read_metrics(directory) if line["step"] <= step]
        temporary = self._path.with_name("metrics.jsonl.tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, self._path)
        self._file = self._path.open("a", buffering=1)
        self._events = SummaryWriter(
            str(directory),
            purge_step=step + 1 if step else None,
            filename_suffix=f".{step}",  # the name's clock counts seconds: a quick resume must not overwrite
            write_to_disk=True,
        )

    def write(self, step: int, values: dict[str, float | int]) -> None:
        """Appends one line `{"step": step, ...}` and the same scalars to TensorBoard."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes both."""
        self._file.close()
        self._events.close()


def read_metrics(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`; a last line that a kill cut short is left out."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    records = []
    for number, line in enumerate(lines):
        try:
            record = json.loads(line) if line else None
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise UserError(f"{path}: line {number + 1} is not JSON") from None
            continue
        if record is not None and not (isinstance(record, dict) and "step" in record):
            raise UserError(f"{path}: line {number + 1} is not a record of a step")
        records += [record] if record else []
    return records


@contextlib.contextmanager
def locked(directory: pathlib.Path):
    """Holds the directory for this process: two writers would mix their runs. Freed when the process ends.

    Raises `UserError` if another process holds it. Where the system has no file locks nothing is locked.
    """
    if fcntl is None:
        yield
        return
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{directory}: in use by another process") from None
        yield
