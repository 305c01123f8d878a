"""The glue of `launch.py export`: a checkpoint of any stage, or a pretrained network, for the ecosystem."""

import pathlib
from typing import Any

import depthgrow_jax
from depthgrow_jax.corpora import vocabulary_of
from depthgrow_jax.errors import UserError, require_choice
from depthgrow_jax.interop.export import DTYPES, check_export, export, free_directory
from depthgrow_jax.model import parse_order, reorder
from depthgrow_jax.subjects import Loaded, load_network
from depthgrow_jax.telling import line
from depthgrow_jax.train.config import MeshConfig

_ONE_DEVICE = MeshConfig(data=1)


def export_network(
    place: str,
    out: str,
    *,
    flag: str = "--run",
    step: int | None = None,
    dtype: str = "float32",
    order: str | None = None,
) -> int:
    """Writes a network as the directory that `save_pretrained` of transformers would write.

    Args:
      place, flag, step: see `subjects.load_network`.
      out: a new directory.
      dtype: of the weights.
      order: the layers to run, unrolled into copies (`model.parse_order`); None: as they are.

    Returns the exit code, 0. Raises `UserError` for anything the user can mend.
    """
    require_choice("--dtype", dtype, DTYPES)
    free_directory(out)
    loaded = load_network(place, step, flag=flag, mesh=_ONE_DEVICE)
    subject = loaded.subject
    program = subject.program
    if order is not None:
        program = reorder(program, parse_order(order, subject.steps))
    if loaded.config.train.objective != "causal":
        raise UserError(f"{flag}={place!r}: is a bidirectional model; no Llama-like class holds one")
    vocabulary = vocabulary_of(loaded, line)
    check_export(subject.cfg, program.steps, out, dtype=dtype, context=loaded.context, vocabulary=vocabulary)
    export(
        subject.cfg,
        subject.params,
        program,
        out,
        dtype=dtype,
        context=loaded.context,
        vocabulary=vocabulary,
        lineage=_lineage(loaded, order),
    )
    print(
        f"{loaded.facts['run']}: {program.steps} layers, {dtype}, written to {pathlib.Path(out).expanduser()}"
    )
    return 0


def _lineage(loaded: Loaded, order: str | None) -> dict[str, Any]:
    """Where the weights come from, as JSON."""
    names = ("run", "name", "step", "depth", "lineage", "operator", "config_hash", "data_hash", "seed")
    facts = {name: loaded.facts[name] for name in names}
    return facts | {"program": order, "depthgrow_jax": depthgrow_jax.__version__}
