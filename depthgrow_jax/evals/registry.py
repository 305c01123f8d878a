"""Every task by name, and groups of them."""

from collections.abc import Sequence

from depthgrow_jax.errors import UserError
from depthgrow_jax.evals import reasoning_gym
from depthgrow_jax.evals.primitives import PRIMITIVES
from depthgrow_jax.evals.task import Task
from depthgrow_jax.evals.tasks_language import LANGUAGE
from depthgrow_jax.evals.tasks_logic import LOGIC
from depthgrow_jax.evals.tasks_math import MATH
from depthgrow_jax.evals.tasks_reading import READING

FILE_TASKS: dict[str, Task] = {task.name: task for task in (*LANGUAGE, *READING, *MATH, *LOGIC)}
TASKS: dict[str, Task] = PRIMITIVES | FILE_TASKS


def _names(tasks: Sequence[Task]) -> tuple[str, ...]:
    return tuple(task.name for task in tasks)


# `primitives` are the five whose mean Kapl et al. 2025 report.
GROUPS: dict[str, tuple[str, ...]] = {
    "primitives": ("copy_random", "copy_real", "assign_basic_0", "assign_code_0", "assign_math_0"),
    "math": _names(MATH),
    "logic": _names(LOGIC),
    "language": _names(LANGUAGE),
    "reading": _names(READING),
}


def resolve(names: Sequence[str]) -> tuple[Task, ...]:
    """Tasks of names, groups and `reasoning_gym:NAME`, in their order, each once.

    Raises `UserError` listing the legal names, and for a generator that reasoning-gym does not have.
    """
    found: dict[str, Task] = {}
    for name in names:
        if name.startswith(reasoning_gym.PREFIX) and name != reasoning_gym.PREFIX:
            found[name] = reasoning_gym.task(name.removeprefix(reasoning_gym.PREFIX))
            continue
        if name not in TASKS and name not in GROUPS:
            legal = ", ".join([*GROUPS, *TASKS, f"{reasoning_gym.PREFIX}NAME"])
            raise UserError(f"eval.tasks={name!r}: must be one of {legal}")
        found |= {member: TASKS[member] for member in GROUPS.get(name, (name,))}
    if not found:
        raise UserError(f"eval.tasks={list(names)}: names no task")
    return tuple(found.values())
