"""Presets have the published sizes; a layer starts by its own shape and index, whatever the stack."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import ModelConfig, abstract_params, depth_of, init, num_params, preset, validate

BASE = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48)


@pytest.mark.parametrize(
    ("name", "depth", "count"),
    [
        ("smollm_135m", 30, 134_515_008),
        ("smollm_360m", 32, 361_821_120),
        ("smollm_1b7", 24, 1_711_376_384),
    ],
)
def test_presets_have_exactly_the_published_number_of_parameters(name, depth, count):
    preset_depth, cfg = preset(name)
    validate(cfg)
    assert preset_depth == depth
    assert num_params(abstract_params(cfg, depth)) == count


def test_preset_takes_overrides_and_refuses_unknown_names():
    assert preset("smollm_360m", dtype="bfloat16")[1].dtype == "bfloat16"
    with pytest.raises(UserError, match="smollm_135m, smollm_360m, smollm_1b7"):
        preset("smollm_7b")


def test_each_layer_draws_the_std_of_its_own_fan_in():
    """An initializer that saw the stack `[L, D, F]` would take L into the fan and shrink every layer."""
    cfg = ModelConfig(vocab_size=512, width=128, heads=4, mlp_dim=320, tie_embeddings=False)
    params = jax.jit(lambda key: init(cfg, key, 12))(jax.random.key(3))
    fan_ins = {
        "attn": dict.fromkeys("qkvo", 128),
        "mlp": {"gate": 128, "up": 128, "down": 320},
    }
    for part, names in fan_ins.items():
        for name, fan_in in names.items():
            kernel = np.asarray(params["layers"][part][name]["kernel"])
            assert kernel.shape[:2] == (12, fan_in)
            np.testing.assert_allclose(kernel.std(axis=(1, 2)), fan_in**-0.5, rtol=0.03)
    np.testing.assert_allclose(params["embed"]["table"].std(), 128**-0.5, rtol=0.03)
    np.testing.assert_allclose(params["head"]["kernel"].std(), 128**-0.5, rtol=0.03)


def test_init_std_sets_every_matrix():
    cfg = ModelConfig(
        vocab_size=512, width=128, heads=4, mlp_dim=320, tie_embeddings=False, init_std=0.05, mlp_bias=True
    )
    params = jax.jit(lambda key: init(cfg, key, 2))(jax.random.key(3))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        wanted = {"kernel": 0.05, "table": 0.05}.get(path[-1].key, 0.0)
        np.testing.assert_allclose(np.std(leaf), wanted, rtol=0.03, err_msg=str(path))


def test_vectors_start_neutral():
    cfg = dataclasses.replace(
        BASE,
        norm="layer",
        norm_placement="sandwich",
        attention_bias=True,
        mlp_bias=True,
        residual_scaling="learned",
        residual_init=0.25,
    )
    params = jax.jit(lambda key: init(cfg, key, 2))(jax.random.key(0))
    start = {"scale": 1.0, "bias": 0.0, "residual_scale": 0.25}
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name in start:
            seen.add(name)
            assert (np.asarray(leaf) == start[name]).all(), path
    assert seen == set(start)


def test_layer_i_starts_the_same_at_every_depth_and_unlike_its_neighbours():
    make = jax.jit(lambda key, depth: init(BASE, key, depth), static_argnums=1)
    small, large = make(jax.random.key(0), 2), make(jax.random.key(0), 5)
    assert (depth_of(small), depth_of(large)) == (2, 5)
    shared = {**large, "layers": jax.tree.map(lambda leaf: leaf[:2], large["layers"])}
    jax.tree.map(np.testing.assert_array_equal, small, shared)
    kernel = np.asarray(large["layers"]["attn"]["q"]["kernel"])
    assert all(not np.array_equal(kernel[i], kernel[j]) for i in range(5) for j in range(i))
    other = make(jax.random.key(1), 2)
    assert not np.array_equal(other["layers"]["attn"]["q"]["kernel"], kernel[:2])
    assert not np.array_equal(other["embed"]["table"], small["embed"]["table"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_abstract_params_describe_init_and_are_float32_for_every_compute_dtype(dtype):
    cfg = dataclasses.replace(BASE, dtype=dtype, tie_embeddings=False)
    abstract = abstract_params(cfg, 3)
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract)} == {jnp.dtype("float32")}
    params = jax.jit(lambda key: init(cfg, key, 3))(jax.random.key(0))
    assert jax.tree.map(lambda p: (p.shape, p.dtype), params) == jax.tree.map(
        lambda p: (p.shape, p.dtype), abstract
    )
    assert num_params(params) == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))
