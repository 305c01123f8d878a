"""A second implementation of the network, in float64 numpy, written from the papers and not from the code.

It loops over layers, heads and positions where that is the plainest way to say what is meant. The only
thing it shares with `depthgrow_jax` is the names and shapes of the parameters.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from depthgrow_jax.model import abstract_params


def random_params(cfg, depth, seed=0):
    """Parameters with the shapes of `init` and nothing of its values: no scale is 1 and no bias is 0."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape)
        name = path[-1].key
        size = leaf.shape[-2] ** -0.5 if name == "kernel" else 0.3
        offset = {"scale": 1.0, "residual_scale": 0.5}.get(name, 0.0)
        return jnp.asarray(offset + size * noise, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(cfg, depth))


def layer_of(params, index):
    """The parameters of stored layer `index`, float64, without the layer axis."""

    def pick(tree):
        if isinstance(tree, dict):
            return {name: pick(leaf) for name, leaf in tree.items()}
        return np.asarray(tree[index], np.float64)

    return pick(params["layers"])


def rope_frequencies(cfg):
    """Radians per position of each pair, after scaling; the case distinction is Llama 3.1's own."""
    width = cfg.head_dim or cfg.width // cfg.heads
    frequencies = []
    for pair in range(width // 2):
        frequency = 1.0 / cfg.rope_theta ** (2 * pair / width)
        wavelength = 2 * math.pi / frequency
        if cfg.rope_scaling == "linear":
            frequency /= cfg.rope_factor
        elif cfg.rope_scaling == "llama3":
            if wavelength > cfg.rope_original_length / cfg.rope_low_freq_factor:
                frequency /= cfg.rope_factor
            elif wavelength >= cfg.rope_original_length / cfg.rope_high_freq_factor:
                span = cfg.rope_high_freq_factor - cfg.rope_low_freq_factor
                smooth = (cfg.rope_original_length / wavelength - cfg.rope_low_freq_factor) / span
                frequency = (1 - smooth) * frequency / cfg.rope_factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


def _norm(cfg, p, x):
    if cfg.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
        return p["scale"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) + p["bias"]
    return p["scale"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps)


def _linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def _attention(cfg, p, x):
    """`x [T, D]`; one head at a time, rotation as multiplication by a complex phase."""
    length, heads, kv_heads = len(x), cfg.heads, cfg.kv_heads or cfg.heads
    width = cfg.head_dim or cfg.width // cfg.heads
    phase = np.exp(1j * np.arange(length)[:, None] * rope_frequencies(cfg)[None])

    def turned(head, norm):
        head = _norm(cfg, p[norm], head) if cfg.qk_norm else head
        z = (head[:, : width // 2] + 1j * head[:, width // 2 :]) * phase
        return np.concatenate([z.real, z.imag], axis=-1)

    q, k, v = (_linear(p[name], x) for name in "qkv")
    mixed = np.zeros((length, heads * width))
    for n in range(heads):
        group = n // (heads // kv_heads)
        mine, shared = slice(n * width, (n + 1) * width), slice(group * width, (group + 1) * width)
        scores = turned(q[:, mine], "q_norm") @ turned(k[:, shared], "k_norm").T / math.sqrt(width)
        if cfg.causal:
            scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, mine] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
    return _linear(p["o"], mixed)


def _mlp(cfg, p, x):
    up = _linear(p["up"], x)
    if cfg.mlp == "gelu":
        hidden = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
    else:
        gate = _linear(p["gate"], x)
        hidden = gate / (1 + np.exp(-gate)) * up
    return _linear(p["down"], hidden)


class Reference(NamedTuple):
    """`logits [B, T, V]`, `streams [K + 1, B, T, D]`, and what attention and MLP added, `[K, B, T, D]`."""

    logits: np.ndarray
    streams: np.ndarray
    attn: np.ndarray
    mlp: np.ndarray


def forward(cfg, params, tokens, order=None, gate=None):
    """The stored layers `order` run as a network of depth `len(order)`, whose factors are that network's.

    `gate [K, 2]` multiplies what attention and MLP add.
    """
    order = list(range(len(params["layers"]["attn_norm"]["scale"]))) if order is None else list(order)
    gate = np.ones((len(order), 2)) if gate is None else gate
    table = np.asarray(params["embed"]["table"], np.float64)
    final_norm = {name: np.asarray(p, np.float64) for name, p in params["head"]["norm"].items()}
    unembedding = table.T if cfg.tie_embeddings else np.asarray(params["head"]["kernel"], np.float64)
    rows = [_forward_row(cfg, params, table[row], order, gate) for row in np.asarray(tokens)]
    streams, attn, mlp = (np.stack(parts, axis=1) for parts in zip(*rows, strict=True))
    return Reference(_norm(cfg, final_norm, streams[-1]) @ unembedding, streams, attn, mlp)


def _forward_row(cfg, params, x, order, gate):
    streams, added = [x], {"attn": [], "mlp": []}
    for position, stored in enumerate(order, start=1):
        p = layer_of(params, stored)
        for column, (kind, sub_layer) in enumerate((("attn", _attention), ("mlp", _mlp))):
            before = x
            factor = gate[position - 1][column]
            if cfg.residual_scaling == "depth":
                factor /= len(order) ** cfg.residual_exponent
            if cfg.residual_scaling == "learned":
                factor *= p["residual_scale"]
            if cfg.norm_placement == "post":
                # With factor 1 this is norm(x + f(x)), the original Transformer.
                y = _norm(cfg, p[f"{kind}_norm"], x + sub_layer(cfg, p[kind], x))
                x = (1 - factor) * x + factor * y
            else:
                y = _norm(cfg, p[f"{kind}_norm"], x)
                if cfg.norm_placement == "pre_lns":
                    y = y / math.sqrt(position)
                y = sub_layer(cfg, p[kind], y)
                if cfg.norm_placement == "sandwich":
                    y = _norm(cfg, p[f"{kind}_post_norm"], y)
                x = x + factor * y
            added[kind].append(x - before)
        streams.append(x)
    return np.stack(streams), np.stack(added["attn"]), np.stack(added["mlp"])
