"""Config files and overrides of a command line, looked at before absl and ml_collections read them.

These describe a faulty file or override in many lines; here it is one.
"""

import os
import pathlib
import re
import runpy
import traceback
from typing import Any

from ml_collections import ConfigDict

from depthgrow_jax.errors import UserError

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def given(argv: list[str], flag: str) -> str | None:
    """The value of a flag, before the flags are read; None if it is not there."""
    form = re.compile(rf"--?{flag}(?:=(.*))?", re.DOTALL)
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        match = form.fullmatch(argument)
        if match:
            return following if match[1] is None else match[1]
    return None


def load_config(argument: str) -> ConfigDict:
    """The config of a `--config` argument. Raises `UserError` saying what is wrong with it, and where."""
    path, *variant = argument.split(":", 1)
    if not os.path.isfile(path):
        raise UserError(
            f"--config={argument}: no such file; for example --config={CONFIGS / 'quickstart.py'}"
        )
    try:
        names = runpy.run_path(path)
        if "get_config" not in names:
            raise UserError(f"--config={argument}: {path} has no function get_config()")
        config = names["get_config"](*variant)
    except UserError as error:
        raise UserError(f"--config={argument}: {error}") from error
    except Exception as error:  # a config file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == path), None)
        line = error.lineno if isinstance(error, SyntaxError) else line
        where = f" line {line}" if line else ""
        legal = f"; legal: {', '.join(names['VARIANTS'])}" if not line and "VARIANTS" in names else ""
        message = first_line(error.msg if isinstance(error, SyntaxError) else error)
        raise UserError(
            f"--config={argument}: {path}{where}: {type(error).__name__}: {message}{legal}"
        ) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"--config={argument}: get_config() returned {type(config).__name__}, not a ConfigDict"
        )
    return config


def check_fields(config: ConfigDict, argv: list[str]) -> None:
    """Raises `UserError` for the first `--config.a.b` in `argv` that is no field."""
    for argument in argv:
        override = re.match(r"--?(?:no)?config\.([^=]+)", argument)
        group, path = config, override[1].split(".") if override else []
        for i, name in enumerate(path):
            if not isinstance(group, ConfigDict) or name not in group:
                legal = (
                    f"legal: {', '.join(group)}" if isinstance(group, ConfigDict) else "its group is a value"
                )
                raise UserError(f"{'.'.join(path[: i + 1])}: unknown field; {legal}")
            group = group[name]


def wrong_value(config: ConfigDict, error: Exception) -> str:
    """What an override that does not fit its field's type should have been."""
    override = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error), re.DOTALL)
    if not override:
        return first_line(error)
    value: Any = config
    for name in override[1].split("."):
        value = value[name]
    is_group = isinstance(value, ConfigDict)
    legal = (
        f"is a group of fields: {', '.join(value)}" if is_group else f"must be of type {type(value).__name__}"
    )
    return f"{override[1]}={override[2]!r}: {legal}"


def first_line(message: object) -> str:
    """The first line of a message that may have several, or none."""
    return (str(message).strip().splitlines() or ["no message"])[0]
