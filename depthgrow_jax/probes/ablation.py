"""What is lost when a layer, its attention or its MLP is removed.

Csordas et al. (arXiv 2505.13898) measure, for every layer s that is skipped, the relative change of what each
later layer adds to the stream, and the change of the output distribution. Four modes:

    current         remove everywhere, measure everywhere
    future          remove before position t, measure from t on: only attention can carry the damage
    local_current   each later layer alone reads the clean stream less what s adds: no cascade
    local_future    the same, removed before t, measured from t on
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import LayerProgram, ModelConfig, Params, layer_step, rotation
from depthgrow_jax.probes import settings as shared
from depthgrow_jax.probes.config import AblationConfig
from depthgrow_jax.probes.inputs import (
    Batch,
    Prompts,
    Subject,
    Watch,
    batches,
    no_watch,
    num_batches,
    placed,
)
from depthgrow_jax.probes.outputs import EFFECTS, KL_CONVENTION
from depthgrow_jax.probes.result import (
    Quantity,
    Result,
    Score,
    layer_axis,
    score,
    token_quantity,
)
from depthgrow_jax.probes.settings import Settings
from depthgrow_jax.probes.suffix import Clean, Where, clean_run, local_sweep, sweep

_PARTS_OF_MODE = {
    "current": ("layer", "attention", "attention_direct", "mlp", "mean", "resample"),
    "future": ("layer", "attention", "mlp"),
    "local_current": ("layer",),
    "local_future": ("layer",),
}


def split_positions(config: AblationConfig, lengths: np.ndarray) -> np.ndarray:
    """int32 `[P, splits]`: where each prompt is split, -1 where it has fewer candidates.

    Candidates are split_first, + split_stride, ..., below length - split_last + 1, in the order of a shuffle
    seeded anew for every prompt (Csordas et al.: every 8th position from 8 to T - 5, seed 123, the first 4).
    """
    positions = np.full((len(lengths), config.splits), -1, np.int32)
    for row, length in zip(positions, lengths, strict=True):
        stop = int(length) - config.split_last + 1
        candidates = list(range(config.split_first, stop, config.split_stride))
        random.Random(config.split_seed).shuffle(candidates)
        chosen = candidates[: config.splits]
        row[: len(chosen)] = chosen
    return positions


def check(config: AblationConfig, prompts: Prompts) -> None:
    """Raises `UserError` for prompts that the chosen modes and parts cannot use."""
    shortest = config.split_first + config.split_last
    if any("future" in mode for mode in config.modes) and (prompts.lengths < shortest).any():
        worst = int(np.argmin(prompts.lengths))
        raise UserError(
            f"prompts: prompt {worst + 1} has {prompts.lengths[worst]} tokens, too short to be split for the "
            f"future effects; at least {shortest} (probe.ablation.split_first + split_last), or leave the "
            "future modes out of probe.ablation.modes"
        )
    if "resample" in config.parts and "current" in config.modes and len(prompts.inputs) < 2:
        raise UserError(
            "prompts: resample ablation takes another prompt's contribution, so it needs at least 2; "
            "leave resample out of probe.ablation.parts"
        )


def _where(settings: Settings, config: AblationConfig, prompts: Prompts, future: bool) -> Where:
    masks = (
        shared.intervened(settings, prompts),
        shared.counted(settings, prompts),
        shared.counted_outputs(settings, prompts),
    )
    if not future:
        return Where(*(mask[:, None] for mask in masks))
    splits = split_positions(config, np.asarray(prompts.lengths))[:, :, None]
    position = np.arange(prompts.inputs.shape[1])[None, None]
    before, after = (splits >= 0) & (position < splits), (splits >= 0) & (position >= splits)
    return Where(*(mask[:, None] & side for mask, side in zip(masks, (before, after, after), strict=True)))


@functools.partial(jax.jit, static_argnames=("cfg", "part"))
def _replacement(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    clean: Clean,
    part: str,
    means: Float[Array, "K D"],
    partner: Clean,
    available: Int[Array, " B"],
) -> Float[Array, "K B T D"]:
    """What each layer adds to the stream instead of a_l + m_l.

    Args:
      means: of the contributions, for `mean`.
      partner, available: the clean run of other prompts and their lengths, for `resample`.
    """
    if part == "layer":
        return jnp.zeros_like(clean.attn)
    if part == "mlp":
        return clean.attn
    if part == "attention_direct":
        return clean.mlp
    if part == "attention":
        closed = program._replace(gate=program.gate.at[:, 0].set(0.0))
        rotary = rotation(cfg, jnp.arange(clean.attn.shape[2])[None])

        def without_attention(k):
            return layer_step(cfg, params, k, clean.streams[k], program=closed, rotary=rotary).mlp

        return jax.lax.map(without_attention, jnp.arange(program.steps))
    added = clean.attn + clean.mlp
    if part == "mean":
        return jnp.broadcast_to(means.astype(added.dtype)[:, None, None], added.shape)
    # Beyond the end of the other prompt its tokens but the first come round again.
    position = jnp.arange(added.shape[2])[None]
    place = jnp.where(position == 0, 0, 1 + (position - 1) % jnp.maximum(available - 1, 1)[:, None])
    return jnp.take_along_axis(partner.attn + partner.mlp, place[None, :, :, None], axis=2)


@functools.partial(jax.jit, static_argnames="cfg")
def _sum_contributions(cfg, params, program, tokens, counted):
    """Sum over counted tokens of each layer's contribution, `[B, K, D]`."""
    clean = clean_run(cfg, params, program, tokens)
    added = (clean.attn + clean.mlp).astype(jnp.float32)
    return jnp.einsum("kbtd,bt->bkd", added, counted.astype(jnp.float32))


def _mean_contributions(subject: Subject, prompts: Prompts, settings: Settings) -> np.ndarray:
    """`[K, D]`: mean over all counted tokens of all prompts."""
    total, number = np.zeros((subject.steps, subject.cfg.width)), 0
    for batch in batches(subject, prompts, settings.batch_size):
        where = shared.counted(settings, batch.prompts)
        sums = _sum_contributions(subject.cfg, subject.params, subject.program, batch.prompts.inputs, where)
        total += np.asarray(sums[: batch.real], np.float64).sum(axis=0)
        number += int(np.asarray(where)[: batch.real].sum())
    return (total / max(number, 1)).astype(np.float32)


class _Collected:
    """Statistics of one mode and part, batch by batch."""

    def __init__(self):
        self.effect: list[np.ndarray] = []
        self.outputs: dict[str, list[np.ndarray]] = {}

    def add(self, effect, outputs, real: int) -> None:
        """Takes `[4, B, S, K]` and `[4, B, S]` arrays of a batch."""
        self.effect.append(np.asarray(effect[:, :real]))
        for name, values in outputs.items():
            self.outputs.setdefault(name, []).append(np.asarray(values[:, :real]))

    def quantities(self, label: str, tokens, output_tokens, floors) -> dict[str, Quantity]:
        """One quantity for the effects on later layers and one for each effect on the output."""
        effect = np.concatenate(self.effect, axis=1)
        axes = ("skipped", "layer")
        made = {f"{label}.effect": token_quantity(axes, "relative", effect, tokens, floors["effect"])}
        for name, parts in self.outputs.items():
            values = np.concatenate(parts, axis=1)
            made[f"{label}.{name}"] = token_quantity(
                ("skipped",), EFFECTS[name], values, output_tokens, floors[name]
            )
        return made


def _largest(effect, outputs, real: int) -> dict[str, float]:
    """The largest effects of a run in which nothing was removed."""
    floors = {"effect": float(np.abs(np.asarray(effect)[:, :real]).max())}
    for name, values in outputs.items():
        values = np.asarray(values)[:, :real]
        floors[name] = float(np.abs(1 - values if name == "top1_agreement" else values).max())
    return floors


def ablation(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: AblationConfig,
    *,
    watch: Watch = no_watch,
) -> Result:
    """Removes every layer in turn, in every mode and part of `config`.

    Quantities `{mode}.{part}.effect` (skipped, layer): relative change of what `layer` adds to the stream,
    ||c - c~|| / max(||c||, 1e-6), c = a + m; `{mode}.{part}.{kl, kl_reverse, prob_l2, loss_increase,
    top1_agreement}` (skipped): see `outputs.effects`. A `future` statistic pools the tokens of all splits of
    a prompt. Only `current` mode has parts besides `layer`, `attention` and `mlp`; the local modes remove
    whole layers, and `local_future` cannot reach the output.

    Scores: `second_half_share.{mode}`, see its definition.

    The noise floor of a quantity is the largest value that the same compiled sweep gives on the first batch
    when nothing is removed: at layer 0, the longest suffix; in the local modes at every layer.

    Cost, in forward passes: about K/2 for each part of `current`, `splits` times as much for each of
    `future`; half of one and `splits` halves for the local modes; every layer removed costs one head.

    Raises `UserError` as `check` and `settings.check_counted` do.
    """
    check(config, prompts)
    shared.check_counted(settings, prompts)
    cfg, params, program, steps = subject.cfg, subject.params, subject.program, subject.steps
    means = np.zeros((steps, cfg.width), np.float32)
    if "mean" in config.parts and "current" in config.modes:
        means = _mean_contributions(subject, prompts, settings)
    wanted = [(m, part) for m in config.modes for part in _PARTS_OF_MODE[m] if part in config.parts]
    collected = {key: _Collected() for key in wanted}
    floors: dict[str, dict[str, float]] = {}
    counts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    output_counts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    starts = np.arange(steps)

    def replacement(clean: Clean, batch: Batch, part: str):
        partner, available = clean, np.asarray(batch.prompts.lengths, np.int32)
        if part == "resample":
            # The next prompt of all, wherever batches end.
            others = placed(subject, prompts, (batch.indices + 1) % len(prompts.inputs))
            partner = clean_run(cfg, params, program, others.inputs)
            available = np.asarray(others.lengths, np.int32)
        return _replacement(cfg, params, program, clean, part, means, partner, available)

    def measure(clean: Clean, batch: Batch, where: Where, mode: str, part: str, lanes: int):
        run = (cfg, params, program, clean)
        targets, chunk_bytes = batch.prompts.targets, settings.chunk_bytes
        if mode.startswith("local"):
            # Removed before t and with no cascade, nothing can reach the outputs from t on.
            on_output = mode != "local_future"
            effect, outputs = local_sweep(*run, where, targets, chunk_bytes=chunk_bytes, on_output=on_output)
            nothing = {name: values[:, :, steps:] for name, values in outputs.items()}
            floors.setdefault(mode, _largest(effect[:, :, steps:], nothing, batch.real))
            return effect[:, :, :steps], {name: values[:, :, :steps] for name, values in outputs.items()}
        instead = replacement(clean, batch, part)
        how = {"lanes": lanes, "chunk_bytes": chunk_bytes}
        if mode not in floors:
            # Only layer 0, whose suffix is the longest; the last layer's lanes have none.
            nowhere = np.where(starts == 0, 0, steps - 1)
            effect, outputs = sweep(*run, instead, where, targets, nowhere, np.zeros(steps, bool), **how)
            floors[mode] = _largest(effect, outputs, batch.real)
        return sweep(*run, instead, where, targets, starts, np.ones(steps, bool), **how)

    number = num_batches(subject, prompts, settings.batch_size)
    for batch in watch("ablation", number, batches(subject, prompts, settings.batch_size)):
        clean = clean_run(cfg, params, program, batch.prompts.inputs)
        for future in (False, True):
            of_mode = [key for key in wanted if ("future" in key[0]) == future]
            if not of_mode:
                continue
            where = _where(settings, config, batch.prompts, future)
            counts[future].append(np.asarray(where.counted).sum(axis=(1, 2))[: batch.real])
            output_counts[future].append(np.asarray(where.counted_outputs).sum(axis=(1, 2))[: batch.real])
            # The splits of a prompt are lanes already.
            lanes = 1 if future else min(settings.lanes, steps)
            for mode, part in of_mode:
                effect, outputs = measure(clean, batch, where, mode, part, lanes)
                collected[mode, part].add(effect, outputs, batch.real)

    quantities = {}
    for (mode, part), parts in collected.items():
        future = "future" in mode
        tokens, output_tokens = (
            shared.pooling_weights(settings, np.concatenate(c[future])) for c in (counts, output_counts)
        )
        quantities |= parts.quantities(f"{mode}.{part}", tokens, output_tokens, floors[mode])
    axis = layer_axis(steps)
    return Result(
        probe="ablation",
        steps=steps,
        axes={"skipped": axis, "layer": axis},
        quantities=quantities,
        conventions=shared.conventions(settings, cfg) | _conventions(settings, config),
        examples=len(prompts.inputs),
        tokens=int(max(np.concatenate(c).sum() for c in counts.values() if c)),
        scores={
            f"second_half_share.{mode}": second_half_share(quantities[f"{mode}.layer.prob_l2"], mode)
            for mode in config.modes
            if f"{mode}.layer.prob_l2" in quantities
        },
    )


def _conventions(settings: Settings, config: AblationConfig) -> dict[str, str]:
    words = {
        "intervened tokens": f"all but the first {settings.protect}" if settings.protect else "all",
        "effect": "relative to the clean contribution, denominator at least 1e-6",
        "kl direction": KL_CONVENTION,
    }
    if any("future" in mode for mode in config.modes):
        words["splits"] = (
            f"{config.splits} of {config.split_first}, +{config.split_stride}, ... to "
            f"T - {config.split_last}, shuffled by seed {config.split_seed}"
        )
    return words


def second_half_share(effect: Quantity, mode: str) -> Score:
    """Share of the output signal that the second half of the layers carries.

    Args:
      effect: `prob_l2` (skipped), with the token statistics of examples.
    """
    by_example = effect.by_example["max"]
    steps = by_example.shape[1]
    weight = np.clip(np.arange(steps) + 1 - steps / 2, 0, 1)  # an odd depth gives half of its middle layer

    def share(means):
        total = means.sum(axis=1)
        return np.where(total > 0, (means @ weight) / np.where(total > 0, total, 1), 0.0)

    return score(
        share,
        [by_example],
        "sum of d_s over the second half of the layers / sum of all d_s; d_s = mean over examples of the "
        f"maximum over counted tokens of ||p - p_without_s||_2, mode {mode} (arXiv 2512.08819, Fig. 1A)",
    )
