"""The schema of a run, in one place: `ml_collections` outside, frozen dataclasses inside.

The dataclasses of the rooms (model, growth, data, train) are the schema: their fields, types and defaults
make the `ConfigDict` that config files edit, and `parse` turns an edited one back into them, checked.
"""

import dataclasses
import hashlib
import json
import math
import types
import typing
from typing import Any

from ml_collections import ConfigDict

from depthgrow_jax import growth, model
from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.data.config import validate as validate_data
from depthgrow_jax.errors import UserError, require
from depthgrow_jax.growth import GrowthConfig
from depthgrow_jax.model import ModelConfig
from depthgrow_jax.train.config import (
    CheckpointConfig,
    InitFromConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from depthgrow_jax.train.config import validate as validate_train


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run: a network, how it grows, what it reads, how it is trained.

    Attributes:
      name: free text, shown in tables.
      depth: layers at the end of training.
      seed: initialisation, data order, and every random draw of training.
    """

    name: str = ""
    depth: int = 8
    seed: int = 0
    model: ModelConfig = ModelConfig()
    growth: GrowthConfig = GrowthConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    init_from: InitFromConfig = InitFromConfig()


class Experiment(typing.NamedTuple):
    """Every run of a config: `runs[arm, seed]`; `named` when the config lists arms or several seeds."""

    runs: dict[tuple[str, int], RunConfig]
    named: bool


# What may change between a run's start and its resume: nothing that decides a number it computes.
FREE_FIELDS = (
    "name",
    "checkpoint",
    "mesh",
    "data.cache_dir",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "model.scan_unroll",
    "model.remat",
)


def base_config(preset: str = "") -> ConfigDict:
    """A locked `ConfigDict` of all fields at their defaults, for config files to edit.

    Besides the fields of `RunConfig` (less `seed`) it has `seeds`, a tuple, and `arms`, a dict from an
    arm's name to a nested dict of overrides: `{"midas": {"growth": {"operator": "midas"}}}`.

    Args:
      preset: a key of `depthgrow_jax.model.PRESETS`, or empty.
    """
    cfg = RunConfig()
    if preset:
        depth, architecture = model.preset(preset)
        cfg = dataclasses.replace(cfg, name=preset, depth=depth, model=architecture)
    fields = to_dict(cfg)
    del fields["seed"]
    config: Any = ConfigDict({**fields, "seeds": (0,), "arms": {}})
    config.data.mixture = ConfigDict()
    return config.lock()


def to_dict(value: Any) -> Any:
    """Nested dicts of a config dataclass; tuples stay tuples, mixtures become dicts by name."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, DataConfig):
            fields["mixture"] = {name: to_dict(component) for name, component in value.mixture}
        return fields
    return value


def from_dict(cls: type, values: dict[str, Any], where: str = "") -> Any:
    """The dataclass `cls` of nested dicts, every field checked.

    Raises `UserError` naming an unknown field, a wrong type, or a number that is not finite.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            raise UserError(f"{where}{name}: unknown field; legal: {', '.join(names)}")
    return cls(**{name: _checked(hints[name], value, f"{where}{name}") for name, value in values.items()})


def _checked(hint: Any, value: Any, field: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), field, value, "must be a group of fields")
        return from_dict(hint, value, f"{field}.")
    if isinstance(hint, types.GenericAlias):
        return _checked_tuple(hint, value, field)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{field}={value!r}: must be of type {hint.__name__}, not {type(value).__name__}")
    # The command line turns "None" into text; where nothing is meant, the field is left empty.
    require(value != "None", field, value, "is the word None; leave it empty for no value")
    if isinstance(value, float):
        require(math.isfinite(value), field, value, "must be a finite number")
    return value


def _checked_tuple(hint: types.GenericAlias, value: Any, field: str) -> tuple:
    """A tuple of `hint`'s item type; JSON's lists are taken for tuples, a dict for (name, value) pairs."""
    item = typing.get_args(hint)[0]
    named = typing.get_origin(item) is tuple and typing.get_args(item)[0] is str
    if named:
        require(isinstance(value, dict), field, value, "must map names to groups of fields")
        part = typing.get_args(item)[1]
        return tuple((name, _checked(part, fields, f"{field}.{name}")) for name, fields in value.items())
    require(isinstance(value, tuple | list), field, value, "must be a tuple")
    return tuple(_checked(item, entry, f"{field}[{i}]") for i, entry in enumerate(value))


def validate(cfg: RunConfig) -> tuple[growth.Stage, ...]:
    """Refuses what cannot be run; returns the stages. Raises `UserError` naming the field."""
    model.validate(cfg.model)
    growth.validate(cfg.growth, cfg.model)
    validate_data(cfg.data)
    validate_train(cfg.train, cfg.optimizer, cfg.checkpoint, cfg.mesh, cfg.init_from)
    require(0 <= cfg.seed < 2**32, "seeds", cfg.seed, "must lie in [0, 2**32), where every seed is another")
    causal = cfg.train.objective == "causal"
    if cfg.model.causal != causal:
        raise UserError(
            f"model.causal={cfg.model.causal}: train.objective={cfg.train.objective!r} needs "
            f"model.causal={causal}, or the model would see what it must predict"
        )
    return growth.plan_stages(cfg.growth, cfg.depth, cfg.train.steps)


def parse(config: ConfigDict) -> Experiment:
    """Every run of an edited `base_config()`, validated. Raises `UserError` naming the field."""
    fields = config.to_dict()
    seeds = fields.pop("seeds", (0,))
    arms = fields.pop("arms", {})
    require(isinstance(seeds, tuple | list) and len(seeds) > 0, "seeds", seeds, "must be a tuple of integers")
    require(len(set(seeds)) == len(seeds), "seeds", seeds, "must not repeat a seed")
    require(isinstance(arms, dict), "arms", arms, "must map names to groups of overrides")
    runs = {}
    for arm, overrides in (arms or {"": {}}).items():
        where = f"arms.{arm}." if arm else ""
        require(isinstance(overrides, dict), f"arms.{arm}", overrides, "must be a group of overrides")
        for seed in seeds:
            merged = {**_merge(fields, overrides, where), "seed": seed}
            try:
                run = from_dict(RunConfig, merged)
                validate(run)
            except UserError as error:
                raise UserError(f"{error} (in arm {arm!r})" if arm else str(error)) from None
            runs[arm, seed] = run
    # A ConfigDict sorts its names; the baseline belongs first.
    runs = dict(sorted(runs.items(), key=lambda item: item[1].growth.operator != "none"))
    return Experiment(runs, named=bool(arms) or len(seeds) > 1)


def _merge(base: dict, overrides: dict, where: str) -> dict:
    merged = dict(base)
    for name, value in overrides.items():
        if name not in base:
            raise UserError(f"{where}{name}: unknown field; legal: {', '.join(base)}")
        # A mixture is replaced as a whole: components of two corpora must not mix by accident.
        nested = isinstance(value, dict) and isinstance(base.get(name), dict) and name != "mixture"
        merged[name] = _merge(base[name], value, f"{where}{name}.") if nested else value
    return merged


def flatten(value: dict, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat = {}
    for name, entry in value.items():
        if isinstance(entry, dict) and entry:
            flat |= flatten(entry, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = entry
    return flat


def binding_fields(cfg: RunConfig) -> dict[str, Any]:
    """The flat fields, as JSON values, that must not change when a run is resumed."""
    flat = flatten(json.loads(json.dumps(to_dict(cfg))))
    return {
        name: value
        for name, value in flat.items()
        if not any(name == free or name.startswith(f"{free}.") for free in FREE_FIELDS)
    }


def config_hash(cfg: RunConfig) -> str:
    """Twelve hex digits of the fields that decide what a run computes."""
    text = json.dumps(binding_fields(cfg), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
