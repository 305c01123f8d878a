"""Which layers could run elsewhere, not at all, twice or at once: effects of changed orders on the outputs.

P prompts, K steps, R run lengths.
"""

from collections.abc import Iterator

import numpy as np

from depthgrow_jax.errors import require
from depthgrow_jax.probes import programs
from depthgrow_jax.probes.config import OrderConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, no_watch, num_batches
from depthgrow_jax.probes.outputs import EFFECTS, KL_CONVENTION
from depthgrow_jax.probes.programs import Change
from depthgrow_jax.probes.result import Axis, Result, token_quantity
from depthgrow_jax.probes.settings import (
    Settings,
    check_counted,
    conventions,
    counted_outputs,
    pooling_weights,
)

OPERATIONS = ("skip", "swap", "reverse", "repeat", "permute", "parallel")
RUN_LENGTHS = (1, 2, 4, 8)
ORDER_CONVENTIONS = {
    "output distance": KL_CONVENTION,
    "intervened tokens": "all; protect does not apply to orders",
    "moved layers": "keep their position factors and gates",
}


def check(config: OrderConfig, steps: int) -> None:
    """Raises `UserError` for runs that are longer than the network of `steps` layers."""
    legal = f"longer than the {steps} layers of the model; legal: 1 to {steps}"
    require(max(config.run_lengths, default=1) <= steps, "probe.order.run_lengths", config.run_lengths, legal)


def run_axes(steps: int, lengths: tuple[int, ...]) -> dict[str, Axis]:
    """Axes `run_length`, relative to K, and `start`, the first layer of the run, normalised start / K."""
    return {
        "run_length": Axis(np.asarray(lengths), np.asarray(lengths) / steps),
        "start": Axis(np.arange(steps), np.arange(steps) / steps),
    }


def default_lengths(steps: int) -> tuple[int, ...]:
    """Those of `RUN_LENGTHS` that a network of `steps` layers has."""
    return tuple(length for length in RUN_LENGTHS if length <= steps)


def _changes(
    operation: str, steps: int, lengths: tuple[int, ...], config: OrderConfig
) -> Iterator[tuple[tuple[int, ...], Change]]:
    """(place in the arrays, change) of all that exist."""
    for row, length in enumerate(lengths):
        if length == 1 and operation in ("reverse", "permute", "parallel"):
            continue
        moved = 2 * length if operation == "swap" else length
        for start in range(steps - moved + 1):
            if operation == "permute":
                for draw in range(config.permutations):
                    seed = (config.seed, length, start, draw)
                    yield (row, start, draw), programs.permute(steps, start, length, seed)
            else:
                yield (row, start), getattr(programs, operation)(steps, start, length)


def order(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: OrderConfig,
    *,
    watch: Watch = no_watch,
) -> Result:
    """Effects on the outputs of skipping, moving, repeating and averaging runs of layers.

    For a run of n layers from `start` on: `skip` (it does not run), `swap` (exchanged with the n layers that
    follow), `reverse`, `repeat` (once more, directly after itself), `permute` (random orders, never the plain
    one), `parallel` (all read the same stream; the mean of their outputs, residual included). After Kapl et
    al. (arXiv 2512.08819: skip, swap, reverse) and Sun et al. (arXiv 2407.09298: skip, reverse, random order,
    parallel).

    Returns:
      A `Result` with quantities `{operation}.{effect}`, effects and units as in `outputs.EFFECTS`, on the
      axes `run_length` `[R]` and `start` `[K]`, for `permute` also `draw`; NaN where no such change exists.
      And `clean.loss`, nats, without axes. Noise floors are those of the plain order, run from step 0 by the
      same compiled function: the largest departure at a counted token.

    Raises:
      UserError: a run is longer than the network, or a prompt has no token that counts.
    """
    steps = subject.steps
    check(config, steps)
    check_counted(settings, prompts)
    lengths = config.run_lengths or default_lengths(steps)
    tried = {operation: list(_changes(operation, steps, lengths, config)) for operation in OPERATIONS}
    changes = [programs.plain(steps), *(change for found in tried.values() for _, change in found)]

    loss, counts, found = [], [], {name: [] for name in EFFECTS}
    departure = dict.fromkeys(EFFECTS, 0.0)
    for batch in watch(
        "order",
        num_batches(subject, prompts, settings.batch_size),
        batches(subject, prompts, settings.batch_size),
    ):
        counted = counted_outputs(settings, batch.prompts)
        run = (subject.cfg, subject.params, subject.program)
        targets, real = batch.prompts.targets, batch.real
        streams, batch_loss = programs.clean_run(
            *run, batch.prompts.inputs, targets, counted, settings.chunk_bytes
        )
        swept = programs.sweep(*run, streams, targets, counted, changes, settings.chunk_bytes)
        loss.append(np.asarray(batch_loss)[:, :real])
        counts.append(np.asarray(counted).sum(axis=1)[:real])
        for name, (statistics, largest) in swept.items():
            found[name].append(statistics[:, :, :real])
            departure[name] = max(departure[name], float(largest[0, :real].max()))

    tokens = np.concatenate(counts)
    weights = pooling_weights(settings, tokens)
    quantities = {"clean.loss": token_quantity((), "nats", np.concatenate(loss, axis=1), weights)}
    for name, parts in found.items():
        values = np.moveaxis(np.concatenate(parts, axis=2), 1, 2)
        at = 1  # after the plain order
        for operation, entries in tried.items():
            axes, shape = ("run_length", "start"), (len(lengths), steps)
            if operation == "permute":
                axes, shape = (*axes, "draw"), (*shape, config.permutations)
            placed = np.full((*values.shape[:2], *shape), np.nan)
            for number, (place, _) in enumerate(entries):
                placed[:, :, *place] = values[:, :, at + number]
            at += len(entries)
            quantities[f"{operation}.{name}"] = token_quantity(
                axes, EFFECTS[name], placed, weights, departure[name]
            )
    return Result(
        probe="order",
        steps=steps,
        axes={**run_axes(steps, lengths), "draw": Axis(np.arange(config.permutations))},
        quantities=quantities,
        conventions=conventions(settings, subject.cfg)
        | ORDER_CONVENTIONS
        | {
            "repeat": "the run once more, directly after itself",
            "parallel": "mean of the layers' outputs, residual included",
            "permute": f"{config.permutations} random orders a run, never the plain one, seed {config.seed}",
            "missing": "NaN where the layers do not suffice, or a run of one has no other order",
        },
        examples=len(tokens),
        tokens=int(tokens.sum()),
    )
