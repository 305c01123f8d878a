"""The first state of a run: its own newest checkpoint, else `init_from`, else scratch."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from depthgrow_jax.errors import UserError, require
from depthgrow_jax.interop import Pretrained, is_reference, open_model
from depthgrow_jax.model import ModelConfig, Params
from depthgrow_jax.train import state as states
from depthgrow_jax.train.checkpoints import Checkpoints, with_shardings
from depthgrow_jax.train.sharding import state_shardings
from depthgrow_jax.train.spec import RunSpec
from depthgrow_jax.train.state import TrainState


class Setup(NamedTuple):
    """A run with its optimizer and devices."""

    spec: RunSpec
    tx: optax.GradientTransformation
    mesh: Mesh

    @property
    def ema(self) -> bool:
        """Whether the run keeps a moving average of the parameters."""
        return self.spec.train.ema_decay > 0

    def abstract(self, depth: int, lineage_rows: int = 1) -> TrainState:
        """Shapes, dtypes and shardings of the state at `depth`."""
        state = states.abstract_state(self.spec.model, self.tx, depth, ema=self.ema, stages=lineage_rows)
        return with_shardings(state, state_shardings(self.mesh, state))


def shardings_of(tree: Any) -> Any:
    """The sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def first_state(setup: Setup, checkpoints: Checkpoints, data_hash: str) -> tuple[TrainState, dict[str, Any]]:
    """The state to go on from, and its meta.

    Raises `UserError` for a checkpoint that is not of this plan, this data or these shapes.
    """
    latest = checkpoints.latest()
    if latest is not None:
        meta = checkpoints.meta(latest)
        _check_resumable(setup, checkpoints.directory / str(latest), meta, data_hash)
        abstract = states.to_items(setup.abstract(meta["depth"], len(meta["lineage"])))
        return states.from_items(checkpoints.restore(latest, abstract)), meta
    fresh = {"step": 0, "stage": 0, "seconds": {}, "window": {}, "evaluation": {}}
    source = setup.spec.init_from.path
    if is_reference(source):
        return from_pretrained(setup), fresh
    return (from_other_run(setup) if source else from_scratch(setup)), fresh


def from_scratch(setup: Setup) -> TrainState:
    """A freshly initialised state of the first stage's depth."""
    spec, depth = setup.spec, setup.spec.stages[0].depth
    make = jax.jit(
        lambda: states.create(spec.model, setup.tx, depth, spec.seed, ema=setup.ema),
        out_shardings=shardings_of(setup.abstract(depth)),
    )
    return make()


def _check_resumable(setup: Setup, where: pathlib.Path, meta: dict[str, Any], data_hash: str) -> None:
    stage = meta["stage"]
    planned = [planned.depth for planned in setup.spec.stages]
    if planned[stage : stage + 1] != [meta["depth"]]:
        raise UserError(
            f"{where}: has depth {meta['depth']} in stage {stage + 1}; the depths of this plan are {planned}"
        )
    if meta["config_hash"] != setup.spec.config_hash:
        raise UserError(
            f"{where}: was trained under another config (hash {meta['config_hash']}, now "
            f"{setup.spec.config_hash}); use another workdir"
        )
    if meta["data_hash"] != data_hash:
        raise UserError(
            f"{where}: was trained on other data (hash {meta['data_hash']}, now {data_hash}); "
            "restore the files or use another workdir"
        )


def architecture(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model that decide what its parameters compute, as JSON values."""
    how = ("dtype", "remat", "scan_unroll", "init_std", "residual_init")
    return {name: value for name, value in dataclasses.asdict(model).items() if name not in how}


def check_init_from(spec: RunSpec) -> None:
    """Raises `UserError` for an `init_from` that cannot be used."""
    if is_reference(spec.init_from.path):
        pretrained_model(spec)
    else:
        other_checkpoint(spec)


def other_checkpoint(spec: RunSpec) -> tuple[Checkpoints, int, dict[str, Any]]:
    """The checkpoints that `init_from` names, the step to take, and its meta.

    Raises `UserError` if there is none, or if its architecture or depth is not that of the first stage. The
    tokenizer is not compared: a run may go on with other data, whose ids must mean the same.
    """
    source = spec.init_from
    directory = pathlib.Path(source.path).expanduser() / "checkpoints"
    if not directory.is_dir():
        raise UserError(f"init_from.path={source.path!r}: no run with checkpoints there")
    other = Checkpoints(directory, writable=False)
    if not other.steps():
        raise UserError(f"init_from.path={source.path!r}: holds no complete checkpoint")
    step = source.step or other.steps()[-1]
    if step not in other.steps():
        raise UserError(f"init_from.step={source.step}: not saved in {directory}; legal: {other.steps()}")
    meta = other.meta(step)
    _check_same_network(
        spec, meta["model"], meta["depth"], f"step {step}", f", or another of {other.steps()}"
    )
    return other, step, meta


def pretrained_model(spec: RunSpec) -> Pretrained:
    """The pretrained model that `init_from` names, its weights not yet read.

    Raises `UserError` if it cannot be read, or is not a network of the first stage.
    """
    source = spec.init_from
    require(source.what == "params", "init_from.what", source.what, "must be params for a pretrained model")
    require(source.step == 0, "init_from.step", source.step, "must be 0: a pretrained model has no steps")
    found = open_model(source.path)
    _check_same_network(spec, architecture(found.cfg), found.depth, "it", "")
    if spec.train.sequence_length > found.context:
        raise UserError(
            f"train.sequence_length={spec.train.sequence_length}: must be at most {found.context}, the "
            f"longest sequence that {source.path} is made for"
        )
    return found


def _check_same_network(spec: RunSpec, theirs: dict[str, Any], depth: int, what: str, instead: str) -> None:
    """Raises `UserError` unless a network is one of the run's first stage."""
    field, ours = f"init_from.path={spec.init_from.path!r}", _resolved(architecture(spec.model))
    theirs = _resolved(theirs)
    if theirs != ours:
        names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        shown = "; ".join(f"model.{n} there {theirs.get(n)!r}, here {ours.get(n)!r}" for n in names)
        raise UserError(f"{field}: is of another architecture ({shown})")
    start = spec.stages[0].depth
    if depth != start:
        raise UserError(
            f"{field}: {what} has depth {depth}, this run starts at depth {start}; "
            f"set growth.start_depth={depth}{instead}"
        )


def _resolved(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of an architecture, with what stands for a default written out: equal networks compare equal."""
    fields = architecture(ModelConfig()) | fields
    heads, width = fields["heads"], fields["width"]
    kv_heads, head_dim = fields["kv_heads"] or heads, fields["head_dim"] or width // heads
    return fields | {"kv_heads": kv_heads, "head_dim": head_dim}


def from_pretrained(setup: Setup) -> TrainState:
    """A fresh state around the weights of a pretrained model."""
    depth = setup.spec.stages[0].depth
    abstract = setup.abstract(depth)
    params = pretrained_model(setup.spec).params(shardings_of(abstract.params))
    return _around(setup, params, abstract)


def _around(setup: Setup, params: Params, abstract: TrainState) -> TrainState:
    make = jax.jit(
        lambda p: states.from_params(p, setup.tx, ema=setup.ema), out_shardings=shardings_of(abstract)
    )
    return make(params)


def from_other_run(setup: Setup) -> TrainState:
    """Parameters, or all, of another run's checkpoint, at step 0."""
    depth = setup.spec.stages[0].depth
    other, step, meta = other_checkpoint(setup.spec)
    abstract = setup.abstract(depth, len(meta["lineage"]))
    items = states.to_items(abstract)
    if setup.spec.init_from.what == "params":
        params = other.restore(step, {"params": items["params"]})["params"]
        return _around(setup, params, setup.abstract(depth))
    state = states.from_items(other.restore(step, items))
    # Its clock starts anew, and its layers count as original: no gate ramps for them.
    restart = jax.jit(
        lambda s: s.replace(step=s.step * 0, born=s.born * 0 - 1), out_shardings=shardings_of(abstract)
    )
    return restart(state)
