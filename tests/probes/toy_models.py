"""Tiny random networks and prompts for the tests of probes."""

import jax
import numpy as np
import pytest

from depthgrow_jax import model
from depthgrow_jax.model import ModelConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, windows

VOCABULARY, LENGTH = 37, 20
BASE = {"vocab_size": VOCABULARY, "width": 16, "heads": 4, "mlp_dim": 24, "init_std": 0.3}
# Every norm placement; grouped-query attention and untied heads among them.
ARCHITECTURES = {
    "pre": {"norm_placement": "pre", "kv_heads": 2},
    "pre_lns": {"norm_placement": "pre_lns", "tie_embeddings": False},
    "post": {"norm_placement": "post", "kv_heads": 1, "norm": "layer", "mlp": "gelu"},
    "sandwich": {"norm_placement": "sandwich", "tie_embeddings": False, "kv_heads": 2},
    "scaled": {"residual_scaling": "depth", "residual_exponent": 0.5, "attention_bias": True},
}
# For tests that compile for seconds each: the two that differ most, the others with the slow tests.
EVERY = [
    name if name in ("pre", "post") else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES
]


def subject(depth: int = 3, seed: int = 0, **fields) -> Subject:
    """A random network of `depth` layers; norm scales are random too, so that nothing is 1 by chance."""
    cfg = ModelConfig(**{**BASE, **fields})
    params = jax.jit(lambda: model.init(cfg, jax.random.key(seed), depth))()
    rng = np.random.default_rng(seed)

    def vary(path, leaf):
        named = any(getattr(key, "key", "") == "scale" for key in path)
        return leaf * rng.uniform(0.7, 1.3, leaf.shape).astype(np.float32) if named else leaf

    return Subject(cfg, jax.tree_util.tree_map_with_path(vary, params), model.layer_program(cfg, depth))


def text(examples: int = 4, length: int = LENGTH, seed: int = 0) -> Prompts:
    """Random ids, no padding."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (examples, length + 1))
    return windows(tokens.astype(np.int32))


def ragged(lengths: tuple[int, ...] = (20, 14, 17), seed: int = 0) -> Prompts:
    """Random ids, padded on the right to the longest; the last three tokens are the answer."""
    full = text(len(lengths), max(lengths), seed)
    sizes = np.asarray(lengths)
    valid = np.arange(max(lengths))[None] < sizes[:, None]
    answer = (sizes - 3).astype(np.int32)
    return Prompts(full.inputs * valid, full.targets * valid, valid.copy(), valid, answer)
