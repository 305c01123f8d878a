"""Results of probes as files: NAME.npz holds the arrays, NAME.json says what they are.

Keys of the arrays: `quantity/statistic`, `quantity/by_example/statistic`, `quantity/weights`, `axis/name`,
`axis/name/normalised`, `array/name`. The JSON is written last: its presence means finished.
"""

import hashlib
import io
import math
import os
import pathlib
import zipfile
from typing import Any

import numpy as np

from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.result import Axis, Quantity, Result, Score
from depthgrow_jax.rundir import read_json, write_json

# Layout of both files; raised when either changes.
FORMAT = 1


def save(directory: pathlib.Path, result: Result, header: dict[str, Any]) -> pathlib.Path:
    """Writes a result, replacing the one of the same probe; a kill leaves the old, the new or none.

    Args:
      header: where the numbers come from, JSON values.

    Returns:
      The path of the JSON file, which `load` takes.

    Raises:
      ValueError: names that would clash as keys, or arrays of something else than numbers or text.
    """
    arrays = _arrays(result)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    content = buffer.getvalue()
    path = directory / f"{result.probe}.json"
    # The old description must not stand beside the new arrays.
    path.unlink(missing_ok=True)
    temporary = directory / f"{result.probe}.npz.tmp"
    temporary.write_bytes(content)
    os.replace(temporary, directory / f"{result.probe}.npz")
    description = {
        "format": FORMAT,
        "probe": result.probe,
        "steps": result.steps,
        "examples": result.examples,
        "tokens": result.tokens,
        "header": header,
        "conventions": result.conventions,
        "axes": {name: {"normalised": axis.normalised is not None} for name, axis in result.axes.items()},
        "quantities": {
            name: {
                "axes": q.axes,
                "unit": q.unit,
                "noise_floor": q.noise_floor,
                "statistics": list(q.statistics),
                "by_example": list(q.by_example),
                "weighted": q.weights is not None,
            }
            for name, q in result.quantities.items()
        },
        "scores": {name: score._asdict() for name, score in result.scores.items()},
        "notes": result.notes,
        "arrays": list(result.arrays),
        "npz_sha256": hashlib.sha256(content).hexdigest(),
    }
    write_json(path, _plain(description))
    return path


def load(path: str | pathlib.Path) -> tuple[Result, dict[str, Any]]:
    """The result and header of a JSON file that `save` wrote, arrays equal to the bit.

    Raises `UserError` naming the file that is missing, damaged, or of another format.
    """
    path = pathlib.Path(path)
    described = describe(path)
    npz = path.with_suffix(".npz")
    try:
        content = npz.read_bytes()
        if hashlib.sha256(content).hexdigest() != described["npz_sha256"]:
            raise ValueError("not the arrays that were described")
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            return _result(described, dict(stored)), described["header"]
    except FileNotFoundError:
        raise UserError(f"{npz}: no such file; it belongs to {path.name}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} or its .npz: damaged ({' '.join(str(error).split())[:200]}); remove it"
        ) from None


def describe(path: pathlib.Path) -> dict[str, Any]:
    """What a JSON file of `save` holds. Raises `UserError` if it is not one, or of another format."""
    if path.suffix != ".json":
        raise UserError(f"{path}: name the .json beside it")
    described = read_json(path)
    if not isinstance(described, dict) or not isinstance(described.get("header"), dict):
        raise UserError(f"{path}: is not the result of a probe")
    if described.get("format") != FORMAT:
        raise UserError(f"{path}: is of format {described.get('format')!r}, this version reads {FORMAT}")
    return described


def _arrays(result: Result) -> dict[str, np.ndarray]:
    """Every array of the result by its key."""
    named: list[tuple[str, Any]] = []
    for name, q in result.quantities.items():
        named += [(f"{name}/{statistic}", values) for statistic, values in q.statistics.items()]
        named += [(f"{name}/by_example/{statistic}", values) for statistic, values in q.by_example.items()]
        if q.weights is not None:
            named.append((f"{name}/weights", q.weights))
    for name, axis in result.axes.items():
        named.append((f"axis/{name}", axis.values))
        if axis.normalised is not None:
            named.append((f"axis/{name}/normalised", axis.normalised))
    named += [(f"array/{name}", values) for name, values in result.arrays.items()]
    arrays = {key: np.asarray(values) for key, values in named}
    if len(arrays) < len(named):
        raise ValueError(f"{result.probe}: names of quantities, axes and arrays clash")
    for key, values in arrays.items():
        if values.dtype.kind not in "biufU":
            raise ValueError(f"{result.probe}: {key} is of dtype {values.dtype}, not numbers or text")
    return arrays


def _result(described: dict[str, Any], stored: dict[str, np.ndarray]) -> Result:
    return Result(
        probe=described["probe"],
        steps=described["steps"],
        axes={
            name: Axis(
                stored[f"axis/{name}"], stored[f"axis/{name}/normalised"] if about["normalised"] else None
            )
            for name, about in described["axes"].items()
        },
        quantities={
            name: Quantity(
                tuple(about["axes"]),
                about["unit"],
                {statistic: stored[f"{name}/{statistic}"] for statistic in about["statistics"]},
                {statistic: stored[f"{name}/by_example/{statistic}"] for statistic in about["by_example"]},
                about["noise_floor"],
                stored[f"{name}/weights"] if about["weighted"] else None,
            )
            for name, about in described["quantities"].items()
        },
        conventions=described["conventions"],
        examples=described["examples"],
        tokens=described["tokens"],
        scores={name: _score(fields) for name, fields in described["scores"].items()},
        notes=described["notes"],
        arrays={name: stored[f"array/{name}"] for name in described["arrays"]},
    )


def _score(fields: dict[str, Any]) -> Score:
    numbers: dict[str, Any] = {name: math.nan if value is None else value for name, value in fields.items()}
    return Score(**numbers)


def _plain(value: Any) -> Any:
    """JSON values; numbers that are not finite, which JSON does not know, as null."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
