"""The config of an evaluation command: its `ConfigDict` face, and what it says."""

from collections.abc import Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from depthgrow_jax.config import from_dict, to_dict
from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.config import EvalConfig, validate
from depthgrow_jax.rundir import check_name
from depthgrow_jax.train.config import MeshConfig, validate_mesh


class Plan(NamedTuple):
    """`name` of the output directory, what is asked, and the devices."""

    name: str
    eval: EvalConfig
    mesh: MeshConfig


def base_config() -> ConfigDict:
    """A locked `ConfigDict` for config files: `name`, `eval` and `mesh`."""
    return ConfigDict(
        {"name": "default", "eval": to_dict(EvalConfig()), "mesh": to_dict(MeshConfig())}
    ).lock()


def parse(config: ConfigDict, tasks: Sequence[str] = (), limit: int | None = None) -> Plan:
    """The parts of an edited `base_config()`, checked; `tasks` and `limit` that are given replace its own.

    Raises `UserError` naming the field.
    """
    fields = config.to_dict()
    if set(fields) != {"name", "eval", "mesh"}:
        raise UserError(
            f"--config: has {', '.join(fields)}; the config of evaluations has name, eval and mesh"
        )
    if tasks:
        fields["eval"]["tasks"] = tuple(tasks)
    if limit is not None:
        fields["eval"]["limit"] = limit
    name = fields["name"]
    check_name(name)
    asked = from_dict(EvalConfig, fields["eval"], "eval.")
    validate(asked)
    mesh = from_dict(MeshConfig, fields["mesh"], "mesh.")
    validate_mesh(mesh)
    return Plan(name, asked, mesh)
