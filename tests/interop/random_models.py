"""Parameters for tests, in numpy: no scale is 1 and no bias is 0, as they would be after `init`."""

import jax
import numpy as np

from depthgrow_jax.model import ModelConfig, Params, abstract_params


def random_params(cfg: ModelConfig, depth: int, seed: int = 0) -> Params:
    """Float32 parameters with the shapes of `init` and nothing of its values."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        size = leaf.shape[-2] ** -0.5 if name == "kernel" else 0.3
        offset = {"scale": 1.0, "residual_scale": 0.6}.get(name, 0.0)
        return np.asarray(offset + size * rng.standard_normal(leaf.shape), np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(cfg, depth))
