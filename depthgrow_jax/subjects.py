"""A network to be run and not trained: of a run directory, or a pretrained one."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from depthgrow_jax.config import RunConfig, from_dict, validate
from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.errors import UserError
from depthgrow_jax.growth import gate_at
from depthgrow_jax.interop import Pretrained, is_reference, open_model
from depthgrow_jax.model import LayerProgram, Params, abstract_params, layer_program
from depthgrow_jax.probes.inputs import Subject
from depthgrow_jax.rundir import read_json
from depthgrow_jax.train.checkpoints import Checkpoints, with_shardings
from depthgrow_jax.train.config import MeshConfig, TrainConfig
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
      config: of the run; of a pretrained network what a run of it would have: its architecture, and the text
        that it is shown.
      subject: the network as it ran after `step` steps, on the devices of the mesh.
      step: of the checkpoint; 0 for a pretrained network.
      meta: JSON of the checkpoint (depth, lineage, born, hashes). The config hash of a pretrained network is
        its fingerprint; it has no data hash.
      facts: who this is, for the header of a result.
      context: the longest sequence that it is made for.
      pretrained: where it comes from, if not from a run.
    """

    config: RunConfig
    subject: Subject
    step: int
    meta: dict[str, Any]
    facts: dict[str, Any]
    context: int
    pretrained: Pretrained | None = None


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


def load_network(
    place: str,
    step: int | None = None,
    *,
    flag: str,
    text: DataConfig | None = None,
    length: int = 0,
    dtype: str = "float32",
    mesh: MeshConfig = _ALL_DEVICES,
) -> Loaded:
    """The network that a command was given: a run's, or a pretrained one where `place` is a reference.

    Args:
      text: what a pretrained network is shown; None where nothing is. A run has its own.
      length: tokens of that text in a sequence; 0 for 256.
      (the others as in `load_subject`)

    Raises `UserError` as `load_subject` and `interop.open_model`, and for a step of a pretrained network.
    """
    if not is_reference(place):
        return load_subject(place, step, dtype=dtype, mesh=mesh, flag=flag)
    if step is not None:
        raise UserError(f"--step={step}: is for --run; {flag}={place!r} has no steps")
    return load_pretrained(place, text or DataConfig(), length=length, dtype=dtype, mesh=mesh)


def load_pretrained(
    reference: str,
    text: DataConfig,
    *,
    length: int = 0,
    dtype: str = "float32",
    mesh: MeshConfig = _ALL_DEVICES,
) -> Loaded:
    """A pretrained network, on the devices of the mesh.

    Args:
      reference: see `interop.open_model`.
      text: what it is shown, in its own tokenizer unless this names a `tokenizer.json`.

    Raises `UserError` for files that cannot be used, devices that do not fit.
    """
    pretrained = open_model(reference)
    devices = make_mesh(mesh, _NO_ROWS)
    abstract = abstract_params(pretrained.cfg, pretrained.depth)
    params = pretrained.params(state_shardings(devices, abstract))
    length = min(length or TrainConfig.sequence_length, pretrained.context)
    own = text
    if text.tokenizer == DataConfig.tokenizer:
        own = dataclasses.replace(text, tokenizer=reference)
    config = RunConfig(
        name=reference,
        depth=pretrained.depth,
        model=pretrained.cfg,
        data=own,
        train=TrainConfig(sequence_length=length, batch_size=1),
    )
    meta = {
        "depth": pretrained.depth,
        "lineage": [list(range(pretrained.depth))],
        "config_hash": pretrained.fingerprint,
        "data_hash": "",
    }
    subject = _subject(config, params, layer_program(pretrained.cfg, pretrained.depth), devices, dtype)
    facts = _facts(reference, config, meta, 0)
    return Loaded(config, subject, 0, meta, facts, pretrained.context, pretrained)


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
    subject = _subject(cfg, params, _program(cfg, meta, step), devices, dtype)
    facts = _facts(_label(directory), cfg, meta, step)
    return Loaded(cfg, subject, step, meta, facts, cfg.train.sequence_length)


def _subject(
    cfg: RunConfig, params: Params, program: LayerProgram, devices: jax.sharding.Mesh, dtype: str
) -> Subject:
    return Subject(
        dataclasses.replace(cfg.model, dtype=dtype, remat="none"),
        params,
        program,
        batch_sharding(devices) if devices.size > 1 else None,
        devices.size,
    )


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


def _label(run: pathlib.Path) -> str:
    place = run.absolute()
    # A directory `seed0` alone says nothing.
    return f"{place.parent.name}/{place.name}" if place.name.startswith("seed") else place.name


def _facts(label: str, cfg: RunConfig, meta: dict[str, Any], step: int) -> dict[str, Any]:
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
