"""Where files of evaluation data are, and the items of a task in them."""

import os
import pathlib

from depthgrow_jax.data.readers import DATA_ROOT
from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.items import Item
from depthgrow_jax.evals.task import Task

_BELOW = "evals"


def find(path: str, data_dir: str = "", *, source: str) -> pathlib.Path:
    """The file `path` in `data_dir`, else in `$DEPTHGROW_DATA`, or in `evals` below the one that is asked.

    Raises `UserError` saying what to download, from `source`, and where to put it.
    """
    root = data_dir or os.environ.get(DATA_ROOT, "")
    where = pathlib.Path(root).expanduser()
    candidates = [where / path, where / _BELOW / path]
    for candidate in candidates if root else []:
        if candidate.is_file():
            return candidate
    target = candidates[0] if root else f"DIR/{path}, with eval.data_dir or {DATA_ROOT} naming DIR"
    raise UserError(f"{path}: no such evaluation file; download it from {source}, and put it at {target}")


def read(task: Task, data_dir: str = "", seed: int = 0) -> list[Item]:
    """The items of a task, in their order. Raises `UserError` for a missing file or a wrong record."""
    return list(task.read(_file(task, task.path, data_dir), seed))


def read_examples(task: Task, data_dir: str = "", seed: int = 0) -> list[Item] | None:
    """What the examples of a task are taken from; None for the task itself. Raises as `read`."""
    if task.shots_read is None:
        return None
    return list(task.shots_read(_file(task, task.shots_path, data_dir), seed))


def _file(task: Task, path: str, data_dir: str) -> pathlib.Path | None:
    return find(path, data_dir, source=task.source) if path else None
