"""Streaming over chunks of positions equals the dense calculation."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr
from toy_models import LENGTH, VOCABULARY, subject, text

from depthgrow_jax import model
from depthgrow_jax.probes.outputs import EFFECTS, effects


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 4 * 2 * VOCABULARY, 1 << 20])
def test_streamed_effects_equal_dense_ones(chunk_bytes):
    """Chunks of 1 position, of 3 (which do not divide 20), and of all."""
    network, prompts = subject(2, tie_embeddings=False), text(2)
    rng = np.random.default_rng(0)
    clean = rng.normal(size=(2, LENGTH, 16)).astype(np.float32)
    others = np.stack([clean, clean + rng.normal(size=clean.shape) * 0.5, -clean]).astype(np.float32)
    arrays = (jnp.asarray(x) for x in (clean, others, prompts.targets))
    got = effects(network.cfg, network.params, *arrays, chunk_bytes)
    assert set(got) == set(EFFECTS)

    def log_probs(h):
        return log_softmax(np.asarray(model.unembed(network.cfg, network.params, h), np.float64), axis=-1)

    log_p = log_probs(jnp.asarray(clean))
    for s, other in enumerate(others):
        log_q = log_probs(jnp.asarray(other))
        p, q = np.exp(log_p), np.exp(log_q)
        gap = np.take_along_axis(log_p - log_q, prompts.targets[..., None], -1)[..., 0]
        expected = {
            "kl": rel_entr(p, q).sum(-1),
            "kl_reverse": rel_entr(q, p).sum(-1),
            "prob_l2": np.linalg.norm(p - q, axis=-1),
            "loss_increase": gap,
            "top1_agreement": (p.argmax(-1) == q.argmax(-1)).astype(float),
        }
        for name, array in expected.items():
            np.testing.assert_allclose(got[name][s], array, atol=3e-6, err_msg=name)
    for name in ("kl", "kl_reverse", "prob_l2", "loss_increase"):
        assert (np.asarray(got[name][0]) == 0).all()
