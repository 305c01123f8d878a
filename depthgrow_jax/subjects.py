"""A trained network read back from its run directory: what a command needs that runs it, not trains it."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from depthgrow_jax.config import RunConfig, from_dict, validate
from depthgrow_jax.errors import UserError
from depthgrow_jax.growth import gate_at
from depthgrow_jax.model import LayerProgram, abstract_params, layer_program
from depthgrow_jax.probes.inputs import Subject
from depthgrow_jax.rundir import read_json
from depthgrow_jax.train.checkpoints import Checkpoints, with_shardings
from depthgrow_jax.train.config import MeshConfig
from depthgrow_jax.train.sharding import batch_sharding, make_mesh, state_shardings
from depthgrow_jax.train.start import architecture

# A mesh without a batch: `probes.inputs.rows_of` makes batches that the devices divide.
_NO_ROWS = 0
_RUNS_NAMED = 8
_NEEDED = ("model", "depth", "born", "lineage", "config_hash", "data_hash")
_ALL_DEVICES = MeshConfig()


class Loaded(NamedTuple):
    """A network and where it comes from.

    Attributes:
      config: of the run.
      subject: the network as it ran after `step` steps, on the devices of the mesh.
      step: of the checkpoint.
      meta: JSON of the checkpoint (depth, lineage, born, hashes).
      facts: who this is, for the header of a result.
    """

    config: RunConfig
    subject: Subject
    step: int
    meta: dict[str, Any]
    facts: dict[str, Any]


def read_config(run: pathlib.Path, flag: str = "--run") -> RunConfig:
    """The config of a run directory; `flag` is what named it.

    Raises `UserError` if there is no run: naming the runs below it where it is an experiment.
    """
    if not run.is_dir():
        raise UserError(f"{flag}={str(run)!r}: no such directory; must be the directory of a run")
    path = run / "config.json"
    if not path.is_file():
        raise UserError(f"{flag}={str(run)!r}: is not a run{_runs_below(run)}")
    content = read_json(path)
    fields = content.get("config") if isinstance(content, dict) else None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: is not the config of a run")
    try:
        cfg = from_dict(RunConfig, fields)
        validate(cfg)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return cfg


def _runs_below(directory: pathlib.Path) -> str:
    found = [p for pattern in ("*", "*/*") for p in directory.glob(f"{pattern}/config.json")]
    names = sorted(str(path.parent.relative_to(directory)) for path in found)
    if not names:
        return "; a run holds config.json and checkpoints/"
    more = f" and {len(names) - _RUNS_NAMED} more" if len(names) > _RUNS_NAMED else ""
    return f"; runs below it: {', '.join(names[:_RUNS_NAMED])}{more}"


def load_subject(
    run: str | pathlib.Path,
    step: int | None = None,
    *,
    dtype: str = "float32",
    mesh: MeshConfig = _ALL_DEVICES,
    flag: str = "--run",
) -> Loaded:
    """The network of a run after `step` steps, parameters alone.

    The residual gate of layers that were inserted shortly before is what it was at that step, as in the
    evaluation of training. A checkpoint at a growth boundary holds the network before it grows.

    Args:
      run: directory.
      step: one that is saved; None for the newest.
      dtype: of the computation; parameters stay float32.
      mesh: devices over which batches and parameters are split.
      flag: what named the directory, for errors.

    Raises:
      UserError: no run, no such checkpoint, damaged files, devices that do not fit.
    """
    directory = pathlib.Path(run).expanduser()
    cfg = read_config(directory, flag)
    devices = make_mesh(mesh, _NO_ROWS)
    checkpoints, step = _checkpoint(directory, step, flag)
    meta = checkpoints.meta(step)
    missing = [name for name in _NEEDED if name not in meta]
    if missing:
        raise UserError(f"{checkpoints.directory / str(step) / 'meta'}: lacks {', '.join(missing)}; damaged?")
    stored, present = meta["model"], architecture(cfg.model)
    if {**present, **stored} != present:
        raise UserError(f"{directory / 'config.json'}: describes another architecture than its checkpoints")
    abstract = abstract_params(cfg.model, meta["depth"])
    abstract = with_shardings(abstract, state_shardings(devices, abstract))
    params = checkpoints.restore(step, {"params": abstract})["params"]
    program = _program(cfg, meta, step)
    several = devices.size > 1
    subject = Subject(
        dataclasses.replace(cfg.model, dtype=dtype, remat="none"),
        params,
        program,
        batch_sharding(devices) if several else None,
        devices.size,
    )
    return Loaded(cfg, subject, step, meta, _facts(directory, cfg, meta, step))


def _checkpoint(run: pathlib.Path, step: int | None, flag: str) -> tuple[Checkpoints, int]:
    directory = run / "checkpoints"
    checkpoints = Checkpoints(directory, writable=False) if directory.is_dir() else None
    saved = checkpoints.steps() if checkpoints else []
    if checkpoints is None or not saved:
        raise UserError(f"{flag}={str(run)!r}: holds no complete checkpoint")
    if step is not None and step not in saved:
        raise UserError(f"--step={step}: not saved in {directory}; legal: {', '.join(map(str, saved))}")
    return checkpoints, saved[-1] if step is None else step


def _program(cfg: RunConfig, meta: dict[str, Any], step: int) -> LayerProgram:
    """The program that training runs after `step` steps."""
    gate = gate_at(cfg.growth, jnp.int32(step), jnp.asarray(meta["born"], jnp.int32))
    return layer_program(cfg.model, meta["depth"], gate=gate)


def _facts(run: pathlib.Path, cfg: RunConfig, meta: dict[str, Any], step: int) -> dict[str, Any]:
    place = run.absolute()
    # A directory `seed0` alone says nothing.
    label = f"{place.parent.name}/{place.name}" if place.name.startswith("seed") else place.name
    return {
        "run": label,
        "name": cfg.name,
        "step": step,
        "depth": meta["depth"],
        "lineage": meta["lineage"],
        "operator": cfg.growth.operator,
        "config_hash": meta["config_hash"],
        "data_hash": meta["data_hash"],
        "seed": cfg.seed,
        "objective": cfg.train.objective,
        "device": jax.devices()[0].device_kind,
    }
