"""The config of a probe command: its `ConfigDict` face, and what it says."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from depthgrow_jax.config import from_dict, to_dict
from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.data.config import validate as validate_data
from depthgrow_jax.errors import UserError, require_choice
from depthgrow_jax.probes.config import PRESETS, ProbeConfig, validate
from depthgrow_jax.rundir import check_name
from depthgrow_jax.train.config import MeshConfig, validate_mesh

# What a pretrained network is shown unless the config says otherwise: enough to hold out some of it.
TEXT = DataConfig(max_bytes=4_000_000, validation_fraction=0.1)


def base_config(preset: str = "default") -> ConfigDict:
    """A locked `ConfigDict` for config files: `name` (of the output directory), `probe` and `mesh`.

    Raises `UserError` for a preset that is none of `PRESETS`.
    """
    require_choice("preset", preset, PRESETS)
    changed: dict[str, Any] = {}
    for field, value in PRESETS[preset].items():
        group = getattr(ProbeConfig(), field)
        changed[field] = dataclasses.replace(group, **value) if isinstance(value, dict) else value
    probe = dataclasses.replace(ProbeConfig(), **changed)
    config: Any = ConfigDict(
        {"name": preset, "probe": to_dict(probe), "data": to_dict(TEXT), "mesh": to_dict(MeshConfig())}
    )
    config.data.mixture = ConfigDict()
    return config.lock()


class Plan(NamedTuple):
    """What a config of probes says.

    Attributes:
      name: of the output directory.
      probe: the probes and their conventions.
      text: what a pretrained network is shown.
      mesh: devices.
    """

    name: str
    probe: ProbeConfig
    text: DataConfig
    mesh: MeshConfig


def parse(config: ConfigDict, probes: Sequence[str] = ()) -> Plan:
    """The parts of an edited `base_config()`, checked; `probes` that are given replace those of the config.

    Raises `UserError` naming the field.
    """
    fields = config.to_dict()
    if set(fields) != {"name", "probe", "data", "mesh"}:
        raise UserError(
            f"--config: has {', '.join(fields)}; the config of probes has name, probe, data and mesh"
        )
    if probes:
        fields["probe"]["probes"] = tuple(probes)
    name = fields["name"]
    check_name(name)
    probe = from_dict(ProbeConfig, fields["probe"], "probe.")
    validate(probe)
    text = from_dict(DataConfig, fields["data"], "data.")
    validate_data(text)
    mesh = from_dict(MeshConfig, fields["mesh"], "mesh.")
    validate_mesh(mesh)
    return Plan(name, probe, text, mesh)
