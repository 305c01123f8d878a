"""The one exception a user may see without a traceback."""


class UserError(Exception):
    """Something the user can mend: a field, a file, a checkpoint.

    The message is one line that names the field or path, the value found and what would be
    legal. `launch.py` prints it after ``error:`` and exits with code 2; nothing else in the
    project catches it.
    """


def require(condition: bool, field: str, value: object, legal: str) -> None:
    """Raises `UserError` ``"{field}={value!r}: {legal}"`` unless `condition` holds."""
    if not condition:
        raise UserError(f"{field}={value!r}: {legal}")


def require_choice(field: str, value: object, choices) -> None:
    """Raises `UserError` unless `value` is one of `choices`, which the message lists."""
    require(value in tuple(choices), field, value, "must be one of " + ", ".join(map(str, choices)))


class Diverged(Exception):
    """The loss or the gradient is not finite. Names the step and the last good checkpoint; exit code 3."""


class Preempted(Exception):
    """A run was asked to stop (SIGTERM or Ctrl-C) and has saved; exit code 75, "try again"."""
