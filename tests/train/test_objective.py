"""Losses equal a float64 computation in NumPy, and the masked objective corrupts as BERT does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.train.config import TrainConfig
from depthgrow_jax.train.objective import (
    Examples,
    SpecialTokens,
    causal_examples,
    loss_by_sequence,
    make_examples,
    masked_examples,
)

SPECIAL = SpecialTokens(vocab_size=50, separator=48, mask=49)


def reference_loss(logits, targets, weights, z_loss):
    """(objective, cross-entropy) of each sequence, float64, written as the definition reads."""
    logits = np.asarray(logits, np.float64)
    objective, cross_entropy = np.zeros(len(logits)), np.zeros(len(logits))
    for b, t in np.ndindex(targets.shape):
        log_z = np.log(np.sum(np.exp(logits[b, t])))
        cross_entropy[b] += weights[b, t] * (log_z - logits[b, t, targets[b, t]])
        objective[b] += weights[b, t] * z_loss * log_z**2
    return objective + cross_entropy, cross_entropy


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_loss_equals_numpy(getkey, z_loss):
    logits = 3 * jax.random.normal(getkey(), (4, 7, 11))
    targets = np.asarray(jax.random.randint(getkey(), (4, 7), 0, 11))
    weights = np.asarray(jax.random.bernoulli(getkey(), 0.5, (4, 7)), np.float32)
    examples = Examples(targets, jnp.asarray(targets), jnp.asarray(weights))
    expected = reference_loss(logits, targets, weights, z_loss)
    for found, wanted in zip(loss_by_sequence(logits, examples, z_loss), expected, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_loss_of_large_logits_is_finite():
    logits = jnp.asarray([[[1e4, -1e4, 0.0]]])
    examples = Examples(*(jnp.zeros((1, 1), jnp.int32),) * 2, jnp.ones((1, 1)))
    np.testing.assert_allclose(loss_by_sequence(logits, examples)[1], 0.0)


def test_causal_targets_are_the_next_tokens():
    tokens = jnp.asarray([[5, 6, 7, 8], [1, 2, 3, 4]])
    examples = causal_examples(tokens)
    np.testing.assert_array_equal(examples.inputs, [[5, 6, 7], [1, 2, 3]])
    np.testing.assert_array_equal(examples.targets, [[6, 7, 8], [2, 3, 4]])
    np.testing.assert_array_equal(examples.weights, np.ones((2, 3)))


def test_masked_rates(getkey):
    """15% chosen; of these 80% show the mask, 10% another token by chance, 10% themselves."""
    tokens = jax.random.randint(getkey(), (400, 501), 0, 48)
    examples = masked_examples(tokens, getkey(), 0.15, SPECIAL)
    np.testing.assert_array_equal(examples.targets, tokens[:, :-1])
    chosen = np.asarray(examples.weights) == 1
    inputs, targets = np.asarray(examples.inputs), np.asarray(examples.targets)
    np.testing.assert_array_equal(inputs[~chosen], targets[~chosen])
    # Five standard deviations of a binomial share.
    close = lambda share, p, n: abs(share - p) < 5 * np.sqrt(p * (1 - p) / n)  # noqa: E731
    n = chosen.sum()
    assert close(chosen.mean(), 0.15, chosen.size)
    masked = (inputs == SPECIAL.mask) & chosen
    # A random draw gives the mask itself, or the token itself, once in 50.
    assert close(masked.sum() / n, 0.8 + 0.1 / 50, n)
    assert close(((inputs == targets) & chosen).sum() / n, 0.1 + 0.1 / 50, n)
    random = inputs[chosen & ~masked & (inputs != targets)]
    assert set(np.unique(random)) == set(range(50)) - {SPECIAL.mask}


def test_separators_are_never_hidden(getkey):
    tokens = jnp.where(
        jax.random.bernoulli(getkey(), 0.5, (64, 129)),
        SPECIAL.separator,
        jax.random.randint(getkey(), (64, 129), 0, 48),
    )
    examples = masked_examples(tokens, getkey(), 0.9, SPECIAL)
    separators = np.asarray(examples.targets) == SPECIAL.separator
    assert not np.asarray(examples.weights)[separators].any()
    np.testing.assert_array_equal(np.asarray(examples.inputs)[separators], SPECIAL.separator)
    assert np.asarray(examples.weights)[~separators].mean() > 0.85


def test_masking_follows_the_key(getkey):
    tokens, key = jax.random.randint(getkey(), (8, 33), 0, 48), getkey()
    cfg = TrainConfig(objective="masked", mask_rate=0.3)
    once, again, other = (make_examples(cfg, tokens, k, SPECIAL).inputs for k in (key, key, getkey()))
    np.testing.assert_array_equal(once, again)
    assert (np.asarray(once) != np.asarray(other)).any()
