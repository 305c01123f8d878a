"""Typed access to JSON objects that somebody else wrote."""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from depthgrow_jax.errors import UserError
from depthgrow_jax.rundir import read_json

_SHOWN = 80  # characters of a value in an error
# No size of a model comes near; what is beyond would be allocated before its tensors are looked at.
MOST = 2**24
_LARGEST = sys.float_info.max


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises `UserError` naming a file that does not."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


class Fields:
    """The fields of a JSON object, checked when they are read.

    Every method raises `UserError` naming `where`, the field, its value and what is legal.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
    ):
        """Args: defaults: of fields that are missing; prefix: put before the names in errors."""
        self._values, self._where, self._defaults, self._prefix = values, where, defaults or {}, prefix

    def get(self, name: str) -> Any:
        """The value as it is; a missing one has its default, or None."""
        return self._values.get(name, self._defaults.get(name))

    def error(self, name: str, legal: str) -> UserError:
        """The error about the value of a field."""
        shown = repr(self.get(name))
        shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
        return UserError(f"{self._where}: {self._prefix}{name}={shown}: {legal}")

    def require(self, condition: bool, name: str, legal: str) -> None:
        """Raises the error about a field unless `condition` holds."""
        if not condition:
            raise self.error(name, legal)

    def integer(self, name: str) -> int:
        """An integer of 1 to `MOST`."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise self.error(name, f"must be an integer of at least 1, at most {MOST}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer of 1 to `MOST`, or null."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        """A finite number above 0."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise self.error(name, "must be a finite number above 0")
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value
